"""The model as lm-evaluation-harness calls it: tokens are made here, and engines of the parent process read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from rlhf_core.chat.encoding import Tokenizer, decode_completion, texts_marked
from rlhf_core.chat.rendering import render
from rlhf_core.chat.special_tokens import marked, token_ids
from rlhf_core.errors import StageError, shortened

# Called with `score` or `generate` and the requests; returns an answer of each, see answering.py.
Ask = Callable[[str, list[dict[str, Any]]], list[Any]]
# Of generation_kwargs, beside the two that are read here.
_SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_SHOWN = 80  # characters of a prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an answer that the samples of the harness lack."""

    tokens: int
    finish_reason: str  # of a completion; `choice`: it was given


class EngineModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """Texts are tokenised as by the harness's own models: a document with the tokenizer's own special tokens, a chat
    with those of its template. Special tokens in texts stay text.
    """

    def __init__(self, tokenizer: Tokenizer, ask: Ask, settings: Mapping[str, Any]) -> None:
        """settings: `max_length`, `max_tokens`, `long_prompts`, `apply_chat_template` of BenchmarkConfig."""
        super().__init__()
        self._tokenizer, self._ask = tokenizer, ask
        self._max_length: int = settings["max_length"]
        self._max_tokens: int = settings["max_tokens"]
        self._truncates = settings["long_prompts"] == "truncate"
        self._chat: bool = settings["apply_chat_template"]
        self.truncated = 0  # prompts
        self.answers: dict[tuple[str, str], Answer] = {}  # by prompt and text

    @property
    def eot_token_id(self) -> int:
        token: int = self._tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        bos: int | None = self._tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if self._chat:  # the template has written them
            return token_ids(self._tokenizer, string)
        begins = string.startswith(str(self._tokenizer.decode([self.prefix_token_id])))
        own = not begins if add_special_tokens is None else add_special_tokens
        return token_ids(self._tokenizer, marked(self._tokenizer, string), add_special_tokens=own)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render the conversation; without a generation prompt, the model continues its last turn."""
        begun = "" if add_generation_prompt else chat_history[-1]["content"]
        asked = chat_history if add_generation_prompt else chat_history[:-1]
        messages, _tools = texts_marked(self._tokenizer, asked, None)
        return render(self._tokenizer, messages, None, generation_prompt=True) + marked(self._tokenizer, begun)

    @property
    def tokenizer_name(self) -> str:
        return ""  # for caches of requests, which are off

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        items = []
        for (prompt, continuation), context, tokens in requests:
            if not tokens:
                raise StageError(f"{_shown(prompt)}: the answer {continuation!r} has no token of its own")
            room = self._max_length - len(tokens)
            items.append({"context": self._fitting(context, room, prompt), "continuation": tokens, "greedy": True})
            self.answers[prompt, continuation] = Answer(len(tokens), "choice")
        return [(logprob, is_greedy) for logprob, is_greedy in self._ask("score", items)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-prob of each document, every token read with as many before it as fit."""
        items: list[dict[str, Any]] = []
        documents: list[int] = []  # of each item
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            # The engine's limit is of tokens read and predicted.
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self._max_length - 1, 1)
            for context, continuation in map(make_disjoint_window, windows):
                items.append({"context": context, "continuation": continuation, "greedy": False})
                documents.append(number)
        totals = [0.0] * len(requests)
        for number, answers in groupby(zip(documents, self._ask("score", items), strict=True), lambda each: each[0]):
            totals[number] = sum(logprob for _, (logprob, _) in answers)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the completions up to the first stop text of each, which is left out, as is the end of a turn."""
        items, stops = [], []
        for request in requests:
            prompt, given = request.args[:2]
            sampling = dict(normalize_gen_kwargs(given, self._max_tokens))
            stops.append([text for text in sampling.pop("until") if text])
            most = sampling.pop("max_gen_toks")
            sampling.pop("do_sample")
            sampling["top_k"] = max(0, sampling.get("top_k") or 0)  # -1: all
            if unknown := sorted(sampling.keys() - _SAMPLING.keys()):
                raise StageError(f"generation_kwargs: the engines have no `{unknown[0]}`: take it out of the task")
            context = self._fitting(self.tok_encode(prompt), self._max_length - most, prompt)
            drawn = sampling if sampling.get("temperature") else {}  # else greedily, whatever else is set
            items.append({"prompt": context, "max_tokens": most, **_SAMPLING, **drawn})
        texts = []
        for request, stop, (ids, reason) in zip(requests, stops, self._ask("generate", items), strict=True):
            text = decode_completion(self._tokenizer, ids)
            cut = min((at for each in stop if (at := text.find(each)) >= 0), default=len(text))
            reason = "stop" if cut < len(text) else reason
            texts.append(text[:cut])
            self.answers[request.args[0], text[:cut]] = Answer(len(ids), reason)
        return texts

    def _fitting(self, context: Sequence[int], room: int, prompt: str) -> list[int]:
        """Return the context's last `room` tokens. Raises StageError if it is not to be truncated."""
        if len(context) <= room:
            return list(context)
        if room < 1:
            raise StageError(f"{_shown(prompt)}: the answer leaves no room in rollout.max_length={self._max_length}")
        if not self._truncates:
            raise StageError(
                f"{_shown(prompt)}: a prompt has {len(context)} tokens, more than the {room} that fit into "
                f"rollout.max_length={self._max_length} with the answer: raise it, or set long_prompts to truncate"
            )
        self.truncated += 1
        return list(context[-room:])


def _shown(prompt: str) -> str:
    return repr(shortened(prompt, _SHOWN))
