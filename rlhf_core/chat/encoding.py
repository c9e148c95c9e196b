"""The only place that tokenises: text to token ids; loads no torch.

An assistant turn is trained in the form in which it is sampled: the tokens of its prompt (the conversation before it,
with the generation prompt), then the template's text of the turn as the last one, up to the token that ends it. Turns
that continue each other, token by token, are one sequence. Where a template rewrites earlier turns (it drops their
reasoning, or ends only the last turn), the next turn begins a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rlhf_core.chat.image_messages import set_image_token
from rlhf_core.chat.rendering import Message, Tools, render, require_reply_written, require_written, untagged
from rlhf_core.chat.rendering import Tokenizer as Tokenizer
from rlhf_core.chat.sampled_tokens import SampledReply
from rlhf_core.chat.special_tokens import following_ids, is_special, marked, token_ids, unmarked
from rlhf_core.errors import ConversationError, StageError, reason_of
from rlhf_core.models.folders.folder import read_config
from rlhf_core.models.folders.vision_models import VISION_MODELS, reads_images

Completion = str | Sequence[Message]  # a reply, or turns of which the first and the last are the assistant's
Encoded = tuple[list[int], list[bool]]  # token ids and mask, equally long; the mask is true on trained tokens

_ANY_TEXT = "a \ue000"  # with a character that few vocabularies have: unknown characters must have a token
_TOOL_CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "answer"}}}


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder. Raises StageError if there is none, or none that ends a completion."""
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        raise StageError(f"{folder}: there is no tokenizer.json in this model folder")
    try:
        tokenizer: Tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer(_ANY_TEXT)
    except BaseException as error:  # of any type; a defect of the library, which is Rust, is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        kind = "" if type(error) is Exception else f"{type(error).__name__}: "
        raise StageError(
            f"{folder}: tokenizer.json and the files beside it make no tokenizer: fetch them again "
            f"({kind}{reason_of(error)})"
        ) from error
    if tokenizer.eos_token_id is None or not tokenizer.eos_token:  # of an empty text it would be the unknown token
        raise StageError(f"{folder}: the tokenizer has no end-of-text token; set eos_token in tokenizer_config.json")
    if tokenizer.eos_token_id not in tokenizer(f"a{tokenizer.eos_token}a")["input_ids"]:
        raise StageError(
            f"{folder}: the tokenizer reads its own end-of-text token, {tokenizer.eos_token}, as text, and so the chat "
            "template's special tokens: set split_special_tokens in tokenizer_config.json, and single_word of added "
            "tokens, to false"
        )
    _set_image_token(tokenizer, folder)
    return tokenizer


def _set_image_token(tokenizer: Tokenizer, folder: Path) -> None:
    """Set the image token from a model's config.json; an adapter's folder has none."""
    config = read_config(folder) if (folder / "config.json").is_file() else {}
    if not reads_images(config):
        return
    field = VISION_MODELS[config["model_type"]].image_field
    number = config.get(field)
    if not isinstance(number, int) or not is_special(tokenizer, number):
        raise StageError(
            f"{folder}: config.json: {field} is {number}, which is not a special token of "
            "the tokenizer: give config.json and tokenizer of one model"
        )
    set_image_token(tokenizer, str(tokenizer.convert_ids_to_tokens(number)))


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a document: BOS if the tokenizer adds one, the text, EOS. Special tokens in the text are text."""
    ids = token_ids(tokenizer, marked(tokenizer, text), add_special_tokens=True)  # the caller checks lengths
    eos = tokenizer.eos_token_id
    return ids if ids and ids[-1] == eos else [*ids, eos]


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
    """Encode a prompt for an engine: the chat template with its generation prompt."""
    messages, tools = texts_marked(tokenizer, messages, tools)
    require_written(tokenizer, messages, tools)
    return token_ids(tokenizer, render(tokenizer, messages, tools, generation_prompt=True))


def encode_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Tools | None = None,
    *,
    sampled: SampledReply | None = None,
) -> list[Encoded]:
    """Encode a conversation into sequences in which every assistant turn with a prompt is trained exactly once, with
    the token that ends it.

    Usually one; several where the template rewrites earlier turns. Messages after the last assistant turn are dropped.
    sampled: the last message, if a model sampled it: its tokens are trained as they are, and no end where it was
    truncated.
    Raises ConversationError if the template cannot render the conversation faithfully.
    """
    # One that begins the conversation answers nothing: the turns after it read it.
    if not any(message["role"] == "assistant" for message in messages[1:]):
        raise ConversationError("the conversation has no assistant turn, so there is nothing to train on")
    return _written_sequences(tokenizer, messages, tools, sampled, first=1, required=len(messages))


def num_tokens_of_all(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None = None) -> int:
    """Return the tokens of the conversation rendered once: those of `encode_conversation` if the template only
    appends.
    """
    messages, tools = texts_marked(tokenizer, messages, tools)
    return len(token_ids(tokenizer, render(tokenizer, messages, tools, generation_prompt=False)))


def encode_completion(
    tokenizer: Tokenizer, prompt: Sequence[Message], completion: Completion, tools: Tools | None = None, *,
    sampled: SampledReply | None = None,
) -> Encoded:  # fmt: skip
    """Encode a prompt and one completion of it as ids and mask, true on the completion and its end.

    The ids begin with those of `encode_prompt`, also where a tokenizer would merge across that border.
    sampled: as in `encode_conversation`.
    """
    messages = [*prompt, *as_messages(completion)]
    sequence, *others = _written_sequences(
        tokenizer, messages, tools, sampled, first=len(prompt), required=len(messages) - 1
    )
    if others:
        raise ConversationError(
            "the chat template rewrites earlier turns, or the tokenizer merges them with the text that follows, so "
            "the turns of the completion do not form one token sequence"
        )
    return sequence


def ended_completion(
    tokenizer: Tokenizer, prompt: Sequence[Message], completion: Completion, tools: Tools | None = None, *,
    sampled: SampledReply | None = None,
) -> Encoded:  # fmt: skip
    """Encode as `encode_completion`, up to the token that ends the completion.

    The template's text after the end of a turn is cut: a sampled completion has none of it either.
    """
    ids, mask = encode_completion(tokenizer, prompt, completion, tools, sampled=sampled)
    length = max((index + 1 for index, trained in enumerate(mask) if trained), default=len(ids))
    return ids[:length], mask[:length]


def as_messages(completion: Completion) -> Sequence[Message]:
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion


def texts_marked(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None
) -> tuple[list[Message], Tools | None]:
    """Return messages and tools with their special tokens `marked`.

    Raises ConversationError if the template depends on texts, and would write something else where they are marked.
    """
    texts, schemas = [marked(tokenizer, message) for message in messages], marked(tokenizer, tools)
    if texts != list(messages) or schemas != tools:
        asks = messages[-1]["role"] != "assistant"
        written = unmarked(render(tokenizer, texts, schemas, generation_prompt=asks))
        if written != render(tokenizer, messages, tools, generation_prompt=asks):
            raise ConversationError(
                "a text holds a special token of the tokenizer, which the chat template does not render unchanged: "
                "remove it from the row"
            )
    return texts, schemas


def decode_completion(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of sampled tokens, special tokens dropped."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of tokens with all special tokens."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def written_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of sampled tokens with its special tokens, except the one that ends it."""
    ended = ids and ids[-1] in stop_token_ids(tokenizer)
    return decoded(tokenizer, ids[: len(ids) - bool(ended)])


def stop_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a completion: EOS, and the special tokens that the template writes after an assistant
    turn.
    """
    return tuple(dict.fromkeys([_eos(tokenizer), *(ending[0] for ending in _endings(tokenizer))]))


def _endings(tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the endings of assistant turns: each a stop token, and the template's text after it, such as a newline."""
    return (*_template_endings(tokenizer, str(tokenizer.chat_template)), (_eos(tokenizer),))


@lru_cache(maxsize=32)
def _template_endings(tokenizer: Tokenizer, template: str) -> tuple[tuple[int, ...], ...]:
    """Return the endings that the template writes.

    template: the tokenizer's, so that replacing it invalidates the cache.
    """
    if tokenizer.chat_template is None:
        return ()
    question = {"role": "user", "content": "question"}
    endings = []
    whole = render(tokenizer, [question, {"role": "assistant", "content": "answer"}], None, generation_prompt=False)
    _, separator, text = whole.rpartition("answer")
    ids = token_ids(tokenizer, text)
    special = [index for index, token in enumerate(ids) if is_special(tokenizer, token)]
    if separator and special:
        endings.append(tuple(ids[special[0] :]))
    if "tool_calls" in template:
        endings += _tool_call_endings(tokenizer, question)
    return tuple(endings)


def _tool_call_endings(tokenizer: Tokenizer, question: Message) -> list[tuple[int, ...]]:
    """Return the last special token of a turn that calls a tool; there may be others before it, around the call."""
    calling = {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]}
    try:
        before = render(tokenizer, [question], None, generation_prompt=True)
        whole = render(tokenizer, [question, calling], None, generation_prompt=False)
    except StageError:
        return []  # a row with tool calls will be refused with the reason
    ids = token_ids(tokenizer, whole.removeprefix(before)) if whole.startswith(before) else []
    last = max((index for index, token in enumerate(ids) if is_special(tokenizer, token)), default=0)
    if last == 0 or decode_completion(tokenizer, ids[last:]).strip():
        return []  # no call is written, or it does not end with a special token
    return [tuple(ids[last:])]


@dataclass(frozen=True, slots=True)
class _Turn:
    prompt: list[int]
    completion: list[int]  # trained: the assistant's text, and the token that ends it
    rest: list[int]  # the template's text after that, such as a newline

    def continues(self, earlier: _Turn) -> bool:
        return self.prompt[: len(earlier.prompt) + len(earlier.completion)] == [*earlier.prompt, *earlier.completion]


def _turn(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None, sampled: SampledReply | None = None
) -> _Turn:
    """Encode the last of `messages`, an assistant's. Raises ConversationError if it cannot be separated from its
    prompt.
    """
    index = len(messages) - 1
    before = render(tokenizer, messages[:-1], tools, generation_prompt=True)
    if sampled is not None and sampled.token_ids:
        return _Turn(token_ids(tokenizer, before), list(sampled.token_ids), [])
    whole = render(tokenizer, messages, tools, generation_prompt=False)
    if not whole.startswith(before):
        common = next(n for n, (a, b) in enumerate(zip(before, whole + "\0", strict=False)) if a != b)
        raise ConversationError(
            f"the chat template prompts turn {index} with {before[max(0, common - 20) :][-60:]!r} but renders it as "
            f"{whole[max(0, common - 20) :][:60]!r}, so the prompts of training and inference differ: change the base "
            "stage's chat_template"
        )
    if messages[-1]["content"].strip() not in whole[len(before) :]:
        require_reply_written(tokenizer, messages, tools, whole)
    prompt, tokens = token_ids(tokenizer, before), token_ids(tokenizer, whole)
    as_one_text = tokens[: len(prompt)] == prompt  # no token reaches across the border
    written = tokens[len(prompt) :] if as_one_text else following_ids(tokenizer, whole[len(before) :])
    end = _end_of_turn(tokenizer, written)
    _require_tagged(tokenizer, messages, tools, start=len(before))
    if sampled is not None and sampled.was_cut:
        return _Turn(prompt, written if end is None else written[: end - 1], [])
    if end is None:
        # The template writes no end: without one the model would never learn to stop.
        return _Turn(prompt, [*written, _eos(tokenizer)], [])
    return _Turn(prompt, written[:end], written[end:])


def _end_of_turn(tokenizer: Tokenizer, written: Sequence[int]) -> int | None:
    """Return the number of tokens up to the stop token that ends the turn; None if the template writes none.

    Content may contain a stop token too: only one written by the template ends the turn.
    """
    for ending in _endings(tokenizer):
        if tuple(written[-len(ending) :]) == ending:
            return len(written) - len(ending) + 1
    return None


def _require_tagged(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None, start: int) -> None:
    """Raise ConversationError if the template has `{% generation %}`, and leaves a trained part of the last turn
    untagged.

    Tags may reach further (over the generation prompt, which is not trained), and need not include the end of the turn.
    """
    left = untagged(tokenizer, messages, tools, start)
    for token in stop_token_ids(tokenizer):
        left = left.replace(str(tokenizer.convert_ids_to_tokens(token)), "")
    if left.strip():
        raise ConversationError(
            f"the chat template does not tag {left.strip()[:60]!r} of turn {len(messages) - 1} with "
            "{% generation %}, but writes it after its generation prompt, where the model must write it itself: "
            "correct the tags, or take them out"
        )


def _written_sequences(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None, sampled: SampledReply | None, *,
    first: int, required: int,
) -> list[Encoded]:  # fmt: skip
    """Return the sequences of the assistant turns from message `first` on.

    required: the number of messages that the template must render faithfully; it renders no reply whose tokens are
    known.
    """
    sampled = None if sampled is None else sampled.read_by(tokenizer)
    if sampled is not None and sampled.token_ids:
        *before, reply = messages
        before, tools = texts_marked(tokenizer, before, tools)
        messages, required = [*before, reply], len(before)
    else:
        messages, tools = texts_marked(tokenizer, messages, tools)
    require_written(tokenizer, messages[:required], tools)
    sequences: list[list[_Turn]] = []
    for index in range(first, len(messages)):
        if messages[index]["role"] == "assistant":
            is_last = index == len(messages) - 1
            turn = _turn(tokenizer, messages[: index + 1], tools, sampled if is_last else None)
            if sequences and turn.continues(sequences[-1][-1]):
                sequences[-1].append(turn)
            else:
                sequences.append([turn])
    return [_sequence(turns) for turns in sequences]


def _sequence(turns: Sequence[_Turn]) -> Encoded:
    """Concatenate turns that continue each other."""
    last = turns[-1]
    ids = [*last.prompt, *last.completion, *last.rest]
    mask = [False] * len(ids)
    for turn in turns:
        start = len(turn.prompt)
        mask[start : start + len(turn.completion)] = [True] * len(turn.completion)
    return ids, mask


def _eos(tokenizer: Tokenizer) -> int:
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise StageError("the tokenizer has no end-of-text token; set eos_token in tokenizer_config.json")
    return eos
