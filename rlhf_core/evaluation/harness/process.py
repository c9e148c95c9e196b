"""The process of lm-evaluation-harness, which runs the Python of task files. It asks its parent for what engines say.

Started by answering.py: it receives the settings, and sends requests for the engines, then rows, then the results.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from json import dumps  # the user's files may replace that of the module
from typing import Any

from rlhf_core.errors import StageError
from rlhf_core.processes.lines import open_pipes, received
from rlhf_core.processes.user_code import user_error


def main() -> None:
    requests, replies = open_pipes()
    incoming = received(requests)
    settings = next(incoming)

    def exchange(message: Mapping[str, Any]) -> Any:
        replies.write(dumps(message) + "\n")
        replies.flush()
        return next(incoming)

    # Read when the libraries are imported.
    os.environ |= {"HF_DATASETS_CACHE": settings["cache"], "TQDM_DISABLE": "1"}
    if settings["unsafe_code"]:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    from rlhf_core.evaluation.harness.running import run_tasks

    last: dict[str, Any]
    try:
        last = {"results": run_tasks(settings, exchange)}
    except StageError as error:
        last = {"error": str(error)}
    except (Exception, SystemExit) as error:  # the code of tasks may raise anything
        last = {"error": f"lm-evaluation-harness raised {user_error(error)}"}
    exchange(last)


if __name__ == "__main__":
    main()
