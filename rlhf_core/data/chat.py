"""The only place that tokenises. Text in, token ids out; loads no torch.

A conversation is tokenised in segments, cut where an assistant turn begins and ends, so that the tokens of a prompt
are always a prefix of the tokens of the conversation, and no merge of two segments can hide what the model must say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import StageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    Tokenizer = PreTrainedTokenizerFast
else:
    Tokenizer = Any  # importing transformers takes a second; the name is for annotations

Message = Mapping[str, str]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises StageError if there is none, or none that ends a completion."""
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        raise StageError(f"{folder}: there is no tokenizer.json in this model folder")
    tokenizer: Tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise StageError(f"{folder}: the tokenizer has no end-of-text token; set eos_token in tokenizer_config.json")
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """A document: BOS if the tokenizer adds one (never two), the text, EOS."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])  # lengths are checked, and named, by whoever encodes
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids if ids and ids[-1] == eos else [*ids, eos]


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """What an engine is given to answer: the chat template with its generation prompt."""
    return [token for ids, _ in _segments(tokenizer, messages, generation_prompt=True) for token in ids]


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Token ids and mask, equally long; the mask is true on what an assistant says, and on the token that ends it."""
    ids: list[int] = []
    mask: list[bool] = []
    for tokens, said in _segments(tokenizer, messages, generation_prompt=False):
        ids += tokens
        mask += [said] * len(tokens)
    trained = [token for token, said in zip(ids, mask, strict=True) if said]
    if messages[-1]["role"] == "assistant" and trained[-1] not in stop_token_ids(tokenizer):
        # The template writes no end after the last turn: without one the model would never learn to stop.
        ids.append(_eos(tokenizer))
        mask.append(True)
    return ids, mask


def encode_completion(tokenizer: Tokenizer, prompt: Sequence[Message], completion: str) -> tuple[list[int], list[bool]]:
    """A prompt and one completion of it, as ids and mask; the mask is true on the completion alone and its end."""
    ids, mask = encode_conversation(tokenizer, [*prompt, {"role": "assistant", "content": completion}])
    start = len(encode_prompt(tokenizer, prompt))
    return ids, [said and index >= start for index, said in enumerate(mask)]


def decode_completion(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of sampled tokens, special tokens dropped."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


@lru_cache(maxsize=32)
def stop_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end a completion: EOS, and the special token that the template writes after an assistant turn."""
    stop = [_eos(tokenizer)]
    if tokenizer.chat_template is not None:
        question = [{"role": "user", "content": "question"}]
        before = _render(tokenizer, question, generation_prompt=True)
        whole = _render(tokenizer, [*question, {"role": "assistant", "content": "answer"}], generation_prompt=False)
        if whole.startswith(before + "answer"):
            ending = _ids(tokenizer, whole.removeprefix(before + "answer"))
            stop += [token for token in ending[:1] if token in tokenizer.all_special_ids and token not in stop]
    return tuple(stop)


def _segments(
    tokenizer: Tokenizer, messages: Sequence[Message], *, generation_prompt: bool
) -> Iterator[tuple[list[int], bool]]:
    """Token ids of each segment, and whether an assistant says it."""
    whole = _render(tokenizer, messages, generation_prompt=generation_prompt)
    done = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], generation_prompt=True)
        until = _render(tokenizer, messages[: index + 1], generation_prompt=False)
        if not (whole.startswith(until) and until.startswith(before)):
            raise StageError(
                f"the chat template writes turn {index} differently when later turns follow, so what the assistant "
                "says cannot be told apart; train on single turns, or change the template"
            )
        yield _ids(tokenizer, whole[done : len(before)]), False
        said = _ids(tokenizer, until[len(before) :])
        end = _end_of_turn(tokenizer, said)
        yield said[:end], True
        yield said[end:], False  # such as the newline that some templates write after the end of a turn
        done = len(until)
    yield _ids(tokenizer, whole[done:]), False


def _end_of_turn(tokenizer: Tokenizer, said: Sequence[int]) -> int:
    stop = stop_token_ids(tokenizer)
    return next((index for index in range(len(said), 0, -1) if said[index - 1] in stop), len(said))


def _render(tokenizer: Tokenizer, messages: Sequence[Message], *, generation_prompt: bool) -> str:
    if tokenizer.chat_template is None:
        raise StageError("the tokenizer has no chat template; give the base model one, or train on text")
    from jinja2 import TemplateError

    conversation: list[dict[str, Any]] = [dict(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generation_prompt)
    except TemplateError as error:
        raise StageError(f"the chat template refuses a conversation: {error}") from error
    return str(text)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    # The template has written every special token already: BOS must not be added again.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []


def _eos(tokenizer: Tokenizer) -> int:
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise StageError("the tokenizer has no end-of-text token; set eos_token in tokenizer_config.json")
    return eos
