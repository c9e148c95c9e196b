"""Every architecture that reads images: the model's own forward, the same for any division, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.division import Division
from rlhf_core.errors import StageError
from rlhf_core.models.folders.vision_models import VISION_MODELS
from rlhf_core.models.layouts import PACKED, ROWS
from rlhf_core.models.loading import load_causal_model, load_scalar_model
from rlhf_core.models.merging import merge_adapter
from rlhf_core.models.output_head import backbone
from rlhf_core.models.packed import PolicyModel, ScalarModel
from rlhf_core.models.vision import ImageProcessor, RowImages, open_processor
from rlhf_core.models.vision_models import ARCHITECTURES, VisionModel
from rlhf_core.models.vision_models.grids import grid_positions
from rlhf_core.packing import pack, select
from rlhf_core.types import PackedBatch, Pixels
from tests.rlhf_core.models.saved import save_state
from tests.rlhf_core.pictures import IMAGES, packed_with_pictures, picture
from tests.rlhf_core.vision_folders import BUILDERS, vision_folder

CPU = torch.device("cpu")
PARTS = "smolvlm"  # the one that the tier of parts runs


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.parts if kind == PARTS else pytest.mark.endurance("architectures"))
        for kind in BUILDERS
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(kind)
    for colour, size in (("red", (40, 30)), ("blue", (90, 70))):
        (place / colour).write_bytes(picture(colour, size))
    return vision_folder(kind, place / "model")


@pytest.fixture(scope="module")
def processor(folder: Path) -> ImageProcessor:
    found = open_processor(folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def batch(folder: Path, processor: ImageProcessor) -> PackedBatch:
    return packed_with_pictures(folder, folder.parent, processor)


def load(folder: Path, **options: Any) -> Any:
    return load_causal_model(folder, dtype=torch.float32, attention="sdpa", **options).eval()


def own_inputs(kind: str, folder: Path, processor: ImageProcessor, index: int) -> Any:
    """The inputs of transformers' own processor for the text of a sequence."""
    own: Any = processor._processor
    content = f"{own.image_token * len(IMAGES[index])}{index}?"
    conversation = [{"role": "user", "content": content}, {"role": "assistant", "content": "red" * (index + 1)}]
    text = load_tokenizer(folder).apply_chat_template(conversation, tokenize=False)
    opened = [Image.open(folder.parent / colour).convert("RGB") for colour in IMAGES[index]]
    # This processor leaves out the parts of images of which a text has several; engines do not.
    images = [[each] for each in opened] if kind == "llava_onevision" else [opened]
    return own(text=text, **({"images": images} if opened else {}), return_tensors="pt", add_special_tokens=False)


def test_log_probs_are_those_of_the_models_own_forward(
    kind: str, folder: Path, processor: ImageProcessor, batch: PackedBatch
) -> None:
    model = PolicyModel(load(folder))
    model.check_layouts(CPU)
    assert str(model.layouts) == "packed"
    found = model(batch)[0].split(batch.sequence_lengths.tolist())
    for index in range(len(IMAGES)):
        inputs = own_inputs(kind, folder, processor, index)
        ids = inputs["input_ids"][0]
        assert ids.tolist() == select(batch, [index]).input_ids.tolist()
        logprobs = model.model(**inputs).logits[0].log_softmax(-1)
        assert torch.allclose(found[index][1:], logprobs[:-1].gather(-1, ids[1:, None])[:, 0], atol=1e-5)


def test_scores_are_those_of_the_models_own_forward(
    kind: str, folder: Path, processor: ImageProcessor, batch: PackedBatch, tmp_path: Path
) -> None:
    """Scores of a head on the causal model's layers equal those of the stored scalar model."""
    options: dict[str, Any] = {"dtype": torch.float32, "attention": "sdpa", "seed": 3}
    classifier: Any = load_scalar_model(folder, **options).eval()
    model = ScalarModel(classifier)
    model.check_layouts(CPU)
    found = model(batch)
    for index, scores in enumerate(found.split(batch.sequence_lengths.tolist())):
        inputs = own_inputs(kind, folder, processor, index)
        hidden = backbone(classifier)(**inputs, use_cache=False).last_hidden_state[0]
        assert torch.allclose(scores, classifier.score(hidden).squeeze(-1), atol=1e-5)
    classifier.save_pretrained(tmp_path)
    stored = ScalarModel(load_scalar_model(tmp_path, **options).eval())
    stored.layouts = model.layouts
    assert torch.allclose(stored(batch), found, atol=1e-6)


def gradients(model: Any, batches: Sequence[PackedBatch]) -> dict[str, Tensor]:
    model.zero_grad()
    for part in batches:
        (model(part)[0] * part.loss_mask).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_the_gradient_is_that_of_single_sequences_for_any_division(kind: str, folder: Path, batch: PackedBatch) -> None:
    model = PolicyModel(load(folder).double())
    expected = gradients(model, [select(batch, [index]) for index in range(len(IMAGES))])
    assert any(VISION_MODELS[kind].encoder in name and grad.any() for name, grad in expected.items())
    for layouts in (PACKED, ROWS):
        model.layouts = layouts
        for tokens in (1000, 60):
            replicas = Division.of(batch, replicas=2, tokens_per_micro_batch=tokens).split()
            got = gradients(model, [part for replica in replicas for part in replica])
            assert got.keys() == expected.keys()
            for name, value in expected.items():
                # Norms and angles of positions are computed in float32.
                assert (got[name] - value).norm() <= 1e-6 * value.norm() + 1e-9, (str(layouts), tokens, name)


def test_a_frozen_encoder_leaves_the_connector_trained(kind: str, folder: Path, batch: PackedBatch) -> None:
    model = PolicyModel(load(folder, freeze_vision=True))
    names = set(gradients(model, [batch]))
    parts = VISION_MODELS[kind]
    inside = {name for name in names if f".{parts.encoder}." in name}
    connecting = {name for name in names if any(f".{part}" in name for part in parts.connectors)}
    assert connecting
    assert inside <= connecting


def test_an_adapter_changes_the_text_model_alone(kind: str, folder: Path, batch: PackedBatch) -> None:
    names = gradients(PolicyModel(load(folder, lora=LoraConfig(rank=2), gradient_checkpointing=True)), [batch])
    assert names
    assert not any(f".{part}." in name for name in names for part in VISION_MODELS[kind].all)


def test_checkpointed_layers_have_the_same_gradients(folder: Path, batch: PackedBatch) -> None:
    plain, again = PolicyModel(load(folder)), PolicyModel(load(folder, gradient_checkpointing=True).train())
    expected, got = gradients(plain, [batch]), gradients(again, [batch])
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(got[name], value, atol=1e-5 * float(value.abs().max()) + 1e-9), name


def _all(self: VisionModel, config: Any, batch: PackedBatch) -> None:
    """As of text: the index in the sequence is all."""


def _nothing(self: VisionModel, later: Sequence[Tensor], is_image: Tensor) -> dict[str, Any]:
    return {}


@pytest.mark.endurance("architectures")
@pytest.mark.parametrize(
    ("kind_of_it", "part", "wrong"),
    [("qwen2_5_vl", "position_ids", _all), ("qwen3_vl", "position_ids", _all), ("qwen3_vl", "arguments", _nothing),
     ("gemma3", "arguments", _nothing)],
)  # fmt: skip
def test_what_is_computed_otherwise_is_refused_at_load(
    kind_of_it: str, part: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PolicyModel(load(vision_folder(kind_of_it, tmp_path)))
    monkeypatch.setattr(type(ARCHITECTURES[kind_of_it]), part, wrong)
    with pytest.raises(StageError, match=r"for sequences with images, laid out \w+, differs from its own forward"):
        model.check_layouts(CPU)


@pytest.mark.parts
def test_positions_of_an_image_are_the_cells_of_its_grid() -> None:
    """Of 2 × 3 tokens behind two of text, in the second sequence; the first is text."""
    grid = Pixels(torch.zeros(24, 1), torch.tensor([6]), rows=torch.tensor([24]), sizes=torch.tensor([[1, 4, 6]]))
    parts = torch.tensor([-1] * 5 + [*range(6)] + [-1, -1])
    packed = pack([[1] * 3, [1] * 10], [[False] * 3, [False] * 10])
    time, height, width = grid_positions(replace(packed, image_parts=parts, pixels=grid), 2).tolist()
    assert time == [0, 1, 2, 0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert height == [0, 1, 2, 0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert width == [0, 1, 2, 0, 1, 2, 3, 4, 2, 3, 4, 5, 6]


@pytest.mark.endurance("architectures")
def test_newlines_beside_images_of_gemma_are_merged_as_its_tokenizer_does(tmp_path: Path) -> None:
    """The tokens that an engine gets in their place are those of the template."""
    (tmp_path / "red").write_bytes(picture("red"))
    processor = open_processor(vision_folder("gemma3", tmp_path / "model"))
    assert processor is not None
    own: Any = processor._processor
    tokenizer, image = own.tokenizer, Image.open(tmp_path / "red").convert("RGB")
    mark = own.image_token
    for text in (f"a\n{mark}b", f"{mark}{mark}b", f"a\n{mark}\nb", f"a\n\n{mark}\n\nb", f"a{mark}"):
        written = tokenizer(text, add_special_tokens=False)["input_ids"]
        digests = ["red"] * written.count(processor.image_token_id)
        ids, mask, images = RowImages(processor, tmp_path).expanded(written, [False] * len(written), digests)
        expected = own(text=text, images=[[image] * len(digests)], add_special_tokens=False, return_tensors="pt")
        assert ids == expected["input_ids"][0].tolist(), text
        assert len(mask) == len(ids)
        for each in reversed(images):
            ids[each.start : each.start + each.length] = each.written or [processor.image_token_id]
        assert ids == written


@pytest.mark.parts
def test_an_architecture_that_is_not_in_the_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}')
    save_file({"model.x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StageError, match=r"'llava' reads images, and its architecture was not tested here: take one"):
        load(tmp_path)


@pytest.mark.parts
def test_the_tables_have_the_same_architectures() -> None:
    assert ARCHITECTURES.keys() == VISION_MODELS.keys()
    assert {*BUILDERS, "idefics3"} == set(ARCHITECTURES)


@pytest.mark.parametrize("load_adapted", [load_causal_model, load_scalar_model])
def test_an_adapter_is_merged_whatever_names_the_folder_has(folder: Path, tmp_path: Path, load_adapted: Any) -> None:
    options = {"dtype": torch.float32, "attention": "sdpa"}
    adapted = load_adapted(folder, **options, lora=LoraConfig(rank=2)).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    save_state(adapted, get_peft_model_state_dict(adapted), tmp_path / "adapter", None)
    merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged")
    merged = load_adapted(tmp_path / "merged", **options).eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    given = adapted(input_ids=ids).logits
    torch.testing.assert_close(merged(input_ids=ids).logits, given, rtol=1e-4, atol=1e-4)
    assert (given - load_adapted(folder, **options).eval()(input_ids=ids).logits).abs().max() > 0.01
