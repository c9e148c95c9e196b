"""Conversion of requests to vLLM's prompts, with one token for each image, which vLLM expands."""

from __future__ import annotations

from typing import Any

from rlhf_core.errors import StageError
from rlhf_core.rollout.engine import Request
from rlhf_core.system.image_decoding import decoded_image


def prompt_of(request: Request, image_token: int | None) -> Any:
    """Return vLLM's prompt of `request`. image_token: placeholder of an image; None: the model reads text only.

    Raises ValueError for images that the model cannot read.
    """
    ids = list(request.prompt)
    if not request.images:
        return {"prompt_token_ids": ids}
    if image_token is None:
        raise ValueError("a request has images, but the model that is served reads text alone")
    for image in reversed(request.images):
        ids[image.start : image.start + image.length] = image.written or [image_token]
    images = [decoded_image(image.content) for image in request.images]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}


def require_same_prompt(request: Request, output: Any) -> None:
    """Raise StageError unless vLLM has expanded the images of a prompt to the tokens that are trained."""
    if request.images and list(output.prompt_token_ids) != list(request.prompt):
        raise StageError(
            f"the engine reads {len(output.prompt_token_ids)} tokens where the trainer reads {len(request.prompt)}: "
            "they expand images to different tokens, so this model cannot be trained on what it samples"
        )
