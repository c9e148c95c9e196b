"""Checks of merges: whether the models have the same shape and tokens; and of quantisation."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.stages.merging import MergeConfig, MergeModelsConfig
from rlhf_core.config.stages.quantisation import QuantiseConfig
from rlhf_core.graph.drafting import Draft
from rlhf_core.models.folders.folder import text_config
from rlhf_core.models.folders.mixable import OTHER_TOKENIZER, mix_problem
from rlhf_core.models.folders.targets import quantised_problem
from rlhf_core.preflight.stages.context import CheckContext
from rlhf_core.preflight.stages.tokens import same_tokens


def merge(config: MergeConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    """Yield a problem for a merge into another model than the adapter's base."""
    adapter = context.nodes[node.inputs["adapter"]]
    model, trained_on = context.models.get(node.name), context.models.get(adapter.name)
    if model is None or trained_on is None:
        return
    if adapter.config.quantised is not None and node.inputs["model"] != adapter.inputs["model"]:
        yield (
            f"{node.section}.model: `{adapter.name}` was trained on a quantised base, whose weights this model does "
            "not have: remove it, to merge into that one"
        )
        return
    names = ["hidden_size", "num_hidden_layers"]
    if adapter.config.adapter_targets == "all-linear":
        names.append("intermediate_size")
    for name in names:
        merged_into, adapted = text_config(model.settings).get(name), text_config(trained_on.settings).get(name)
        if merged_into is not None and adapted is not None and merged_into != adapted:
            yield (
                f"{node.section}.model: its {name} is {merged_into}, but `{adapter.name}` is an adapter of a model "
                f"whose {name} is {adapted}: remove it, to merge into that one"
            )
            return


def quantise(config: QuantiseConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    """Yield the reason why the node's model cannot be quantised."""
    model = context.models.get(node.name)
    problem = None if model is None else quantised_problem(model.settings)
    if problem is not None:
        reader = node.name.removeprefix("quantised.")
        setting = f"{node.section}.model" if reader == node.name else f"{reader}.lora.quantised"
        yield f"{setting}: {problem}"


def merge_models(config: MergeModelsConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    model = context.models.get(node.name)
    for place in range(len(config.others)):
        other = context.models.get(node.inputs[f"others.{place}.model"])
        if model is None or other is None:
            continue
        problem = OTHER_TOKENIZER if same_tokens(other, model, context.root) is False else None
        problem = problem or mix_problem(model.settings, other.settings)
        if problem is not None:
            yield f"{node.section}.others.{place}.model: {problem}"
