"""Episodes as tokens: what is assembled is what the template writes, and every limit ends an episode."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rlhf_core.chat.feedback import require_turns_follow
from rlhf_core.chat.rendering import render
from rlhf_core.chat.templates import SHIPPED
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.environments.environments import Retry
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.data.prompts import to_prompts
from rlhf_core.environments import Environment, Feedback, Reply
from rlhf_core.environments.opening import InProcessHost
from rlhf_core.environments.retry import RetryEnvironment
from rlhf_core.environments.single_turn import SingleTurnEnvironment
from rlhf_core.episodes.episode import Episode, EpisodeRules
from rlhf_core.episodes.rollouter import Rollouter, Start
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.rl.rollouts import RolloutSampler
from rlhf_core.rollout.engine import SamplingParameters
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.types import Completion, Trajectory
from tests.rlhf_core.chat.families import (
    ENDS_LAST_TURN_ONLY,
    ENDS_NO_TURN,
    MERGES_SYSTEM,
    STRIPS_REASONING,
    TURNS,
    byte_level,
    space_before_text,
)

WORDS = word_level_tokenizer([], context_length=64)
ROW = {"id": "row", "prompt": [{"role": "user", "content": "a?"}], "answer": "b"}


def config(**settings: Any) -> RLConfig:
    block = {"rewards": {"exact": {"type": "verifier"}}, "group_size": 2, "optimizer": {"learning_rate": 1e-3}}
    return RLConfig.model_validate({
        "algorithm": "grpo", "dataset": "p", "steps": 3, "prompts_per_step": 2, "sampling": {"max_tokens": 4},
        "rollout": {"max_length": 64}, "environment": {"type": "retry", "feedback": "no", "max_turns": 3},
        "grpo": {**block, **settings.pop("grpo", {})}, **settings,
    })  # fmt: skip


class Says(Environment):
    """Answers with what it was made with, one after the other."""

    def __init__(self, *feedback: Any) -> None:
        self._feedback = iter(feedback)

    async def step(self, reply: Reply) -> Feedback:
        said = next(self._feedback)
        if isinstance(said, Exception):
            raise said
        return said  # type: ignore[no-any-return]


def user(text: str, **more: Any) -> Feedback:
    return Feedback([{"role": "user", "content": text}], **more)


SAMPLING = SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=4, stop_token_ids=())


class Begun(Episode):
    """An episode that a test plays without an event loop."""

    def hear(self, reply: Completion) -> None:
        asyncio.run(self.take(reply))


def episode(
    environment: Environment, tokenizer: PreTrainedTokenizerFast = WORDS, max_turns: int = 3, max_length: int = 64
) -> Begun:
    (prompt,) = to_prompts([ROW], tokenizer, max_tokens=60)
    rules = EpisodeRules(tokenizer, max_turns, max_length, SAMPLING, "says")
    begun = Begun(prompt, environment, rules)
    asyncio.run(begun.begin(seed=0))
    return begun


def reply(tokenizer: PreTrainedTokenizerFast, text: str, stop: str | None = "<eos>", version: int = 0) -> Completion:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + (
        [tokenizer.convert_tokens_to_ids(stop)] if stop else []
    )
    return Completion(tuple(ids), (-1.0,) * len(ids), "stop" if stop else "length", version)


def shipped(name: str) -> str:
    return SHIPPED[name].text


@pytest.mark.parametrize(
    ("tokenizer", "stop"),
    [
        (WORDS, "<eos>"),
        (byte_level(TURNS), "<|im_end|>"),
        (space_before_text(TURNS), "<|im_end|>"),
        (byte_level(shipped("chatml")), "<|im_end|>"),
        (byte_level(shipped("plain")), "<eos>"),
        (byte_level(MERGES_SYSTEM), "<eos>"),
    ],
)
def test_an_episode_is_what_the_template_writes_of_its_conversation(
    tokenizer: PreTrainedTokenizerFast, stop: str
) -> None:
    ours = episode(Says(user("no"), user("on", reward=0.5), Feedback(done=True, reward=2.0)), tokenizer, max_length=200)
    turns = ["x", "yz", "b"]
    for text in turns:
        ours.hear(reply(tokenizer, text, stop))
    assert ours.over
    made = ours.trajectory()
    sampled = made.token_ids[made.loss_mask].tolist()
    assert sampled == [token for text in turns for token in reply(tokenizer, text, stop).token_ids]
    assert made.rollout_logprobs.tolist() == [-1.0 if mask else 0.0 for mask in made.loss_mask]
    said = [*ROW["prompt"]]  # type: ignore[misc]
    for text, answer in zip(turns, ["no", "on", None], strict=True):
        said += [{"role": "assistant", "content": text}] + ([{"role": "user", "content": answer}] if answer else [])
    whole = render(tokenizer, said, None, generation_prompt=False)
    assembled = tokenizer.decode(made.token_ids.tolist())
    assert "".join(whole.split()).startswith("".join(assembled.split()))
    assert whole.rstrip().endswith(stop)
    assert (made.completion, made.turns, made.environment_reward) == ("b", 3, 2.5)
    assert made.messages == tuple(said[:-1])
    assert (made.finish_reason, made.weight_version) == ("stop", 0)


def test_the_tokens_between_two_replies() -> None:
    ours = episode(Says(user("no"), Feedback(done=True)))
    ours.hear(reply(WORDS, "x"))
    ours.hear(reply(WORDS, "b"))
    made = ours.trajectory()
    assert WORDS.decode(made.token_ids) == "<bos><user>a?<assistant>x<eos><user>no<assistant>b<eos>"
    assert WORDS.decode(made.token_ids[made.loss_mask]) == "x<eos>b<eos>"


def test_sampled_tokens_are_never_tokenised_again() -> None:
    tokenizer = byte_level(TURNS)
    ab, a, b = (tokenizer.convert_tokens_to_ids(piece) for piece in ("ab", "a", "b"))
    ours = episode(Says(user("no"), Feedback(done=True)), tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ours.hear(Completion((a, b, end), (-1.0,) * 3, "stop", 0))
    made = ours.trajectory()
    assert made.token_ids[made.loss_mask].tolist() == [a, b, end]
    assert ab not in made.token_ids.tolist()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (STRIPS_REASONING, "rewrites earlier turns, such as leaving out their reasoning"),
        (ENDS_LAST_TURN_ONLY, "rewrites earlier turns|does not end each assistant turn"),
        (ENDS_NO_TURN, "does not end each assistant turn with a special token"),
    ],
)
def test_a_template_that_does_not_only_append_is_refused_before_anything_is_sampled(template: str, reason: str) -> None:
    with pytest.raises(StageError, match=reason):
        require_turns_follow(byte_level(template))


def test_a_reply_that_the_template_would_rewrite_ends_the_step() -> None:
    tokenizer = byte_level(STRIPS_REASONING)
    plain = episode(Says(user("no")), tokenizer, max_length=200)
    plain.hear(reply(tokenizer, "x", "<|im_end|>"))
    assert not plain.over
    ours = episode(Says(user("no")), tokenizer, max_length=200)
    with pytest.raises(StageError, match="environment says, row row, turn 1: the chat template rewrites earlier turns"):
        ours.hear(reply(tokenizer, "<think>so</think>x", "<|im_end|>"))


def test_limits_end_an_episode() -> None:
    forever = [user("no") for _ in range(9)]
    ours = episode(Says(*forever), max_turns=2)
    ours.hear(reply(WORDS, "x"))
    assert not ours.over
    ours.hear(reply(WORDS, "x"))
    assert ours.over
    assert ours.trajectory().finish_reason == "stop"

    cut = episode(Says(*forever))
    cut.hear(reply(WORDS, "x", stop=None))
    assert cut.over
    assert cut.trajectory().finish_reason == "length"

    # <bos><user>a?<assistant>x<eos> are 7 tokens, <user>no<assistant> are 4.
    full = episode(Says(*forever), max_length=11)
    full.hear(reply(WORDS, "x"))
    assert full.over
    assert full.trajectory().finish_reason == "length"
    assert full.trajectory().token_ids.numel() == 7, "what nobody replied to is left out"
    assert not_full(max_length=12)


def not_full(max_length: int) -> bool:
    ours = episode(Says(user("no")), max_length=max_length)
    ours.hear(reply(WORDS, "x"))
    return not ours.over


def test_the_version_of_an_episode_is_that_of_its_oldest_turn() -> None:
    ours = episode(Says(user("no"), Feedback(done=True)))
    ours.hear(reply(WORDS, "x", version=1))
    ours.hear(reply(WORDS, "b", version=2))
    assert ours.trajectory().weight_version == 1


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (ValueError("ouch"), r"it raised ValueError: ouch\n"),
        (None, r"step\(\) returned NoneType, expected a Feedback"),
        (user("no", reward=float("nan")), r"step\(\) returned the reward nan, expected a finite number"),
        (user("no", done=1), r"step\(\) returned done=1, expected True or False"),
        (Feedback(), r"step\(\) returned the messages \(\), expected a list with at least one"),
        (Feedback([{"role": "user"}]), r"step\(\) returned the message .*, expected \{role, content: text\}"),
        (
            Feedback([{"role": "user", "content": "half \ud83d of one"}]),
            r"step\(\) returned a message that cannot be used: `message.content` is not valid Unicode",
        ),
        (
            Feedback([{"role": "user", "content": [{"type": "image", "image": b"PNG"}]}]),
            r"step\(\) returned a message with images, but the policy reads text alone, or something else",
        ),
        (
            Feedback([{"role": "assistant", "content": "me"}]),
            r"step\(\) speaks as 'assistant'",
        ),
        (
            Feedback([{"role": "tool", "content": "3"}]),
            "the chat template refuses a conversation: .* not tool",
        ),
    ],
)
def test_an_environment_that_fails_is_named_with_the_row_and_the_turn(said: Any, problem: str) -> None:
    ours = episode(Says(user("no"), said))
    ours.hear(reply(WORDS, "x"))
    with pytest.raises(StageError, match=rf"^environment says, row row, turn 2:? ?{problem}"):
        ours.hear(reply(WORDS, "x"))


def test_an_environment_bounds_the_next_reply() -> None:
    class Asks(Says):
        async def reset(self, row: Mapping[str, Any], seed: int) -> Feedback:
            return Feedback(row["prompt"], max_tokens=2)

    ours = episode(Asks(user("no", max_tokens=1), user("no"), Feedback(done=True)))
    limits = [ours.sampling.max_tokens]
    for _ in range(2):
        ours.hear(reply(WORDS, "x"))
        limits.append(ours.sampling.max_tokens)
    assert limits == [2, 1, 4]
    for bad in (0, 5, True, 1.0, "2"):
        with pytest.raises(
            EpisodeError, match=r"turn 1: step\(\) returned max_tokens=.*, expected an integer from 1 to the 4"
        ):
            episode(Says(user("no", max_tokens=bad))).hear(reply(WORDS, "x"))


def test_an_environment_chooses_the_sampling_of_the_next_reply() -> None:
    class Asks(Says):
        async def reset(self, row: Mapping[str, Any], seed: int) -> Feedback:
            return Feedback(row["prompt"], temperature=0.5)

    ours = episode(Asks(user("no", temperature=2), user("no"), Feedback(done=True)))
    temperatures = []
    for _ in range(3):
        temperatures.append(ours.sampling.temperature)
        ours.hear(reply(WORDS, "x"))
    assert temperatures == [0.5, 2.0, 1.0]
    made = ours.trajectory()
    assert made.temperatures is not None
    assert made.temperatures[made.loss_mask].tolist() == [0.5] * 2 + [2.0] * 2 + [0.0] * 2
    assert not made.temperatures[~made.loss_mask].any()


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"temperature": 0}, r"temperature of 0; replies are sampled at 0\.01 to 2"),
        ({"temperature": 2.1}, r"temperature of 2\.1; "),
        ({"temperature": True}, "temperature of True; "),
        ({"temperature": float("nan")}, "temperature of nan; "),
        ({"top_p": 0}, "top_p of 0; it is a share above 0, up to 1"),
        ({"top_p": "1"}, "top_p of '1'; "),
        ({"top_p": 0.9}, r"top_p of 0\.9, but this run samples from all tokens: set `sampling\.top_k`"),
    ],
)
def test_a_reply_that_cannot_be_sampled_fails(asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(EpisodeError, match=rf"turn 1: step\(\) returned a {problem}"):
        episode(Says(user("no", **asked))).hear(reply(WORDS, "x"))


def test_the_engine_is_asked_for_no_more_than_the_environment_wants() -> None:
    class Asks(RetryEnvironment):
        async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
            return Feedback(await super().reset(row, seed), max_tokens=2)

    of_run = config()
    engine = ScriptedEngine(lambda *_: [WORDS.convert_tokens_to_ids("x")] * 4, max_length=64)
    environment_host = InProcessHost(of_run.environment, Asks)
    ours = RolloutSampler(of_run, Rollouter(InlineEngines(engine), WORDS, of_run.rollout, environment_host), 0)
    (made,) = ours.sample(to_prompts([ROW], WORDS, max_tokens=60), step=1)
    assert [(t.num_sampled_tokens, t.finish_reason) for t in made] == [(2, "length")] * 2


def stopped_by_texts(*feedback: Feedback, **sampling: Any) -> tuple[str, Trajectory]:
    """The text and the trajectory of an episode whose replies are a b c d a b, as far as the engine samples."""
    of_run = config(sampling={"max_tokens": 6, **sampling})
    ids = WORDS.convert_tokens_to_ids(["a", "b", "c", "d", "a", "b"])
    engine = ScriptedEngine(lambda *_: ids, max_length=64, logprob=-0.5)
    host = InProcessHost(of_run.environment, lambda *_: Says(*feedback))
    starts = [Start(prompt, lambda turn: turn) for prompt in to_prompts([ROW], WORDS, max_tokens=58)]
    (made,) = Rollouter(InlineEngines(engine), WORDS, of_run.rollout, host).play(starts, of_run.sampling)
    return str(WORDS.decode(made.token_ids)), made


def test_a_stop_text_ends_each_reply_and_the_turn_is_ended_before_the_next() -> None:
    text, made = stopped_by_texts(user("no"), Feedback(done=True), stop=["bc", "da"])
    assert text == "<bos><user>a?<assistant>abc<eos><user>no<assistant>abc"
    assert (made.finish_reason, made.completion, made.turns) == ("stop", "abc", 2)
    # The token that ends the turn was not sampled: it trains nothing.
    sampled = made.token_ids[made.loss_mask].tolist()
    assert sampled == WORDS.convert_tokens_to_ids(["a", "b", "c"] * 2)
    assert made.rollout_logprobs[made.loss_mask].tolist() == [-0.5] * 6


def test_an_environment_names_texts_that_end_the_next_reply_beside_those_of_the_run() -> None:
    text, made = stopped_by_texts(user("no", stop=["b"]), user("no"), Feedback(done=True), stop=["cd"])
    assert text == "<bos><user>a?<assistant>abcd<eos><user>no<assistant>ab<eos><user>no<assistant>abcd"
    assert made.num_sampled_tokens == 10
    for bad in ("b", [""], [1], {"b": 1}):
        with pytest.raises(EpisodeError, match=r"turn 1: step\(\) returned stop=.*, expected a list of texts"):
            episode(Says(user("no", stop=bad))).hear(reply(WORDS, "x"))
    with pytest.raises(EpisodeError, match="17 texts as stop, and the most are 16"):
        episode(Says(user("no", stop=["b"] * 17))).hear(reply(WORDS, "x"))


def test_a_reply_without_a_stop_text_is_as_long_as_without_one() -> None:
    cut, plain = stopped_by_texts(Feedback(), stop=["x"]), stopped_by_texts(Feedback())
    assert cut[1].finish_reason == "length"
    assert cut[0] == plain[0] == "<bos><user>a?<assistant>abcdab"


def test_an_environment_may_take_so_many_seconds_in_all_turns_together() -> None:
    class Waits(Environment):
        async def step(self, reply: Reply) -> Any:
            await asyncio.sleep(0.3 if reply.text == "x" else 1000)
            return user("no")

    def play(*replies: str, seconds: float) -> None:
        (prompt,) = to_prompts([ROW], WORDS, max_tokens=60)
        ours = Episode(prompt, Waits(), EpisodeRules(WORDS, 9, 64, SAMPLING, "waits", seconds))

        async def played() -> None:
            await ours.begin(0)
            for text in replies:
                await ours.take(reply(WORDS, text))

        asyncio.run(played())

    play("x", "x", seconds=60)
    problem = r"^environment waits, row row, turn {}: its turns took more than the {} s of `episode_seconds` together"
    with pytest.raises(EpisodeError, match=problem.format(2, "0.5")):
        play("x", "x", seconds=0.5)
    with pytest.raises(EpisodeError, match=problem.format(1, "0.05")):
        play("y", seconds=0.05)


def test_an_environment_may_ask_something_else_than_the_row() -> None:
    class Asks(Says):
        async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, Any]]:
            return [{"role": "user", "content": f"{row['answer']}?"}]

    ours = episode(Asks(Feedback(done=True)))
    ours.hear(reply(WORDS, "b"))
    made = ours.trajectory()
    assert WORDS.decode(made.token_ids) == "<bos><user>b?<assistant>b<eos>"
    assert made.prompt.text == "b?"
    with pytest.raises(StageError, match=r"row row, turn 0: reset\(\) returned messages of 5 tokens, more than the 4"):
        episode(Asks(), max_length=8)


def sampler(script: Callable[[Sequence[int], int | None], Sequence[int]], **settings: Any) -> RolloutSampler:
    of_run = config(**settings)
    implementation = RetryEnvironment if isinstance(of_run.environment, Retry) else SingleTurnEnvironment
    environment_host = InProcessHost(of_run.environment, implementation)
    engines = InlineEngines(ScriptedEngine(script, max_length=64))
    return RolloutSampler(of_run, Rollouter(engines, WORDS, of_run.rollout, environment_host), 0)


def test_retry_says_that_a_reply_is_wrong_until_it_is_right() -> None:
    seeds: list[int] = []

    def script(prompt: Sequence[int], seed: int | None) -> Sequence[int]:
        assert seed is not None
        seeds.append(seed)
        right = WORDS.decode(prompt).count("no") == seed % 2
        return WORDS("b" if right else "x", add_special_tokens=False)["input_ids"] + [WORDS.eos_token_id]

    prompts = to_prompts([{**ROW, "id": str(i)} for i in range(3)], WORDS, max_tokens=60)
    made = [t for group in sampler(script).sample(prompts, step=1) for t in group]
    assert [t.prompt.id for t in made] == ["0", "0", "1", "1", "2", "2"]
    assert all(t.environment_reward == (t.completion == "b") for t in made)
    assert {t.turns for t in made} >= {1, 2}
    assert len(seeds) == sum(t.turns for t in made), "an episode that is over is not asked again"
    assert len(set(seeds)) == len(seeds)


def test_seeds_of_all_turns_rounds_and_steps_differ() -> None:
    seeds: list[int] = []

    def script(prompt: Sequence[int], seed: int | None) -> Sequence[int]:
        assert seed is not None
        seeds.append(seed)
        return [WORDS.eos_token_id]

    ours = sampler(script)
    prompts = to_prompts([{**ROW, "id": str(i)} for i in range(3)], WORDS, max_tokens=60)
    for step, sampling_round in itertools.product(range(3), range(3)):
        ours.sample(prompts, step, sampling_round)
    assert len(seeds) == 9 * 6 * 3
    assert len(set(seeds)) == len(seeds)
    single: list[int] = []
    sampler(lambda p, s: single.append(s or 0) or [WORDS.eos_token_id], environment={"type": "single_turn"}).sample(
        prompts, 0, 0
    )
    assert single == seeds[:6]
