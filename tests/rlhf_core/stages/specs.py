"""Specs of a quick and a slow stage, stored as a flow stores them. Import it as tests.rlhf_core.stages.specs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.contract import Stage
from rlhf_core.graph.user_files import user_files
from rlhf_core.stages.key import computing_libraries, stage_key
from rlhf_core.stages.table import STAGES

QUICK = "def rows():\n    return [{'text': 'one'}, {'text': 'two'}]\n"
# Says where it is and then works for long, in a way that only a signal ends.
SLOW = (
    "import time\n\ndef rows():\n    print('at work', flush=True)\n    time.sleep(60)\n    return [{'text': 'one'}]\n"
)
CONFIG = DatasetConfig.model_validate(
    {"format": "text", "source": {"type": "function", "path": "code/data.py", "function": "rows"}}
)


def specified(
    repository: ArtifactRepository,
    root: Path,
    code: str,
    stage: Stage = STAGES["dataset"],
    inputs: Mapping[str, ArtifactRef] = MappingProxyType({}),
    config: StageConfig = CONFIG,
    **changes: object,
) -> StageSpec:
    """The spec of a dataset that the user's `code` makes, or of another stage with its `config`, with everything a flow
    stores before it starts the job."""
    (root / "code").mkdir(parents=True, exist_ok=True)
    (root / "code" / "data.py").write_text(code)
    files = user_files(config, root)
    for path in files:
        repository.put_blob(root / path)
    libraries = computing_libraries()
    key = stage_key(stage, config, inputs=inputs, user_files=files, seed=1, libraries=libraries)
    spec = StageSpec(
        name="data.text", stage=stage.name, stage_version=stage.version, key=key, config=config.model_dump(mode="json"),
        inputs=dict(inputs), user_files=files, seed=1, libraries=libraries,
        tracking={"wandb": False, "tensorboard": False},
    ).model_copy(update=changes)  # fmt: skip
    repository.write_spec(spec)
    return spec
