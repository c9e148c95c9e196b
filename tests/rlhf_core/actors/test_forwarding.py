"""What a job says of the variables that it has received. That it receives them: tests/tasks/test_ray_jobs.py."""

from __future__ import annotations

import pytest

from rlhf_core.actors import forwarding

pytestmark = pytest.mark.parts


def test_only_what_is_known_to_be_harmless_is_shown() -> None:
    shown = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/x", "HF_ENDPOINT": "https://host", "ALIGNMENT_WARM": "1"}
    hidden = {
        "HF_TOKEN": "a", "HF_HUB_TOKEN": "b", "AWS_REGION": "c", "AWS_SESSION_TOKEN": "d", "WANDB_API_KEY": "e",
        "ALIGNMENT_HEADER_JUDGE": "f", "HF_HUB_URL": "https://user:word@host",
    }  # fmt: skip
    assert forwarding.divided({**hidden, **shown}) == (shown, hidden)


def test_secrets_are_replaced_by_the_names_of_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    received = {
        "AWS_SECRET_ACCESS_KEY": "abc+123/def", "AWS_REGION": "us-east-1", "HF_TOKEN": "hf_abcdef",
        "ALIGNMENT_HEADER_JUDGE": "Authorization: Bearer a-token", "AWS_ENDPOINT_URL": "http://someone:password@host:1",
        "HF_TOKEN_SHORT": "a",
    }  # fmt: skip
    monkeypatch.setattr(forwarding, "_received", received)
    text = "at us-east-1: abc+123/def, a-token, hf_abcdef; http://someone:password@host:1/x is a host"
    assert forwarding.redacted(text) == (
        "at us-east-1: <AWS_SECRET_ACCESS_KEY>, <ALIGNMENT_HEADER_JUDGE>, <HF_TOKEN>; "
        "http://<AWS_ENDPOINT_URL>:<AWS_ENDPOINT_URL>@host:1/x is a host"
    )
