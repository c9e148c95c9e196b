"""The JSON documents of a store, read into their classes."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from rlhf_core.config.base import Config
from rlhf_core.errors import IntegrityError, one_line

Document = TypeVar("Document", bound=Config)


def parsed(kind: type[Document], data: bytes, where: str, what: str, remedy: str = "") -> Document:
    """The document that `data` is.

    where: the object, as messages name it; what: it should be, such as `a manifest`; remedy: what to do if it is not.
    Raises IntegrityError, in one sentence, for one that is damaged.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        what_to_do = f": {remedy}" if remedy else ""
        raise IntegrityError(f"{where} is not {what} ({first_problem(error)}){what_to_do}") from error


def first_problem(error: ValidationError) -> str:
    """Where in the document it is, and what, without pydantic's other lines."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "JSON"
    said = first["msg"].removeprefix("Value error, ")
    return one_line(f"{place}: {said[:1].lower()}{said[1:]}")
