"""Published LoRA adapters in a vLLM engine, which loads them from folders alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.rollout.transport.base import Transport, WeightManifest
from rlhf_core.rollout.transport.folder import SharedFolder, weights_folder


def load_adapter(llm: Any, last: Any, lora: LoraConfig, transport: Transport, manifest: WeightManifest) -> Any:
    """Replace the adapter `last` (None: none) by the one that `transport` brings; returns its LoRARequest.

    The folder that it is received into, or that was sent, may be removed afterwards.
    """
    if isinstance(transport, SharedFolder):
        return _replaced(llm, last, transport.folder, manifest.version)
    with weights_folder(manifest.num_bytes) as folder:
        SharedFolder(folder, lora).send(transport.receive(manifest), manifest)
        return _replaced(llm, last, folder, manifest.version)


def _replaced(llm: Any, last: Any, folder: Path, version: int) -> Any:
    from vllm.lora.request import LoRARequest

    if not (folder / "adapter_config.json").is_file():
        raise WeightSyncError(f"version {version} is not an adapter in a folder, which is all that this engine serves")
    # A new id for each version: vLLM caches adapters by id, and never reads their folder again.
    adapter = LoRARequest(f"version-{version}", 1 if last is None else last.lora_int_id + 1, str(folder))
    if last is not None:
        llm.llm_engine.remove_lora(last.lora_int_id)
    if not llm.llm_engine.add_lora(adapter):
        raise WeightSyncError(f"vLLM did not take the adapter of version {version}")
    llm.collective_rpc("remember_adapter", args=(str(folder),))
    return adapter
