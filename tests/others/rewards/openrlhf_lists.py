"""The same with lists in place of tensors."""


def with_scores(texts, questions, answers):
    right = [float(answer in text) for text, answer in zip(texts, answers, strict=True)]
    return {"rewards": [2 * value - 1 for value in right], "scores": right}


def fails(queries, prompts, labels):
    return {"rewards": [float("nan")]}


def two_arguments(queries, prompts):
    return [1.0]
