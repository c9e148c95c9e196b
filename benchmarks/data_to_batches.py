"""From a file of rows to packed batches, beside plain `datasets`.

`python -m benchmarks.data_to_batches [ROWS] [PROCESSES] [PHASE]`: by default 5 million texts of about 280 characters,
of which one in 40 repeats an earlier one; one process; all phases up to the last: read, tokenise, pack.

Ours reads, checks and deduplicates as the dataset stage, tokenises as pre-training, and packs and divides every step of
an epoch for two ranks. Plain `datasets` loads the JSON, maps the tokenizer over it, and maps that into blocks of equal
length; it neither checks nor deduplicates rows. Each is a process of its own. BENCHMARK_FOLDER is the folder of the
files.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.data import FolderContext
from benchmarks.process_memory import ProcessWatch
from benchmarks.record import store_figures

WORDS, DIFFERENT, VOCABULARY = 42, 20_000, 8192
LENGTH, BATCH, RANKS, TOKENS = 512, 256, 2, 8192  # tokens of a sequence; examples of a step; tokens of a micro-batch
FILE, EOS = "texts.jsonl", "<eos>"
PHASES = ("start", "read", "tokenise", "pack")
ARGUMENTS = ("5000000", "1", PHASES[-1])


def bodies() -> list[str]:
    """Return texts of words drawn by Zipf's law; reproducible."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(30_000)]
    weights = list(accumulate(1 / (rank + 10) for rank in range(len(words))))
    return [" ".join(draw.choices(words, cum_weights=weights, k=WORDS)) for _ in range(DIFFERENT)]


def write_inputs(root: Path, rows: int) -> None:
    """Write the file, and the folder of a byte-level tokenizer trained on such texts."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    all_bodies = bodies()
    with (root / FILE).open("w") as file:
        for number in range(rows):
            number = number // 2 if number % 20 == 0 else number
            file.write(json.dumps({"text": f"{number} {all_bodies[number % DIFFERENT]}"}) + "\n")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(all_bodies, vocab_size=VOCABULARY, special_tokens=[EOS], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token=EOS).save_pretrained(root / "model")


@contextmanager
def phase(name: str) -> Iterator[dict[str, int]]:
    """Print the seconds of the phase, the processor seconds with ended children's, and the yielded mapping."""
    counts: dict[str, int] = {}
    started, worked = time.perf_counter(), sum(os.times()[:4])
    yield counts
    times = {"seconds": time.perf_counter() - started, "worked": sum(os.times()[:4]) - worked}
    print(json.dumps({"phase": name, **times, **counts}), flush=True)


def ours(root: Path, processes: int, last: str) -> None:
    with phase("start"):
        from rlhf_core.chat.encoding import load_tokenizer
        from rlhf_core.config.data.dataset import DatasetConfig
        from rlhf_core.config.stages.language_models import PretrainConfig
        from rlhf_core.data.fitting import RowPolicy
        from rlhf_core.data.reading import iterate_rows
        from rlhf_core.stages.dataset import run
        from rlhf_core.supervised.encoding import fit_examples
        from rlhf_core.supervised.examples import divide
        from rlhf_core.supervised.schedule import step_indices
        from rlhf_core.supervised.sft import document_examples, pack_sequences

    with tempfile.TemporaryDirectory(dir=root) as work:
        context: Any = FolderContext(root, Path(work))
        settings = {
            "format": "text", "source": {"type": "files", "paths": [FILE]}, "near_duplicates": "off",
            "processes": processes,
        }  # fmt: skip
        with phase("read") as counts:
            output = run(DatasetConfig.model_validate_json(json.dumps(settings)), {}, context)
            counts |= {name: value for name, value in output.metrics.items() if isinstance(value, int)}
        if last == "read":
            return
        with phase("tokenise") as counts:
            encode = partial(document_examples, load_tokenizer(root / "model"), max_length=LENGTH)
            rows = iterate_rows(output.folder)
            examples = fit_examples(rows, encode, RowPolicy(), LENGTH, context.workdir, processes).rows
            counts["examples"] = len(examples)
        if last == "tokenise":
            return
        config = PretrainConfig.model_validate_json(
            json.dumps({"dataset": "d", "batch_size": BATCH, "max_length": LENGTH, "optimizer": {"learning_rate": 1}})
        )
        with phase("pack") as counts:
            tokens = 0
            for indices in step_indices(len(examples), config, 0):
                shards = divide(pack_sequences([examples[index] for index in indices]), RANKS, TOKENS)
                tokens += shards[0].num_tokens
            counts["tokens"] = tokens


def plain(root: Path, processes: int, last: str) -> None:
    with phase("start"):
        import datasets
        from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    processes_or_none = processes if processes > 1 else None
    with tempfile.TemporaryDirectory(dir=root) as cache:
        with phase("read") as counts:
            rows = datasets.load_dataset("json", data_files=str(root / FILE), split="train", cache_dir=cache)
            counts["rows"] = len(rows)
        if last == "read":
            return
        with phase("tokenise") as counts:
            encoded = rows.map(
                _tokens, batched=True, remove_columns=["text"], num_proc=processes_or_none,
                fn_kwargs={"tokenizer": tokenizer},
            )  # fmt: skip
            counts["examples"] = len(encoded)
        if last == "tokenise":
            return
        with phase("pack") as counts:
            blocks = encoded.map(_blocks, batched=True, num_proc=processes_or_none)
            counts["tokens"] = len(blocks) * LENGTH


def _tokens(batch: Mapping[str, list[str]], tokenizer: Any) -> dict[str, list[list[int]]]:
    return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in tokenizer(batch["text"])["input_ids"]]}


def _blocks(batch: Mapping[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    ids = [token for sequence in batch["input_ids"] for token in sequence]
    return {"input_ids": [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH + 1, LENGTH)]}


def measured(root: Path, name: str, *arguments: str) -> tuple[dict[str, dict[str, float]], ProcessWatch]:
    """Return the output of each phase, and the memory of the whole."""
    command = [sys.executable, "-m", "benchmarks.data_to_batches", f"--{name}", str(root), *arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with running, ProcessWatch(running.pid, interval=1.0) as watch:
        assert running.stdout is not None
        lines = [json.loads(line) for line in running.stdout if line.startswith('{"phase"')]
        status = running.wait()
    if status:
        raise SystemExit(f"{name} ended with {status}")
    return {line.pop("phase"): line for line in lines}, watch


def main(arguments: list[str]) -> None:
    match arguments:
        case ["--ours", root, processes, last]:
            ours(Path(root), int(processes), last)
        case ["--plain", root, processes, last]:
            plain(Path(root), int(processes), last)
        case _:
            rows, processes, last = (*arguments, *ARGUMENTS[len(arguments) :])
            phases = PHASES[: PHASES.index(last) + 1]
            console = Console(width=160)
            table = Table("", *(f"{name}, s (CPU)" for name in phases), "MiB", "MiB without files", "")
            figures: dict[str, Any] = {"rows": int(rows)}
            with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as folder:
                write_inputs(Path(folder), int(rows))
                size = (Path(folder) / FILE).stat().st_size
                for name in ("ours", "plain"):
                    phases_by_name, watch = measured(Path(folder), name, processes, last)
                    figures[name] = {
                        "processor_seconds": [of["worked"] for of in phases_by_name.values()],
                        "memory_mib": watch.peak / 2**20,
                    }
                    seconds = [f"{of.pop('seconds'):.0f} ({of.pop('worked'):.0f})" for of in phases_by_name.values()]
                    memory = [f"{bytes_ / 2**20:.0f}" for bytes_ in (watch.peak, watch.peak_anonymous)]
                    counts = {key: value for of in phases_by_name.values() for key, value in of.items()}
                    table.add_row(name, *seconds, *memory, str(counts))
            title = f"{rows} rows, {size / 2**20:.0f} MiB, {processes} processes; load average {os.getloadavg()[0]:.1f}"
            console.print(title, table)
            store_figures(figures)


if __name__ == "__main__":
    main(sys.argv[1:])
