def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "acc": ground_truth in solution_str}


def only_a_number(data_source, solution_str, ground_truth, extra_info, penalty=0.0):
    return float(ground_truth in solution_str) - penalty
