"""The work that both sides of `benchmarks.grpo_vs_trl` do: model, tokenizer, prompts and reward, made on the spot.

Every completion has the same number of tokens, so both sides train on exactly as many: the model is made so that it
never samples the token that would end one, and no side has to forbid it. All prompts are equally long: nobody pads.
Importing this loads no torch: the reward function's own process reads this file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, USER, ASSISTANT, EOS = SPECIAL_TOKENS = ("<pad>", "<bos>", "<user>", "<assistant>", "<eos>")
TEMPLATE = (
    "<bos>{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 2048
PROMPTS = 256  # in the dataset


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama; embedding and head are tied. On CPU vLLM serves attention heads of size 32 and 64, among others."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int


SHAPES = {
    "1m": Shape(1024, 128, 344, 4, 4, 4),
    "25m": Shape(12288, 512, 1376, 6, 8, 8),
    "135m": Shape(49152, 576, 1536, 30, 9, 3),  # SmolLM2-135M
}


@dataclass(frozen=True, slots=True)
class Workload:
    size: str  # of SHAPES
    dtype: Literal["float32", "bfloat16"]
    prompts: int = 8  # of one step
    group: int = 8  # completions of one prompt
    prompt_tokens: int = 32
    completion_tokens: int = 64
    micro_batch: int = 64  # sequences of one forward and backward
    warm_up: int = 2  # steps that are not counted
    steps: int = 5  # that are
    threads: int = 2  # of every process that computes; no two of them do so at a time

    @property
    def completions(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        """Trained tokens of one step."""
        return self.completions * self.completion_tokens

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def accumulation(self) -> int:
        """Forwards and backwards of one step."""
        return self.completions // self.micro_batch

    @property
    def shape(self) -> Shape:
        return SHAPES[self.size]

    def check(self) -> None:
        """Raises ValueError where the sides could not do the same work."""
        if self.completions % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide {self.completions} completions")
        if self.prompt_tokens <= 3 or self.length > CONTEXT:
            raise ValueError(f"prompts have more than 3 tokens, and {CONTEXT} at most with their completion")

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Workload:
        return cls(**json.loads(file.read_text(encoding="utf-8")))


def word_ids(vocabulary: int) -> range:
    """The tokens that stand for a word, `w4` and so on: all but the special ones."""
    return range(len(SPECIAL_TOKENS) - 1, vocabulary - 1)


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One token a word; EOS is the last of `vocabulary`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS[:-1], *(f"w{i}" for i in word_ids(vocabulary)), EOS]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=PAD,
        additional_special_tokens=[USER, ASSISTANT], model_max_length=CONTEXT,
    )  # fmt: skip
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_model(shape: Shape, folder: Path) -> int:
    """A folder that transformers loads, in float32, with the tokenizer; its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=shape.vocabulary - 1,
    ))  # fmt: skip
    _never_end(model.get_input_embeddings().weight)
    model.save_pretrained(folder)
    tokenizer(shape.vocabulary).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _never_end(embedding: Any) -> None:
    """Takes some 20 nats from the logit of EOS, wherever the model is.

    One coordinate of the residual stream is a large constant: that of every token's embedding. The head, which shares
    the embedding, reads it with one sign for every token and with the other for EOS.
    """
    constant = 16 / embedding.shape[1] ** 0.5
    embedding.data[:, 0] = constant
    embedding.data[-1, 0] = -constant


def rows(workload: Workload) -> list[dict[str, Any]]:
    """The dataset: rows of format `prompts`, one user turn each."""
    random = Random(0)
    words = word_ids(workload.shape.vocabulary)
    asked = [" ".join(f"w{random.choice(words)}" for _ in range(workload.prompt_tokens - 3)) for _ in range(PROMPTS)]
    return [{"id": str(i), "prompt": [{"role": "user", "content": text}]} for i, text in enumerate(asked)]


def prompt_ids(workload: Workload) -> set[tuple[int, ...]]:
    """What each side must sample from: <bos> <user> ... <assistant>."""
    contents = [row["prompt"][0]["content"].split() for row in rows(workload)]
    return {(1, 2, *(int(word[1:]) for word in words), 3) for words in contents}


def reward(completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Any]) -> list[float]:
    """Cheap, and different for the completions of one prompt, so that every token has a gradient."""
    return [sum(map(ord, completion)) % 97 / 97 for completion in completions]


def write_result(file: Path, began: float, steps: Sequence[dict[str, float]], versions: dict[str, str]) -> None:
    """began: of the counted steps, on the clock `time.perf_counter`. steps: seconds by phase, and of the whole step."""
    file.write_text(json.dumps({"began": began, "steps": list(steps), "versions": versions}), encoding="utf-8")
