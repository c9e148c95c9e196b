"""`--reward.remote_url FILE.py` of OpenRLHF."""

import torch


def reward_func(queries, prompts, labels):
    # queries is prompts + responses
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor(
        [1.0 if label in response else -1.0 for response, label in zip(responses, labels, strict=True)]
    )
    return {
        "rewards": rewards,  # for the advantages
        "scores": rewards,  # for dynamic filtering
        "extra_logs": {"response_length": torch.tensor([len(response) for response in responses]), "kind": "rule"},
    }


def only_a_tensor(queries, prompts, labels):
    return torch.tensor([float(len(queries[0]))])
