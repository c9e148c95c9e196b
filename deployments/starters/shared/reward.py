"""The reward of this run: change it as you like; the stage that uses it is then computed again."""


def reward(completions: list[str], prompts: list[str], rows: list[dict[str, str]]) -> list[float]:
    """Return a point for an answer that contains the right one, and less for longer ones, down to 0.8."""
    return [
        float(row["answer"].lower() in text.lower()) * (1 - 0.2 * min(len(text) / 400, 1))
        for text, row in zip(completions, rows, strict=True)
    ]
