"""Image decoding of vLLM's server, with the pixels that training reads. Importing this module imports vLLM."""

from __future__ import annotations

import os
from io import BytesIO
from typing import Any

from vllm import envs
from vllm.multimodal.image import open_image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, ImageMediaIO, MediaConnector
from vllm.multimodal.media.base import MediaWithBytes

from rlhf_core.system.image_decoding import as_rgb

_NAME = "alignment"


def decode_as_training_does() -> None:
    """Make the server of this process decode images as training does."""
    MEDIA_CONNECTOR_REGISTRY.register(_NAME)(_Connector)
    os.environ["VLLM_MEDIA_CONNECTOR"] = _NAME


class _Images(ImageMediaIO):
    def load_bytes(self, data: bytes) -> Any:
        loaded = super().load_bytes(data)  # raises for data that is not an image, or too large
        if self.image_mode != "RGB":  # set by the request
            return loaded
        with open_image(BytesIO(data)) as image:
            return MediaWithBytes(as_rgb(image), data, loaded.io_config)


class _Connector(MediaConnector):
    async def fetch_image_async(self, image_url: str, *, image_mode: str | None = "RGB") -> Any:
        reader = _Images(**({"image_mode": image_mode} | self.media_io_kwargs.get("image", {})))
        return await self.load_from_url_async(image_url, reader, fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT)
