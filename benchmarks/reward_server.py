"""A reward server under load, with a worker killed on the way: `python -m benchmarks.reward_server`.

Clients request rewards of texts from `alignment serve-reward`, each client one request after the other. After a
third of the responses, one of the worker processes is killed. Every response is compared with the model's rewards in
this process, of one text at a time. With `--attempts 1` no request is retried, so that those of the killed worker show
as errors.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from benchmarks.logprobs import machine
from benchmarks.record import store_figures
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rewards.rewards import HTTPReward
from rlhf_core.errors import RewardError
from rlhf_core.models.folders.folder import update_json
from rlhf_core.reward_server.model import ServedModel
from rlhf_core.rewards.http import RewardServer
from tests.services import free_ports

WORDS = tuple(f"word{number} " for number in range(500))
CONTEXT = 512
START_SECONDS = 300
TOLERANCE = 1e-4  # of a reward in float32, which depends on the other texts of its forward

Text = tuple[str, str]  # prompt, completion


def make_model(folder: Path, hidden: int, layers: int) -> int:
    """Write a reward model with random weights in float32; return its number of parameters."""
    torch.manual_seed(0)
    tokenizer = word_level_tokenizer(WORDS, context_length=CONTEXT)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, max_position_embeddings=CONTEXT, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    update_json(folder / "config.json", reward_mean=0.1, reward_std=0.5)
    return sum(parameter.numel() for parameter in model.parameters())


def texts(count: int) -> list[Text]:
    """Return distinct texts, with completions of 10 to 200 words."""
    draw = random.Random(0)
    return [
        (f"question {number}", f"{number} " + "".join(draw.choices(WORDS, k=draw.randint(10, 200))))
        for number in range(count)
    ]


def expected(folder: Path, all_texts: Sequence[Text]) -> list[float]:
    """Return the rewards in this process, each of a forward of its own."""
    model = ServedModel(folder, dtype="float32")
    rewards = []
    for prompt, completion in all_texts:
        tokens = model.tokens(prompt, [{"role": "user", "content": prompt}], completion, None)
        rewards.append(model.reward(prompt, model.scores([tokens])[0]))
    return rewards


@contextmanager
def server(folder: Path, workers: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the URL and the process of a ready server."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "deployments.cli.main", "serve-reward", str(folder), "--port", str(port)]
    process = subprocess.Popen([*command, "--workers", str(workers)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while len(ready_workers(process.pid)) < workers or not answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server does not start")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/score", process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def ready_workers(pid: int) -> list[int]:
    """Return the processes below `pid` that have loaded torch."""
    children = [child for child in psutil.Process(pid).children() if child.memory_info().rss > 200 * 2**20]
    return [child.pid for child in children]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--texts", type=int, default=10_000)
    options.add_argument("--clients", type=int, default=64)
    options.add_argument("--per-request", type=int, default=8)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--attempts", type=int, default=5)
    options.add_argument("--hidden", type=int, default=128)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--keep", action="store_true", help="kill no worker")
    parsed = options.parse_args()
    where = machine()
    os.environ.setdefault("ALIGNMENT_SERVE_TOKEN", secrets.token_urlsafe(32))
    os.environ["ALIGNMENT_HEADER_REWARD"] = f"Authorization: Bearer {os.environ['ALIGNMENT_SERVE_TOKEN']}"
    all_texts = texts(parsed.texts)
    requests = [
        range(start, min(start + parsed.per_request, len(all_texts)))
        for start in range(0, len(all_texts), parsed.per_request)
    ]
    got: dict[int, float] = {}
    errors: dict[int, str] = {}
    to_kill = threading.Event()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = make_model(folder, parsed.hidden, parsed.layers)
        with server(folder, parsed.workers) as (url, process):
            config = HTTPReward(
                type="http",
                url=url,
                header_variable="ALIGNMENT_HEADER_REWARD",
                timeout_seconds=300.0,
                attempts=parsed.attempts,
            )

            def client(number: int) -> None:
                reward = RewardServer(config)
                for request in requests[number :: parsed.clients]:
                    part = [all_texts[index] for index in request]
                    try:
                        result = reward([text for _, text in part], [prompt for prompt, _ in part], [{}] * len(part))
                        got.update(zip(request, result.rewards, strict=True))
                    except RewardError as error:
                        errors.update(dict.fromkeys(request, str(error)))
                    if len(got) > len(all_texts) / 3:
                        to_kill.set()
                reward.close()

            started = time.monotonic()
            with ThreadPoolExecutor(parsed.clients) as pool:
                clients = [pool.submit(client, number) for number in range(parsed.clients)]
                if not parsed.keep:
                    to_kill.wait()
                    killed = ready_workers(process.pid)[0]
                    os.kill(killed, signal.SIGKILL)
                for one in clients:
                    one.result()
            seconds = time.monotonic() - started
            if not parsed.keep:
                while len(ready_workers(process.pid)) < parsed.workers:  # it is started again
                    time.sleep(0.2)
        worst = max(abs(reward - value) for reward, value in zip(
            (got[index] for index in sorted(got)),
            expected(folder, [all_texts[index] for index in sorted(got)]), strict=True,
        ))  # fmt: skip
    lost = len(all_texts) - len(got.keys() | errors.keys())
    print(where)
    print(
        f"{parameters / 1e6:.1f}M parameters, {parsed.workers} workers, {parsed.clients} clients, {len(all_texts)} "
        f"texts in requests of {parsed.per_request}, {parsed.attempts} attempts, "
        f"{'no' if parsed.keep else 'one'} worker killed: "
        f"{len(got)} answered, {len(errors)} errors, {lost} lost; largest difference {worst:.1e}; "
        f"{seconds:.1f} s, {len(got) / seconds:.0f} texts/s"
    )
    store_figures({
        "texts": len(all_texts), "answered": len(got), "errors": len(errors), "lost": lost,
        "largest_difference": worst, "texts_per_second": len(got) / seconds,
    })  # fmt: skip
    for error in sorted(set(errors.values())):
        print("error:", error)
    if lost or worst > TOLERANCE:
        raise SystemExit("FAILED: an answer is lost or wrong")


if __name__ == "__main__":
    main()
