"""Settings of a run's base model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_core.config.base import Config, Dtype, NamedFolder, Role, since_default
from rlhf_core.config.numbers import Depth, Deviation, Tokens, Width
from rlhf_core.config.stages.base import NamedStageConfig, SeededConfig
from rlhf_core.config.stages.token_form import TokenForm
from rlhf_core.config.texts import NonEmpty, Repository, Requirement, Revision

MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")  # of the files that make up a model folder


class FolderModel(Config):
    """A folder with config.json, safetensors weights and a tokenizer; `path` may be any fsspec URL."""

    type: Literal["folder"]
    path: NonEmpty = Field(description="the folder; a relative path starts at the recipe's folder")

    def named_folders(self) -> Iterator[NamedFolder]:
        yield NamedFolder(self.path, MODEL_SUFFIXES, "a model")


class HubModel(Config):
    type: Literal["hub"]
    repository: Repository = Field(description="`owner/name` on the Hugging Face hub")
    revision: Revision = Field(
        default="main", description="a commit, or a branch or tag, whose commit is part of the key"
    )

    @property
    def url(self) -> str:
        return f"hf://{self.repository}@{self.revision}"


class WheelModel(Config):
    """A GGUF file inside an installable wheel (see docs/guides/recipes.md), dequantised into safetensors."""

    type: Literal["wheel"]
    requirement: Requirement = Field(description="exact requirement, e.g. name==1.2.3")
    file: NonEmpty = Field(description="path of the GGUF file inside the wheel")


class ScratchVision(Config):
    """The vision encoder of a small Idefics3: an image is resized to a square, and becomes (image_size / patch_size /
    scale_factor)² tokens, with three marks around them.
    """

    image_size: Width = Field(default=56, description="side of the square, in pixels; a multiple of `patch_size`")
    patch_size: Width = Field(default=14, description="side of a patch, in pixels")
    scale_factor: Depth = Field(default=2, description="patches along each side of a token")
    hidden_size: Width = Field(
        default=64, description="hidden size; `heads` times a number that engines serve, such as 32"
    )
    intermediate_size: Width = Field(default=128, description="hidden size of the feed-forward layers")
    layers: Depth = Field(default=2, description="number of transformer layers")
    heads: Depth = Field(default=2, description="number of attention heads")

    @property
    def tokens(self) -> int:
        """Tokens of an image, without the marks around it."""
        return (self.image_size // self.patch_size // self.scale_factor) ** 2


class ScratchModel(Config):
    """A small randomly initialised Llama, with a word-level tokenizer: printable ASCII and the given words. With
    `vision` it is the text model of an Idefics3.
    """

    type: Literal["scratch"]
    words: tuple[NonEmpty, ...] = Field(default=(), description="strings of one token each, longest match first")
    hidden_size: Width = Field(default=128, description="hidden size; `heads` times an even number")
    intermediate_size: Width = Field(default=384, description="hidden size of the feed-forward layers")
    layers: Depth = Field(default=4, description="number of transformer layers")
    heads: Depth = Field(default=4, description="number of attention heads")
    context_length: Tokens = Field(default=256, description="maximum sequence length, in tokens")
    tie_word_embeddings: bool = Field(default=True, description="the output layer shares the embedding's weights")
    initializer_range: Deviation = Field(default=0.05, description="standard deviation of the random weights")
    vision: ScratchVision | None = since_default(
        None, description="its vision encoder, which makes it an Idefics3; none: text only"
    )


BaseModelSource = Annotated[FolderModel | HubModel | WheelModel | ScratchModel, Field(discriminator="type")]


class BaseModelConfig(SeededConfig, NamedStageConfig, TokenForm):
    token_settings: ClassVar[tuple[str, ...]] = ("step_tag", "labels", "separator")

    source: BaseModelSource = Field(description="source of the model")
    chat_template: str | None = Field(
        default=None,
        description="`chatml`, `llama3`, `plain`, or a .jinja file in the recipe's folder; none: the model's own",
    )
    input_template: str | None = Field(
        default=None, description="for a model without chat: text around `{prompt}`, followed by the completion and EOS"
    )
    dtype: Dtype = Field(default="bfloat16", description="dtype of the stored weights")
    kind: Literal["policy", "reward_model", "token_reward_model"] = Field(
        default="policy",
        description="a language model; a reward model with a score head; or a language model that is a process reward "
        "model in token form",
    )
    separator: str = since_default("\n", min_length=1, description="of the form `token`: text between two steps")

    @property
    def in_token_form(self) -> bool:
        return self.kind == "token_reward_model"

    @property
    def makes(self) -> Role:
        return "model" if self.kind == "policy" else "reward_model"

    @property
    def model_dtype(self) -> Dtype:
        return self.dtype

    @property
    def draws(self) -> bool:
        return isinstance(self.source, ScratchModel)

    def named_files(self) -> tuple[str, ...]:
        return () if self.template_file is None else (self.template_file,)

    @property
    def template_file(self) -> str | None:
        """Path of the chat template, if it is a user's file."""
        return self.chat_template if self.chat_template is not None and self.chat_template.endswith(".jinja") else None
