"""What the recipes of these tests name as their user's file: rows that wait for, or fail without, a sign."""

import time
from pathlib import Path


def rows(text: str, needs: str = "", waits_for: str = "", size: int = 4) -> list[dict[str, str]]:
    if needs and not Path(needs).exists():
        raise ValueError(f"there is no {Path(needs).name}")
    while waits_for and not Path(waits_for).exists():
        print("waiting", flush=True)
        time.sleep(0.2)
    return [{"text": f"{text} {number}"} for number in range(size)]
