"""What the tests of images in stages share: rows with pictures, and the datasets that are made of them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.config.base import Config
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.contract import Output
from rlhf_core.stages import dataset as dataset_stage
from tests.rlhf_core.pictures import picture
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.stages.supervised_runs import ENGINE, OPTIMIZER

C = TypeVar("C", bound=Config)
ENGINE_SETTINGS, OPTIMIZER_SETTINGS = (given.model_dump(mode="json") for given in (ENGINE, OPTIMIZER))
COLOURS = ("red", "blue")


def rows(count: int) -> list[dict[str, Any]]:
    """What colour a picture has; every fifth row has none and asks to repeat a word."""
    made: list[dict[str, Any]] = []
    for index in range(count):
        colour = COLOURS[index % 2]
        if index % 5 == 4:
            made.append({"prompt": f"say {colour} {index}", "answer": colour})
            continue
        content = base64.b64encode(picture(colour, (30 + index, 40), kind="PNG" if index % 3 else "JPEG")).decode()
        made.append({"prompt": "colour?", "answer": colour, "image": f"data:image/png;base64,{content}"})
    return made


def valid(config: type[C], settings: dict[str, Any]) -> C:
    return config.model_validate_json(json.dumps(settings))


def made(folder: Path, data_format: str, given: list[dict[str, Any]], **settings: Any) -> Output:
    folder.mkdir(parents=True)
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    source = {"type": "files", "paths": ["d.jsonl"]}
    config = valid(DatasetConfig, {"format": data_format, "source": source, **settings})
    context = LocalContext(folder / "work", user_files_root=folder, name="data.d")
    return dataset_stage.run(config, {}, context)


def pairs(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**row, "chosen": row["answer"], "rejected": COLOURS[1 - COLOURS.index(row["answer"])]} for row in given
    ]  # fmt: skip
