"""Tokens and masks of conversations, with templates that behave like those of real families."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.chat.encoding import (
    encode_completion,
    encode_conversation,
    encode_prompt,
    stop_token_ids,
)
from rlhf_core.chat.rendering import DATE
from rlhf_core.chat.templates import SHIPPED, _input_template
from rlhf_core.errors import ConversationError, StageError
from tests.rlhf_core.chat.families import (
    DATED,
    DEFAULT_SYSTEM,
    ENDS_LAST_TURN_ONLY,
    ENDS_NO_TURN,
    ENDS_TWICE,
    MERGES_SYSTEM,
    REFUSES_SYSTEM,
    STRIPS_REASONING,
    TALK,
    TEMPLATES,
    TURNS,
    WITH_TOOLS,
    assistant,
    byte_level,
    space_before_text,
    system,
    texts,
    user,
)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            TURNS,
            [system("s"), *TALK],
            [
                "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"
                "⟦r1<|im_end|>⟧\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n⟦r2<|im_end|>⟧\n"
            ],
        ),
        (
            DEFAULT_SYSTEM,
            TALK[:2],
            [
                "<|im_start|>system\nBe of use.<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"
                "⟦r1<|im_end|>⟧\n"
            ],
        ),
        (  # a turn's reasoning is trained where the model would write it, and not there when the next turn is asked for
            STRIPS_REASONING,
            [user("q1"), assistant("<think>t1</think>\nr1"), user("q2"), assistant("<think>t2</think>\nr2")],
            [
                "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n⟦<think>t1</think>\nr1<|im_end|>⟧\n",
                "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\nr1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
                "<|im_start|>assistant\n⟦<think>t2</think>\nr2<|im_end|>⟧\n",
            ],
        ),
        (  # without reasoning nothing is rewritten
            STRIPS_REASONING,
            TALK,
            [
                "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n⟦r1<|im_end|>⟧\n<|im_start|>user\nq2<|im_end|>\n"
                "<|im_start|>assistant\n⟦r2<|im_end|>⟧\n"
            ],
        ),
        (
            MERGES_SYSTEM,
            [system("s"), user(" q1 "), assistant(" r1\n"), user("q2"), assistant("r2")],
            ["<bos>[Q] <<s>>\n\nq1 [/Q]⟦ r1 <eos>⟧[Q] q2 [/Q]⟦ r2 <eos>⟧"],
        ),
        (
            REFUSES_SYSTEM,
            TALK[:2],
            ["<bos><|im_start|>user\nq1<|im_end|>\n<|im_start|>model\n⟦r1<|im_end|>⟧\n"],
        ),
        (
            ENDS_LAST_TURN_ONLY,
            TALK,
            ["user: q1\nassistant: ⟦r1<eos>⟧", "user: q1\nassistant: r1\nuser: q2\nassistant: ⟦r2<eos>⟧"],
        ),
        (
            ENDS_NO_TURN,
            TALK,
            ["user: q1\nassistant: ⟦r1\n<eos>⟧", "user: q1\nassistant: r1\nuser: q2\nassistant: ⟦r2\n<eos>⟧"],
        ),
        (  # sampling stops at <|im_end|>: the EOS after it is never asked of the model
            ENDS_TWICE,
            TALK[:2],
            ["<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n⟦r1<|im_end|>⟧\n<eos>"],
        ),
        (  # a turn that holds the token which ends turns
            TURNS,
            [user("q"), assistant("a<|im_end|>b")],
            ["<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>b<|im_end|>⟧\n"],
        ),
        (  # the same where the template ends no turn
            ENDS_NO_TURN,
            [user("q"), assistant("a<eos>b")],
            ["user: q\nassistant: ⟦a<eos>b\n<eos>⟧"],
        ),
        (  # an assistant turn that answers nothing is read by the others
            TURNS,
            [assistant("hello"), *TALK[:2]],
            [
                "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"
                "⟦r1<|im_end|>⟧\n"
            ],
        ),
        (  # what follows the last reply is nobody's context
            TURNS,
            [*TALK[:2], user("q2")],
            ["<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n⟦r1<|im_end|>⟧\n"],
        ),
    ],
)
def test_what_is_trained_is_what_the_template_writes(template: str, messages: Any, expected: list[str]) -> None:
    assert texts(byte_level(template), messages) == expected


def test_a_merge_over_the_end_of_the_prompt_is_undone() -> None:
    """Two newlines are one token; the engine's prompt ends with the first, and the reply begins with the second."""
    tokenizer = byte_level(TURNS)
    [(ids, mask)] = encode_conversation(tokenizer, [user("q"), assistant("\nr")])
    assert [tokenizer.decode(t) for t, trained in zip(ids, mask, strict=True) if trained] == ["\n", "r", "<|im_end|>"]
    whole = tokenizer.apply_chat_template([user("q"), assistant("\nr")])["input_ids"]
    assert len(ids) == len(whole) + 1
    # In a later prompt they are one token, so that the later turn cannot continue this sequence.
    assert len(encode_conversation(tokenizer, [user("q"), assistant("\nr"), *TALK[2:]])) == 2


@pytest.mark.parametrize("template", [MERGES_SYSTEM, TURNS], ids=["merges system", "turns"])
def test_a_tokenizer_that_puts_a_space_before_texts_puts_none_before_replies(template: str) -> None:
    tokenizer = space_before_text(template)
    messages = [user("a"), assistant("b"), user("a b"), assistant("b")]
    [(ids, _)] = encode_conversation(tokenizer, messages)
    assert ids == tokenizer.apply_chat_template(messages)["input_ids"]


@pytest.mark.parametrize("completions", [("\nr", "s"), (TALK[1:], [assistant("r"), user("q"), assistant("\n")])])
def test_two_completions_begin_with_the_tokens_that_the_model_is_asked_with(completions: Any) -> None:
    """Also where the tokenizer has a token for the end of the prompt and what follows it: two line ends."""
    tokenizer = byte_level(TURNS)
    asked = encode_prompt(tokenizer, TALK[:1])
    for completion in completions:
        ids, mask = encode_completion(tokenizer, TALK[:1], completion)
        assert ids[: len(asked)] == asked
        assert not any(mask[: len(asked)])
        assert mask[len(asked)]
    (one, _), (other, _) = (encode_completion(tokenizer, TALK[:1], completion) for completion in completions)
    assert next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b) >= len(asked)


def test_of_a_completion_of_several_turns_the_assistant_s_are_trained() -> None:
    tokenizer = byte_level(TURNS)
    ids, mask = encode_completion(tokenizer, TALK[:1], TALK[1:])
    assert (ids, mask) == encode_conversation(tokenizer, TALK)[0]
    with pytest.raises(ConversationError, match="the turns of the completion do not form one token sequence"):
        encode_completion(byte_level(STRIPS_REASONING), [user("q")], [assistant("<think>t</think>\nr"), *TALK[2:]])


def test_no_bos_is_added_to_a_template_that_writes_it() -> None:
    tokenizer = byte_level(MERGES_SYSTEM, bos=True)
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    ids, _ = encode_completion(tokenizer, [user("q")], "r")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert encode_prompt(tokenizer, [user("q")]).count(tokenizer.bos_token_id) == 1


def test_today_is_always_the_same_day() -> None:
    tokenizer = byte_level(DATED)
    assert "Today is 01 Jan 2025 00:00:00.000000<" in tokenizer.decode(encode_prompt(tokenizer, [user("q")]))
    assert texts(tokenizer, TALK) == texts(tokenizer, TALK)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (REFUSES_SYSTEM, [system("s"), *TALK], "refuses a conversation: no system role"),
        (MERGES_SYSTEM, [user("a"), user("b"), assistant("c")], "refuses a conversation: turns must alternate"),
        (TURNS, [assistant("hello"), user("q")], "no assistant turn"),
        (TURNS, [user("q")], "no assistant turn"),
        (
            TURNS.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}"),
            TALK[:2],
            r"prompts turn 1 with 'im_start\|>assistant\\n<think>\\n' but renders it as "
            r"'im_start\|>assistant\\nr1<\|im_end\|>\\n', so the prompts of training and inference differ",
        ),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.role + m.content + eos_token }}{% endfor %}",
            [system("s"), *TALK],
            "does not write turn 0, of role system, so the model would never see it",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            TALK[:2],
            "does not write turn 1, of role assistant, so the model would never learn it",
        ),
        ("{{ messages[0].content + nothing.at.all }}", TALK, "refuses a conversation: 'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", TALK, "refuses a conversation: can only concatenate str"),
        (
            "{% for m in messages %}\n{{ m.content }",
            TALK,
            "syntax error in line 2 of the chat template: unexpected '}'",
        ),
        (TURNS, [user("q"), assistant("r", reasoning_content="t")], "does not write `reasoning_content` of turn 1"),
    ],
)
def test_what_a_template_cannot_write_is_refused(template: str, messages: Any, message: str) -> None:
    with pytest.raises(StageError, match=message):
        encode_conversation(byte_level(template), messages)


# Texts with what tokenizers merge, templates look for, and people write.
CONTENTS = st.lists(
    st.sampled_from(["a", "b", " ", "\n", "\n\n", "é", "</think>", "{{ x }}", "<|im_end|>", "<eos>", "[/Q]"]),
    min_size=1, max_size=6,
).map("".join).filter(str.strip)  # fmt: skip
PAIRS = st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=3)
ALL_TEMPLATES = {
    **TEMPLATES,
    **{f"shipped {name}": shipped.text for name, shipped in SHIPPED.items()},
    "input": _input_template("Q: {prompt}\n"),
}


@pytest.mark.parametrize("template", ALL_TEMPLATES.values(), ids=list(ALL_TEMPLATES))
@given(pairs=PAIRS, opening=st.none() | CONTENTS)
@settings(max_examples=25, deadline=None)
def test_prompt_and_completion_are_the_conversation(
    template: str, pairs: list[tuple[str, str]], opening: str | None
) -> None:
    tokenizer = byte_level(template)
    takes_system = "no system role" not in template and "input_template" not in template
    messages = [system(opening)] if opening is not None and takes_system else []
    for question, reply in pairs:
        messages += [user(question), assistant(reply)]
    sequences = encode_conversation(tokenizer, messages)
    found = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = encode_prompt(tokenizer, messages[:index])
        ids, mask = encode_completion(tokenizer, messages[:index], message["content"])
        end = max(place for place, trained in enumerate(mask) if trained) + 1
        assert ids[: len(prompt)] == prompt
        assert mask == [False] * len(prompt) + [True] * (end - len(prompt)) + [False] * (len(ids) - end)
        assert ids[end - 1] in stop_token_ids(tokenizer)
        assert message["content"].strip() in tokenizer.decode(ids[len(prompt) : end])
        # The text is the template's own, but for an EOS where it ends a turn with nothing.
        written = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False, strftime_now=DATE.strftime)
        assert tokenizer.decode(ids).removesuffix("<eos>") == written.removesuffix("<eos>")
        # It stands in exactly one sequence of the conversation, trained in the same places.
        holding = [n for n, (longer, _) in enumerate(sequences) if longer[:end] == ids[:end]]
        own = [n for n in holding if sequences[n][1][len(prompt) : end] == mask[len(prompt) : end]]
        assert own, "no sequence trains this turn"
        found.append(end - len(prompt))
    assert sum(sum(mask) for _, mask in sequences) == sum(found)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TURNS, ["<eos>", "<|im_end|>"]),
        (ENDS_TWICE, ["<eos>", "<|im_end|>"]),
        (WITH_TOOLS, ["<eos>", "<|im_end|>", "<|eom|>"]),
        (ENDS_NO_TURN, ["<eos>"]),
        # Calls are not written, so that the turn is its header: no stop token.
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% if m.tool_calls %}{% endif %}{% endfor %}", ["<eos>"]),
        # Calls end with text, after a special token.
        (
            TURNS.replace(
                "'<|im_end|>\\n'", "('call<|eom|>' + m.tool_calls | string if m.tool_calls else '<|im_end|>')"
            ),
            None,
        ),
    ],
)
def test_stop_tokens(template: str, expected: list[str] | None) -> None:
    tokenizer = byte_level(template)
    assert tokenizer.convert_ids_to_tokens(stop_token_ids(tokenizer)) == (expected or ["<eos>", "<|im_end|>"])


def test_contents_are_never_code() -> None:
    assert "{{ 1 + 1 }}" in texts(byte_level(TURNS), [user("q"), assistant("{{ 1 + 1 }}")])[0]
