"""transformers' processors without their readers of videos, which need torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def images_only(name: str, folder: Path) -> Any:
    """Return the processor of the class `name` for the model in `folder`, which reads images and text."""
    import transformers

    kind: Any = getattr(transformers, name)

    class ImagesOnly(kind):  # type: ignore[misc]  # of a class that is known at run time alone
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [each for each in kind.get_attributes() if each != "video_processor"]

    return ImagesOnly.from_pretrained(folder, local_files_only=True)
