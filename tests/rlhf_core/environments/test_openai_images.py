"""Images in requests of the OpenAI API, by the real client: data URLs alone, and another image is another prompt."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.contract import Input
from rlhf_core.episodes.calls import Calls, joined, trajectory_of
from rlhf_core.episodes.shown_images import ShownImages, row_with_data_urls
from rlhf_core.models.vision import open_processor
from rlhf_core.rl.experience import pack_trajectories
from rlhf_core.types import Prompt, SequenceImage
from tests.rlhf_core.environments.policies import policy
from tests.rlhf_core.environments.test_policy_server import chat, play
from tests.rlhf_core.pictures import picture, vision_model

pytestmark = pytest.mark.parts

RED, BLUE = picture("red"), picture("blue")


def url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def asks(*pictures: bytes, text: str = "colour?") -> dict[str, Any]:
    shown = [{"type": "image_url", "image_url": {"url": url(each), "detail": "auto"}} for each in pictures]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return vision_model(tmp_path_factory.mktemp("base"))


def seeing(model: Input, folder: Path, **settings: Any) -> Calls:
    """A policy that says `red`, and may be shown two images in an episode."""
    processor = open_processor(model.folder)
    assert processor is not None
    shown = ShownImages(processor, folder / "shown", 2)
    return policy(load_tokenizer(model.folder), lambda prompt: "red", images=shown, **settings)


def test_the_same_text_about_another_image_is_another_sequence(model: Input, tmp_path: Path) -> None:
    made = seeing(model, tmp_path)

    async def agent(client: AsyncOpenAI) -> None:
        said = (await chat(client, asks(RED))).choices[0].message.model_dump()
        await chat(client, asks(RED), said, asks(BLUE, text="and this?"))  # continues the first
        await chat(client, asks(BLUE), said, {"role": "user", "content": "again"})  # was never said of this image

    play(made, agent)
    first, second, third = made.completed
    assert [Path(image.path).read_bytes() for image in second.images] == [RED, BLUE]
    assert first.images == second.images[:1]
    assert third.images[0].path == second.images[1].path
    assert first.prompt == third.prompt[: len(first.prompt)]  # by tokens alone it would continue the first
    assert [[call.number for call in each.calls] for each in joined(made.completed)] == [[0, 1], [2]]
    assert [[call.number for call in each.calls] for each in joined([first, third])] == [[0], [2]]
    asked = Prompt("row", "a", (1,), {"id": "row", "prompt": []})
    trajectory = trajectory_of(joined(made.completed), asked, made.tokenizer.decode, 1.0)
    assert (trajectory.prompt.images, trajectory.feedback_images) == (third.images, ())
    assert [branch.images for branch in trajectory.branches] == [second.images]
    batch = pack_trajectories([trajectory], open_processor(model.folder))
    assert batch.pixels is not None
    assert batch.image_parts is not None
    assert len(batch.pixels.values) == 2  # each picture once
    tokens = int(batch.pixels.tokens[0])
    blue, red = [list(range(i * tokens, (i + 1) * tokens)) for i in range(2)]
    assert batch.image_parts[batch.image_parts >= 0].tolist() == [*blue, *red, *blue]
    assert not batch.loss_mask[batch.image_parts >= 0].any()


def test_the_images_of_a_row_are_asked_about_as_they_are(model: Input, tmp_path: Path) -> None:
    made, file = seeing(model, tmp_path), picture("red", kind="JPEG")
    (path := tmp_path / hashlib.sha256(file).hexdigest()).write_bytes(file)
    said = [{"role": "user", "content": "a \ufffc b", "images": [path.name]}]
    prompt = Prompt("row", "", (1,), {"prompt": said, "answer": "red"}, images=(SequenceImage(str(path), 0, 1),))
    row = row_with_data_urls(prompt)
    shown = {"type": "image_url", "image_url": {"url": url(file, "image/jpeg")}}
    parts = [{"type": "text", "text": "a "}, shown, {"type": "text", "text": " b"}]
    assert row == {"prompt": [{"role": "user", "content": parts}], "answer": "red"}

    async def agent(client: AsyncOpenAI) -> None:
        await chat(client, *row["prompt"])

    play(made, agent)
    (call,) = made.completed
    assert call.messages == said
    assert [Path(image.path).read_bytes() for image in call.images] == [file]
    assert prompt.row["prompt"] is said  # the record of the row is as it was


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://host/a.png"}}], "is 'https://host/a.png', which is not"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "is 'file:///etc/passwd', which is not"),
        ([{"type": "image_url", "image_url": {"url": "a.png"}}], "is 'a.png', which is not fetched: give a data URL"),
        ([{"type": "image_url", "image_url": {"url": url(b"no picture")}}], "is not an image that can be read"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}], "is not valid base64"),
        ([{"type": "image_url", "image_url": {"url": "data:text/html,<p>"}}], "is not valid base64"),
        ([{"type": "image_url", "image_url": url(RED)}], "image_url must have `url`"),
        ([{"type": "image_url", "image_url": {"url": url(RED), "detail": "low"}}], "at most the detail auto"),
        ([{"type": "image_url", "image_url": {"url": url(RED)}, "id": 1}], "must be of the type text, or in a message"),
        (asks(RED, text="a \ufffc")["content"], "holds the character U+FFFC"),
        (asks(RED, BLUE, RED)["content"], "it has 3 images, more than rollout.max_images=2"),
        ([{"type": "image_url", "image_url": {"url": url(bytes(20_000_001))}}], "more than images.max_bytes=20000000"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "content",
)
def test_what_is_no_image_of_the_request_itself_is_refused(
    model: Input, tmp_path: Path, content: Any, problem: str
) -> None:
    made = seeing(model, tmp_path)

    async def agent(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(client, {"role": "user", "content": content})
        assert isinstance(refused.value.body, dict)
        assert problem in refused.value.body["message"]

    play(made, agent)
    assert made.completed == []


def test_images_of_others_than_the_user_are_refused(model: Input, tmp_path: Path) -> None:
    made = seeing(model, tmp_path)

    async def agent(client: AsyncOpenAI) -> None:
        for role in ("system", "assistant"):
            with pytest.raises(openai.BadRequestError, match="or in a message of the user image_url"):
                await chat(client, {**asks(RED), "role": role}, {"role": "user", "content": "colour?"})

    play(made, agent)
