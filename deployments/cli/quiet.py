"""The switches of libraries for what they print beside a command's own lines."""

from __future__ import annotations

import logging
import os

from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

_VARIABLES = {"TRANSFORMERS_VERBOSITY": "error", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}  # read at import


def quiet_libraries() -> None:
    """Turn off warnings and progress bars of libraries, before they are imported.

    Errors are printed as before, and so are the bars of downloads. A variable that the user has set decides.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    for library in ("bitsandbytes", "vllm"):
        logging.getLogger(library).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # it sets its level when it is imported
    if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        disable_progress_bars()  # of transformers, too
        enable_progress_bars("huggingface_hub")


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
