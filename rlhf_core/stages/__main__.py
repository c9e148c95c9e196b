"""The entry of a job: `python -m rlhf_core.stages --store URL --stage sft --key <64 hexadecimal digits>`.

On a node with a warm process, the job is a fork of it; here it is a fresh process. Imports nothing before that.
"""

import sys

from rlhf_core.warm.client import exit_with, run_warm

if __name__ == "__main__":
    status = run_warm(["-m", "rlhf_core.stages.job", *sys.argv[1:]])
    if status is not None:
        exit_with(status)

    from rlhf_core.stages.job import main

    sys.exit(main())
