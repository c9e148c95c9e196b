from __future__ import annotations

import json
import math

import pytest
import torch

from rlhf_core.errors import StageError
from rlhf_core.training.best import Best, KeptWeights
from rlhf_core.training.distributed import join_group

pytestmark = pytest.mark.parts


@pytest.mark.parametrize(
    ("maximise", "values", "steps"),
    [
        (False, [3.0, 2.0, 2.0, 5.0], [1, 2, 2, 2]),
        (True, [3.0, 2.0, 4.0, 4.0], [1, 1, 3, 3]),
        (False, [math.nan, -math.inf, 2.0, math.nan], [0, 0, 3, 3]),
        (True, [math.inf, math.nan], [0, 0]),
    ],
)
def test_the_first_of_the_best_finite_values(maximise: bool, values: list[float], steps: list[int]) -> None:
    best = Best("a", maximise=maximise)
    found = []
    for step, value in enumerate(values, start=1):
        before = best.step
        assert best.update(step, {"a": value, "b": 10.0 * step}) is (best.step != before)
        found.append(best.step)
    assert found == steps
    restored = Best("a", maximise=maximise)
    restored.load_state_dict(json.loads(json.dumps(best.state_dict())))
    if steps[-1]:
        expected = {"x/best": values[steps[-1] - 1], "x/best_step": steps[-1]}
        assert restored.metrics("x/") == best.metrics("x/") == expected
        assert restored.measured["b"] == 10.0 * steps[-1]
    else:
        assert restored.metrics("x/") == {}


def test_what_is_kept_goes_into_a_checkpoint() -> None:
    """tests/rlhf_core/training/test_redivision.py has ranks that have a part each, and resume with other parts."""
    join_group(rank=0, size=1)
    layout = {"a": torch.empty(3, device="meta")}
    kept, restored = KeptWeights(layout), KeptWeights(layout)
    restored.load_state(kept.state())
    with pytest.raises(StageError, match="no weights were kept: no validation of this run was finite"):
        restored.weights()
    kept.keep([("a", torch.arange(3.0))])
    restored.load_state(kept.state())
    assert [(name, tensor.tolist()) for name, tensor in restored.weights()] == [("a", [0.0, 1.0, 2.0])]
    assert {*kept.state().shared} == {"is_kept"}, "the other ranks would fetch it too"
