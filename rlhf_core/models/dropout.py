"""Training without dropout: in eval mode, with gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


def set_train_mode(model: nn.Module, *, dropout: bool) -> None:
    """Put `model`, or the transformers model in it, into the mode of an update.

    Without `dropout` that is eval mode: no dropout of the model or its adapter, no noise of routers, no dropped layers,
    so that it computes the same as after `eval()`. Layers are still checkpointed, if enabled.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.train(dropout)
    for layer in model.modules():
        if not isinstance(layer, GradientCheckpointingLayer) or not layer.gradient_checkpointing:
            continue
        layer.training = True  # else it would not call the function that checkpoints
        checkpoint: Any = layer._gradient_checkpointing_func
        if isinstance(checkpoint, _InEvalMode):
            checkpoint = checkpoint.checkpoint
        layer.__dict__["_gradient_checkpointing_func"] = checkpoint if dropout else _InEvalMode(layer, checkpoint)


class _InEvalMode:
    """Checkpoints a layer that runs in eval mode, in forward and in recomputation."""

    def __init__(self, layer: nn.Module, checkpoint: Callable[..., Any]) -> None:
        self._layer, self.checkpoint = layer, checkpoint

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.checkpoint(partial(self._run, function), *arguments)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._layer.training = False
        try:
            return function(*arguments)
        finally:
            self._layer.training = True
