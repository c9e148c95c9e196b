"""The policy of most tests of a training rank."""

from __future__ import annotations

import pytest

from rlhf_core.contract import Input
from tests.rlhf_core.rl.one_rank import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return tiny_llama(tmp_path_factory.mktemp("model"))
