"""The tokenizer of models built from scratch: printable ASCII, and the recipe's words."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_core.chat.image_messages import set_image_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, USER, ASSISTANT, UNKNOWN = "<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, USER, ASSISTANT, UNKNOWN)
# Image tokens under the names of Idefics3's processor: a part of an image, and the marks around an image.
IMAGE = "<image>"
IMAGE_TOKENS = (IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
CHARACTERS = (*filter(str.isprintable, string.printable), "\n")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<assistant>{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('this model knows user and assistant turns only, not ' + message['role']) }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def vocabulary(words: Sequence[str], *, images: bool = False) -> dict[str, int]:
    """Return the id of each token. images: also those of a model that reads images."""
    tokens = (*SPECIAL_TOKENS, *CHARACTERS, *words, *(IMAGE_TOKENS if images else ()))
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def word_level_tokenizer(words: Sequence[str], context_length: int, *, images: bool = False) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token for each of `words` (the longest match wins), for each printable ASCII
    character, and newline.

    Decoding restores the text exactly; any other character becomes <unk>. A document is `<bos>text<eos>`, a
    conversation `<bos><user>question<assistant>answer<eos>`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = vocabulary(words, images=images)
    longest_first = sorted(set(words), key=lambda word: (-len(word), word))
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, tokens[BOS])])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT, *(IMAGE_TOKENS if images else ())], model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    wrapped.chat_template = CHAT_TEMPLATE
    if images:
        set_image_token(wrapped, IMAGE)
    return wrapped
