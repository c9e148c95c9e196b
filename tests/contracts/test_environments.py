"""Environments keep one contract: one of this process, a function of the user's file, and tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlhf_core.chat.templates import SHIPPED
from rlhf_core.config.environments.environments import AnyEnvironment, FunctionEnvironment, ToolsEnvironment
from rlhf_core.environments import EnvironmentHost, open_environments
from rlhf_core.testing.environment import EnvironmentContract
from tests.rlhf_core.chat.families import byte_level
from tests.rlhf_core.stages.context import LocalContext

pytestmark = [pytest.mark.parts, pytest.mark.usefixtures("forked")]

ROW = {"id": "row", "prompt": [{"role": "user", "content": "a?"}], "answer": "b"}
FOLDER = Path(__file__).parents[1] / "rlhf_core" / "environments"


def opened(config: AnyEnvironment, folder: Path) -> AbstractContextManager[EnvironmentHost]:
    context = LocalContext(folder, user_files_root=FOLDER)
    return open_environments(config, context, byte_level(SHIPPED["chatml"].text))


class _Configured(EnvironmentContract):
    row = ROW
    config: ClassVar[AnyEnvironment]

    @pytest.fixture(autouse=True)
    def _stack(self, tmp_path: Path) -> Iterator[None]:
        self.folder = tmp_path
        with ExitStack() as self.stack:
            yield

    def make(self) -> EnvironmentHost:
        return self.stack.enter_context(opened(self.config, self.folder))


class TestFunctionEnvironment(_Configured):
    replies = (["fine", "fine"], ["first_number"])
    failing_reply = "raises"
    config = FunctionEnvironment.model_validate(
        {"type": "function", "path": "hostile.py", "timeout_seconds": 20, "memory_gib": 0.5}
    )


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TOOLS = ToolsEnvironment.model_validate({
    "type": "tools", "parser": "hermes", "max_turns": 6,
    "tools": {
        "shop": {"type": "function", "path": "tool_functions.py", "function": "Shop", "options": {"price": 3}},
    },
})  # fmt: skip


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentHost]:
    """One for most tests: its parser imports vLLM."""
    with opened(TOOLS, tmp_path_factory.mktemp("work")) as environments:
        yield environments


@pytest.mark.slow("a process imports vLLM's parsers")
class TestTools(_Configured):
    replies = ([call("put", thing="x"), call("total"), "done"], [call("total"), "done"])
    config = TOOLS

    @pytest.fixture
    def environments(self, tools: EnvironmentHost) -> EnvironmentHost:
        return tools
