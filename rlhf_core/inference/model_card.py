"""The model card of an artifact: lineage, data, settings and evaluations, from the manifests of its store.

Nothing of this machine or of an account is in it: see `public`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from rlhf_core.artifacts.lineage import Lineage
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest, MetricValue
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.report.formatting import compared_metrics, number, with_interval

_SECRET = re.compile(r"token$|secret|password|passwd|api_?key|authorization|credential|headers$", re.IGNORECASE)
_TRAINED = frozenset({Kind.BASE_MODEL, Kind.POLICY, Kind.ADAPTER, Kind.REWARD_MODEL})
HIDDEN = "(left out)"


def model_card(
    manifest: Manifest, lineage: Lineage, evaluations: Sequence[Manifest], *, adapter: bool, licence: str | None
) -> str:
    """Return README.md of the exported model.

    lineage: of `manifest`. evaluations: of the model, in this store. adapter: it is exported as a peft adapter.
    licence: its identifier on the hub; None: not known.
    """
    from huggingface_hub import ModelCard, ModelCardData

    base = base_of(lineage)
    data = ModelCardData(
        license=licence,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=None if manifest.kind == Kind.REWARD_MODEL else "text-generation",
        base_model=base,
        datasets=sorted(_hub_datasets([m for m in lineage.nodes.values() if m.stage == "dataset"])) or None,
        tags=["alignment", manifest.stage],
        model_name=manifest.recipe or manifest.name if evaluations else None,
        eval_results=list(_results(evaluations)) or None,
    )
    title = manifest.recipe or manifest.name
    sections = [f"# {title}: {manifest.name}", *_sections(manifest, lineage, evaluations, base, adapter, licence)]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"))


def evaluations_of(repository: ArtifactRepository, ref: ArtifactRef) -> list[Manifest]:
    """Return the evaluations of the model in the store, also of an adapter when merged, newest first."""
    manifests = list(repository.list_artifacts())
    same = {ref} | {m.ref for m in manifests if m.stage == "merge" and ref in m.parents.values()}
    found = [m for m in manifests if m.kind == Kind.EVALUATION and m.parents.get("model") in same]
    return sorted(found, key=lambda manifest: manifest.finished_at, reverse=True)


def base_of(lineage: Lineage) -> str | None:
    """Return the repository on the hub that the model was first made from; None if it was none, or are several."""
    names = {name for m in lineage.nodes.values() if (name := hub_model(m)) is not None}
    return names.pop() if len(names) == 1 else None


def hub_model(manifest: Manifest) -> str | None:
    """Return the repository of a stage `base` that was fetched from the hub."""
    source = manifest.config.get("source") if manifest.stage == "base" else None
    return str(source["repository"]) if isinstance(source, Mapping) and source.get("type") == "hub" else None


def public(value: Any, key: str = "") -> Any:
    """Return a value of settings without secrets, and without paths and accounts of this machine.

    Of absolute paths the last part stays, of URLs scheme, host and path.
    """
    if key and _SECRET.search(key) and value:
        return HIDDEN
    match value:
        case Mapping():
            return {str(public(name)): public(each, str(name)) for name, each in value.items()}
        case list() | tuple():
            return [public(each) for each in value]
        case str() if "://" in value:
            parts = urlsplit(value)
            host = parts.netloc.rpartition("@")[2]
            return PurePosixPath(parts.path).name if parts.scheme == "file" else f"{parts.scheme}://{host}{parts.path}"
        case str() if value.startswith(("/", "~")) and "\n" not in value:
            return PurePosixPath(value).name
        case str() if value.startswith("../"):
            return PurePosixPath(value).name
    return value


def _sections(
    manifest: Manifest,
    lineage: Lineage,
    evaluations: Sequence[Manifest],
    base: str | None,
    adapter: bool,
    licence: str | None,
) -> Iterator[str]:
    yield f"The artifact `{manifest.ref.full}`, a {manifest.kind}, made on {manifest.finished_at:%Y-%m-%d}."
    if licence is None:
        yield "**Licence**: not known. It is bound by that of its base" + (f", `{base}`." if base else ".")
    yield f"## How to load it\n\n```python\n{_loading(manifest, adapter)}\n```"
    yield from _evaluation_section(evaluations)
    datasets = [m for m in lineage.nodes.values() if m.stage == "dataset"]
    if datasets:
        lines = [f"| {_escaped(m.name)} | {_escaped(_sources(m))} | {_counts(m.metrics)} |" for m in datasets]
        yield "## Data\n\n" + "\n".join(["| dataset | sources | counts |", "|---|---|---|", *lines])
    yield "## Lineage\n\nFrom the first inputs to this model.\n\n" + "\n".join(
        f"{index}. `{m.ref}` {_escaped(m.name)}: {m.kind}"
        + (f", from {', '.join(f'`{ref}`' for ref in m.parents.values())}" if m.parents else "")
        for index, m in enumerate(lineage.nodes.values(), 1)
    )
    trained = [m for m in lineage.nodes.values() if m.kind in _TRAINED]
    yield "## Settings\n\n" + "\n\n".join(
        f"<details><summary>{_escaped(m.name)}</summary>\n\n```json\n{_settings(m)}\n```\n\n</details>" for m in trained
    )
    libraries = ", ".join(f"{name} {version}" for name, version in sorted(manifest.libraries.items()))
    seconds = sum(m.device_seconds for m in lineage.nodes.values())
    yield f"## Made with\n\n{libraries}. {number(round(seconds))} device-seconds in all stages together."


def _loading(manifest: Manifest, adapter: bool) -> str:
    if adapter:
        return (
            "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n\n"
            'model = AutoPeftModelForCausalLM.from_pretrained("FOLDER")\n'
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")'
        )
    kind = "SequenceClassification" if manifest.kind == Kind.REWARD_MODEL else "CausalLM"
    return (
        f"from transformers import AutoModelFor{kind}, AutoTokenizer\n\n"
        f'model = AutoModelFor{kind}.from_pretrained("FOLDER", dtype="auto")\n'
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")'
    )


def _evaluation_section(evaluations: Sequence[Manifest]) -> Iterator[str]:
    for m in evaluations:
        names = compared_metrics({"": m.metrics})
        rows = [f"| {_escaped(name)} | {_escaped(with_interval(m.metrics, name))} |" for name in names]
        lines = "\n".join(["| metric | value (95 % interval) |", "|---|---|", *rows])
        yield f"## Evaluation: {_escaped(m.name)}\n\nOn `{_dataset_name(m)}`, artifact `{m.ref}`.\n\n{lines}"


def _dataset_name(evaluation: Manifest) -> str:
    return str(evaluation.config.get("dataset", evaluation.name))


def _results(evaluations: Sequence[Manifest]) -> Iterator[Any]:
    from huggingface_hub import EvalResult

    for m in evaluations:
        for name in compared_metrics({"": m.metrics}):
            value = m.metrics[name]
            if isinstance(value, int | float):
                dataset = _dataset_name(m)
                yield EvalResult(
                    task_type="text-generation", dataset_type=dataset, dataset_name=dataset, metric_type=name,
                    metric_value=value,
                )  # fmt: skip


def _hub_datasets(manifests: Collection[Manifest]) -> set[str]:
    return {
        str(source["repository"]) for m in manifests for source in _sources_in(m.config) if source.get("type") == "hub"
    }


def _sources_in(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the sources of rows in the settings of a dataset, also those of a mix."""
    for each in (config.get("source"), *config.get("mix", ())):
        if isinstance(each, Mapping):
            yield each["source"] if isinstance(each.get("source"), Mapping) else each


def _sources(manifest: Manifest) -> str:
    """Describe the sources of a dataset, as its recipe names them."""
    described = []
    for source in _sources_in(manifest.config):
        shown = public(source)
        names = shown.get("paths") or shown.get("tasks") or [shown.get("repository") or shown.get("path") or ""]
        pinned = next(
            (p[:12] for url, p in manifest.pins.items() if str(names[0] if isinstance(names, list) else "") in url), ""
        )
        described.append(
            " ".join(filter(None, (str(shown.get("type")), ", ".join(map(str, names)), shown.get("split"), pinned)))
        )
    return "; ".join(described) or "–"


def _counts(metrics: Mapping[str, MetricValue]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items() if isinstance(value, int)) or "–"


def _settings(manifest: Manifest) -> str:
    seed = {} if manifest.seed is None else {"seed": manifest.seed}
    return json.dumps({**public(manifest.config), **seed}, indent=2, ensure_ascii=False).replace("```", "'''")


def _escaped(text: str) -> str:
    return re.sub(r"([<>|`*\[\]])", r"\\\1", text.replace("\n", " "))
