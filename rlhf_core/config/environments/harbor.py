"""A task of Harbor as a dataset row has it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rlhf_core.errors import RecipeError

COLUMN = "harbor"  # of a prompt


@dataclass(frozen=True, slots=True)
class HarborTask:
    """The start of a runtime, and the tests. Files are by their paths in the folders of the task."""

    environment: Mapping[str, bytes]  # beside a Dockerfile, perhaps
    tests: Mapping[str, bytes]  # one of them `test.sh`
    image: str | None
    variables: Mapping[str, str]  # of all commands
    test_variables: Mapping[str, str]  # of the tests beside them
    test_seconds: float

    @property
    def dockerfile(self) -> str | None:
        text = self.environment.get("Dockerfile")
        return None if text is None else text.decode(errors="replace")

    @classmethod
    def of(cls, column: Any) -> HarborTask:
        """Return the task in a row's column. Raises RecipeError if it has none."""
        try:
            return cls(
                environment=_decoded(column["environment"]), tests=_decoded(column["tests"]), image=column["image"],
                variables=_texts(column["variables"]), test_variables=_texts(column["test_variables"]),
                test_seconds=float(column["test_seconds"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
            raise RecipeError(
                f"`{COLUMN}` is not a task of Harbor: let a source `{{type: harbor, folder: …}}` read the task's folder"
            ) from error

    def column(self) -> dict[str, Any]:
        """Return the task as JSON values."""
        return {
            "environment": _encoded(self.environment), "tests": _encoded(self.tests), "image": self.image,
            "variables": dict(self.variables), "test_variables": dict(self.test_variables),
            "test_seconds": self.test_seconds,
        }  # fmt: skip


def _decoded(files: Any) -> dict[str, bytes]:
    return {path: base64.b64decode(content, validate=True) for path, content in files.items()}


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(content).decode() for path, content in files.items()}


def _texts(values: Any) -> dict[str, str]:
    if not all(isinstance(text, str) for pair in values.items() for text in pair):
        raise ValueError("a variable is text")
    return cast("dict[str, str]", dict(values))
