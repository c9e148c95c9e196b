"""`alignment merge`."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.chat.vocabulary import tokens_beyond
from rlhf_core.errors import StageError
from rlhf_core.inference.models import merge, named_models
from rlhf_core.models.folders.check import vocabulary_size
from rlhf_core.models.folders.folder import read_config
from rlhf_core.system.paths import user_path
from rlhf_core.system.scratch import scratch_folder


def merge_into(adapter: str, base: str | None, target: Path) -> Path:
    """Merge the adapter into its base and write the model to the folder `target`, completely or not at all.

    Raises StageError if `target` exists, or as `named_model` and `merge_adapter` do, or if the tokenizer has tokens
    without a row of the embedding.
    """
    target = user_path(target).absolute()
    if target.exists():
        raise StageError(f"{target} exists already: give another folder by -o")
    if not target.parent.is_dir():
        raise StageError(f"{target.parent}: there is no such folder for the merged model: make it, or give another -o")
    (model,) = named_models([adapter], base)
    if model.adapter is None:
        raise StageError(f"{adapter} is a whole model, no adapter: there is nothing to merge")
    with scratch_folder("merge", target.parent) as folder:
        built = folder / "model"
        merge(model, built)
        rows = vocabulary_size(read_config(built))
        for problem in () if rows is None else tokens_beyond(load_tokenizer(built), rows):
            raise StageError(f"{adapter}: {problem}")
        built.rename(target)
    return target
