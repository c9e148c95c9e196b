"""Prices of what a run takes. They are part of no key: costs are computed when they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from pydantic import Field

from rlhf_core.config.base import Config
from rlhf_core.config.numbers import Price
from rlhf_core.config.texts import Currency, NonEmpty

P = TypeVar("P")


class JudgePrices(Config):
    input: Price = Field(description="price of a million tokens of prompts")
    output: Price = Field(description="price of a million tokens of replies")


class PricesConfig(Config):
    currency: Currency = Field(description="three letters, such as EUR")
    gpus: dict[NonEmpty, Price] = Field(
        default={},
        description="GPU -> price of an hour of one; its name as NVIDIA's driver gives it, or a pattern such as "
        "`*H100*`, of which the first that fits counts",
    )
    core: Price | None = Field(default=None, description="price of an hour of a reserved core; none: part of others")
    gib: Price | None = Field(default=None, description="price of an hour of a GiB of memory; none: part of others")
    judges: dict[NonEmpty, JudgePrices] = Field(
        default={}, description="judge's model, or a pattern as of `gpus` -> prices of its tokens"
    )

    def gpu(self, name: str) -> float | None:
        """Return the price of an hour of a GPU; None: the table has none."""
        return _first(self.gpus, name)

    def judge(self, model: str) -> JudgePrices | None:
        return _first(self.judges, model)


def _first(prices: Mapping[str, P], name: str) -> P | None:
    """Return the price of `name` itself, else of the first pattern that fits."""
    if name in prices:
        return prices[name]
    return next((price for pattern, price in prices.items() if fnmatchcase(name, pattern)), None)
