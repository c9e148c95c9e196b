"""RL on two nodes that share no file system, as one command: `python -m tests.two_nodes`."""

from __future__ import annotations

import sys

from tests.two_nodes.machines import in_a_rack, obstacle

SCENARIO = "tests.two_nodes.scenario"


def main() -> int:
    if reason := obstacle():
        print(f"this machine cannot be two nodes: {reason}")
        return 1
    found = in_a_rack(SCENARIO)
    same = found["weights"][0] == found["weights"][1]
    print(f"{found['seconds']:.0f} s; engines {found['engines']}; resumed after step {found['checkpoint']}")
    print(f"weights of the killed run and of an undisturbed one are {'the same' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
