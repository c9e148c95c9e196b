"""What a person reads of a stage's progress."""

import pytest

from tasks.job_log import Progress


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(1, 4, "rollout", {"reward": 0.51234}, 90.0), "step 1 of 4 · rollout · reward 0.5123 · 1:30 left"),
        (Progress(0, 4, "start workers", {}, None), "step 0 of 4 · start workers"),
        (Progress(2000, 0, "reading", {"kept": 1976}, None), "2000 · reading · kept 1976"),
        (Progress(0, 0, "publish", {}, None), "publish"),
    ],
)
def test_progress_as_text(progress: Progress, text: str) -> None:
    assert str(progress) == text
