"""`alignment generate`: completions of prompts by any model, as the stage `generate` samples them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.chat.sampled_tokens import tokenizer_digest
from rlhf_core.config.engines.rollout import SamplingConfig
from rlhf_core.data.formats import Row, format_of
from rlhf_core.data.prompts import to_prompts
from rlhf_core.episodes.rollouter import Rollouter
from rlhf_core.errors import StageError
from rlhf_core.models.folders.folder import context_length
from rlhf_core.rl.rows import completion_entry, completions_row
from rlhf_core.rollout.child_engine import quiet_engine
from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.rollout.engines import Engines
from rlhf_core.stages.generate import completed
from rlhf_core.types import Prompt, Trajectory

OpenEngine = Callable[[Path, EngineSettings], AbstractContextManager[Engines]]

_AT_ONCE = 256  # completions per call of the engine
_SHOWN = 40  # characters of a prompt


@dataclass(frozen=True, slots=True)
class Request:
    """The completions requested of each prompt."""

    samples: int
    sampling: SamplingConfig
    seed: int
    tokens: bool  # write the tokens of each completion, with their log-probs


def generate(
    folder: Path, tokenizer: Tokenizer, rows: Sequence[Row], request: Request, settings: EngineSettings,
    write: Callable[[Sequence[Row]], None], open_engine: OpenEngine = quiet_engine,
) -> None:  # fmt: skip
    """Pass rows of the format `completions` to `write`, in the order of `rows` (of the format `prompts`), some at a
    time.

    A prompt gets the same samples in every call with this seed. The engine has room for the longest prompt, whatever
    `settings` are. Raises StageError for a prompt that leaves no room in the model's context, and ValueError if the
    engine cannot serve the model.
    """
    prompts = to_prompts(rows, tokenizer, max_tokens=2**31)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    length = len(longest.token_ids) + request.sampling.max_tokens
    context = context_length(folder)
    if context is not None and length > context:
        raise StageError(
            f"the prompt {longest.text[:_SHOWN]!r} has {len(longest.token_ids)} tokens, and with a completion of up to "
            f"{request.sampling.max_tokens} it has no room in the model's context of {context}: shorten it, or lower "
            "--max-tokens"
        )
    each, at_once = request.samples, max(1, _AT_ONCE // request.samples)
    digest = tokenizer_digest(tokenizer)
    config = settings.config.model_copy(update={"max_length": length})
    with ExitStack() as stack:
        try:
            engines = stack.enter_context(open_engine(folder, replace(settings, config=config)))
        except ValueError as error:  # of its settings
            raise StageError(str(error)) from error
        rollouter = Rollouter(engines, tokenizer, config)
        for start in range(0, len(prompts), at_once):
            part = prompts[start : start + at_once]
            completions = completed(part, each, request.sampling, rollouter, request.seed)
            rows = [_row(prompt, completions[n * each : (n + 1) * each], request) for n, prompt in enumerate(part)]
            write([row | ({"tokenizer": digest} if request.tokens else {}) for row in rows])


def _row(prompt: Prompt, completions: Sequence[Trajectory], request: Request) -> Row:
    entries = [
        completion_entry(trajectory, tokens=request.tokens, logprobs=request.tokens)
        | {"tokens": int(trajectory.loss_mask.sum())}
        for trajectory in completions
    ]
    # Columns for judges of answers. A column that the format of completions would read is none of those.
    beside = format_of("completions").reads or frozenset()
    others = {name: value for name, value in prompt.row.items() if name not in {"id", *beside}}
    return completions_row(prompt.row["prompt"], prompt.row, entries) | others
