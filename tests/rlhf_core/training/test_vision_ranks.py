"""Two real ranks that divide the weights of each architecture that reads images: they train what one rank trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlhf_core.models.folders.vision_models import VISION_MODELS
from rlhf_core.training.distributed import join_group
from tests.rlhf_core.pictures import picture
from tests.rlhf_core.training.mixed_images import trained_on_images
from tests.rlhf_core.training.ranks import Answers, of, run_ranks
from tests.rlhf_core.training.tiny_engine import weights_of
from tests.rlhf_core.training.vision_ranks import DAMPED, measured
from tests.rlhf_core.vision_folders import BUILDERS, vision_folder

pytestmark = pytest.mark.endurance("architectures")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    for kind in BUILDERS:
        vision_folder(kind, path / kind / "vision" / "model")
        for colour in ("red", "blue"):
            (path / kind / colour).write_bytes(picture(colour))
    return path


@pytest.fixture(scope="module")
def answers(folder: Path) -> Answers:
    return run_ranks("tests.rlhf_core.training.vision_ranks", 2, folder, *BUILDERS)


@pytest.mark.slow("starts two ranks for all tests of the file")
@pytest.mark.parametrize("kind", BUILDERS)
def test_ranks_that_divide_the_weights_train_on_images_what_one_trains(
    folder: Path, answers: Answers, tmp_path: Path, kind: str
) -> None:
    """Under ZeRO 3 a rank gathers weights of the vision encoder for the other's images, too."""
    join_group(rank=0, size=1)
    alone = trained_on_images(folder / kind, tmp_path, {"zero_stage": 0}, optimizer=DAMPED)
    one, other = (numbers[kind] for numbers in answers[0])
    assert one["losses"] == other["losses"] == pytest.approx(alone.losses, rel=1e-5)
    assert any(bool(a) != bool(b) for a, b in zip(one["pictures"], other["pictures"], strict=True))
    assert one["measured"] == other["measured"] == pytest.approx(measured(alone), rel=1e-5)
    before = load_file(folder / kind / "vision" / "model" / "model.safetensors")
    found, wanted = of(answers, kind), weights_of(alone.engine)
    assert found.keys() == wanted.keys()
    changed = set()
    for name, weight in wanted.items():
        stored = before.get(name)
        if stored is None:  # a name that folders of the hub have otherwise
            stored = before[name.replace("vision_tower.", "vision_tower.vision_model.")]
        change = (weight - stored).norm()
        assert (found[name] - weight).norm() <= 1e-3 * change + 1e-6, name
        changed |= {name} if change > 1e-3 else set()
    encoder = VISION_MODELS[kind].encoder.removeprefix("model.")  # as files have it
    assert any(name.removeprefix("model.").startswith(encoder) for name in changed), changed
