"""Checks of distillation: whether teacher and student are compatible, and stored log-probs cover all rows."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.stages.distillation import STORED_INPUT, TEACHER_INPUT, DistillationConfig
from rlhf_core.config.stages.logprobs import TopLogprobsConfig
from rlhf_core.graph.drafting import Draft
from rlhf_core.models.folders.readers import teacher_problem
from rlhf_core.preflight.stages import supervised
from rlhf_core.preflight.stages.context import CheckContext, Note
from rlhf_core.preflight.stages.tokens import same_tokens


def check(config: DistillationConfig, node: Draft, context: CheckContext) -> Iterator[str | Note]:
    yield from supervised.check(config, node, context)
    for problem in (*_teachers(config, node, context), *_stored(config, node, context)):
        yield f"{node.section}.{problem}"


def _teachers(config: DistillationConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    if node.inputs.get(TEACHER_INPUT) == node.inputs["model"] and config.cross_entropy_coefficient == 0:
        yield f"{TEACHER_INPUT}: the student starts from this model, so nothing would be learned: name another"
    student = context.models.get(node.name)
    for name in config.stored_inputs or (TEACHER_INPUT,):
        teacher = context.models.get(node.inputs[name])
        same = None if student is None or teacher is None else same_tokens(teacher, student, context.root)
        if student is None or teacher is None or same is None:
            continue
        longest = 0 if config.stored_inputs else config.max_length  # of stored ones their own stage has a limit
        problem = teacher_problem(teacher.settings, student.settings, max_length=longest, reads_tokens=same)
        if problem is not None:
            yield f"{name}: {problem}: name another model"


def _stored(config: DistillationConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    stored = [context.nodes[node.inputs[name]] for name in config.stored_inputs]
    made_here = [each.config for each in stored if isinstance(each.config, TopLogprobsConfig)]
    if len({(stage.k, stage.temperature) for stage in made_here}) > 1:
        yield f"{STORED_INPUT}: its stages have different `k` or `temperature`: give them the same"
    if len(made_here) < len(stored) or not stored:
        return
    read = {each.inputs["dataset"] for each in stored}
    for setting, dataset in node.inputs.items():
        if setting.endswith("dataset") and dataset not in read:
            yield (
                f"{STORED_INPUT}: none of its stages reads the rows of `{setting}`, {dataset}: add one that does, "
                "with the teacher as its model"
            )
