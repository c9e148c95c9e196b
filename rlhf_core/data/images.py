"""Images of rows: read, verified, and kept once by content. Imports PIL if installed.

A row has images in the parts of a content, as in OpenAI and transformers, or in a column `images` or `image`. Each is a
file's bytes, alone or as `{bytes, path}`, a data URL or base64, or the name of a file in the folder that the dataset's
`images.folder` names. An ImageReader replaces each by an ImagePart.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_core.chat.image_messages import ImagePart
from rlhf_core.config.data.dataset import ImagesConfig
from rlhf_core.data.formats.base import Row, RowError
from rlhf_core.data.formats.messages import role_of
from rlhf_core.errors import reason_of
from rlhf_core.system.image_decoding import FORMATS, as_rgb, encoded_image

IMAGE_PART, IMAGE_URL_PART = "image", "image_url"
_VIDEO_PART = "video"  # whose frames are images
_COLUMNS = ("images", "image")
_MESSAGE_COLUMNS = ("messages", "conversations", "conversation", "prompt", "question")
_KEYS = ("image", "image_url", "bytes", "base64", "path", "url")  # of a part, or of a value of the column
_IN_TEXT = "<image>"  # how data sets whose contents are plain text write it
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_LONGEST_NAME = 1024  # characters: longer text is base64
_BASE64 = ("iVBORw0KGgo", "/9j/", "UklGR")  # how that of PNG, JPEG and WEBP begins


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads a dataset's images. Picklable: each process may have one."""

    config: ImagesConfig
    folder: Path | None  # with the files that rows name; None: it is not at hand, or the settings name none
    store: Path | None = None  # where the files are kept; None: nowhere, and only their headers are read

    @classmethod
    def before_a_run(cls, config: ImagesConfig, root: Path) -> ImageReader:
        """Return a reader of the headers of available images. root: the recipe's folder."""
        named = config.folder
        return cls(config, None if named is None or "://" in named else root / named)

    def __call__(self, row: Row, completions: Sequence[str] = ()) -> Row:
        """Return the row with each of its images read, in the content of a message; the row itself if there is none.

        completions: columns that may be conversations, each of which has the images of the prompt where it repeats it.
        Raises RowError for an image that cannot be read, one without a placeholder, or a placeholder without an image.
        """
        column_images = _column_images(row)
        named = [name for name in _MESSAGE_COLUMNS if name in row]
        completed = [name for name in completions if isinstance(row.get(name), list | tuple)]
        if not column_images and not any(_has_parts(row[name]) for name in (*named, *completed)):
            return row
        read: Row = {}
        for columns in [named] if named else [[name] for name in completed] or [[]]:
            images = _Images(self, column_images)
            read |= {name: images.placed(row[name], name) for name in columns}
            images.require_all_placed()
        for name in completed if named else ():
            read[name] = _Images(self, column_images if _has_parts(row[name]) else []).placed(row[name], name)
        return {name: value for name, value in row.items() if name not in _COLUMNS} | read

    def read(self, value: Any, place: str) -> str:
        """Return the SHA-256 of the image `value`, content or name. Raises RowError, which names the place."""
        content = _content(value, place, self)
        if content is None:
            return hashlib.sha256(repr(value).encode()).hexdigest()  # of a file that is not at hand
        if len(content) > self.config.max_bytes:
            raise RowError(
                f"`{place}` has {len(content)} bytes, more than images.max_bytes={self.config.max_bytes}: raise it, or "
                "give a smaller image",
                "an image has too many bytes",
            )
        self._verify(content, place)
        digest = hashlib.sha256(content).hexdigest()
        if self.store is not None and not (self.store / digest).is_file():
            self._keep(content, digest)
        return digest

    def _verify(self, content: bytes, place: str) -> None:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                width, height = image.size
                if width * height > self.config.max_pixels:
                    raise RowError(
                        f"`{place}` has {width} x {height} pixels, more than images.max_pixels="
                        f"{self.config.max_pixels}: raise it, or give a smaller image",
                        "an image has too many pixels",
                    )
                if getattr(image, "is_animated", False):
                    raise RowError(f"`{place}` is animated, and models read still images", "an image is animated")
                if self.store is not None:  # before a run only the header is read
                    as_rgb(image)
        except RowError:
            raise
        except Exception as error:  # PIL raises many types; all mean that these bytes are no image
            unknown = isinstance(error, UnidentifiedImageError)
            why = "its bytes are none of these" if unknown else reason_of(error)
            raise RowError(
                f"`{place}` is not an image that can be read ({why}): give {', '.join(FORMATS)}",
                "an image cannot be read",
            ) from error

    def _keep(self, content: bytes, digest: str) -> None:
        """Write the file atomically: other processes may keep the same one."""
        assert self.store is not None
        with tempfile.NamedTemporaryFile(dir=self.store, delete=False) as file:
            file.write(content)
        os.replace(file.name, self.store / digest)


def _column_images(row: Row) -> list[tuple[str, Any]]:
    """Return the place and the value of each image in the columns."""
    columns = [name for name in _COLUMNS if row.get(name) is not None and not _is_empty(row[name])]
    if len(columns) > 1:
        raise RowError("the row has both `images` and `image`: remove one, such as by `columns: {unused: image}`")
    if not columns:
        return []
    (name,) = columns
    value = row[name]
    if isinstance(value, list | tuple):
        return [(f"{name}[{index}]", each) for index, each in enumerate(value)]
    return [(name, value)]


def _is_empty(value: Any) -> bool:
    return isinstance(value, str | bytes | Sequence | Mapping) and not value


def _has_parts(messages: Any) -> bool:
    return isinstance(messages, list | tuple) and any(
        _is_image(part) or _is_video(part) for message in messages for part in _parts_of(message)
    )


def _parts_of(message: Any) -> Sequence[Any]:
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in (IMAGE_PART, IMAGE_URL_PART)


def _is_video(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == _VIDEO_PART


def _with_frames(part: Any, place: str) -> Iterator[tuple[Any, str]]:
    """Yield a part with its place; of a video each of its frames, as an image. Raises RowError for other videos."""
    if not _is_video(part):
        yield part, place
        return
    frames = part.get("video")
    if not isinstance(frames, list | tuple) or not frames:
        raise RowError(
            f"`{place}` is a video that is no list of frames: give {{type: video, video: [image, …]}}",
            "a video is no list of frames",
        )
    for index, frame in enumerate(frames):
        yield {"type": IMAGE_PART, "image": frame}, f"{place}.video[{index}]"


class _Images:
    """The images of one row; those of its columns wait for placeholders."""

    def __init__(self, reader: ImageReader, column_images: Sequence[tuple[str, Any]]) -> None:
        self._reader = reader
        self._column_images = list(column_images)
        self._used = 0
        self._read = 0

    def placed(self, value: Any, column: str) -> Any:
        """Return `value` of the column with each image read: messages, or a prompt as text."""
        if isinstance(value, str) and self._column_images:
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list | tuple):
            return value
        messages = [dict(message) if isinstance(message, Mapping) else message for message in value]
        if self._column_images and not _has_parts(messages):
            self._place(messages, column)
        for index, message in enumerate(messages):
            if parts := _parts_of(message):
                key = "content" if "content" in message else "value"
                where = f"{column}[{index}].{key}"
                message[key] = [
                    self._part(each, place)
                    for n, part in enumerate(parts)
                    for each, place in _with_frames(part, f"{where}[{n}]")
                ]
        return messages

    def require_all_placed(self) -> None:
        if self._used < len(self._column_images):
            place, _ = self._column_images[self._used]
            raise RowError(
                f"`{place}` has no placeholder: the messages have {self._used} for {len(self._column_images)} images",
                "an image has no placeholder in the messages",
            )

    def _place(self, messages: list[Any], column: str) -> None:
        """Insert parts where the texts contain `<image>`, or else in front of the first turn of the user."""
        texts = [(index, key) for index, key in _texts(messages) if _IN_TEXT in messages[index][key]]
        for index, key in texts:
            pieces = messages[index][key].split(_IN_TEXT)
            parts: list[Any] = [{"type": "text", "text": pieces[0]}]
            for piece in pieces[1:]:
                parts += [{"type": IMAGE_PART}, {"type": "text", "text": piece}]
            messages[index][key] = parts
        if texts:
            return
        first = next((place for place in _texts(messages) if _role(messages[place[0]]) == "user"), None)
        if first is None:
            raise RowError(f"`{column}` has no user text to put the row's images in front of")
        index, key = first
        parts = [{"type": IMAGE_PART} for _ in self._column_images]
        messages[index][key] = [*parts, {"type": "text", "text": messages[index][key]}]

    def _part(self, part: Any, place: str) -> Any:
        if not _is_image(part):
            return part
        value = {key: part[key] for key in _KEYS if part.get(key) is not None}
        if not value:
            if self._used == len(self._column_images):
                raise RowError(
                    f"`{place}` is an image without content, and the row has {len(self._column_images)} in "
                    "`images`: add it there, or take the part out",
                    "a place in the messages has no image",
                )
            place, value = self._column_images[self._used]
            self._used += 1
        self._read += 1
        if self._read > self._reader.config.max_per_row:
            raise RowError(
                f"`{place}`: the row has more than images.max_per_row={self._reader.config.max_per_row} images: raise "
                "it, or drop such rows",
                "a row has too many images",
            )
        return ImagePart(self._reader.read(value, place))


def _texts(messages: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Yield message and key of each text that is not the assistant's."""
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or _role(message) == "assistant":
            continue
        for key in ("content", "value"):
            if isinstance(message.get(key), str):
                yield index, key


def _role(message: Mapping[str, Any]) -> str | None:
    return role_of(message.get("role", message.get("from")))


def _content(value: Any, place: str, reader: ImageReader) -> bytes | None:
    """Return the bytes of the file; None if it is not available."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, Mapping):
        keys = [key for key in _KEYS if value.get(key) is not None]
        key = "bytes" if "bytes" in keys else keys[0] if keys else ""
        if key and (key == "bytes" or len(keys) == 1):  # beside bytes, Arrow has the path that they came from
            return _decoded(value[key], place) if key == "base64" else _content(value[key], place, reader)
    elif isinstance(value, str) and value:
        if value.startswith(("data:", *_BASE64)) or len(value) > _LONGEST_NAME:
            return _decoded(value, place)
        return _of_file(value, place, reader)
    elif hasattr(value, "save"):  # a picture of PIL, as data sets of the hub and functions give it
        return _of_picture(value, place)
    raise RowError(
        f"`{place}` is not an image: give a file's bytes, a data URL, or the name of a file in images.folder",
        "an image is given in another way than is read",
    )


def _decoded(text: Any, place: str) -> bytes:
    try:
        header = _DATA_URL.match(text)
        if text.startswith("data:") and header is None:
            raise ValueError("a data URL begins with data:image/…;base64,")
        return base64.b64decode(text[header.end() if header else 0 :], validate=True)
    except (TypeError, ValueError) as error:
        raise RowError(f"`{place}` is not valid base64 ({error})", "an image is not valid base64") from error


def _of_file(name: str, place: str, reader: ImageReader) -> bytes | None:
    config = reader.config
    if config.folder is None:
        raise RowError(
            f"`{place}` names the file {name[:80]!r}: name the folder that it is in by the dataset's images.folder",
            "an image is a file, and images.folder names no folder",
        )
    inside = name.removeprefix(f"{config.folder.rstrip('/')}/")
    path = PurePosixPath(inside)
    if "://" in inside or path.is_absolute() or ".." in path.parts:
        raise RowError(
            f"`{place}` names {name[:80]!r}, which is not in images.folder={config.folder}: name a file in it",
            "an image is not in images.folder",
        )
    if reader.folder is None:
        return None
    try:
        if (reader.folder / path).stat().st_size > config.max_bytes:
            return bytes(config.max_bytes + 1)  # not read, whatever its size
        return (reader.folder / path).read_bytes()
    except OSError as error:
        raise RowError(
            f"`{place}` names {inside[:80]!r}, which cannot be read in {config.folder} ({error.strerror})",
            "the file of an image cannot be read",
        ) from error


def _of_picture(picture: Any, place: str) -> bytes:
    try:
        return encoded_image(picture)
    except Exception as error:  # PIL raises many types; all mean that this picture has no pixels
        raise RowError(
            f"`{place}` is a picture that cannot be read ({reason_of(error)})", "an image cannot be read"
        ) from error
