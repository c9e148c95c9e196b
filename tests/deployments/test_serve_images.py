"""A model that reads images, served: the same file has the pixels that training reads."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.inference.model_server import Address, running_server, served_model
from rlhf_core.system.image_decoding import encoded_image
from tests.rlhf_core.pictures import vision_model
from tests.services import LOOPBACK, free_ports

pytestmark = pytest.mark.endurance("architectures")


def logprobs(client: httpx.Client, content: bytes) -> list[float]:
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    asked = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "red"}]
    request = {"model": "m", "temperature": 0, "max_tokens": 4, "logprobs": True}
    answer = client.post(
        "/v1/chat/completions", json={**request, "messages": [{"role": "user", "content": asked}]}, timeout=100
    )
    return [token["logprob"] for token in answer.raise_for_status().json()["choices"][0]["logprobs"]["content"]]


def png(image: Image.Image) -> bytes:
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


@pytest.mark.timeout(300)
@pytest.mark.slow("starts vLLM's server")
def test_16_bit_grey_is_seen_as_it_is_trained(tmp_path: Path) -> None:
    grey = Image.fromarray((np.arange(1200).reshape(30, 40) * 50).astype(np.uint16))
    folder = vision_model(tmp_path).folder
    rollout = ["cpu_cache_gib=0.05", "threads=1"]
    served = served_model("m", folder, load_tokenizer(folder), "float32", rollout)
    with running_server(served, Address(LOOPBACK, *free_ports(1))) as server, server.address.client() as client:
        found = logprobs(client, png(grey))
        assert found == pytest.approx(logprobs(client, encoded_image(grey)), abs=1e-5)
        assert found != pytest.approx(logprobs(client, png(grey.convert("RGB"))), abs=1e-2)
