"""Tools of a user's file: one function, and a class with the state of an episode."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from pydantic import Field


def add(a: int, b: Annotated[int, Field(description="the second")] = 1) -> int:
    """Adds two numbers."""
    return a + b


class Shop:
    def __init__(self, price: int) -> None:
        self.price = price

    def reset(self, row) -> None:
        self.basket = [row["answer"]]

    def put(self, thing: str, kind: Literal["new", "used"] = "new") -> str:
        """Puts a thing into the basket."""
        if thing == "bomb":
            raise ValueError("not sold here")
        self.basket.append(thing)
        return f"{kind} {thing}"

    async def total(self) -> dict[str, object]:
        """What the basket costs."""
        return {"things": self.basket, "costs": self.price * len(self.basket)}

    def hang(self) -> None:
        """Never returns."""
        time.sleep(1000)

    def _hidden(self) -> None: ...


def without_docstring(a: int) -> int:
    return a


def without_type(a) -> int:
    """Does nothing."""


def of_any_arguments(*a: int) -> int:
    """Does nothing."""


class Nothing:
    pass
