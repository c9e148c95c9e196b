"""Lengths of rows, by the model's own tokenizer, against the recipe's limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.models.folders.folder import update_json
from rlhf_core.preflight.look import preflight
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.recipes import (
    Change,
    Problems,
    both,
    file,
    gym,
    model_folder,
    put,
    validation,
    write,
)

pytestmark = pytest.mark.parts


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put("sft", "max_length", value=65), "sft.max_length=65 is more than the model's context of 64 tokens: lower"),
        (put("pretrain", "max_length", value=65), "pretrain.max_length=65 is more than the model's context of 64"),
        (
            put("rl", "rollout", "max_length", value=65),
            "rl.rollout.max_length=65 is more than the model's context of 64",
        ),
        (
            put("evaluation", "sampling", "max_tokens", value=64),
            "evaluation.sampling.max_tokens=64 leaves no room for a prompt in evaluation.rollout.max_length=64",
        ),
        (
            put("rl", "rollout", "max_length", value=30),
            "rl.dataset: the prompt of prompts.jsonl line 1 in `data.prompts` has 23 tokens; "
            "with rl.sampling.max_tokens=8 that is more than rl.rollout.max_length=30: raise it to 31, ",
        ),
        (
            put("rl", "validation", value=validation(sampling={"max_tokens": 50})),
            "rl.validation.dataset: the prompt of prompts.jsonl line 1 in `data.prompts` has 23 tokens; with "
            "rl.validation.sampling.max_tokens=50 that is more than rl.rollout.max_length=64: raise it to 73, ",
        ),
        (
            put(
                "rl",
                "validation",
                value=validation(
                    also={
                        "far": {
                            "dataset": "prompts",
                            "scorers": validation()["scorers"],
                            "sampling": {"max_tokens": 50},
                        }
                    }
                ),
            ),
            "rl.validation.also.far.dataset: the prompt of prompts.jsonl line 1 in `data.prompts` has 23 tokens; with "
            "rl.validation.also.far.sampling.max_tokens=50 that is more than rl.rollout.max_length=64",
        ),
        (
            both(
                put("sft", "max_length", value=27),
                put("sft", "validation", value={"dataset": "talks", "every_steps": 1}),
            ),
            "sft.validation.dataset: talks.jsonl line 1 in `data.talks` has 28 tokens, more than sft.max_length=27",
        ),
        (
            put("sft", "max_length", value=27),
            "sft.dataset: talks.jsonl line 1 in `data.talks` has 28 tokens, more than sft.max_length=27",
        ),
        (
            put("reward_model", "max_length", value=27),
            "reward_model.dataset: pairs.jsonl line 1 in `data.pairs` has 28 tokens",
        ),
    ],
)
def test_what_is_too_long_is_one_sentence(problems: Problems, change: Change, expected: str) -> None:
    said = problems(change)
    assert any(expected in problem for problem in said), said


def test_the_longest_row_is_found_wherever_it_is(problems: Problems) -> None:
    rows = [{"prompt": "a", "answer": "b"}] * 3000
    rows[2345] = {"prompt": "x" * 60, "answer": "b"}
    said = problems(file("prompts.jsonl", "\n".join(map(json.dumps, rows))))
    assert [problem.partition(" in `data.prompts` has")[0] for problem in said] == [
        "rl.dataset: the prompt of prompts.jsonl line 2346",
        "evaluation.dataset: the prompt of prompts.jsonl line 2346",
    ]


def test_generated_prompts_are_measured(problems: Problems) -> None:
    said = problems(gym(tasks={"word_sorting": {}}))
    assert said[0].startswith("rl.dataset: the prompt of word_sorting item ")
    assert "more than rl.rollout.max_length=64" in said[0]


def test_lengths_are_measured_with_a_folders_tokenizer(problems: Problems) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["base"]["source"] = {"type": "folder", "path": "model"}
        recipe["rl"]["rollout"]["max_length"] = 30
        recipe["sft"]["max_length"] = 100
        model_folder(root)

    said = problems(change)
    assert [problem.partition(":")[0] for problem in said] == [
        "sft.max_length=100 is more than the model's context of 64 tokens",
        "rl.dataset",
    ]


@pytest.mark.endurance("architectures")
@pytest.mark.parametrize(("tokens", "refused"), [(40, True), (39, False)])
def test_positions_that_engines_and_trainer_compute_differently_are_refused(
    tokens: int, refused: bool, problems: Problems
) -> None:
    """With room for more than 40 tokens, an engine uses the long factors for all sequences."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["base"]["source"] = {"type": "folder", "path": "model"}
        recipe["rl"]["rollout"]["max_length"] = tokens
        model_folder(root)
        update_json(
            root / "model" / "config.json",
            rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            original_max_position_embeddings=40,
        )

    said = [problem for problem in problems(change) if "longrope" in problem]
    assert len(said) == refused
    assert not said or said[0].startswith(
        "rl.rollout.max_length=40 is too long for this model: its positions (longrope)"
    )
    assert not said or said[0].endswith("set it to 39 at most")


def test_long_rows_that_will_be_dropped_or_truncated_are_notes_and_no_problems(
    problems: Problems, tmp_path: Path
) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["data"]["talks"]["on_long_row"] = "truncate"
        recipe["data"]["prompts"]["on_long_row"] = "drop"
        recipe["sft"]["max_length"] = 30
        recipe["rl"]["rollout"]["max_length"] = 30
        for name, key in (("talks", "completion"), ("prompts", "answer")):
            rows = [{"prompt": prompt, key: "four"} for prompt in ("a", "x" * 30, "y" * 40)]
            (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    assert problems(change) == []
    assert preflight(load_recipe(write(tmp_path, change))) == [
        "sft.dataset: 2 of 3 rows of `data.talks` that can be read here are longer than 30 tokens: truncated, or "
        "dropped where nothing to train would be left",
        "rl.dataset: 2 of 3 rows of `data.prompts` that can be read here are longer than 22 tokens: dropped",
    ]


def test_rows_that_the_template_cannot_write_are_named_or_a_note(problems: Problems, tmp_path: Path) -> None:
    def change(policy: str) -> Change:
        def changed(recipe: dict[str, Any], root: Path) -> None:
            recipe["data"]["talks"]["on_bad_row"] = policy
            system, *talk = ({"role": role, "content": "a"} for role in ("system", "user", "assistant"))
            rows = [{"messages": messages} for messages in (talk, [system, *talk], talk, [system, *talk[:2], *talk])]
            (root / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))

        return changed

    refused = "talks.jsonl line 2: the chat template refuses a conversation: "
    (said,) = problems(change("error"))
    assert said.startswith(f"sft.dataset: {refused}")
    assert said.endswith("or set data.talks.on_bad_row to drop, which drops at least 2 of 4 rows of `data.talks`")
    (note,) = preflight(load_recipe(write(tmp_path, change("drop"))))
    assert note.startswith(
        f"sft.dataset: at least 2 of 4 rows of `data.talks` are dropped, which the chat template cannot write; "
        f"first: {refused}"
    )


@pytest.mark.slow("tokenises a book")
@pytest.mark.endurance("mutations")
def test_a_conversation_of_thousands_of_turns_and_a_book_are_measured_quickly(problems: Problems) -> None:
    """Turn by turn, and token by token, they would take minutes."""
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant")] * 5000
    [sentence] = problems(both(file("talks.jsonl", json.dumps({"messages": turns})), put("rl", value=None)))
    assert "talks.jsonl line 1 in `data.talks` has " in sentence
    book = json.dumps({"prompt": "x " * 2_000_000, "completion": "y"})
    [sentence] = problems(both(file("talks.jsonl", book), put("rl", value=None)))
    assert "talks.jsonl line 1 in `data.talks` has at least 363636 tokens" in sentence


def test_special_tokens_in_texts_are_a_note(tmp_path: Path) -> None:
    """Perhaps somebody has applied a template already."""
    path = write(tmp_path, file("talks.jsonl", json.dumps({"prompt": "a<eos>", "completion": "b<eos>"})))
    assert preflight(load_recipe(path)) == [
        "sft.dataset: 1 of 1 rows of `data.talks` hold special tokens of the tokenizer, such as `<eos>` in talks.jsonl "
        "line 1, which are read as text: only the chat template writes them"
    ]


@pytest.mark.parametrize(
    ("template", "row", "expected"),
    [
        ("plain", {"prompt": "é", "completion": "b"},
         "hold what the tokenizer does not know, such as `é` in talks.jsonl line 1, and reads as <unk>"),
        ("own.jinja", {"prompt": "a", "completion": "<think>c</think>b"},
         "the chat template leaves out or changes a part of the last reply in 1 of 1 rows of `data.talks`"),
        ("own.jinja", {"prompt": "a", "completion": "b "}, ""),
    ],
)  # fmt: skip
def test_what_is_read_in_another_way_is_a_note(
    tmp_path: Path, template: str, row: dict[str, str], expected: str
) -> None:
    said = "{{ m['content'].split('</think>')[-1].strip() if m['role'] == 'assistant' else m['content'] }}"
    own = "{% for m in messages %}{{ m['role'] }}" + said + "{{ eos_token }}{% endfor %}"
    own += "{% if add_generation_prompt %}assistant{% endif %}"
    change = both(put("base", "chat_template", value=template), file("own.jinja", own),
                  file("talks.jsonl", json.dumps(row)))  # fmt: skip
    found = [note for note in preflight(load_recipe(write(tmp_path, change))) if note.startswith("sft.dataset")]
    assert [expected in note for note in found] == [True] * bool(expected), found


@pytest.mark.parametrize("length", [15, 14])
def test_a_pair_is_as_long_as_its_stage_reads_it(problems: Problems, length: int) -> None:
    """What the template writes after a turn's end is no part of it."""
    own = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}\n\n{% endfor %}"
    rows = [{"prompt": f"What {i}?", "chosen": "four", "rejected": "five"} for i in range(4)]
    change = both(put("base", "chat_template", value="own.jinja"), file("own.jinja", own), put("rl", value=None),
                  put("reward_model", "max_length", value=length),
                  file("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))  # fmt: skip
    said = [problem for problem in problems(change) if "reward_model.dataset" in problem]
    assert len(said) == (length == 14), said


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "of 1 rows 0 are longer than 64 tokens, and 1 cannot be written by the chat template; the first that the",
        ),
        (
            {"prompt": "x" * 80, "completion": "y"},
            "of 1 rows 1 are longer than 64 tokens, and 0 cannot be written by the chat template",
        ),
    ],
)
def test_a_dataset_of_which_every_row_would_be_dropped_is_a_problem(
    problems: Problems, row: dict[str, Any], sentence: str
) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["data"]["talks"] |= {"on_bad_row": "drop", "on_long_row": "drop"}
        (root / "talks.jsonl").write_text(json.dumps(row))

    [problem] = problems(change)
    assert problem.startswith(f"sft.dataset: no row of `data.talks` would be left: {sentence}")


LONG = "x" * 80
SHORT_PAIR = {"prompt": "What?", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("name", "policy", "rows", "expected"),
    [
        ("talks", "truncate", [{"prompt": LONG, "completion": "y"}], "sft.dataset: no row of `data.talks` would be"),
        ("talks", "truncate", [{"prompt": "x", "completion": LONG}], ""),
        ("text", "drop", [{"text": LONG}], "pretrain.dataset: no row of `data.text` would be left: of 1 rows 1 are"),
        ("text", "truncate", [{"text": LONG}], ""),
        ("text", "error", [{"text": LONG}], ""),  # it is split
        ("pairs", "drop", [SHORT_PAIR, {**SHORT_PAIR, "prompt": LONG}], "reward_model.dataset: fewer than two prompts"),
        ("pairs", "truncate", [SHORT_PAIR, {**SHORT_PAIR, "prompt": "How?", "chosen": LONG}], ""),
        (
            "pairs",
            "truncate",
            [SHORT_PAIR, {"prompt": "How?", "chosen": LONG, "rejected": f"{LONG}y"}],
            "reward_model.dataset: fewer than two prompts of `data.pairs` would be left: of 2 rows 1 are",
        ),
        (
            "pairs",
            "error",
            [SHORT_PAIR, {**SHORT_PAIR, "chosen": "c"}],
            "reward_model.dataset: `pairs` has the rows of",
        ),
    ],
)
def test_enough_of_a_dataset_must_be_left(
    problems: Problems, name: str, policy: str, rows: list[dict[str, Any]], expected: str
) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["data"][name]["on_long_row"] = policy
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    said = problems(change)
    assert len(said) == bool(expected), said
    assert all(problem.startswith(expected) for problem in said), said
