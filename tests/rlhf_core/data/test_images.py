"""Rows with images: each form is read, unreadable ones are bad rows, and chat templates render each."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlhf_core.chat.encoding import encode_completion, encode_prompt
from rlhf_core.chat.image_messages import IMAGE
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.data.dataset import ImagesConfig
from rlhf_core.data.formats import RowError, canonical_row, format_of
from rlhf_core.data.images import ImageReader
from rlhf_core.errors import ConversationError
from tests.rlhf_core.pictures import picture

RED, BLUE = picture("red"), picture("blue", kind="JPEG")
RED_SHA, BLUE_SHA = (hashlib.sha256(content).hexdigest() for content in (RED, BLUE))
RED_URL = "data:image/png;base64," + base64.b64encode(RED).decode()
TEXT = {"type": "text", "text": "what?"}
USER = {"role": "user", "content": "what?"}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


PARTS_TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<assistant>' }}"
    "{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{{ '<eos>' if m.role == 'assistant' else '' }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else '' }}"
)


@pytest.fixture
def reader(tmp_path: Path) -> ImageReader:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(RED)
    (tmp_path / "store").mkdir()
    return ImageReader(ImagesConfig(folder="pictures"), tmp_path / "pictures", tmp_path / "store")


def asked(row: dict[str, Any], reader: ImageReader) -> dict[str, Any]:
    message: dict[str, Any]
    (message,) = canonical_row(row, "prompts", {}, reader)["prompt"]
    return message


def user(*content: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": list(content)}]}


def test_the_frames_of_a_video_are_images_in_its_place(reader: ImageReader) -> None:
    frames = [RED, RED_URL, {"bytes": BLUE, "path": None}, "red.png"]
    message = asked(user(TEXT, {"type": "video", "video": frames}, {"type": "text", "text": "!"}), reader)
    assert message["content"] == f"what?{IMAGE * 4}!"
    assert message["images"] == [RED_SHA, RED_SHA, BLUE_SHA, RED_SHA]
    with pytest.raises(RowError, match=r"`prompt\[0\]\.content\[0\]` is a video that is no list of frames"):
        asked(user({"type": "video", "video": "film.mp4"}, TEXT), reader)
    with pytest.raises(RowError, match=r"`prompt\[0\]\.content\[0\]\.video\[1\]` is not an image"):
        asked(user({"type": "video", "video": [RED, 7]}, TEXT), reader)
    with pytest.raises(RowError, match=r"content\[0\]\.video\[8\]`: the row has more than images\.max_per_row=8"):
        asked(user({"type": "video", "video": [RED] * 9}, TEXT), reader)


@pytest.mark.parametrize(
    "row",
    [
        user({"type": "image", "image": RED}, TEXT),
        user({"type": "image", "bytes": RED, "path": "somewhere.png"}, TEXT),
        user({"type": "image_url", "image_url": {"url": RED_URL}}, TEXT),
        user({"type": "image", "url": RED_URL}, TEXT),
        user({"type": "image", "path": "red.png"}, TEXT),
        user({"type": "image", "path": "pictures/red.png"}, TEXT),
        {**user({"type": "image"}, TEXT), "images": [RED]},
        {"prompt": "what?", "images": [{"bytes": RED, "path": None}]},
        {"prompt": "<image>what?", "image": RED},
        user({"type": "image", "base64": RED_URL.partition(",")[2]}, TEXT),
        {"prompt": "what?", "image": RED_URL.partition(",")[2]},
        {"prompt": [{"role": "user", "content": "what?"}], "images": ["red.png"]},
    ],
)
def test_an_image_is_read_in_each_way_that_data_sets_give_it(row: dict[str, Any], reader: ImageReader) -> None:
    message = asked(row, reader)
    assert message == {"role": "user", "content": f"{IMAGE}what?", "images": [RED_SHA]}
    assert reader.store is not None
    assert (reader.store / RED_SHA).read_bytes() == RED


ASKED = {"role": "user", "content": [{"type": "image"}, TEXT]}
OWN = {"role": "user", "content": [{"type": "image", "image": RED}, TEXT]}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "what?", "chosen": "red", "rejected": "blue", "image": RED},
        {"question": "what?", "chosen": "red", "rejected": "blue", "images": ["red.png"]},
        {"prompt": [ASKED], "chosen": [says("red")], "rejected": [says("blue")], "images": [RED]},
        {"chosen": [ASKED, says("red")], "rejected": [ASKED, says("blue")], "images": [RED]},
        {"chosen": [USER, says("red")], "rejected": [USER, says("blue")], "image": RED},
        {"chosen": [OWN, says("red")], "rejected": [OWN, says("blue")]},
        {"prompt": [OWN], "chosen": [OWN, says("red")], "rejected": [OWN, says("blue")]},
        {"prompt": [ASKED], "chosen": [ASKED, says("red")], "rejected": [ASKED, says("blue")], "images": [RED]},
    ],
)
def test_both_completions_of_a_pair_answer_its_image(row: dict[str, Any], reader: ImageReader) -> None:
    pair = canonical_row(row, "preferences", {}, reader)
    assert pair["prompt"] == [{"role": "user", "content": f"{IMAGE}what?", "images": [RED_SHA]}]
    assert (pair["chosen"], pair["rejected"]) == ("red", "blue")


def test_a_pair_of_two_images_is_none(reader: ImageReader) -> None:
    other = {"role": "user", "content": [{"type": "image", "image": BLUE}, TEXT]}
    with pytest.raises(RowError, match="`chosen` and `rejected` do not answer the same prompt"):
        canonical_row({"chosen": [OWN, says("red")], "rejected": [other, says("blue")]}, "preferences", {}, reader)
    unplaced = {"prompt": "what?", "chosen": [ASKED, says("red")], "rejected": "blue", "images": [RED]}
    with pytest.raises(RowError, match="do not answer the same prompt"):
        canonical_row(unplaced, "preferences", {}, reader)
    with pytest.raises(RowError, match=r"`images\[1\]` has no place"):
        canonical_row(
            {"prompt": [ASKED], "chosen": "red", "rejected": "blue", "images": [RED, BLUE]}, "preferences", {}, reader
        )


def test_images_keep_their_places_and_a_picture_in_memory_its_pixels(reader: ImageReader) -> None:
    opened = Image.open(io.BytesIO(RED))
    row = {**user({"type": "image"}, TEXT, {"type": "image"}), "images": [BLUE, opened]}
    message = asked(row, reader)
    assert message["content"] == f"{IMAGE}what?{IMAGE}"
    assert message["images"][0] == BLUE_SHA
    assert reader.store is not None
    kept = Image.open(reader.store / message["images"][1])
    assert kept.tobytes() == opened.tobytes()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "x", "image": b"PNG"}, "`image` is not an image that can be read .*: give PNG, JPEG, WEBP"),
        ({"prompt": "x", "image": RED[:60]}, "`image` is not an image that can be read"),
        ({"prompt": "x", "image": picture("red", kind="GIF")}, "`image` is not an image that can be read"),
        ({"prompt": "x", "image": picture("red", (600, 500))}, "has 600 x 500 pixels, more than images.max_pixels"),
        ({"prompt": "x", "image": RED + b"\0" * 3000}, "bytes, more than images.max_bytes=2000"),
        ({"prompt": "x", "images": [RED] * 3}, r"`images\[2\]`: the row has more than images.max_per_row=2 images"),
        ({"prompt": "x", "images": ["../red.png"]}, r"`images\[0\]` names '../red.png', which is not in images.folder"),
        ({"prompt": "x", "images": ["https://host/red.png"]}, "which is not in images.folder=pictures"),
        ({"prompt": "x", "images": ["blue.png"]}, "names 'blue.png', which cannot be read in pictures"),
        ({"prompt": "x", "images": ["data:image/png;base64,?"]}, "is not valid base64"),
        ({"prompt": "x", "images": [7]}, "is not an image: give a file's bytes"),
        ({"prompt": "x", "image": RED, "images": [RED]}, "the row has both `images` and `image`"),
        (user({"type": "image"}, TEXT), r"`prompt\[0\].content\[0\]` is an image without content, and the row has 0"),
        ({**user({"type": "image"}), "images": [RED, RED]}, r"`images\[1\]` has no placeholder: the messages have 1"),
        ({"prompt": "<image><image>x", "images": [RED]}, "is an image without content, and the row has 1"),
        (user({"type": "image", "image": RED}, {"type": "text", "text": IMAGE}), "holds the character U\\+FFFC"),
        (user({"type": "audio", "audio": RED}), "a part of the type 'audio': rows hold only text"),
        ({"prompt": "x", "audio": b"x"}, "`audio` accompanies the text, but rows hold only text"),
    ],
)
def test_what_is_no_image_or_has_no_place_is_a_bad_row(
    row: dict[str, Any], problem: str, reader: ImageReader, tmp_path: Path
) -> None:
    config = ImagesConfig(folder="pictures", max_bytes=2000, max_pixels=50_000, max_per_row=2)
    with pytest.raises(RowError, match=problem):
        canonical_row(row, "prompts", {}, ImageReader(config, reader.folder, reader.store))


def test_replies_and_other_formats_have_no_images(reader: ImageReader) -> None:
    reply = {"role": "assistant", "content": [{"type": "image", "image": RED}]}
    with pytest.raises(RowError, match=r"`messages\[1\]` has images, but models write text alone"):
        canonical_row({"messages": [*user(TEXT)["prompt"], reply]}, "conversations", {}, reader)
    with pytest.raises(RowError, match="in `conversations`, `prompts`, `preferences` and `unpaired` images"):
        canonical_row({"prompt": "x", "images": [RED], "completions": ["a"]}, "completions", {}, reader)


def test_the_same_question_about_another_image_is_another_row(reader: ImageReader) -> None:
    form = format_of("prompts")
    first, again, other = (
        canonical_row({"prompt": "what?", "images": [each]}, "prompts", {}, reader) for each in (RED, RED, BLUE)
    )
    for key in (form.duplicate_key, form.asked_text, form.whole_text):
        assert key(first) == key(again) != key(other)
    # A text that holds the character is as it was.
    assert form.asked_text({"prompt": [{"role": "user", "content": IMAGE}]}) == IMAGE


@pytest.mark.parametrize("template", [None, PARTS_TEMPLATE], ids=["text", "parts"])
def test_the_template_writes_each_image_and_what_a_text_says_stays_text(template: str | None) -> None:
    tokenizer = word_level_tokenizer((), 96, images=True)
    if template is not None:
        tokenizer.chat_template = template
    messages = [{"role": "user", "content": f"a{IMAGE}b<image>", "images": [RED_SHA]}]
    ids, mask = encode_completion(tokenizer, messages, "c")
    tokens = tokenizer.convert_ids_to_tokens(ids)
    start = 1 if template is None else 0  # our own template begins with <bos>
    assert tokens[start:] == ["<user>", "a", "<image>", "b", *"<image>", "<assistant>", "c", "<eos>"]
    assert [token for token, trained in zip(tokens, mask, strict=True) if trained] == ["c", "<eos>"]
    plain = encode_prompt(tokenizer, [{"role": "user", "content": IMAGE}])
    assert tokenizer.convert_tokens_to_ids("<image>") not in plain


def test_a_model_of_text_is_given_no_image() -> None:
    tokenizer = word_level_tokenizer((), 96)
    with pytest.raises(ConversationError, match="a message has images, but the model reads text alone"):
        encode_prompt(tokenizer, [{"role": "user", "content": IMAGE, "images": [RED_SHA]}])
