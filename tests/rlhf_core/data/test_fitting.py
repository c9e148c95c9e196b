from __future__ import annotations

import pytest

from rlhf_core.data.fitting import Fitting, Row, RowPolicy, fit
from rlhf_core.errors import ConversationError, StageError

pytestmark = pytest.mark.parts


def words(row: Row) -> list[str]:
    if not row["text"]:
        raise ConversationError("there is no word")
    return list(row["text"].split())


def too_long(word: str) -> str | None:
    return f"{word} is too long" if len(word) > 4 else None


def first(word: str) -> str | None:
    return word[:4] if word[0] != "x" else None


ROWS = [{"id": str(n), "text": f"a{n} bb{n}bb xxxxx{n}" if n % 7 else ""} for n in range(100)]


@pytest.mark.parametrize("long", ["drop", "truncate"])
def test_the_number_of_processes_changes_nothing(long: str) -> None:
    policy = RowPolicy(long, "drop")  # type: ignore[arg-type]
    one, two = (fit(ROWS, Fitting(words, too_long, first, policy), keep=list, processes=n) for n in (1, 2))
    assert one == two
    assert (one.bad, one.too_long, one.truncated) == ((15, 170, 0) if long == "drop" else (15, 85, 85))
    assert one.rows[:3] == (["a1", "a2", "a3"] if long == "drop" else ["a1", "bb1b", "a2"])


@pytest.mark.endurance("chaos")
@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_row_that_cannot_be_used_is_named(processes: int) -> None:
    rows = [{"id": str(n), "text": "a"} for n in range(200)]
    rows[80]["text"], rows[40]["text"] = "", "a long one loooong"
    with pytest.raises(StageError, match=r"^loooong is too long$"):
        fit(rows, Fitting(words, too_long, first, RowPolicy()), keep=list, processes=processes)
    with pytest.raises(StageError, match=r"^row 80: there is no word; or drop such rows"):
        fit(rows, Fitting(words, too_long, first, RowPolicy(long="drop")), keep=list, processes=processes)
