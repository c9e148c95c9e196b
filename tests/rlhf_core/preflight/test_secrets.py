"""Credentials in a recipe."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rlhf_core.recipes import Problems

pytestmark = pytest.mark.parts


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"api_key": "something"}, "api_key"),
        ({"nested": {"password": "something"}}, "nested.password"),
        ({"where": "https://me:word@host/path"}, "where"),
        ({"where": ["s3://bucket/x", "https://host/file?X-Amz-Signature=0123"]}, "where"),
        ({"any": "Bearer hf_" + 34 * "a"}, "any"),
    ],
)
def test_a_credential_is_refused_and_not_repeated(
    problems_of_code: Problems, options: dict[str, Any], key: str
) -> None:
    def change(recipe: dict[str, Any], root: object) -> None:
        recipe["rl"]["ppo"]["rewards"]["own"]["options"] = options

    (problem,) = problems_of_code(change)
    assert problem.startswith(f"`rl.ppo.rewards.own.options.{key}` ")
    assert problem.endswith("name that in the reward's `variables`, `header_variable` or `url_variable`")
    assert not any(secret in problem for secret in ("something", "word@", "0123", "aaaa"))


def test_words_that_only_sound_secret_are_not(problems_of_code: Problems) -> None:
    def change(recipe: dict[str, Any], root: object) -> None:
        recipe["rl"]["ppo"]["rewards"]["own"]["options"] = {
            "max_tokens": "9", "token": "<end>", "keys": ["a@b"], "secret": "", "url": "https://host/a?q=x@y",
        }  # fmt: skip

    assert not any("environment variable" in problem for problem in problems_of_code(change))
