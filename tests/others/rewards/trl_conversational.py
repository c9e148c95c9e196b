"""A reward of messages for TRL's GRPOTrainer."""


def polite_and_right(prompts, completions, solution, **kwargs):
    rewards = []
    for prompt, completion, truth in zip(prompts, completions, solution, strict=True):
        asked = prompt[-1]["content"]
        replied = completion[0]["content"]
        assert [prompt[-1]["role"], completion[0]["role"]] == ["user", "assistant"]
        rewards.append(float(truth in replied) + 0.5 * float(replied.startswith("Please") == ("please" in asked)))
    return rewards
