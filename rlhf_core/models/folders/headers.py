"""The tensors of a model folder, from the headers of its safetensors files, without reading weights. Loads no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlhf_core.errors import StageError
from rlhf_core.system.listing import first_repeated, some

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"  # of weights in several files
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_LFS_POINTER = b"version https://git-lfs"
_MAX_TEXT_BYTES = 2**30  # the largest tokenizers have tens of MB
_PART_BYTES = 2**20
_FETCH_AGAIN = "fetch it again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: str
    dtype: str  # as safetensors writes it: F32, BF16, …
    shape: tuple[int, ...]


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file. Raises StageError, which begins with the file's name, for anything else."""
    text = read_text(path)
    try:
        content = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise StageError(f"{path.name} is not JSON ({error}): {_FETCH_AGAIN}") from error
    except StageError as error:
        raise StageError(f"{path.name}: {error}: remove one of them") from error
    if not isinstance(content, dict):
        raise StageError(f"{path.name} holds a {type(content).__name__} where a JSON object belongs: {_FETCH_AGAIN}")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise StageError(f"the key `{first_repeated([name for name, _ in pairs])}` occurs twice in one object")
    return values


def read_text(path: Path) -> str:
    """Return the text of a model folder's file. Raises StageError, which begins with the file's name, if it is none."""
    try:
        if not path.is_file():
            raise StageError(f"there is no {path.name} in this folder")
        _refuse_pointer(path)
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise StageError(f"{path.name} has more than {_MAX_TEXT_BYTES} bytes, which no such file has")
        text = path.read_text(encoding="utf-8")
        if text.startswith("\ufeff"):
            raise StageError(
                f"{path.name} begins with a byte-order mark (BOM), which does not belong there: save it as UTF-8 "
                f"without one, such as by `sed -i '1s/^\\xEF\\xBB\\xBF//' {path.name}`"
            )
        return text
    except UnicodeDecodeError as error:
        raise StageError(f"{path.name} is not UTF-8 text: {_FETCH_AGAIN}") from error
    except OSError as error:
        raise StageError(f"{path.name} cannot be read ({error.strerror}): correct its permissions") from error


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files with the weights: those of the index, or the one file.

    Raises StageError if there are none, one is missing, or the index is invalid.
    """
    single, indexed = (folder / WEIGHTS).is_file(), (folder / WEIGHTS_INDEX).is_file()
    if not indexed:
        if not single:
            raise StageError(_no_weights(folder))
        return [WEIGHTS]
    names = sorted(set(_weight_map(folder).values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise StageError(
                f"{WEIGHTS_INDEX} names `{name}`, which is not a *.safetensors file of this folder: correct it"
            )
    if single and WEIGHTS not in names:
        raise StageError(f"there are two sets of weights, {WEIGHTS} and the files of {WEIGHTS_INDEX}: remove one")
    lacking = [name for name in names if not (folder / name).is_file()]
    if lacking:
        raise StageError(
            f"of the weights, {some(lacking, 3)} that {WEIGHTS_INDEX} names is missing: fetch the folder again"
        )
    return names


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the weights. Raises StageError, in one sentence, if a file is damaged or the index is
    wrong.
    """
    tensors: dict[str, StoredTensor] = {}
    files = weight_files(folder)
    for file in files:
        for name, tensor in _header(folder / file):
            if name in tensors:
                raise StageError(f"the tensor {name} is in {tensors[name].file} and in {file}: remove one")
            tensors[name] = tensor
    if not tensors:
        raise StageError(f"{files[0]} has no tensors: {_FETCH_AGAIN}")
    if (folder / WEIGHTS_INDEX).is_file():
        for name, file in _weight_map(folder).items():
            if name not in tensors or tensors[name].file != file:
                where = f"; it is in {tensors[name].file}" if name in tensors else ""
                raise StageError(
                    f"{WEIGHTS_INDEX} says that {name} is in {file}, which has no such tensor{where}: "
                    "fetch the folder again"
                )
    return tensors


def same_content(folder: Path, tensors: Mapping[str, StoredTensor], first: str, second: str) -> bool:
    """Return whether two of the folder's tensors are bitwise equal."""
    one, other = tensors[first], tensors[second]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(_content(folder, one, first), _content(folder, other, second), strict=True))


def _content(folder: Path, tensor: StoredTensor, name: str) -> Iterator[bytes]:
    """Yield a tensor's bytes in chunks: numpy has no bfloat16."""
    with (folder / tensor.file).open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(header))[name]["data_offsets"]
        file.seek(8 + header + start)
        for left in range(end - start, 0, -_PART_BYTES):
            yield file.read(min(left, _PART_BYTES))


def _header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        if path.stat().st_size == 0:
            raise StageError(f"{path.name} is empty: {_FETCH_AGAIN}")
        _refuse_pointer(path)
        with safe_open(path, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                part = opened.get_slice(name)
                yield name, StoredTensor(path.name, str(part.get_dtype()), tuple(part.get_shape()))
    except SafetensorError as error:
        reason = str(error).partition(": ")[2] or error
        raise StageError(f"{path.name} is damaged, or was not copied whole: {_FETCH_AGAIN} ({reason})") from error
    except OSError as error:
        raise StageError(f"{path.name} cannot be read ({error.strerror or error}): correct its permissions") from error


def _weight_map(folder: Path) -> dict[str, str]:
    places = read_object(folder / WEIGHTS_INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise StageError(f"{WEIGHTS_INDEX} has no `weight_map` of tensors to files: fetch it again")
    return places


def _refuse_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise StageError(f"{path.name} is a Git LFS pointer, not the file: run `git lfs pull` in the folder")


def _no_weights(folder: Path) -> str:
    if (folder / "adapter_config.json").exists():
        return (
            "this is an adapter's folder (adapter_config.json), not a model's: merge the adapter into its model first"
        )
    if os.path.lexists(folder / WEIGHTS):
        return f"{WEIGHTS} is not a file, or a broken link: fetch it again, and copy the files that links point to"
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    hint = f" ({', '.join(others[:3])} cannot be used: convert to safetensors)" if others else ""
    if shards:
        hint = f" (there is {shards[0]}, but no index: fetch {WEIGHTS_INDEX}, or rename the only file)"
    return f"there are no weights in this folder: {WEIGHTS}, or {WEIGHTS_INDEX} with its shards{hint}"
