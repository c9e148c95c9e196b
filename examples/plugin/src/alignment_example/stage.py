"""A stage: reads riddles and a model, and writes how many of its tokens each riddle needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.base import Reads
from rlhf_core.config.numbers import Tokens
from rlhf_core.config.stages.base import NamedStageConfig, RowLimit
from rlhf_core.contract import Input, Output, Stage, StageContext
from rlhf_core.data.reading import read_dataset
from rlhf_core.graph.drafting import Draft
from rlhf_core.preflight.stages.context import CheckContext, Note


class MeasureConfig(NamedStageConfig):
    dataset: Annotated[str, Reads("dataset", format="riddles")] = Field(description="riddles")
    model: Annotated[str | None, Reads("model")] = Field(default=None, description="whose tokens are counted")
    max_length: Tokens = Field(description="longest riddle, in tokens")

    def row_limit(self, dataset: str) -> RowLimit | None:
        return RowLimit("max_length", self.max_length)


def check(config: MeasureConfig, node: Draft, context: CheckContext) -> Iterator[str | Note]:
    riddles = [row["riddle"] for _, row in context.samples.get(config.dataset, [])]
    if config.max_length < 4:
        yield f"{node.section}.max_length: no riddle is as short: raise it"
    if len(riddles) == 1:
        yield Note(f"{node.section}: there is one riddle to measure")


def run(config: MeasureConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    riddles, tokenizer = read_dataset(inputs["dataset"].folder), load_tokenizer(inputs["model"].folder)
    tokens = [riddles.format.num_tokens(tokenizer, row) for row in riddles.rows]
    folder = context.workdir / "lengths"
    folder.mkdir()
    (folder / "lengths.json").write_text(json.dumps(tokens))
    return Output(Kind.REPORT, folder, {"longest": max(tokens)})


MEASURE = Stage(
    "measure",
    1,
    MeasureConfig,
    frozenset({Kind.REPORT}),
    "alignment_example.stage:run",
    needs_template=True,
    checks="alignment_example.stage:check",
)
