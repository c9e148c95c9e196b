"""Encoding of turns after sampled tokens, which are not tokenised again. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.chat.encoding import stop_token_ids, texts_marked
from rlhf_core.chat.rendering import Message, Tokenizer, Tools, render, require_written
from rlhf_core.chat.special_tokens import token_ids
from rlhf_core.errors import StageError

_REPLY = "content-of-the-reply-alone"  # placeholder of a reply where only its surroundings matter
_ANY_TOOL: Tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
_REASONED = "<think>\nreasons\n</think>\n\nanswer"


def encode_feedback(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    feedback: Sequence[Message],
    tools: Tools | None = None,
    *,
    ended: bool = True,
) -> list[int]:
    """Encode the tokens between a reply and the next one: from after the token that ends the assistant turn, over the
    messages that answer it, up to and including the generation prompt.

    messages: the conversation, with the reply as its last turn. ended: whether the reply has the token that ends the
    turn; if it was truncated, that token is the first one returned. The tokens follow the sampled ones, which are not
    tokenised again.
    Raises StageError if the template would render the conversation differently than its parts: if it rewrites an
    earlier turn, or does not end the turn by a special token.
    """
    whole_conversation, tools = texts_marked(tokenizer, [*messages, *feedback], tools)
    *before, reply = whole_conversation[: len(messages)]
    feedback = whole_conversation[len(messages) :]
    shown = [*before, {**reply, "content": _REPLY}]
    prompt = render(tokenizer, before, tools, generation_prompt=True)
    start, _, end = render(tokenizer, shown, tools, generation_prompt=False).partition(_REPLY)
    kept, _, rest = render(tokenizer, [*shown, *feedback], tools, generation_prompt=True).partition(_REPLY)
    if not start.startswith(prompt):
        raise StageError(_unlike_parts("writes a reply in another way than it asks for it"))
    whole = render(tokenizer, whole_conversation, tools, generation_prompt=True)
    if kept != start or "".join(whole.split()) != "".join(f"{start}{reply['content']}{rest}".split()):
        raise StageError(_unlike_parts("rewrites earlier turns, such as leaving out their reasoning"))
    stop = next((token for token in token_ids(tokenizer, end) if token in stop_token_ids(tokenizer)), None)
    if stop is None or not rest.startswith(end):
        raise StageError(_unlike_parts("does not end each assistant turn with a special token"))
    require_written(tokenizer, [*shown, *feedback], tools)
    # The text behind the token is tokenised with it: some tokenizers put a space before every text.
    written = str(tokenizer.convert_ids_to_tokens(stop))
    ids = token_ids(tokenizer, written + rest.partition(written)[2])
    return ids[ids.index(stop) + ended :]


def require_turns_follow(tokenizer: Tokenizer) -> None:
    """Raise StageError if the template renders a conversation with several replies, which may contain reasoning,
    differently than its parts, so that the sampled tokens of a turn could not precede the next.
    """
    question = {"role": "user", "content": "question"}
    encode_feedback(tokenizer, [question, {"role": "assistant", "content": _REASONED}], [question])


def require_results_follow(tokenizer: Tokenizer, tools: Tools = _ANY_TOOL) -> None:
    """Raise StageError if the template does not write tools, or results of calls after sampled tokens."""
    question, result = {"role": "user", "content": "question"}, {"role": "tool", "name": "look_up", "content": "found"}
    encode_feedback(tokenizer, [question, {"role": "assistant", "content": "call"}], [result, result], tools)


def _unlike_parts(how: str) -> str:
    return (
        f"the chat template {how}, so a later turn would not follow the tokens that were sampled: give "
        "the base stage a chat_template that only appends, such as `chatml`, or take a single-turn environment"
    )
