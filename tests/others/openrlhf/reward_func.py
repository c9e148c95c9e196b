def reward_func(queries, prompts, labels):
    return {
        "rewards": [
            float(label in query[len(prompt) :]) for query, prompt, label in zip(queries, prompts, labels, strict=True)
        ]
    }
