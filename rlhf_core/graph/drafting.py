"""Drafting of a recipe's nodes in order: each with its settings, and the nodes named by these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.config.base import Role
from rlhf_core.config.data.dataset import DatasetConfig, OverlapConfig
from rlhf_core.config.inputs import InputSetting, input_settings
from rlhf_core.config.stages.base import NamedStageConfig, StageConfig
from rlhf_core.config.stages.merging import MergeConfig
from rlhf_core.config.stages.outputs import ArtifactConfig
from rlhf_core.config.stages.quantisation import QuantiseConfig
from rlhf_core.contract import KINDS_OF_ROLE, Stage
from rlhf_core.errors import RecipeError, did_you_mean
from rlhf_core.graph.evaluations import evaluation_node
from rlhf_core.recipe.recipe import Recipe, stage_of
from rlhf_core.stages.table import STAGES

Find = Callable[[str], Manifest]  # an artifact in the store, by reference or alias


@dataclass(frozen=True, slots=True)
class Draft:
    """One node of a run, without its key."""

    name: str  # "data.text", "sft", "merge.rl", "evaluation.base", ...
    section: str  # where the recipe has its settings: "data.text", "sft", "evaluation"
    stage: Stage
    config: StageConfig
    inputs: Mapping[str, str]  # input name -> the node that makes it
    existing: Manifest | None = None  # of an artifact that is used as it is
    input_settings: tuple[InputSetting, ...] = ()  # the settings that `inputs` come from
    after: tuple[str, ...] = ()  # nodes that must have succeeded before, though it does not read their results


class Drafter:
    def __init__(self, recipe: Recipe, find: Find | None, held_out: Sequence[str]):
        self.recipe = recipe
        self.find = find
        self.held_out = tuple(dict.fromkeys(held_out))  # datasets that the recipe validates or evaluates on
        self.nodes: dict[str, Draft] = {}
        self.by_role: dict[Role, list[str]] = {}  # names in the recipe, in the order in which they are made
        self.of_all: dict[Role, str] = {}  # settings that were left out and so mean all results above

    def add_stage(self, name: str, config: NamedStageConfig) -> None:
        stage = stage_of(name, config)
        if not stage.entry:
            existing = self.nodes[name].existing
            assert existing is not None
            is_adapter = existing.kind == Kind.ADAPTER
            self._add_result(name, "model" if is_adapter else _roles(existing)[0], is_adapter)
            return
        settings = _input_settings(name, config)
        each = next((setting for setting in settings if setting.reads.each), None)
        if each is None:
            inputs = self._inputs(name, settings)
            if config.quantised is not None:
                inputs["model"] = self._quantised(name, config, inputs["model"])
            self._add(Draft(name, name, stage, config, inputs, None, settings, self._overlaps(settings)))
            self._add_result(name, config.makes, config.adapter_targets is not None)
            return
        if not each.names:
            self.of_all[each.reads.role] = f"{name}.{each.path}"
        inputs = self._inputs(name, tuple(setting for setting in settings if setting is not each))
        names = each.names or self.by_role.get(each.reads.role, [])
        if not names:
            raise RecipeError(
                f"{name}.{each.path}: no stage above `{name}` makes a {each.reads.role}, so it would run for none: "
                f"add one, such as `{_maker(each.reads.roles)}`, or move `{name}` below it"
            )
        for model in names:
            node = self._node(f"{name}.{each.path}", model, each)
            one = {each.input_name(): node, **inputs}
            self._add(Draft(f"{name}.{model}", name, stage, config, one, None, settings))

    def finish(self) -> None:
        """Add the nodes after all stages. Raises RecipeError if there is no stage."""
        if not self.nodes:
            raise RecipeError(
                "the recipe has no stage, and a dataset is made only for one that reads it: add one, such as `sft`"
            )
        report = self.recipe.report
        if report is not None:
            title = report.title or f"Alignment run {self.recipe.name}"
            inputs = {f"node.{name}": name for name in self.nodes}
            config = report.model_copy(update={"title": title})
            self._add(Draft("report", "report", STAGES["report"], config, inputs))

    def _add(self, draft: Draft) -> None:
        self.nodes[draft.name] = draft

    def _add_result(self, name: str, role: Role | None, adapter: bool) -> None:
        if role is None:
            return
        if role == "dataset" and name in self.recipe.data:
            raise RecipeError(f"`{name}` and data.{name} are two datasets of one name: choose another for one of them")
        if role in self.of_all:
            raise RecipeError(
                f"set {self.of_all[role]}: its default, all above, is ambiguous, since `{name}` below makes a {role} "
                f"too; or move `{name}` above"
            )
        self.by_role.setdefault(role, []).append(name)
        if adapter:
            self.by_role.setdefault("adapter", []).append(name)
            if self.recipe.merge:
                self._merged(name)

    def _inputs(self, section: str, settings: tuple[InputSetting, ...]) -> dict[str, str]:
        inputs: dict[str, str] = {}
        named = {setting.path: setting.names for setting in settings}
        for setting in settings:
            place = f"{section}.{setting.path}"
            for other in setting.reads.evaluates:
                evaluation = evaluation_node(self.recipe, self.nodes, place, setting.names[0], named[other][0])
                inputs[setting.evaluation_of(other)] = evaluation
            for input_node in () if setting.reads.evaluates else setting.names:
                inputs[setting.input_name(input_node)] = self._node(place, input_node, setting)
            if not setting.names and not setting.many and not setting.reads.optional:
                inputs[setting.path] = self._default(section, setting, inputs)
        return inputs

    def _default(self, section: str, setting: InputSetting, inputs: Mapping[str, str]) -> str:
        reads = setting.reads
        if reads.of:
            trained = self.nodes[inputs[reads.of]]
            return trained.inputs["model"]
        names = [name for role in reads.roles for name in self.by_role.get(role, [])]
        if not names:
            what = " or ".join(role.replace("_", " ") for role in reads.roles)
            raise RecipeError(
                f"{section}.{setting.path}: no stage above `{section}` makes a {what}: add one, such as "
                f"`{_maker(reads.roles)}`, or name one that exists by a stage `artifact`"
            )
        return self._node(f"{section}.{setting.path}", names[-1], setting)

    def _node(self, place: str, name: str, setting: InputSetting) -> str:
        """Return the node that the setting `place` names by `name`. Raises RecipeError if there is none in its role."""
        roles = setting.reads.roles
        if "dataset" in roles and self._is_dataset(name):
            self._require_format(place, name, setting)
            return self._read_dataset(name)
        candidates = [other for role in roles for other in self.by_role.get(role, [])]
        if name not in candidates:
            hint = "; name others, or remove the setting for all above" if setting.reads.each else ""
            raise RecipeError(f"{place}: {self._why_not(name, roles, candidates)}{hint}")
        wants_adapter = "adapter" in roles
        return name if wants_adapter or name not in self.by_role.get("adapter", []) else self._merged(name)

    def _why_not(self, name: str, roles: tuple[Role, ...], candidates: list[str]) -> str:
        if "dataset" in roles and name not in self.recipe.stages:
            near = did_you_mean(name, self.recipe.data)
            return f"there is no dataset `{name}` in `data`{near}; it has {', '.join(sorted(self.recipe.data))}"
        what = " or ".join(role.replace("_", " ") for role in roles)
        if name in self.recipe.stages and name not in candidates:
            below = name not in {draft.section for draft in self.nodes.values()}
            reason = "comes later in the recipe" if below else f"makes no {what}"
            return f"`{name}` {reason}; above are {', '.join(candidates) or 'none'}"
        hint = f"{did_you_mean(name, candidates)}; there are {', '.join(candidates) or 'none'}"
        return f"no stage `{name}` makes a {what}{hint}"

    def _is_dataset(self, name: str) -> bool:
        is_result = name in self.by_role.get("dataset", [])
        return is_result or name in self.recipe.data or self._existing_dataset(name) is not None

    def _existing_dataset(self, name: str) -> Manifest | None:
        """Return the existing dataset if `name` is a stage `artifact` of one."""
        node = self.nodes.get(name)
        existing = None if node is None else node.existing
        return existing if existing is not None and existing.kind == Kind.DATASET else None

    def _require_format(self, place: str, name: str, setting: InputSetting) -> None:
        """Require the format of a dataset made by a stage; preflight checks those in `data`."""
        wanted, existing = setting.reads.format, self._existing_dataset(name)
        if name in self.recipe.data or wanted is None:
            return
        what = f"`{name}` makes a dataset" if existing is None else f"`{name}` is {existing.ref}"
        actual = dataset_format(self.nodes[name])
        if actual != wanted:
            raise RecipeError(f"{place}: {what}, of the format {actual}; `{place.partition('.')[0]}` needs {wanted}")

    def _read_dataset(self, name: str) -> str:
        """Return the node read as the dataset `name`."""
        return self._dataset(name, ())

    def _dataset(self, name: str, asked_by: tuple[str, ...]) -> str:
        if name not in self.recipe.data:
            return name  # a stage makes it, or it exists already
        if name in asked_by:
            raise RecipeError(f"data.{name}: `exclude` goes in a circle: {' -> '.join((*asked_by, name))}")
        node = f"data.{name}"
        if node not in self.nodes:
            config = self.recipe.data[name]
            settings = _input_settings(node, config)
            for other in config.exclude:
                if not self._is_dataset(other):
                    raise RecipeError(f"data.{name}.exclude: {self._why_not(other, ('dataset',), [])}")
            inputs = {f"exclude.{other}": self._dataset(other, (*asked_by, name)) for other in config.exclude}
            self._add(Draft(node, node, STAGES["dataset"], config, inputs, None, settings))
        return node

    def _overlaps(self, settings: tuple[InputSetting, ...]) -> tuple[str, ...]:
        """Return the nodes that compare these settings' training data with the recipe's held-out data."""
        read = [setting for setting in settings if setting.reads.role == "dataset" and not setting.reads.only_read]
        trained = [name for setting in read if not setting.reads.held_out for name in setting.names]
        datasets = dict.fromkeys(asked_dataset(self.recipe, name) for name in trained)
        return tuple(node for name in datasets if (node := self._overlap(name)) is not None)

    def _overlap(self, name: str) -> str | None:
        config = self.recipe.data.get(name) or self.recipe.stages[name]
        if not config.compares_overlap:  # nor is a stage's result from a dataset that was compared itself
            return None
        excluded = self.recipe.data[name].exclude if name in self.recipe.data else ()
        held_out = tuple(other for other in self.held_out if other not in excluded and self._is_dataset(other))
        if not held_out:
            return None
        node = f"overlap.{name}"
        if node not in self.nodes:
            inputs = {f"held_out.{other}": self._dataset(other, ()) for other in held_out}
            inputs = {"dataset": self._dataset(name, ()), **inputs}
            self._add(Draft(node, node, STAGES["overlap"], OverlapConfig(dataset=name, held_out=held_out), inputs))
        return node

    def _merged(self, name: str) -> str:
        """Return the node that merges the adapter of `name` into its base model."""
        node = f"merge.{name}"
        if node not in self.nodes:
            inputs = {"adapter": name, "model": self.nodes[name].inputs["model"]}
            self._add(Draft(node, node, STAGES["merge"], MergeConfig(adapter=name), inputs))
        return node

    def _quantised(self, name: str, config: StageConfig, model: str) -> str:
        """Return the node that rounds the base of the adapter that the stage `name` trains on the node `model`."""
        node = f"quantised.{name}"
        assert config.quantised is not None
        rounding = QuantiseConfig(model=model, quantisation=config.quantised, dtype=config.model_dtype)
        self._add(Draft(node, node, STAGES["quantise"], rounding, {"model": model}))
        return node

    def find_artifact(self, name: str, config: ArtifactConfig) -> None:
        """Add an existing artifact. All are added first: held-out data may be listed after training stages."""
        if self.find is None:
            raise RecipeError(f"{name}.ref: {config.ref} cannot be looked up, since no store is set")
        try:
            manifest = self.find(config.ref)
        except RecipeError as error:
            raise RecipeError(f"{name}.ref: {error}") from error
        if manifest.kind == Kind.DATASET and name in self.recipe.data:
            raise RecipeError(f"`{name}` and data.{name} are two datasets of one name: choose another for one of them")
        if not _roles(manifest):
            raise RecipeError(f"{name}.ref: {manifest.ref} is a {manifest.kind}, which no stage reads")
        inputs = {}
        if manifest.kind == Kind.ADAPTER:  # it can serve as a model, once it is merged into the one it was trained on
            base = f"{name}.base"
            parent = ArtifactConfig(ref=manifest.parents["model"].full)
            self._add(Draft(base, name, STAGES["artifact"], parent, {}, self.find(parent.ref)))
            inputs = {"model": base}
        self._add(Draft(name, name, STAGES["artifact"], config, inputs, manifest))


def dataset_format(draft: Draft) -> str | None:
    """Return the format of the dataset that this node makes, or is; None: it is no dataset."""
    if draft.existing is None:
        return draft.config.format if isinstance(draft.config, DatasetConfig) else draft.config.made_format
    stage = STAGES.get(draft.existing.stage)
    return (stage.config.made_format if stage is not None else None) or draft.existing.config.get("format")


def asked_dataset(recipe: Recipe, name: str) -> str:
    """Return the dataset whose prompts the dataset `name` contains, perhaps with answers or in other words."""
    passed: set[str] = set()
    while name in recipe.stages and name not in passed:
        passed.add(name)
        name = recipe.stages[name].prompts_of or name
    return name


def _input_settings(section: str, config: StageConfig) -> tuple[InputSetting, ...]:
    """Return the settings that name inputs. Raises RecipeError for one that names the same twice."""
    settings = tuple(input_settings(config))
    for setting in settings:
        twice = next((name for name in setting.names if setting.names.count(name) > 1), None)
        if twice is not None:
            raise RecipeError(f"{section}.{setting.path}: names `{twice}` twice: remove one")
    return settings


def _roles(manifest: Manifest) -> list[Role]:
    """Return the roles in which a stage of a recipe could read the artifact; only a round's end reads evaluations."""
    return [role for role, kinds in KINDS_OF_ROLE.items() if role != "evaluation" and manifest.kind in kinds]


def _maker(roles: tuple[Role, ...]) -> str:
    """Return a stage whose result has such a role."""
    return roles[-1] if roles[-1] in STAGES else "base"
