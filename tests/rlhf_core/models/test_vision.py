"""Images beside packed tokens: the model's own forward, the same for any division, and the right parts are trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from rlhf_core.config.stages.base_model import BaseModelConfig, FolderModel
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.division import Division
from rlhf_core.errors import ConversationError, StageError
from rlhf_core.models.layouts import PACKED, ROWS
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.vision import ImageProcessor, RowImages, open_processor
from rlhf_core.packing import select
from rlhf_core.preflight.model import model_folder_problems
from rlhf_core.stages import base
from rlhf_core.types import PackedBatch
from tests.rlhf_core.pictures import IMAGES, packed_with_pictures, picture, vision_model
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.stages.supervised_runs import base_model

pytestmark = pytest.mark.parts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("vision")
    for colour, size in (("red", (40, 30)), ("blue", (90, 70))):
        (place / colour).write_bytes(picture(colour, size))
    return vision_model(place / "model").folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> ImageProcessor:
    found = open_processor(folder)
    assert found is not None
    return found


def colours_of(folder: Path) -> Path:
    return folder.parents[1]


@pytest.fixture(scope="module")
def batch(folder: Path, processor: ImageProcessor) -> PackedBatch:
    return packed_with_pictures(folder, colours_of(folder), processor)


def load(folder: Path, **options: Any) -> Any:
    return load_causal_model(folder, dtype=torch.float32, attention="sdpa", **options).eval()


def test_log_probs_are_those_of_the_models_own_forward(
    folder: Path, processor: ImageProcessor, batch: PackedBatch
) -> None:
    model = PolicyModel(load(folder))
    model.check_layouts(CPU)
    assert str(model.layouts) == "packed"
    found = model(batch)[0].split(batch.sequence_lengths.tolist())
    own: Any = processor._processor
    for index, colours in enumerate(IMAGES):
        text = f"<bos><user>{'<image>' * len(colours)}{index}?<assistant>{'red' * (index + 1)}<eos>"
        opened = [Image.open(colours_of(folder) / colour).convert("RGB") for colour in colours]
        pictures = {"images": [opened]} if opened else {}
        inputs = own(text=text, **pictures, return_tensors="pt", add_special_tokens=False)
        ids = inputs["input_ids"][0]
        assert ids.tolist() == select(batch, [index]).input_ids.tolist()
        logprobs = model.model(**inputs).logits[0].log_softmax(-1)
        assert torch.allclose(found[index][1:], logprobs[:-1].gather(-1, ids[1:, None])[:, 0], atol=1e-5)


def test_a_photo_is_read_upright_and_transparency_as_white(
    folder: Path, processor: ImageProcessor, tmp_path: Path
) -> None:
    upright = Image.open(colours_of(folder) / "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "photo.png", exif=exif)
    clear = Image.new("RGBA", upright.size, (0, 0, 0, 0))
    clear.paste(upright, mask=upright.convert("L").point([255] * 255 + [0]))  # all but what is white
    clear.save(tmp_path / "clear.png")
    expected = processor.read(str(colours_of(folder) / "red")).pixels
    for name in ("photo.png", "clear.png"):
        assert torch.equal(processor.read(str(tmp_path / name)).pixels.values, expected.values)


def gradients(model: Any, batches: Sequence[PackedBatch]) -> dict[str, Tensor]:
    model.zero_grad()
    for part in batches:
        (model(part)[0] * part.loss_mask).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layouts", [PACKED, ROWS], ids=str)
def test_the_gradient_is_that_of_single_sequences_for_any_division(
    folder: Path, batch: PackedBatch, layouts: Any
) -> None:
    model = PolicyModel(load(folder).double())
    model.layouts = layouts
    expected = gradients(model, [select(batch, [index]) for index in range(4)])
    assert any("vision_model" in name and grad.any() for name, grad in expected.items())
    for tokens in (1000, 40):
        parts = [
            part
            for replica in Division.of(batch, replicas=2, tokens_per_micro_batch=tokens).split()
            for part in replica
        ]
        got = gradients(model, parts)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(got[name], value, rtol=1e-5, atol=1e-9), name


def test_a_selection_has_the_tiles_of_its_own_sequences(batch: PackedBatch) -> None:
    assert batch.pixels is not None
    assert len(batch.pixels.values) == 2  # each picture once
    chosen = select(batch, [3, 2, 0])
    assert chosen.image_parts is not None
    assert chosen.image_parts[chosen.image_parts >= 0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3]
    red = select(batch, [1])
    assert red.pixels is not None
    assert torch.equal(red.pixels.values, batch.pixels.values[:1])
    text = select(batch, [2])
    assert text.image_parts is None
    assert text.pixels is None


def test_a_sampled_image_token_is_text(folder: Path, batch: PackedBatch) -> None:
    """No image is there, so the embedding of the token itself is read."""
    model = PolicyModel(load(folder))
    one = select(batch, [0])
    ids = one.input_ids.clone()
    ids[-2] = model.model.config.image_token_id
    changed = type(one)(**{**one.__dict__, "input_ids": ids})
    assert not torch.equal(model(changed)[0][-1], model(one)[0][-1])


def test_what_is_frozen_has_no_gradient(folder: Path, batch: PackedBatch) -> None:
    frozen = gradients(PolicyModel(load(folder, freeze_vision=True)), [batch])
    assert any(".connector." in name for name in frozen)
    assert not any("vision_model" in name for name in frozen)
    adapted = gradients(PolicyModel(load(folder, lora=LoraConfig(rank=2))), [batch])
    assert adapted
    assert all(".text_model." in name for name in adapted)


def test_a_model_of_text_has_no_encoder_to_freeze(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"engine.freeze_vision: this model reads text alone"):
        load(base_model(tmp_path).folder, freeze_vision=True)


def test_flex_attention_is_for_text(folder: Path) -> None:
    with pytest.raises(StageError, match=r"engine.attention: flex was not tested with models that read images"):
        load_causal_model(folder, dtype=torch.float32, attention="flex")


def test_each_image_must_be_written_once(folder: Path, processor: ImageProcessor) -> None:
    images = RowImages(processor, colours_of(folder))
    with pytest.raises(ConversationError, match="the chat template writes 0 of 1 images"):
        images.expanded([1, 2], [False, True], ["red"])


def test_a_folder_becomes_a_base_model_with_its_processor(folder: Path, tmp_path: Path) -> None:
    assert list(model_folder_problems(folder, reward_model=False, needs_template=True)) == []
    config = BaseModelConfig(source=FolderModel(type="folder", path="model"), dtype="float32")
    output = base.run(config, {}, LocalContext(tmp_path, user_files_root=folder.parent))
    before, after = (load_file(place / "model.safetensors") for place in (folder, output.folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert open_processor(output.folder) is not None
    (output.folder / "processor_config.json").unlink()
    with pytest.raises(StageError, match=r"make no processor of images"):
        open_processor(output.folder)
