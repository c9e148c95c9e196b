"""Environments that fail, each in its own way at the reply that names it; `fine` is answered by an echo."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time


class Environment:
    def __init__(self, mark="!"):
        self.mark = mark
        self.replies = 0

    def reset(self, row):
        if row["answer"] == "no start":
            raise ValueError("there is no game for this row")
        self.first = random.random()
        return [{"role": "user", "content": f"{row['prompt'][-1]['content']}{self.mark}"}]

    def step(self, reply):
        self.replies += 1
        return getattr(self, reply)()

    def fine(self):
        return {"messages": [{"role": "user", "content": f"{self.replies}{self.mark}"}], "reward": 0.5}

    def first_number(self):
        return {"reward": self.first, "done": True}

    def raises(self):
        raise KeyError("no such move")

    def hangs(self):
        time.sleep(1000)

    def hangs_in_c(self):
        return 9**9**9

    def exits(self):
        sys.exit(3)

    def dies(self):
        os._exit(4)

    def crashes(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def prints_without_end(self):
        while True:
            print("x" * 10_000)

    def grows(self):
        kept = []
        while True:
            kept.append(bytearray(2**26))

    def returns_a_list(self):
        return [1]

    def returns_another_key(self):
        return {"message": "hello"}

    def returns_an_object(self):
        return {"messages": [{"role": "user", "content": object()}]}

    def returns_nan(self):
        return {"reward": float("nan")}

    def answers_at_length(self):
        return {"messages": [{"role": "user", "content": "x " * 2**20}]}

    def shows_a_large_image(self):
        return {"messages": [{"role": "user", "content": [{"type": "image", "image": b"." * 2**20}]}]}

    def leaves_a_process(self):
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        return {"messages": [{"role": "user", "content": str(left.pid)}]}

    def closes_everything(self):
        os.closerange(3, 1000)
        return self.fine()

    async def waits(self):
        return {"done": True, "reward": 2}


class Brief:
    def reset(self, row):
        return {"messages": row["prompt"], "max_tokens": 2, "stop": ["b"]}

    def step(self, reply):
        return {"max_tokens": int(reply), "stop": ["c", "d"]}


class WithoutStep:
    pass


class WithAnOption(Environment):
    def __init__(self, *, size):
        super().__init__()


def numbers(**options):
    import numpy

    class Numbers:
        def step(self, reply):
            return {"reward": numpy.float32(0.25), "done": numpy.bool_(True)}

    return Numbers()
