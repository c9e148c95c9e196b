"""Ranks that share the weights of a model's layers: DeepSpeed's tensor parallelism, AutoTP, by transformers' plan.

Embeddings, norms and the head stay whole on every rank, and get the same gradient there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.errors import StageError
from rlhf_core.mesh import Mesh, current_mesh
from rlhf_core.models.adapters import base_model, is_adapted
from rlhf_core.models.folders.tensor_plan import COLUMN, ROW, SUMMED, layer_styles, plan_problem, sizes_problem
from rlhf_core.models.output_head import backbone
from rlhf_core.models.packed import PackedModel
from rlhf_core.models.tensor_parallel import cut_of, mark_cut

_SETTING = "engine.tensor_parallel"
_SPECS: Mapping[str, Mapping[str, Any]] = {
    COLUMN: {"partition_type": "column"},
    ROW: {"partition_type": "row"},
    SUMMED: {"partition_type": "skip", "grad_allreduce": True},
}
_IDS = range(2, 10)
# Largest error of hidden states, relative to their spread; a wrong cut changes them by about 1.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class SharedLayers:
    """The layers of a whole model that ranks are to share, and what it computes before."""

    model: PackedModel
    styles: Mapping[str, str]  # of transformers' plan, by the name of a module
    outputs: tuple[Tensor, Tensor]  # `_outputs` of the whole model

    @classmethod
    def of(cls, model: nn.Module) -> SharedLayers:
        """Raises StageError if the ranks cannot share the weights of `model`."""
        assert isinstance(model, PackedModel)
        transformer = base_model(model.model)
        name, plan = type(transformer).__name__, getattr(transformer, "_tp_plan", None) or {}
        problem = plan_problem(name, plan) or sizes_problem(transformer.config.to_dict(), current_mesh().tensor)
        if is_adapted(model.model):
            problem = f"workers cannot share the weights of {name} with an adapter: remove it"
        elif model.reads_images:
            problem = f"{name} reads images, which was not tested with weights that workers share: remove it"
        if problem is not None:
            raise StageError(f"{_SETTING}: {problem}")
        styles = _styles_of_modules(model, layer_styles(plan))
        _require_known(model, styles)
        return cls(model, styles, _outputs(model))

    @property
    def num_parameters(self) -> int:
        """The number of parameters of a rank once they are cut."""
        ranks = current_mesh().tensor
        cut = {*self._cut}
        counts = ((name.rpartition(".")[0], p.numel()) for name, p in self.model.named_parameters())
        return sum(count // ranks if module in cut else count for module, count in counts)

    @property
    def _cut(self) -> list[str]:
        return [name for name, style in self.styles.items() if style != SUMMED]

    def settings(self) -> dict[str, Any]:
        """Return DeepSpeed's block `tensor_parallel`.

        It names the layers: DeepSpeed finds no plan in a wrapper, and would go by names of its own; with transformers'
        plan it would cut a tied head, whose logits are then of a part of the vocabulary.
        """
        trained = any(parameter.requires_grad for parameter in self.model.parameters())
        specs = [
            {"patterns": [rf"(?:{'|'.join(map(re.escape, names))})\.weight$"], **spec}
            for style, spec in _SPECS.items()
            if (names := [name for name, its in self.styles.items() if its == style]) and (trained or style != SUMMED)
        ]
        return {
            "autotp_size": current_mesh().tensor,
            "vocab_parallel_lm_head": False,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        }

    def adopt(self, engine: Any) -> None:
        """Mark what DeepSpeed's `engine` has cut. Every rank must call it.

        Raises StageError if it is not what was asked for, or if the model computes something else than before.
        """
        from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

        engine.first_dataloader_check.remove()  # it compares batches by ==, which those of tensors do not have
        found = []
        for name, module in self.model.named_modules():
            if isinstance(module, LinearAllreduce):
                mark_cut(module.weight, 1)
            elif isinstance(module, LinearLayer):
                for parameter in module.parameters(recurse=False):
                    mark_cut(parameter, 0)
            else:
                continue
            found.append(name)
        if sorted(found) != sorted(self._cut):
            wrong = ", ".join(sorted({*found} ^ {*self._cut})[:3])
            raise StageError(f"{_SETTING}: DeepSpeed has cut other layers than transformers' plan says: {wrong}")
        self._require_equal(*_outputs(self.model))

    def _require_equal(self, hidden: Tensor, logits: Tensor) -> None:
        name, (expected, wanted) = type(base_model(self.model.model)).__name__, self.outputs
        if logits.shape != wanted.shape:
            raise StageError(
                f"{_SETTING}: cut over workers, {name} has {logits.shape[-1]} logits in place of {wanted.shape[-1]}: "
                "remove it"
            )
        spread = (expected - expected.mean(0)).abs().mean().clamp_min(1e-30)
        error = float((hidden - expected).abs().mean() / spread)
        if not error <= (most := _ROUNDING[next(self.model.parameters()).dtype]):
            raise StageError(
                f"{_SETTING}: cutting the layers of {name} changes hidden states by {error:.2g} of their spread "
                f"(rounding explains {most:g}): remove it"
            )


def _styles_of_modules(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    expressions = {re.compile(r"model\." + re.escape(key).replace(r"\*", r"\d+")): style for key, style in plan.items()}
    found = ((name, expression) for name, _ in model.named_modules() for expression in expressions)
    return {name: expressions[expression] for name, expression in found if expression.fullmatch(name)}


def _require_known(model: PackedModel, styles: Mapping[str, str]) -> None:
    """Raise StageError if a weight that stays whole may belong to single heads: its gradient would be a part."""
    transformer = base_model(model.model)
    hidden = transformer.config.get_text_config().hidden_size
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    inner = {id(p) for p in backbone(transformer).parameters()} - embeddings
    for name, parameter in model.named_parameters():
        if id(parameter) in inner and name.rpartition(".")[0] not in styles and parameter.shape != (hidden,):
            raise StageError(
                f"{_SETTING}: transformers' plan of {type(transformer).__name__} does not say how workers share "
                f"{name.removeprefix('model.')}: remove it"
            )


@torch.no_grad()
def _outputs(model: PackedModel) -> tuple[Tensor, Tensor]:
    """Return the last hidden states (T, d) float32 of a short sequence, and its logits, of a classifier one."""
    transformer = base_model(model.model)
    ids = torch.tensor([_IDS], device=next(model.parameters()).device)
    was_training = transformer.training
    output = transformer.eval()(input_ids=ids, use_cache=False, output_hidden_states=True)
    transformer.train(was_training)
    return output.hidden_states[-1][0].float().cpu(), output.logits[0].cpu()


def clip_gradients(parameters: Sequence[nn.Parameter], longest: float, mesh: Mesh) -> float:
    """Clip the gradients to the norm `longest`; returns the norm before, of whole parameters, on every rank."""
    cut = [parameter for parameter in parameters if cut_of(parameter) is not None]
    if not cut:
        return float(nn.utils.clip_grad_norm_(parameters, longest))
    everywhere = [parameter for parameter in parameters if cut_of(parameter) is None]
    squares = [
        nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) ** 2 for group in (cut, everywhere)
    ]
    norm = (mesh.reduce(squares[0], over="tensor") + squares[1]).sqrt()
    nn.utils.clip_grads_with_norm_(parameters, longest, norm)
    return float(norm)
