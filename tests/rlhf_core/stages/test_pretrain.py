from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import encode_text, load_tokenizer
from rlhf_core.config.stages.language_models import PretrainConfig
from rlhf_core.config.stages.merging import MergeConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.stages import merge, pretrain
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import ENGINE, OPTIMIZER, base_model, context_of, dataset, inline

pytestmark = pytest.mark.parts

TEXT = "the cat sat on the mat"


def test_a_text_longer_than_a_sequence_is_learnt_through_to_its_end(tmp_path: Path) -> None:
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "data", [{"text": TEXT}] * 8)}
    config = PretrainConfig(
        dataset="d", epochs=30, max_steps=60, batch_size=8, max_length=16, engine=ENGINE,
        optimizer=OPTIMIZER.model_copy(update={"learning_rate": 1e-2}),
    )  # fmt: skip
    context = context_of(tmp_path / "run", inputs)
    output = pretrain.run(config, inputs, context, inline)
    assert output.kind == Kind.BASE_MODEL
    assert output.metrics["steps"] == 60
    losses = [metrics["loss"] for _, metrics in context.logs]
    assert losses[0] > 2.0
    assert losses[-1] < 0.2
    # 24 tokens in pieces of 16 and 9: <bos> and the overlap are context, the other 23 are trained.
    ids = encode_text(load_tokenizer(output.folder), TEXT)
    model = AutoModelForCausalLM.from_pretrained(output.folder)
    for piece in (ids[:16], ids[15:]):
        with torch.no_grad():
            predicted = model(input_ids=torch.tensor([piece])).logits[0, :-1].argmax(-1)
        assert predicted.tolist() == piece[1:]


@pytest.mark.endurance("architectures")
def test_an_adapter_is_merged_into_the_same_model(tmp_path: Path) -> None:
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "data", [{"text": TEXT}] * 8)}
    config = PretrainConfig(
        dataset="d", epochs=2, batch_size=8, max_length=16, engine=ENGINE, optimizer=OPTIMIZER,
        lora=LoraConfig(rank=4, dora=True, modules_to_save=("norm",)),
    )  # fmt: skip
    output = pretrain.run(config, inputs, context_of(tmp_path / "run", inputs), inline)
    assert output.kind == Kind.ADAPTER
    adapter = local_input(output.folder, Kind.ADAPTER)
    merged = merge.run(MergeConfig(adapter="p"), {**inputs, "adapter": adapter}, LocalContext(tmp_path / "merge"))
    base = AutoModelForCausalLM.from_pretrained(inputs["model"].folder)
    norm = base.model.norm.weight.detach().clone()
    adapted = PeftModel.from_pretrained(base, str(output.folder))
    policy = AutoModelForCausalLM.from_pretrained(merged.folder)
    ids = torch.tensor([encode_text(load_tokenizer(merged.folder), TEXT)])
    torch.testing.assert_close(policy(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=0, atol=1e-4)
    assert not torch.equal(policy.model.norm.weight, norm)
