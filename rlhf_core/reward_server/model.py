"""A reward model that reads text, in one process, with the same tokens, scores and scale as in RL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlhf_core.chat.encoding import load_tokenizer, stop_token_ids
from rlhf_core.chat.rendering import Message, Tools
from rlhf_core.config.base import Dtype
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.errors import RewardError, StageError
from rlhf_core.models.folders.folder import context_length
from rlhf_core.models.loading import load_scalar_model, torch_dtype
from rlhf_core.models.packed import ScalarModel
from rlhf_core.packing import pack
from rlhf_core.reward_server.settings import require_reward_model
from rlhf_core.rewards.model import OtherTokenizer, scaled

_LONGEST = 2**15  # tokens of one text, if the model's config has no limit


class ServedModel:
    def __init__(self, folder: Path, *, dtype: Dtype, normalize: bool = True) -> None:
        """Load the model, on a GPU if there is one. Raises StageError as `require_reward_model`, or if that fails."""
        self._scale = require_reward_model(folder, normalize=normalize)
        tokenizer = load_tokenizer(folder)
        self._reader = OtherTokenizer(tokenizer, None)
        self._stop = frozenset(stop_token_ids(tokenizer))
        self._longest = context_length(folder) or _LONGEST
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_scalar_model(folder, dtype=torch_dtype(dtype), attention=EngineConfig().attention)
        self._model = ScalarModel(model).to(self._device).eval()
        self._model.check_layouts(self._device)

    def tokens(self, where: str, messages: Sequence[Message], completion: str, tools: Tools | None) -> list[int]:
        """Return the tokens of `messages` with a finished completion. Raises StageError, with `where`, if the template
        cannot render it or it is too long."""
        try:
            return self._fitting(where, self._reader.tokens(messages, completion, tools))
        except RewardError:
            raise
        except StageError as error:
            raise StageError(f"{where}: {error}") from error

    def tokens_of_text(self, where: str, text: str) -> list[int]:
        """Return the tokens of a rendered conversation, special tokens included, without padding around it.

        Raises RewardError, with `where`, if it is too long or empty.
        """
        tokenizer = self._reader.tokenizer
        ids: list[int] = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        padding = {tokenizer.pad_token_id} - self._stop
        text_indices = [index for index, token in enumerate(ids) if token not in padding]
        if not text_indices:
            raise RewardError(f"{where} is empty")
        return self._fitting(where, ids[text_indices[0] : text_indices[-1] + 1])

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the raw score of each sequence, read at its last token, in one forward."""
        batch = pack(sequences, [[True] * len(sequence) for sequence in sequences]).to(self._device)
        with torch.inference_mode():
            raw: list[float] = self._model(batch)[batch.last_token_indices].tolist()
        return raw

    def reward(self, where: str, score: float) -> float:
        """Return the scaled score. Raises RewardError, with `where`, if it is not finite."""
        return scaled(score, self._scale, where)

    def _fitting(self, where: str, ids: list[int]) -> list[int]:
        if len(ids) > self._longest:
            raise RewardError(f"{where} has {len(ids)} tokens of the reward model, which reads {self._longest}")
        return ids
