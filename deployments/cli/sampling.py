"""`alignment generate` and `chat`: completions of models, outside of runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, TextIO

import typer

from deployments.cli import panels
from deployments.cli.signals import end_in_order
from rlhf_core.config.base import Dtype
from rlhf_core.data.formats import Row
from rlhf_core.data.sources.json_rows import NOT_UTF8
from rlhf_core.errors import RecipeError
from rlhf_core.inference.models import chat_tokenizer, named_models, whole_model
from rlhf_core.inference.prompts import read_prompts
from rlhf_core.inference.settings import engine_config, sampling_config
from rlhf_core.models.folders.folder import stored_dtype
from rlhf_core.system.paths import resolved, user_path, writing_to
from rlhf_core.system.scratch import scratch_folder

app = typer.Typer()

_NAMES = "a folder as saved by transformers or peft, stage/key (the first digits are enough), or an alias."
Model = Annotated[str, typer.Argument(help=f"Model: {_NAMES}")]
Models = Annotated[list[str], typer.Argument(help=f"Models, each {_NAMES}", metavar="MODEL…")]
Base = Annotated[
    str | None,
    typer.Option(help="Model that an adapter was trained on; defaults to the one that it names.", metavar="MODEL"),
]
Template = Annotated[
    str | None, typer.Option(help="Chat template instead of the model's own: chatml, llama3, plain, or a .jinja file.")
]
Precision = Annotated[Dtype | None, typer.Option(help="Precision; defaults to that of the weights.")]
Rollout = Annotated[
    list[str] | None,
    typer.Option(help="Setting of the engine, as in the `rollout` of a recipe.", metavar="KEY=VALUE"),
]
System = Annotated[str | None, typer.Option(help="System turn that conversations begin with.")]
Temperature = Annotated[float, typer.Option(help="Temperature from 0.01 to 2, or 0 for greedy sampling.")]
TopP = Annotated[float, typer.Option(help="Sample from the smallest set of tokens with this probability.")]
TopK = Annotated[int, typer.Option(help="Sample from this many of the most likely tokens; 0 is all.")]
MinP = Annotated[
    float, typer.Option(help="Sample from tokens with at least this share of the likeliest one's probability.")
]
MaxTokens = Annotated[int, typer.Option(help="Maximum number of tokens of a completion.")]


@app.command(rich_help_panel=panels.MODELS)
def generate(
    model: Model,
    prompts: Annotated[str, typer.Argument(help="Data file of the format `prompts`, or - for JSON lines.")] = "-",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; defaults to standard output.")] = None,
    samples: Annotated[
        int, typer.Option("--samples", "-n", min=1, max=100_000, help="Completions of each prompt.")
    ] = 1,
    lines: Annotated[bool, typer.Option("--lines", help="Read each line of PROMPTS as a prompt.")] = False,
    system: System = None,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    max_tokens: MaxTokens = 512,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed; the same one gives the same completions.")] = 0,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Write all tokens, and the log-prob of each.")] = False,
    base: Base = None,
    chat_template: Template = None,
    dtype: Precision = None,
    rollout: Rollout = None,
) -> None:
    """Write completions of prompts by a model, a line for each prompt, in the format `completions`.

    For example: alignment generate support-bot/champion questions.jsonl -n 4 --temperature 0.7 -o answers.jsonl
    """
    sampling = sampling_config(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, max_tokens=max_tokens)
    config = engine_config(rollout or [], max_length=max_tokens)
    end_in_order()
    with written(out) as file:
        rows = read_prompts(prompts, lines=lines, system=system)
        (named,) = named_models([model], base)
        with whole_model(named) as folder:
            tokenizer = chat_tokenizer(model, folder, chat_template)
            _say(f"{len(rows)} prompts; loading {model}")
            from rlhf_core.inference.generate import Request
            from rlhf_core.inference.generate import generate as sample
            from rlhf_core.rollout.engine import EngineSettings  # torch takes seconds

            settings = EngineSettings(config, dtype or stored_dtype(folder), seed)
            done = 0

            def write(part: Sequence[Row]) -> None:
                nonlocal done
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
                file.flush()
                done += len(part)
                _say(f"{done} of {len(rows)} prompts completed")

            sample(folder, tokenizer, rows, Request(samples, sampling, seed, logprobs), settings, write)


@app.command(rich_help_panel=panels.MODELS)
def chat(
    models: Models,
    system: System = None,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    max_tokens: MaxTokens = 512,
    base: Base = None,
    chat_template: Template = None,
    dtype: Precision = None,
    rollout: Rollout = None,
) -> None:
    """Chat with a model, or with several side by side.

    /help lists the commands. Standard input may be a pipe.

    For example: alignment chat support-bot/champion ./Llama-3.2-1B-Instruct --system "Answer in one sentence."
    """
    sampling = sampling_config(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, max_tokens=max_tokens)
    from rlhf_core.inference.chat import Chat, ChatModel
    from rlhf_core.inference.model_server import Address, running_server, served_model

    end_in_order()
    interactive = sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # some locales decode bytes to text that no model accepts
    with ExitStack() as stack:
        talking = []
        for named in named_models(models, base):
            folder = stack.enter_context(whole_model(named))
            tokenizer = chat_tokenizer(named.name, folder, chat_template)
            served = served_model(named.name, folder, tokenizer, dtype, rollout or [], engines=len(models))
            _say(f"loading {named.name}")
            address = Address(path=stack.enter_context(scratch_folder("chat")) / "socket")
            stack.enter_context(running_server(served, address))
            client = stack.enter_context(address.client())
            talking.append(ChatModel(named.name, tokenizer, client, sampling, served.config.max_length))
        if interactive:
            import readline  # noqa: F401  (editing, and earlier lines)

            _say("/help lists the commands")
        Chat(talking, system or "", lambda: _read(interactive), _write, interactive).run()


def _read(interactive: bool) -> str:
    try:
        return input("> " if interactive else "")
    except UnicodeDecodeError as error:
        raise RecipeError(f"standard input is {NOT_UTF8}: save it as UTF-8") from error


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    typer.echo(text, err=True)


@contextmanager
def written(out: Path | None) -> Iterator[TextIO]:
    """Yield a file that exists only if the context ends without an exception; none: standard output."""
    if out is None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # of JSON, whatever the terminal's is
        yield sys.stdout
        return
    out = user_path(out)
    if out.is_dir():
        raise RecipeError(f"--out {out}: this is a folder, give a file")
    if out.exists() and not out.is_file():  # a device or a pipe, which is written to and stays
        with writing_to(out), out.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    target = resolved(out)  # the target of a link is replaced, not the link
    if not target.parent.is_dir():
        raise RecipeError(f"--out {out}: there is no such folder: make it first")
    with _replaced(target) as file:
        yield file


@contextmanager
def _replaced(target: Path) -> Iterator[TextIO]:
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with writing_to(target), part.open("x", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
