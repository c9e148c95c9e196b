"""Correctness of layouts by architecture: `python -m benchmarks.architectures docs/reference/models.md`.

Covers every causal architecture of transformers that can be built small from its config class, as a model with random
weights and all kinds of its layers. The layouts that `models/layout_check.py` chooses are compared with an oracle, each
sequence alone through `model(ids).logits`, by log-probs and by the gradient of all weights, in float32. The check gets
a model with the windows and blocks of its class, as a real one has; the oracle also one where these are short. So a
check of a few tokens cannot miss errors that appear at a distance only. Exits with an error if an accepted layout is
wrong.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.small_models import small_config, small_model
from rlhf_core.errors import StageError
from rlhf_core.models.layouts import INDEXED, PACKED, ROWS, TREE, Layouts
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.tree_attention import IMPLEMENTATION, use_tree_attention
from rlhf_core.packing import pack
from rlhf_core.types import PackedBatch

_SECONDS = 300  # for one architecture
_NOT_BUILT = "not built"
_TOLERANCE = 2e-3  # nats, and of the gradient's norm
_LENGTHS = (23, 1, 37, 8, 2, 15)
_LONG_WINDOW = 4096
_SHARED = 14  # tokens that the last sequence begins with as the longest does


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table."""

    model_type: str
    name: str  # of the class
    verdict: str  # packed, packed with sequence indices, rows, refused; or "not built"
    reason: str = ""
    wrong: str = ""  # the oracle's error


def ragged_batch(vocabulary: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randint(3, vocabulary, (length,), generator=generator) for length in _LENGTHS]
    parts[-1][:_SHARED] = parts[2][:_SHARED]
    return pack(parts, [torch.arange(length) > 0 for length in _LENGTHS])


def oracle_error(model: Any, layouts: Layouts) -> float:
    """Return the largest error of a layout against sequences alone by the model's eager attention.

    Of a log-prob in nats, or of the gradient of all weights, relative to its norm.
    """
    batch = ragged_batch(model.config.get_text_config().vocab_size).to(model.device)
    weights = torch.linspace(-1, 1, batch.num_tokens, device=model.device).cos() * batch.loss_mask
    chosen = "sdpa" if model.config._attn_implementation == IMPLEMENTATION else model.config._attn_implementation
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    alone = torch.cat([_plain_logprobs(model, ids) for ids in batch.input_ids.split(batch.sequence_lengths.tolist())])
    expected = _gradient(model, (alone * weights).sum())
    if layouts.packed == "tree":
        use_tree_attention(model)
    elif model._can_set_attn_implementation():
        model.set_attn_implementation(chosen)
    policy = PolicyModel(model)
    policy.layouts = layouts
    logprobs = policy(batch)[0]
    gradient = _gradient(model, (logprobs * weights).sum())
    error = (gradient - expected).norm() / expected.norm()
    return float(torch.maximum((logprobs - alone).abs().max(), error).detach())


def _plain_logprobs(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1].float()
    return torch.cat([logits.new_zeros(1), logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]])


def _gradient(model: Any, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel()) for p in model.parameters()])


def accepted(layouts: Layouts) -> list[Layouts]:
    """Return each layout that a batch may get, alone."""
    packed = [each for each in (TREE, PACKED, INDEXED) if each.packed == layouts.packed]
    return [ROWS, *packed] if layouts.rows else packed


def examine(model_type: str) -> Entry:
    """Examine one architecture. Raises TimeoutError if it takes too long."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    try:
        real, short = (small_model(config) for config in _real_and_short(model_type))
        real(input_ids=torch.arange(3, 9).unsqueeze(0), use_cache=False)
    except Exception as error:  # of a class that cannot be built by settings alone; it is listed as such
        return Entry(model_type, name, _NOT_BUILT, _first_line(error))
    policy = PolicyModel(real)
    with contextlib.redirect_stdout(io.StringIO()) as log:
        try:
            policy.check_layouts(torch.device("cpu"))
        except StageError as error:
            return Entry(model_type, type(real).__name__, "refused", _first_line(error))
    if real.config._attn_implementation == "eager" != short.config._attn_implementation:
        short.set_attn_implementation("eager")  # as the check has chosen
    errors = {f"{layouts} {kind}": oracle_error(model, layouts) for layouts in accepted(policy.layouts)
              for kind, model in (("", real), ("short", short))}  # fmt: skip
    wrong = "; ".join(f"{what}: {error:.2g}" for what, error in errors.items() if not error <= _TOLERANCE)
    _, _, reason = log.getvalue().strip().partition(", since ")
    return Entry(model_type, type(real).__name__, str(policy.layouts), reason, wrong)


def _real_and_short(model_type: str) -> tuple[Any, Any]:
    """Build a model with windows and blocks of the class, and one with short ones.

    A window without a default is long.
    """
    real, short = small_config(model_type, short=False), small_config(model_type)
    if getattr(short, "sliding_window", None) and not getattr(real, "sliding_window", None):
        real = small_config(model_type, short=False, sliding_window=_LONG_WINDOW)
    return real, short


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes more than {_SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


_PAGE = """# Architectures

How the sequences of a batch are laid out for each causal architecture of transformers. At load, every model is checked
with its own weights ([decision 10](../design/decisions/0010-layouts-are-checked-at-load.md)); this page shows what
that finds.

- **tree**: sequences end to end in one row, where tokens that several begin with are there once; attention along each
  sequence. The fastest. With `engine.attention: sdpa`.
- **packed**: sequences end to end in one row with a mask over all, or padded rows where these cost less.
- **rows**: one sequence a row, padded on the right, together with those of similar length.
- **refused**: no layout is right. The job ends with the reason.

Where packing is wrong, it is tried again with sequence indices (`seq_idx`, `cu_seq_lens`), which some kernels for GPUs
take (causal-conv1d, flash-linear-attention). So a model that is in rows here may be packed there. The reason of
a packed model is what keeps it from a tree.

Generated by `python -m benchmarks.architectures docs/reference/models.md` with transformers {transformers} and torch
{torch} on CPU: {counts}.

Each accepted layout was held against an oracle, each sequence alone through `model(ids).logits` in
float32: the log-probs of all tokens, and the gradient of all weights, are equal to {tolerance:g}. A model type that is
not here could not be built small from its settings. It is checked at load like any other.

| model type | class | layout | why |
|---|---|---|---|
{rows}

Not built: {missing}.
"""


def page(entries: Sequence[Entry]) -> str:
    """Return the text of docs/reference/models.md."""
    built = [entry for entry in entries if entry.verdict != _NOT_BUILT]
    verdicts = Counter(entry.verdict for entry in built)
    rows = [f"| {e.model_type} | {e.name} | {e.verdict} | {_without_name(e)} |" for e in built]
    return _PAGE.format(
        transformers=version("transformers"),
        torch=version("torch").partition("+")[0],
        counts=", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())),
        tolerance=_TOLERANCE,
        rows="\n".join(rows),
        missing=", ".join(entry.model_type for entry in entries if entry.verdict == _NOT_BUILT),
    )


def _without_name(entry: Entry) -> str:
    """Return the reason without the class at its beginning, which has a column of its own."""
    return entry.reason.removeprefix(f"{entry.name} ").replace("|", " ")


def main(arguments: Sequence[str]) -> None:
    """arguments: the file of the table, and the model types, without any all."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    entries = []
    for model_type in arguments[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with _time_limit():
            entries.append(examine(model_type))
        print(entries[-1], flush=True)
    if wrong := [entry.model_type for entry in entries if entry.wrong]:
        raise SystemExit(f"accepted but wrong: {', '.join(wrong)}")
    Path(arguments[0]).write_text(page(entries), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
