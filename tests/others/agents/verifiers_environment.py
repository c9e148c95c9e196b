"""An environment of verifiers: the letters of an answer are guessed, in two turns at most."""

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages: vf.Messages, state: vf.State) -> vf.Messages:
        state["asked_again"] = True
        return [{"role": "user", "content": "no"}]

    @vf.stop
    async def guessed(self, state: vf.State) -> bool:
        last = state["trajectory"][-1]["completion"] if state["trajectory"] else []
        return bool(last) and state["answer"] in last[-1]["content"]


async def right(completion, answer) -> float:
    return 1.0 if answer in completion[-1]["content"] else 0.0


async def at_once(completion, state) -> float:
    return 0.0 if state.get("asked_again") else 1.0


def load_environment(bonus: float = 0.5):
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "a?"}], "answer": "abc"}])
    return Guess(dataset=dataset, rubric=vf.Rubric(funcs=[right, at_once], weights=[1.0, bonus]), max_turns=2)


def load_something_else():
    return object()
