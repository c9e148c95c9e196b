"""RL on two ranks and two engines in every combination of PPO or GRPO, all weights or LoRA, ZeRO 2 or 3, and devices of
their own or shared. Further ones share the tokens of each batch, or the weights of each layer, between both ranks, have
a quantised base, models apart from the policy, or an engine over both devices, or send weights by broadcast or by
handle. Each is killed in the middle of a step, resumed, and compared with a run that nothing disturbs.

`python -m tests.rl_matrix` runs all twenty-five; `python -m tests.rl_matrix ppo-lora-zero3-hybrid ...` those named.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import ray

from rlhf_core.config.rl.stage import RLConfig
from tests.rlhf_core.stages.killed_jobs import killed_and_whole
from tests.rlhf_core.stages.rl_jobs import job_inputs, two_by_two

COMBINATIONS: dict[str, RLConfig] = {
    f"{algorithm}-{'lora' if lora else 'full'}-zero{zero}-{'hybrid' if hybrid else 'own'}": two_by_two(
        zero, algorithm, lora=lora, hybrid=hybrid
    )
    for algorithm, lora, zero, hybrid in product(("grpo", "ppo"), (False, True), (2, 3), (False, True))
} | {
    "grpo-full-zero3-sequence": two_by_two(3, sequence=2),
    "ppo-lora-zero2-sequence": two_by_two(2, "ppo", lora=True, sequence=2),
    "ppo-full-zero2-tensor": two_by_two(2, "ppo", tensor=2),
    "grpo-qlora-zero2-own": two_by_two(2, lora=True, quantised=True),
    "ppo-full-zero2-group": two_by_two(2, "ppo", group=True),
    "ppo-full-zero3-collective": two_by_two(3, "ppo", transport="collective"),
    "grpo-full-zero3-ipc": two_by_two(3, transport="ipc"),
    "ppo-lora-zero2-hybrid-ipc": two_by_two(2, "ppo", lora=True, hybrid=True, transport="ipc"),
    "grpo-full-zero3-hybrid-spread-ipc": two_by_two(3, hybrid=True, transport="ipc", spread=2),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rl_matrix", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(COMBINATIONS)}; none: all")
    names = parser.parse_args().names or list(COMBINATIONS)
    if unknown := sorted(set(names) - COMBINATIONS.keys()):
        parser.error(f"there is no {', '.join(unknown)}")
    os.environ.setdefault(
        "RAY_AUTH_MODE", "disabled"
    )  # `ray.init` would make a token for the user's other clusters too
    ray.init(address="local", num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    address = ray.get_runtime_context().gcs_address
    different = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="rl-matrix-") as temporary:
            folder, began = Path(temporary), time.monotonic()
            config = COMBINATIONS[name]
            found = killed_and_whole(config, job_inputs(folder / "inputs", config), folder, address)
            same = found.killed == found.whole
            different += not same
            result = "the same" if same else "DIFFERENT"
            print(
                f"{name}: resumed after step {found.resumed_after}, weights and metrics {result}, "
                f"{time.monotonic() - began:.0f} s", flush=True,
            )  # fmt: skip
    ray.shutdown()
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
