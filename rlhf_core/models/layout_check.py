"""Measures which layouts of sequences a loaded model computes correctly.

Many models of transformers ignore the positions of packed sequences: state-space, linear-attention and convolution
layers, and models whose mask ignores positions. They raise no error; log-probs are then wrong by nats.

A few short sequences are run alone and in each layout. The gradient of one sequence's hidden states with respect to the
embeddings of other sequences, and of later tokens, must be exactly zero: that holds in every precision, and a leak of
any size fails it. And hidden states and their gradient must equal those of sequences alone up to rounding, which is
itself measured: the change of a sequence's hidden states when tokens follow it. Where ZeRO-3 shards the weights, only
hidden states are compared, since DeepSpeed's hooks take every backward pass for one of training.

Attention that ignores part of the model's own eager function is replaced by it (attention_check.py). With attention
`sdpa` a token tree is tried first, also with two sequences that share a prefix. If it is correct it is used, and the
model has the tree's attention from then on; else padded rows and packing are tried. Attention `flex` computes all of
these layouts itself, and a model for which it is wrong is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.errors import StageError, reason_of
from rlhf_core.mesh import current_mesh
from rlhf_core.models import tree_attention
from rlhf_core.models.attention_check import attention_difference
from rlhf_core.models.compiling import compile_layers
from rlhf_core.models.dropout import set_train_mode
from rlhf_core.models.flex_attention import IMPLEMENTATION as FLEX
from rlhf_core.models.folders.folder import depends_on_longest
from rlhf_core.models.folders.vision_models import reads_images
from rlhf_core.models.image_check import require_own_images
from rlhf_core.models.layout_sequences import (
    LENGTHS,
    SHARED,
    branching_sequences,
    continued_sequence,
    different_sequences,
)
from rlhf_core.models.layouts import CUT_TREE, INDEXED, PACKED, ROWS, TREE, Layouts, arranged, depends_on_place
from rlhf_core.models.output_head import backbone
from rlhf_core.packing import select_sequences
from rlhf_core.types import PackedBatch

_MIDDLE, _READ = 1, 8  # the sequence whose gradient is compared, and how many of its tokens have a loss
_OWN = slice(LENGTHS[0], LENGTHS[0] + _READ)
_APART = (slice(0, _OWN.start), slice(_OWN.stop, None))
_SKIPPED = 6  # of a sequence that branches off another: its gradient is compared behind these tokens
# The least errors that count, relative to how much values differ from token to token: of hidden states, of gradients.
# In bfloat16 a token may be sent to another expert for rounding.
_LEAST = {torch.float32: (1e-3, 1e-3), torch.float64: (1e-3, 1e-3), torch.bfloat16: (0.1, 0.3)}
_TIMES_NOISE = 4.0
_MOST_NOISE = 0.5

# Errors of a model's own code for an unsupported layout. Out of memory is a RuntimeError, and is reported as such.
_NOT_FOR_IT = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, NotImplementedError)

# For one sequence alone, (hidden (T, d), ids (1, T)) -> our output (T, ...) float32, and that of the model itself,
# of all tokens or of the last ones.
Outputs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class _Result:
    hidden: Tensor  # (N, d) float32
    gradient: Tensor | None  # (N, d) float32, at the embeddings, of a loss on some tokens of one sequence


@dataclass(frozen=True, slots=True)
class _Tolerance:
    hidden: float
    gradient: float


def checked_layouts(
    model: Any, outputs: Outputs, device: torch.device, *, compiled: bool = False, selective: bool = False
) -> Layouts:
    """Return the layouts in which `model` computes the same as for single sequences; equal on all ranks.

    compiled: compile its layers, which must compute the same. selective: its layers are checkpointed selectively, which
    must compute the same.

    model: a PreTrainedModel where it will be trained, so that the kernels are those of training; it must be in eval
    mode, and under ZeRO-3 every rank must call this. Raises StageError if no layout is correct, if the model sees
    tokens after the one it predicts, or if our output is not the model's own.
    """
    name, batch = type(model).__name__, different_sequences(model, device)
    with tree_attention.recorded_windows() as windows:
        alone = _alone(model, batch)
    if model.config._attn_implementation == FLEX:
        _require_known_masks(model, windows, forwards=batch.num_sequences)
    if (left_out := _choose_attention(model, batch, device)) is not None:
        alone = _alone(model, batch)
    tolerance = _tolerance(model, batch, alone[_MIDDLE])
    with torch.no_grad():
        _require_own_output(model, outputs, select_sequences(batch, [_MIDDLE]), alone[_MIDDLE], tolerance)
    expected = _Result(torch.cat([one.hidden for one in alone]), alone[_MIDDLE].gradient)

    def problem(layouts: Layouts) -> str | None:
        if layouts.packed is not None and (reason := depends_on_place(model.config)):
            return reason
        try:
            return _difference(_measured(model, batch, layouts, _MIDDLE), expected, tolerance)
        except _NOT_FOR_IT as error:
            return f"raises {type(error).__name__}: {reason_of(error)}"

    tree = _tree_problem(model, batch, problem, tolerance) if left_out is None else f"is for sdpa, which {left_out}"
    packed = None
    if _on_all_ranks([tree is None], device)[0]:
        layouts = TREE
    else:
        if tree is None and model.config._attn_implementation == tree_attention.IMPLEMENTATION:
            model.set_attn_implementation("sdpa")
        layouts, packed = _without_tree(model, problem, device)
    if current_mesh().sequence > 1:
        layouts = _cut(model, layouts, problem, tree, device)
    _log(name, layouts, packed=packed, tree=tree)
    if reads_images(model.config.to_dict()):
        require_own_images(model, layouts, device, tolerance.hidden)
    if compiled:
        compile_layers(model)
        if (wrong := problem(layouts)) is not None:
            raise StageError(f"engine.compiled: compiling the layers of {name} {wrong}; remove it")
    if selective:
        set_train_mode(model, dropout=False)
        wrong = problem(layouts)
        model.eval()
        if wrong is not None:
            raise StageError(
                f"engine.gradient_checkpointing: selective: computing parts of the layers of {name} again {wrong}; set "
                "true"
            )
    return layouts


def _without_tree(
    model: Any, problem: Callable[[Layouts], str | None], device: torch.device
) -> tuple[Layouts, str | None]:
    """Return the layouts that are correct, and the problem of packing. Raises StageError if none is."""
    rows, packed = problem(ROWS), problem(PACKED)
    indexed = None if packed is None else problem(INDEXED)
    in_rows, by_position, by_index = _on_all_ranks(
        [rows is None, packed is None, packed is not None and indexed is None], device
    )
    if not (in_rows or by_position or by_index):
        attention = model.config._attn_implementation
        raise StageError(
            f"{type(model).__name__} gives different results for batched and single sequences, so it cannot be "
            f"trained: packing {packed}; padding {rows}"
            + ("; set engine.attention: sdpa" if attention == FLEX or "flash" in attention else "")
        )
    return Layouts("positions" if by_position else "indices" if by_index else None, rows=in_rows), packed


def _cut(
    model: Any, layouts: Layouts, problem: Callable[[Layouts], str | None], tree: str | None, device: torch.device
) -> Layouts:
    """Return the layout of ranks that share the tokens of a batch. Raises StageError if they would compute something
    else: only in the attention of a tree anything passes between them.

    tree: the problem of a token tree.
    """
    if layouts != TREE:
        wrong = f"a token tree {tree or 'is wrong on another rank'}"
    elif depends_on_longest(model.config.to_dict()):
        wrong = "the factors of its positions depend on the longest sequence, of which a rank has a part"
    else:
        wrong = problem(CUT_TREE) or ""
    if not _on_all_ranks([not wrong], device)[0]:
        raise StageError(
            f"engine.sequence_parallel: workers cannot share the tokens of {type(model).__name__}: "
            f"{wrong or 'wrong on another rank'}; remove it"
        )
    return CUT_TREE


def _choose_attention(model: Any, batch: PackedBatch, device: torch.device) -> str | None:
    """Switch to eager attention if the configured one differs; return the difference, or None.

    Raises StageError for a model that cannot switch.
    """
    name, attention = type(model).__name__, model.config._attn_implementation
    difference = attention_difference(model, select_sequences(batch, [_MIDDLE]).input_ids.unsqueeze(0))
    if _on_all_ranks([difference is None], device)[0]:
        return None
    difference = difference or "differs on another rank"
    if attention != "sdpa" or not model._can_set_attn_implementation():
        raise StageError(f"{name}: the attention {attention} {difference}: set engine.attention: eager")
    model.set_attn_implementation("eager")
    return difference


def _alone(model: Any, batch: PackedBatch) -> list[_Result]:
    """Return the result of each sequence alone. Raises StageError if the model cannot compute even that."""
    name = type(model).__name__
    try:
        alone = [_measured(model, select_sequences(batch, [i]), ROWS, 0) for i in range(batch.num_sequences)]
    except _NOT_FOR_IT as error:
        raise StageError(
            f"{name} does not give a hidden state for each token of a sequence: {reason_of(error)}"
        ) from error
    if not all(one.hidden.isfinite().all() for one in alone):
        raise StageError(
            f"{name} computes NaN or infinity for ordinary tokens: its weights, or numbers in its config.json, are "
            "wrong or too large: fetch them again"
        )
    return alone


def _tree_problem(
    model: Any, batch: PackedBatch, problem: Callable[[Layouts], str | None], tolerance: _Tolerance
) -> str | None:
    """Return the reason why a token tree is wrong for `model`; None if it is correct, and the model has its attention
    from here on.
    """
    attention = model.config._attn_implementation
    if attention not in ("sdpa", FLEX) or not model._can_set_attn_implementation():
        return "is for the attention sdpa or flex"
    if reads_images(model.config.to_dict()):
        return "compares tokens, and images of other pixels have the same ones"
    branching, second = branching_sequences(batch), slice(LENGTHS[_MIDDLE], None)
    alone = [_measured(model, select_sequences(branching, [i]), ROWS, 0, skipped=i * _SKIPPED) for i in range(2)]
    expected = _Result(torch.cat([one.hidden for one in alone]), alone[1].gradient)
    if attention == "sdpa":
        tree_attention.use_tree_attention(model)
    with tree_attention.recorded_windows() as windows:
        difference = problem(TREE)
    if difference is None and _has_other_windows(model, windows):
        difference = "leaves out sliding windows"
    if difference is None:
        got = _measured(model, branching, TREE, 1, skipped=_SKIPPED)
        difference = _difference(got, expected, tolerance, own=second, apart=[slice(SHARED, second.start)])
    if difference is not None:
        model.set_attn_implementation(attention)
    return difference


def _require_known_masks(model: Any, windows: Sequence[int | None], *, forwards: int) -> None:
    """Raise StageError unless attention, called in so many forwards with these windows, is told all that restricts it:
    flex attention reads no mask of the model, and in every layout it would be wrong for longer sequences than these.
    """
    problem = depends_on_place(model.config)
    if problem is None and _has_other_windows(model, windows, forwards=forwards):
        problem = "its attention is not told of its sliding windows"
    if problem is not None:
        raise StageError(f"{type(model).__name__}: {problem}, which engine.attention: flex would leave out; set sdpa")


def _has_other_windows(model: Any, windows: Sequence[int | None], *, forwards: int = 1) -> bool:
    """Return True if calls of attention in so many forwards had other windows than those of the config's layers."""
    return sum(window is not None for window in windows) != _windowed_layers(model) * forwards


def _windowed_layers(model: Any) -> int:
    """Return the number of layers with a sliding window, by its config."""
    config = model.config.get_text_config()
    if getattr(config, "sliding_window", None) is None:
        return 0
    layers = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return sum(layer == "sliding_attention" for layer in layers)


def _tolerance(model: Any, batch: PackedBatch, alone: _Result) -> _Tolerance:
    """Measure the rounding. Raises StageError if a token's result depends on later tokens."""
    longer = _measured(model, continued_sequence(batch), ROWS, 0)
    length = LENGTHS[_MIDDLE]
    noise = _relative(longer.hidden[:length], alone.hidden)
    sees_more = longer.gradient is not None and bool(longer.gradient[_READ:].any())
    if sees_more or not noise <= _MOST_NOISE:
        raise StageError(
            f"{type(model).__name__} does not read from left to right: what it computes for a token depends on those "
            "after it, so it has no log-probs to train; name a causal language model"
        )
    least = _LEAST[model.dtype]
    if longer.gradient is None or alone.gradient is None:
        return _Tolerance(max(_TIMES_NOISE * noise, least[0]), least[1])
    gradient_noise = _relative(longer.gradient[:_READ], alone.gradient[:_READ])
    return _Tolerance(max(_TIMES_NOISE * noise, least[0]), max(_TIMES_NOISE * gradient_noise, least[1]))


def _measured(model: Any, batch: PackedBatch, layouts: Layouts, sequence: int, *, skipped: int = 0) -> _Result:
    """Return the hidden states of `batch`, and the gradient of the first tokens of one of its sequences after
    `skipped`.
    """
    arrangement = arranged(model, batch, layouts)
    embedded: list[Tensor] = []

    def leaf(module: Any, inputs: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # a model may scale it in place

    sharded = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    with ExitStack() as stack:
        if sharded:
            stack.enter_context(torch.no_grad())
        else:
            stack.callback(model.get_input_embeddings().register_forward_hook(leaf).remove)
            stack.enter_context(torch.enable_grad())
        output = backbone(model)(**arrangement.arguments, use_cache=False)
        hidden = arrangement.tokens(output.last_hidden_state).all()
        if sharded:
            return _Result(hidden.float(), None)
        start = sum(batch.sequence_lengths.tolist()[:sequence]) + skipped
        read = hidden[start : start + _READ].float()
        # A vector without special directions: along the ones of a normalised vector nothing changes.
        (gradient,) = torch.autograd.grad((read * _alternating(read)).sum(), embedded[:1])
    gradients = arrangement.tokens(gradient).all().float()
    # Of ranks that share tokens each has this loss, and their gradients add up.
    return _Result(hidden.detach().float(), gradients / arrangement.losses)


def _alternating(values: Tensor) -> Tensor:
    return torch.arange(values.numel(), device=values.device).view_as(values).mul(2.399).sin()


def _difference(
    got: _Result, expected: _Result, tolerance: _Tolerance, *, own: slice = _OWN, apart: Sequence[slice] = _APART
) -> str | None:
    """Describe the difference of a layout from single sequences; None if within `tolerance`.

    own: the tokens that have the expected gradient; apart: those without any.
    """
    if got.gradient is not None and any(got.gradient[part].any() for part in apart):
        return "makes a sequence depend on its neighbours"
    error = _relative(got.hidden, expected.hidden)
    if not error <= tolerance.hidden:
        return f"changes hidden states by {error:.2g} of their spread (rounding explains {tolerance.hidden:.2g})"
    if got.gradient is None or expected.gradient is None:
        return None
    error = _relative(got.gradient[own], expected.gradient[: len(got.gradient[own])])
    return None if error <= tolerance.gradient else (
        f"changes gradients by {error:.2g} of their spread (rounding explains {tolerance.gradient:.2g})"
    )  # fmt: skip


def _relative(values: Tensor, expected: Tensor) -> float:
    """Return the mean difference, relative to the variation of the expected values between tokens."""
    spread = (expected - expected.mean(0)).abs().mean()
    return float((values - expected).abs().mean() / spread.clamp_min(1e-30))


def _require_own_output(
    model: Any, outputs: Outputs, batch: PackedBatch, result: _Result, tolerance: _Tolerance
) -> None:
    """Require that our output for hidden states equals that of the model's own forward for the same tokens."""
    refusal = f"{type(model).__name__}: its output cannot be computed from its hidden states, so it is not supported: "
    try:
        computed, expected = outputs(result.hidden.to(model.dtype), batch.input_ids.unsqueeze(0))
        difference = (computed[-len(expected) :] - expected).abs().mean()
    except _NOT_FOR_IT as error:
        raise StageError(f"{refusal}{reason_of(error)}") from error
    scale = (expected - expected.mean(-1, keepdim=True)).abs().mean() if expected.ndim > 1 else computed.abs().mean()
    if not difference <= tolerance.hidden * scale:
        raise StageError(
            f"{refusal}it differs from that of its own forward by {float(difference / scale):.2g} of its spread "
            f"(rounding explains {tolerance.hidden:.2g})"
        )


def _on_all_ranks(right: list[bool], device: torch.device) -> list[bool]:
    """Return which are true on every rank."""
    agreed = current_mesh().reduce(torch.tensor(right, dtype=torch.int32, device=device), dist.ReduceOp.MIN, over="all")
    return [bool(value) for value in agreed.tolist()]


def _log(name: str, layouts: Layouts, *, packed: str | None, tree: str | None) -> None:
    """Print the layouts. packed, tree: the problems of packing, and of a token tree, on this rank."""
    if current_mesh().rank != 0:
        return
    what, wrong = ("a token tree", tree) if layouts.packed == "positions" else ("packing", packed)
    reason = "" if layouts in (TREE, CUT_TREE) else f", since {what} {wrong or 'is wrong on another rank'}"
    print(f"{name}: sequences are laid out {layouts}{reason}", flush=True)
