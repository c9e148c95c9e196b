"""A round's prompts: the first rows of the loop's dataset that no earlier round had. Imports no torch.

Each round's artifact names the one before as its input `previous`, and lists the prompts of all rounds up to its own,
so that this state is in the store alone, and the next round needs no other artifact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.loop import RoundPromptsConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.formats import Row, normalised
from rlhf_core.data.reading import IMAGES_FOLDER, dataset_info, read_dataset, write_dataset
from rlhf_core.errors import StageError

USED_FILE = "used.txt"  # a line for each prompt: the SHA-256 of its normalised text


def run(config: RoundPromptsConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Select prompts; two rows whose prompts differ in whitespace only count as one.

    Raises StageError if too few are left.
    """
    used = dict.fromkeys(_used(inputs.get("previous"), context))
    before = len(used)
    source = inputs["dataset"].folder
    dataset = read_dataset(source)

    def fresh() -> Iterator[Row]:
        for row in dataset.rows:
            prompt = _hashed(dataset.format.asked_text(row))
            if prompt not in used:
                used[prompt] = None
                yield dict(row)

    rows = list(islice(fresh(), config.count))
    if len(rows) < config.count:
        raise StageError(out_of_prompts(len(rows), config.count, before))
    folder = context.workdir / "dataset"
    images = write_dataset(folder, rows, dataset_info(source), images_from=(source / IMAGES_FOLDER,))
    (folder / USED_FILE).write_text("".join(f"{prompt}\n" for prompt in used), encoding="ascii")
    return Output(Kind.DATASET, folder, {"rows": len(rows), "used_before": before, **images})


def out_of_prompts(left: int, needed: int, used: int) -> str:
    """Describe a loop's dataset with fewer unused prompts than a round needs."""
    return (
        f"a round needs {needed} prompts that no earlier one had, and {left} are left after {used} were used: add rows "
        "to the loop's dataset, or lower loop.prompts_per_round"
    )


def _used(previous: Input | None, context: StageContext) -> Iterator[str]:
    """Yield the hashes of the prompts of all rounds up to `previous`."""
    while previous is not None:
        if (listed := previous.folder / USED_FILE).is_file():
            yield from listed.read_text(encoding="ascii").split()
            return
        earlier = read_dataset(previous.folder)  # of an older release, which did not list them
        yield from (_hashed(earlier.format.asked_text(row)) for row in earlier.rows)
        parent = previous.manifest.parents.get("previous")
        previous = None if parent is None else context.fetch(parent)


def _hashed(prompt: str) -> str:
    return hashlib.sha256(normalised(prompt).encode()).hexdigest()
