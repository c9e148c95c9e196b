"""`custom_reward_function` of verl."""

import asyncio
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k", data_source
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    answer = found[-1].replace(",", "") if found else None
    if answer is None:
        return {"score": 0.0, "acc": False, "pred": "", "split_is_train": extra_info["split"] == "train"}
    return {
        "score": 1.0 if answer == ground_truth else 0.1,
        "acc": answer == ground_truth,
        "pred": answer,
        "split_is_train": extra_info["split"] == "train",
    }


def only_a_number(data_source, solution_str, ground_truth, extra_info, penalty=0.0):
    return (1.0 if ground_truth in solution_str else 0.0) - penalty


async def awaited(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.2)
    return float(ground_truth in solution_str)


def nothing(data_source, solution_str, ground_truth, extra_info):
    return None


def without_a_score(data_source, solution_str, ground_truth, extra_info):
    return {"reward": 1.0}


def other_names(source, text, truth, info):
    return 1.0
