from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.data.near_duplicates import Sketcher, SketchFile, similar_earlier, similar_of, sketch

DRAW = random.Random(0)
WORDS = [f"w{i}" for i in range(5000)]


def text_of(words: int) -> str:
    return " ".join(DRAW.choices(WORDS, k=words))


def changed(text: str) -> str:
    """With its last word changed: of 96 sequences of a hundred words, all but one in common."""
    return text.rpartition(" ")[0] + " changed"


def test_sketches_are_the_same_on_every_machine() -> None:
    """Pinned: with other sketches the same stage key would name other rows."""
    texts = ["", "one", "One two  three\nfour five", "one two three four five six", "東京は晴れですか", " ".join(WORDS)]
    sketches = sketch(texts)
    assert sketches.shape == (6, 128)
    assert hashlib.sha256(sketches.astype("<u2").tobytes()).hexdigest()[:16] == "cc1af7d397f33c14"
    assert (sketch(texts * 3)[6:12] == sketches).all()


def test_estimates_are_close_to_the_share_of_sequences_in_common() -> None:
    base = [text_of(104) for _ in range(200)]  # 100 sequences each
    for kept in (60, 80, 90):  # of the words, and of the sequences all but the last 4 of these
        others = [" ".join([*text.split()[: kept + 4], text_of(100 - kept)]) for text in base]
        estimates = (sketch(base) == sketch(others)).mean(axis=1)
        assert estimates.mean() == pytest.approx(kept / (200 - kept), abs=0.01)
        assert estimates.std() < 0.05


def test_near_duplicates_are_found_among_many_rows() -> None:
    texts = [text_of(100) for _ in range(2000)]
    near = {2000 + i: i * 7 for i in range(200)}
    found = similar_earlier(sketch([*texts, *(changed(texts[earlier]) for earlier in near.values())]), 0.8)
    assert {index: int(earlier) for index, earlier in enumerate(found) if earlier >= 0} == near
    others = similar_of(sketch([changed(text) for text in texts[:50]]), sketch(texts), 0.8)
    assert others.tolist() == list(range(50))
    assert (similar_of(sketch(texts[:50]), sketch(texts[50:]), 0.8) == -1).all()


def test_rows_that_all_begin_alike_are_no_near_duplicates_and_cost_no_more_than_others() -> None:
    """Generated prompts share half of their sequences; a bucket with thousands of them has two candidates a row."""
    start = " ".join(WORDS[:50])
    texts = [f"{start} {text_of(50)}" for _ in range(3000)]
    found = similar_earlier(sketch([*texts, changed(texts[1500]), texts[2500]]), 0.8)
    assert (found[:3000] == -1).all()
    assert found[3000:].tolist() == [1500, 2500]


def test_a_threshold_decides() -> None:
    base = text_of(104)
    half = " ".join(base.split()[:84])  # 80 of 100 sequences
    assert similar_earlier(sketch([base, half]), 0.7).tolist() == [-1, 0]
    assert similar_earlier(sketch([base, half]), 0.95).tolist() == [-1, -1]
    assert similar_earlier(sketch([base, base]), 1.0).tolist() == [-1, 0]


def test_short_rows_and_east_asian_scripts() -> None:
    texts = ["Yes", "yes", "no", "今日の天気は晴れで気温は二十度です", "今日の天気は晴れで気温は二十度でした"]
    assert similar_earlier(sketch(texts), 0.7).tolist() == [-1, 0, -1, -1, 3]


def test_rows_in_any_portions_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text_of(30) for _ in range(40)]
    texts += [changed(text) for text in texts[:5]]
    sketcher, results = Sketcher([changed(texts[3])], 0.8), []
    for rows in (45, 7):
        monkeypatch.setattr("rlhf_core.data.near_duplicates._CHARACTERS_IN_BATCH", rows * 100)
        stored, near_prompt = SketchFile(tmp_path / f"{rows}"), []
        for start in range(0, 45, rows):
            sketches, near = sketcher(texts[start : start + rows], questions=texts[start : start + rows])
            stored.append(sketches)
            near_prompt += near.tolist()
        results.append((similar_earlier(stored.read(), 0.8).tolist(), near_prompt))
    assert results[0] == results[1]
    earlier, near_prompt = results[0]
    assert earlier == [-1] * 40 + [0, 1, 2, 3, 4]
    assert np.flatnonzero(near_prompt).tolist() == [3, 43]


def test_no_rows(tmp_path: Path) -> None:
    stored = SketchFile(tmp_path / "none")
    stored.append(Sketcher(["a"], 0.8)([], [])[0])
    assert similar_earlier(stored.read(), 0.8).tolist() == []
