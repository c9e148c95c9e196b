"""A recipe becomes a graph of nodes; each is one stage with its settings, its inputs, and the key of its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.base import Config
from rlhf_core.config.inputs import references
from rlhf_core.config.loading import LoadedRecipe
from rlhf_core.config.recipe import Recipe
from rlhf_core.config.rl import RLConfig
from rlhf_core.contract import Stage
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.user_files import user_files
from rlhf_core.stages.key import stage_key
from rlhf_core.stages.table import STAGES


@dataclass(frozen=True, slots=True)
class Node:
    name: str  # "data.text", "sft", "merge.rl", "evaluation.base", ...
    stage: Stage
    config: Config
    inputs: Mapping[str, str]  # input name -> the node that makes it
    input_refs: Mapping[str, ArtifactRef]  # input name -> the artifact that this node makes
    user_files: Mapping[str, str]  # path as the recipe names it -> sha256
    ref: ArtifactRef


class _Builder:
    def __init__(self, loaded: LoadedRecipe, libraries: Mapping[str, str]):
        self.recipe = loaded.recipe
        self.root = loaded.root
        self.libraries = libraries
        self.nodes: dict[str, Node] = {}

    def add(self, name: str, stage_name: str, config: Config, **inputs: str) -> str:
        return self.add_node(name, stage_name, config, inputs)

    def add_node(self, name: str, stage_name: str, config: Config, inputs: Mapping[str, str]) -> str:
        stage = STAGES[stage_name]
        files = user_files(config, self.root)
        refs = {input_name: self.nodes[node].ref for input_name, node in inputs.items()}
        key = stage_key(stage, config, inputs=refs, user_files=files, seed=self.recipe.seed, libraries=self.libraries)
        self.nodes[name] = Node(name, stage, config, dict(inputs), refs, files, ArtifactRef(stage=stage_name, key=key))
        return name

    def dataset(self, name: str, section: str) -> str:
        return self._dataset(name, section, ())

    def _dataset(self, name: str, section: str, asked_by: tuple[str, ...]) -> str:
        if name in asked_by:
            raise RecipeError(f"data.{name}: `exclude` goes in a circle: {' -> '.join((*asked_by, name))}")
        if name not in self.recipe.data:
            known = ", ".join(sorted(self.recipe.data))
            raise RecipeError(f"{section}: there is no dataset `{name}` in `data`; it has {known}")
        node = f"data.{name}"
        if node not in self.nodes:
            config = self.recipe.data[name]
            inputs = {
                f"exclude.{other}": self._dataset(other, f"data.{name}.exclude", (*asked_by, name))
                for other in config.exclude
            }
            self.add_node(node, "dataset", config, inputs)
        return node

    def full_weights(self, node: str) -> str:
        """The node whose artifact has full weights: `node` itself, or the merge of the adapter that it writes."""
        config = self.nodes[node].config
        if getattr(config, "lora", None) is None:
            return node
        merge = self.recipe.merge
        if merge is None:
            raise RecipeError(
                f"{node} writes a LoRA adapter, and later stages need full weights: give the section `merge`"
            )
        return self.add(f"merge.{node}", "merge", merge, adapter=node, model=self.nodes[node].inputs["model"])


def build_graph(loaded: LoadedRecipe, libraries: Mapping[str, str]) -> dict[str, Node]:
    """All nodes by name, each after those it reads.

    libraries: versions of the libraries that compute, by name; part of every key.
    Raises RecipeError where sections name things that are not there.
    """
    recipe = loaded.recipe
    b = _Builder(loaded, libraries)
    models: dict[str, str] = {}
    model = b.add("base", "base", recipe.base)
    if recipe.pretrain:
        model = b.add("pretrain", "pretrain", recipe.pretrain,
                      model=model, dataset=b.dataset(recipe.pretrain.dataset, "pretrain.dataset"))  # fmt: skip
    models["base"] = model
    if recipe.sft:
        dataset = b.dataset(recipe.sft.dataset, "sft.dataset")
        model = models["sft"] = b.full_weights(b.add("sft", "sft", recipe.sft, model=model, dataset=dataset))
    if recipe.reward_model and (recipe.rl is None or _needs_reward_model(recipe)):
        dataset = b.dataset(recipe.reward_model.dataset, "reward_model.dataset")
        b.add("reward_model", "reward_model", recipe.reward_model, model=model, dataset=dataset)
    if recipe.rl:
        models["rl"] = b.full_weights(b.add_node("rl", "rl", recipe.rl, _rl_inputs(b, recipe.rl, models, model)))
    if recipe.evaluation:
        dataset = b.dataset(recipe.evaluation.dataset, "evaluation.dataset")
        for name in recipe.evaluation.models:
            if name not in models:
                raise RecipeError(f"evaluation.models: no stage `{name}` makes a model; there are {', '.join(models)}")
            b.add(f"evaluation.{name}", "evaluation", recipe.evaluation, model=models[name], dataset=dataset)
    if recipe.report:
        title = recipe.report.title or f"Alignment run {recipe.name}"
        report = recipe.report.model_copy(update={"title": title})
        b.add_node("report", "report", report, {f"node.{name}": name for name in b.nodes})
    return b.nodes


def skipped_sections(recipe: Recipe) -> dict[str, str]:
    """Sections of the recipe that no node runs, and why."""
    skipped = {}
    if recipe.reward_model and recipe.rl and not _needs_reward_model(recipe):
        skipped["reward_model"] = f"rl.{recipe.rl.algorithm} does not use a reward model"
    return skipped


def _rl_inputs(b: _Builder, config: RLConfig, models: Mapping[str, str], last: str) -> dict[str, str]:
    inputs = {}
    for setting in references(config):
        where, name = f"rl.{setting.path}", next(iter(setting.names), None)
        if setting.reads.role == "dataset" and name is not None:
            inputs[setting.path] = b.dataset(name, where)
        elif setting.reads.role == "reward_model" or (name == "reward_model" and "reward_model" in b.nodes):
            if "reward_model" not in b.nodes:
                raise RecipeError(f"rl.{config.algorithm} uses a reward model: give the section `reward_model`")
            inputs[setting.path] = "reward_model"
        elif name is not None:
            if name not in models:
                raise RecipeError(f"{where}: no stage `{name}` makes a model; there are {', '.join(models)}")
            inputs[setting.path] = models[name]
        elif not setting.reads.optional:
            inputs[setting.path] = last
    return inputs


def _needs_reward_model(recipe: Recipe) -> bool:
    if recipe.rl is None:
        return False
    read = list(references(recipe.rl))
    return any(setting.reads.role == "reward_model" or "reward_model" in setting.names for setting in read)
