"""What the deployments of loops are given in Prefect's UI, where no command has looked at it before."""

from __future__ import annotations

import pytest
from prefect.exceptions import ParameterTypeError

from flows.iterative_dpo import iterative_dpo
from flows.rounds import run_rounds
from rlhf_core.errors import RecipeError

pytestmark = pytest.mark.system


def test_a_recipe_without_a_loop() -> None:
    with pytest.raises(RecipeError, match=r"tiny.* has no `loop`"):
        run_rounds("tiny", [], 1)


@pytest.mark.parametrize("rounds", [0, -2])
def test_no_rounds_at_all(rounds: int) -> None:
    with pytest.raises(ParameterTypeError, match="greater than or equal to 1"):
        iterative_dpo.validate_parameters({"rounds": rounds})
