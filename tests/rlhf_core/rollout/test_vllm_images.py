"""Completions of prompts with images, sampled by a real engine while weights are published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.config.rollout import RolloutEngineConfig
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.vision import open_processor, with_images
from rlhf_core.packing import pack
from rlhf_core.rollout.child_engine import ChildEngine
from rlhf_core.rollout.child_process import ChildProcess
from rlhf_core.rollout.engine import EngineSettings, Request, RequestImage, SamplingParameters
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.types import SequenceImage
from tests.rlhf_core.pictures import picture, vision_model
from tests.rlhf_core.rollout.models import disturb, publish

CONFIG = RolloutEngineConfig(max_length=64, cpu_cache_gib=0.05, max_sequences=16)


@pytest.mark.timeout(300)
def test_completions_continue_with_what_published_weights_make_of_their_images(
    engine_process: ChildProcess, tmp_path: Path
) -> None:
    folder = vision_model(tmp_path / "base").folder
    processor = open_processor(folder)
    assert processor is not None
    asked, images = {}, {}
    for number, colour in enumerate(("red", "blue", "red")):
        path = tmp_path / colour
        path.write_bytes(picture(colour))
        ids = [4, *processor.read(str(path)).token_ids, 5 + number]
        images[number] = [SequenceImage(str(path), 1, len(ids) - 2)]
        sampled = SamplingParameters(1.0, 1.0, max_tokens=1 if number == 0 else 24, stop_token_ids=())
        asked[number] = Request(ids, sampled, 20 + number, [RequestImage(path.read_bytes(), 1, len(ids) - 2)])
    engine = ChildEngine(engine_process, folder, EngineSettings(CONFIG, "float32", seed=0))
    before, after = (load_causal_model(folder, dtype=torch.float32, attention="sdpa").eval() for _ in range(2))
    disturb(after, seed=3)

    complete = engine.advance(asked)
    while not complete:  # a slow forward takes longer than a call waits
        complete = engine.advance({})
    assert list(complete) == [0]
    publish(InlineEngines(engine), after.state_dict(), 1)
    while len(complete) < 3:
        complete |= engine.advance({})
    engine.shutdown()

    for number in (1, 2):
        made = complete[number]
        sequence = [*asked[number].prompt, *made.token_ids]
        batch = with_images(pack([sequence], [[False] * len(sequence)]), [images[number]], processor)
        with torch.no_grad():
            old, new = (PolicyModel(m)(batch)[0][-len(made.token_ids) :].tolist() for m in (before, after))
        assert [stretch.weight_version for stretch in made.stretches] == [0, 1]
        first = made.stretches[0].tokens
        assert made.logprobs == pytest.approx([*old[:first], *new[first:]], abs=1e-4)
        assert made.logprobs != pytest.approx(old, abs=1e-2)
