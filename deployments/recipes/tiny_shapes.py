"""The data of the recipe `tiny-vision`: pictures of red and blue squares, and the number of one colour."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageDraw

Row = dict[str, Any]

NUMBERS = ("zero", "one", "two", "three", "four")
COLOURS = {"red": (220, 40, 40), "blue": (40, 60, 220)}
_SIDE, _CELLS = 56, 4  # pixels of the picture, and cells along each side
_CELL = _SIDE // _CELLS


def counted(seed: int, size: int, missed_share: float = 0.55) -> list[Row]:
    """Return demonstrations by a person who often misses one of several squares; some rows have no picture."""
    generator = random.Random(seed)
    rows = []
    for index, (question, picture, count) in enumerate(_items(seed, size)):
        missed = count >= 2 and generator.random() < missed_share
        rows.append({**_prompt(question, picture), "answer": NUMBERS[count - missed]})
        if index % 10 == 0:
            word = generator.choice(NUMBERS)
            rows.append({"prompt": f"Write {word} ({index}).", "answer": word})
    return rows


def prompts(seed: int, size: int, suffix: str = "") -> list[Row]:
    """Return the same questions, with the right answers. suffix: of each question."""
    return [
        {**_prompt(question + suffix, picture), "answer": NUMBERS[count]}
        for question, picture, count in _items(seed, size)
    ]


def _prompt(question: str, picture: bytes) -> Row:
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return {"prompt": [{"role": "user", "content": content}]}


def _items(seed: int, size: int) -> Iterator[tuple[str, bytes, int]]:
    """Yield question, picture and right number. Item i is made from seed + i."""
    for index in range(size):
        generator = random.Random(seed + index)
        counts = {colour: generator.randrange(len(NUMBERS)) for colour in COLOURS}
        asked = generator.choice(list(COLOURS))
        yield f"How many {asked} squares?", _picture(counts, generator), counts[asked]


def _picture(counts: dict[str, int], generator: random.Random) -> bytes:
    """Draw a PNG with so many squares of each colour, each somewhere in a cell of its own."""
    ground = generator.randrange(180, 256)
    image = Image.new("RGB", (_SIDE, _SIDE), (ground, ground, ground))
    draw = ImageDraw.Draw(image)
    cells = generator.sample(range(_CELLS**2), sum(counts.values()))
    colours = [colour for colour, count in counts.items() for _ in range(count)]
    for cell, colour in zip(cells, colours, strict=True):
        row, column = divmod(cell, _CELLS)
        side = generator.randrange(8, 12)
        left, top = (_CELL * place + generator.randrange(_CELL - side) for place in (column, row))
        draw.rectangle((left, top, left + side, top + side), fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
