"""Completions of prompts with images, sampled by a real engine while weights are published."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict

from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.models.adapters import add_lora
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.vision import ImageProcessor, open_processor, with_images
from rlhf_core.packing import pack
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.child_engine import ChildEngine
from rlhf_core.rollout.engine import EngineSettings, Request, RequestImage, RolloutEngine, SamplingParameters
from rlhf_core.types import Completion, SequenceImage
from tests.rlhf_core.pictures import picture, tiled_vision_model, vision_model
from tests.rlhf_core.rollout.models import disturb, publish

pytestmark = pytest.mark.endurance("architectures")

CONFIG = VllmEngineConfig(max_length=64, cpu_cache_gib=0.05, max_sequences=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(tmp_path_factory.mktemp("base")).folder


@dataclass(frozen=True)
class Asked:
    """A prompt about a picture."""

    request: Request
    image: SequenceImage


def ask(
    processor: ImageProcessor, path: Path, colour: str, number: int, tokens: int, size: tuple[int, int] = (40, 30)
) -> Asked:
    path.write_bytes(picture(colour, size))
    ids = [4, *processor.read(str(path)).token_ids, 5 + number]
    sampled = SamplingParameters(1.0, 1.0, max_tokens=tokens, stop_token_ids=())
    image = SequenceImage(str(path), 1, len(ids) - 2)
    return Asked(Request(ids, sampled, 20 + number, [RequestImage(path.read_bytes(), 1, len(ids) - 2)]), image)


def logprobs(model: Any, asked: Asked, made: Completion, processor: ImageProcessor) -> list[float]:
    """Of the tokens that were sampled, by `model`."""
    sequence = [*asked.request.prompt, *made.token_ids]
    batch = with_images(pack([sequence], [[False] * len(sequence)]), [[asked.image]], processor)
    with torch.no_grad():
        found: list[float] = PolicyModel(model)(batch)[0][-len(made.token_ids) :].tolist()
    return found


@pytest.mark.endurance("architectures")
@pytest.mark.timeout(300)
def test_completions_continue_with_what_published_weights_make_of_their_images(
    engine_process: ChildProcess, folder: Path, tmp_path: Path
) -> None:
    processor = open_processor(folder)
    assert processor is not None
    asked = {
        number: ask(processor, tmp_path / colour, colour, number, tokens=1 if number == 0 else 24)
        for number, colour in enumerate(("red", "blue", "red"))
    }
    engine = ChildEngine(engine_process, folder, EngineSettings(CONFIG, "float32", seed=0))
    before, after = (load_causal_model(folder, dtype=torch.float32, attention="sdpa").eval() for _ in range(2))
    disturb(after, seed=3)

    complete = engine.call_on(0, RolloutEngine.advance, {number: each.request for number, each in asked.items()})
    while not complete:  # a slow forward takes longer than a call waits
        complete = engine.call_on(0, RolloutEngine.advance, {})
    assert list(complete) == [0]
    publish(engine, after.state_dict(), 1)
    while len(complete) < 3:
        complete |= engine.call_on(0, RolloutEngine.advance, {})
    engine.shutdown()

    for number in (1, 2):
        made = complete[number]
        old, new = (logprobs(model, asked[number], made, processor) for model in (before, after))
        assert [stretch.weight_version for stretch in made.stretches] == [0, 1]
        first = made.stretches[0].tokens
        assert made.logprobs == pytest.approx([*old[:first], *new[first:]], abs=1e-4)
        assert made.logprobs != pytest.approx(old, abs=1e-2)


def test_an_adapter_is_served_behind_images(engine_process: ChildProcess, folder: Path, tmp_path: Path) -> None:
    processor, lora = open_processor(folder), LoraConfig(rank=3, alpha=6.0)
    assert processor is not None
    asked = ask(processor, tmp_path / "red", "red", 0, tokens=12)
    engine = ChildEngine(engine_process, folder, EngineSettings(CONFIG, "float32", seed=0, lora=lora))
    before, base = (load_causal_model(folder, dtype=torch.float32, attention="sdpa").eval() for _ in range(2))
    adapted = add_lora(base, lora, "CAUSAL_LM").eval()
    disturb(adapted, seed=3, only="lora_")
    publish(engine, get_peft_model_state_dict(adapted), 1, lora=lora)
    (made,) = engine.share(RolloutEngine.generate, [asked.request])
    engine.shutdown()
    assert made.logprobs == pytest.approx(logprobs(adapted, asked, made, processor), abs=1e-4)
    assert made.logprobs != pytest.approx(logprobs(before, asked, made, processor), abs=1e-2)


def test_images_that_are_cut_into_tiles_are_seen_as_the_trainer_sees_them(
    engine_process: ChildProcess, tmp_path: Path
) -> None:
    folder = tiled_vision_model(tmp_path / "base").folder
    processor = open_processor(folder)
    assert processor is not None
    square, wide = (
        ask(processor, tmp_path / f"{size}", "red", 0, tokens=12, size=size) for size in ((60, 60), (120, 40))
    )
    assert [len(processor.read(each.image.path).pixels.values) for each in (square, wide)] == [5, 3]
    engine = ChildEngine(engine_process, folder, EngineSettings(CONFIG, "float32", seed=0))
    model = load_causal_model(folder, dtype=torch.float32, attention="sdpa").eval()
    for asked, made in zip(
        (square, wide), engine.share(RolloutEngine.generate, [square.request, wide.request]), strict=True
    ):
        assert made.logprobs == pytest.approx(logprobs(model, asked, made, processor), abs=1e-4)
    engine.shutdown()
