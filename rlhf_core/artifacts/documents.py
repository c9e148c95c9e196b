"""JSON documents of a store, parsed into their classes."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from rlhf_core.config.base import Config
from rlhf_core.errors import IntegrityError, one_line

Document = TypeVar("Document", bound=Config)


def parsed(kind: type[Document], data: bytes, where: str, what: str, remedy: str = "") -> Document:
    """Parse a document.

    where: the object, for messages; what: the expected document, such as `a manifest`; remedy: how to replace it.
    Raises IntegrityError, in one sentence, if the document is damaged.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        what_to_do = f": {remedy}" if remedy else ""
        raise IntegrityError(f"{where} is not {what} ({first_problem(error)}){what_to_do}") from error


def first_problem(error: ValidationError) -> str:
    """Return field and reason of the first validation error, without pydantic's other lines."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "JSON"
    reason = first["msg"].removeprefix("Value error, ")
    return one_line(f"{place}: {reason[:1].lower()}{reason[1:]}")
