"""A recipe on a Slurm of two nodes that reaches its time limit and resumes, as one command: `python -m tests.slurm`."""

from __future__ import annotations

import sys

from tests.slurm.daemons import obstacle
from tests.two_nodes.machines import in_a_rack

SCENARIO = "tests.slurm.scenario"


def main() -> int:
    if reason := obstacle():
        print(f"there is no Slurm of two nodes here: {reason}")
        return 1
    found = in_a_rack(SCENARIO)
    same = found["weights"][0] == found["weights"][1]
    print(f"{found['seconds']:.0f} s; queued again and resumed after step {found['checkpoint']}")
    print(f"weights of that run and of an undisturbed one are {'the same' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
