"""Drafting of a loop's round: the recipe's nodes with the accepted model and the round's prompts, and its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.rounds import RoundStart
from rlhf_core.config.base import Reads, Role
from rlhf_core.config.inputs import InputSetting, input_settings
from rlhf_core.config.stages.loop import ACCEPTED, LoopConfig, RoundConfig, RoundPromptsConfig
from rlhf_core.config.stages.outputs import ArtifactConfig
from rlhf_core.contract import KINDS_OF_ROLE
from rlhf_core.errors import RecipeError, did_you_mean
from rlhf_core.graph.drafting import Draft, Drafter, Find
from rlhf_core.graph.evaluations import evaluation_node, score_problem
from rlhf_core.recipe.recipe import Recipe
from rlhf_core.stages.table import STAGES

PROMPTS, ROUND = "round_prompts", "round"  # nodes, called as their stages
_PREVIOUS = "previous_prompts"
_A_MODEL = InputSetting("candidate", Reads("model"), (), many=False)


class RoundDrafter(Drafter):
    def __init__(
        self, recipe: Recipe, find: Find | None, held_out: Sequence[str], loop: LoopConfig, start: RoundStart | None
    ):
        """start: of the round; None: of the first."""
        super().__init__(recipe, find, held_out)
        self.loop = loop
        self.start = start
        self._check_names()

    def _check_names(self) -> None:
        stages, prompts = self.recipe.stages, self.recipe.data.get(self.loop.prompts)
        if self.loop.start not in stages:
            near = did_you_mean(self.loop.start, stages)
            raise RecipeError(f"loop.start: there is no stage `{self.loop.start}`{near}; there are {', '.join(stages)}")
        if prompts is None:
            raise RecipeError(f"loop.prompts: {self._why_not(self.loop.prompts, ('dataset',), [])}")
        if prompts.format != "prompts":
            raise RecipeError(
                f"loop.prompts: `{self.loop.prompts}` has the format {prompts.format}, and a round needs prompts"
            )
        if ACCEPTED in stages:
            raise RecipeError(
                f"`{ACCEPTED}` is reserved for the model that the loop accepted last: choose another name"
            )

    def _add_result(self, name: str, role: Role | None, adapter: bool) -> None:
        super()._add_result(name, role, adapter)
        if name == self.loop.start:
            self._add_accepted(name)

    def _read_dataset(self, name: str) -> str:
        return self._round_prompts(name) if name == self.loop.prompts else super()._read_dataset(name)

    def _add_accepted(self, start: str) -> None:
        """Add the last accepted model of the loop: that of the stage `start` until there is one."""
        if start not in self.by_role.get("model", []):
            raise RecipeError(f"loop.start: `{start}` makes no model: name a stage that does")
        node = self._merged(start) if start in self.by_role.get("adapter", []) else start
        if PROMPTS in self._above(node):
            raise RecipeError(
                f"loop.prompts: `{start}`, from which the first round starts, reads `{self.loop.prompts}` too, and "
                "would be another model each round: give it a dataset of its own"
            )
        ref = None if self.start is None else self.start.accepted
        accepted = self._artifact(ACCEPTED, ref, {"model": node})
        if accepted.existing is not None and accepted.existing.kind not in KINDS_OF_ROLE["model"]:
            raise RecipeError(
                f"the alias {self.recipe.name}/{ACCEPTED} points at {ref}, which is of the kind "
                f"{accepted.existing.kind} and no model: point it at one (`alignment alias`)"
            )
        self._add(accepted)
        self.by_role["model"].append(ACCEPTED)

    def _round_prompts(self, name: str) -> str:
        """Return the node with the round's part of the dataset `name`."""
        start = self.start
        if PROMPTS in self.nodes:
            return PROMPTS
        inputs, previous = {"dataset": self._dataset(name, ())}, None
        if start is not None and start.prompts is not None and self._is_stored(start.prompts):
            self._add(self._artifact(PROMPTS, start.prompts, inputs))
            return PROMPTS
        if start is not None and start.previous_prompts is not None:
            previous = _PREVIOUS
            self._add(self._artifact(previous, start.previous_prompts, {}))
            inputs["previous"] = previous
        config = RoundPromptsConfig(dataset=name, previous=previous, count=self.loop.prompts_per_round)
        self._add(Draft(PROMPTS, "loop", STAGES[PROMPTS], config, inputs))
        return PROMPTS

    def finish(self) -> None:
        """Add the round's end. Raises RecipeError for a loop without effect."""
        self._add_round()
        super().finish()

    def _add_round(self) -> None:
        loop = self.loop
        candidate = self._node("loop.candidate", loop.candidate, _A_MODEL)
        used = set(self._above(candidate))
        if ACCEPTED not in used:
            raise RecipeError(
                f"loop.candidate: `{loop.candidate}` is not made from `{ACCEPTED}`, so each round would make the same: "
                f"let it, or a stage that it reads, start from `{ACCEPTED}`"
            )
        if PROMPTS not in used:
            raise RecipeError(
                f"loop.prompts: `{loop.candidate}` is made without `{loop.prompts}`: name it as the dataset of the "
                "stage that samples or trains on prompts"
            )
        config = RoundConfig(
            accepted=ACCEPTED, candidate=candidate, prompts=PROMPTS, gate=loop.gate,
            accepted_evaluation=self._evaluation(ACCEPTED),
            candidate_evaluation=self._evaluation(loop.candidate),
            start_evaluation=None if loop.gate.start_margin is None else self._evaluation(loop.start),
        )  # fmt: skip
        inputs = {setting.path: setting.names[0] for setting in input_settings(config) if setting.names}
        self._add(Draft(ROUND, "loop", STAGES[ROUND], config, inputs))

    def _evaluation(self, model: str) -> str:
        """Return the node that evaluates `model` for the gate."""
        gate = self.loop.gate
        node = evaluation_node(self.recipe, self.nodes, "loop.gate.evaluation", gate.evaluation, model)
        problem = score_problem(self.recipe, "loop.gate", gate.evaluation, gate.scorer, gate.completions)
        if problem is not None:
            raise RecipeError(problem)
        return node

    def _above(self, node: str) -> Iterator[str]:
        """Yield all nodes that `node` depends on, some more than once."""
        for other in self.nodes[node].inputs.values():
            yield other
            yield from self._above(other)

    def _is_stored(self, ref: ArtifactRef) -> bool:
        try:
            return self.find is not None and self.find(ref.full) is not None
        except RecipeError:
            return False

    def _artifact(self, node: str, ref: ArtifactRef | None, inputs: Mapping[str, str]) -> Draft:
        """Return a node of an existing artifact, or, if `ref` is None, of the artifact that it reads."""
        config = ArtifactConfig(ref=f"{self.recipe.name}/{node}" if ref is None else ref.full)
        existing = None if ref is None or self.find is None else self.find(config.ref)
        return Draft(node, "loop", STAGES["artifact"], config, inputs, existing)
