"""Step tags, for process rewards in token form: a text after each step, at whose last token a model reads the step.

With the tag ` ки` and lines as steps, two of them are written `a + b = 5 ки\\nso 5 ки`, as in arXiv:2312.08935.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.chat.encoding import Tokenizer, encode_completion, written_text
from rlhf_core.chat.rendering import Message, Tools
from rlhf_core.chat.steps import completed
from rlhf_core.errors import ConversationError


def encode_tagged(
    tokenizer: Tokenizer,
    prompt: Sequence[Message],
    steps: Sequence[str],
    *,
    separator: str,
    tag: str,
    tools: Tools | None = None,
) -> tuple[list[int], list[int]]:
    """Return token ids of the prompt and the steps, each with its tag, up to the last tag; and the index of the last
    token of each tag.

    Raises ConversationError if the tokenizer or the chat template changes the text, or two tags end in one token.
    """
    tagged = [f"{step}{tag}" for step in steps]
    whole = separator.join(tagged)
    ids, mask = encode_completion(tokenizer, prompt, whole, tools)
    places = [index for index, sampled in enumerate(mask) if sampled]
    completion = [ids[place] for place in places]
    written = written_text(tokenizer, completion)
    start = written.find(whole)  # some tokenizers decode a space before a text
    if start < 0:
        raise ConversationError(
            f"the completion's tokens decode to a text that differs from its steps with the tag {tag!r}: the tokenizer "
            "or the chat template changes it; drop the row, or set another `step_tag`"
        )
    ends: list[int] = []
    position = start - len(separator)
    for step in tagged:
        position += len(separator) + len(step)
        ends.append(completed(tokenizer, completion, written, position, first=ends[-1] if ends else 0))
    if len(set(ends)) < len(ends):
        raise ConversationError(f"two tags {tag!r} end in one token, which has one reward: set another `step_tag`")
    return ids[: places[ends[-1]] + 1], [places[end] for end in ends]


def label_ids(tokenizer: Tokenizer, labels: Sequence[str]) -> tuple[int, int]:
    """Return the tokens of the labels of a right and of a wrong step: each the name of a token, or a text of one.

    Raises ConversationError if a label is neither, or if both are one token.
    """
    vocabulary = tokenizer.get_vocab()
    ids = []
    for label in labels:
        known = vocabulary.get(label)
        tokens = tokenizer(label, add_special_tokens=False)["input_ids"] if known is None else [known]
        if len(tokens) != 1:
            raise ConversationError(f"the label {label!r} is {len(tokens)} tokens of this model, expected one")
        ids.append(int(tokens[0]))
    right, wrong = ids
    if right == wrong:
        raise ConversationError(f"the labels {labels[0]!r} and {labels[1]!r} are one token of this model")
    return right, wrong
