"""A base in 4 bits under an adapter: `python -m benchmarks.quantised_base 300m`.

Bytes of a random Llama's weights in bfloat16 and with its linear layers in NF4, and the largest differences of
log-probs: of the trainer from the folder that engines serve, of that folder from the original, of the merged model from
the adapted one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from bitsandbytes.nn import Params4bit
from peft import get_peft_model_state_dict
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.loading import MIB, SHAPES, write_model
from benchmarks.logprobs import machine
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.models.adapters import is_adapted
from rlhf_core.models.loading import load_causal_model, save_model
from rlhf_core.models.merging import merge_adapter
from rlhf_core.models.quantisation import write_rounded

QLORA = LoraConfig(rank=16, quantised="nf4")
TOKENS = 128


def load(folder: Path, lora: LoraConfig | None = None) -> nn.Module:
    return load_causal_model(folder, dtype=torch.bfloat16, attention="sdpa", lora=lora).eval()


@torch.no_grad()
def logprobs(model: nn.Module, vocabulary: int) -> Tensor:
    """Return all log-probs of random tokens, (TOKENS, vocabulary)."""
    ids = torch.randint(vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    logits: Tensor = model(input_ids=ids).logits
    return logits[0].float().log_softmax(-1)


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of the base's weights, with the factors of packed ones."""
    parameters = [parameter for name, parameter in model.named_parameters() if "lora_" not in name]
    factors = [p.quant_state.absmax for p in parameters if isinstance(p, Params4bit)]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*parameters, *factors))


def measure(name: str, folder: Path) -> dict[str, float]:
    shape = SHAPES[name]
    original, served, adapter, merged = (folder / part for part in ("original", "served", "adapter", "merged"))
    write_model(shape, original)
    write_rounded(original, served, "bfloat16")
    plain, packed = load(served), load(served, QLORA)
    assert is_adapted(packed)
    found = {"MiB in bfloat16": stored_bytes(plain) / MIB, "MiB in NF4": stored_bytes(packed) / MIB}
    of_folder = logprobs(plain, shape.vocabulary)
    found["trainer - folder"] = float((logprobs(packed, shape.vocabulary) - of_folder).abs().max())
    found["folder - original"] = float((of_folder - logprobs(load(original), shape.vocabulary)).abs().max())
    generator = torch.Generator().manual_seed(1)
    for parameter in packed.parameters():
        if parameter.requires_grad:
            parameter.data = 0.01 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    weights = get_peft_model_state_dict(packed)
    save_model(packed, weights, weights.items(), adapter, None)
    merge_adapter(served, adapter, merged)
    of_adapter = logprobs(packed, shape.vocabulary)
    found["adapter"] = float((of_adapter - of_folder).abs().max())
    found["merged - adapted"] = float((logprobs(load(merged), shape.vocabulary) - of_adapter).abs().max())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantised_base", description=__doc__)
    parser.add_argument("model", choices=SHAPES)
    model = parser.parse_args().model
    table = Table(title=f"{model}: {machine()}")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(model, Path(folder))
    for column in found:
        table.add_column(column, justify="right")
    table.add_row(*(f"{value:.4g}" for value in found.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
