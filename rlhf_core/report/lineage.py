"""The stages of a run as a graph of what each was made from, laid out in columns by depth for one picture.

A line that passes a column has a place of its own between the boxes, so that it never runs behind a stage that has
nothing to do with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.errors import shortened
from rlhf_core.report.node_view import NodeView

_MOST_NODES = 60
# In pixels; the style sheet's font fits a name of so many characters into a box.
_BOX_WIDTH, _BOX_HEIGHT, _LONGEST_NAME = 150, 28, 18
_COLUMN_WIDTH, _BETWEEN_BOXES, _BETWEEN_LINES, _MARGIN = 210, 42, 14, 6
_SWEEPS = 3

_Roles = Mapping[str, Mapping[str, Sequence[str]]]  # stage -> parent -> the names by which it reads it
_Place = tuple[str, int]  # a stage in its column, or the line of a stage in a later column that it passes


@dataclass(frozen=True, slots=True)
class Box:
    node: NodeView
    x: int
    y: int
    label: str
    text: str  # all of it in words


@dataclass(frozen=True, slots=True)
class Line:
    path: str  # of SVG, from the right of the parent to the left of the child
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    width: int
    height: int
    boxes: Sequence[Box]
    lines: Sequence[Line]
    left_out: int  # stages beyond the most that a picture has
    box_width: int = _BOX_WIDTH
    box_height: int = _BOX_HEIGHT


def lineage_picture(nodes: Sequence[NodeView], inputs: Mapping[str, Mapping[str, ArtifactRef]]) -> Picture:
    """Return the picture of a run's stages. inputs: of each stage, by its name; those of other runs are left out."""
    drawn = nodes[:_MOST_NODES]
    names = {node.ref: node.name for node in drawn}
    roles: dict[str, dict[str, list[str]]] = {node.name: {} for node in drawn}
    for node in drawn:
        for role, ref in inputs.get(node.name, {}).items():
            if ref in names and names[ref] != node.name:
                roles[node.name].setdefault(names[ref], []).append(role)
    depths = _depths(roles)
    columns = _columns(roles, depths)
    heights = _heights(columns, depths)
    boxes = [
        Box(
            node, _left(depths[node.name]), heights[node.name, depths[node.name]] - _BOX_HEIGHT // 2,
            shortened(node.name, _LONGEST_NAME), _words(node, roles[node.name]),
        )
        for node in drawn
    ]  # fmt: skip
    lines = [
        Line(_path(parent, name, depths, heights), f"{parent} is the {' and '.join(read)} of {name}")
        for name, parents in roles.items()
        for parent, read in parents.items()
        if depths[parent] < depths[name]
    ]
    return Picture(
        _left(max(0, len(columns) - 1)) + _BOX_WIDTH + _MARGIN,
        max(heights.values(), default=0) + _BOX_HEIGHT // 2 + _MARGIN,
        boxes, lines, len(nodes) - len(drawn),
    )  # fmt: skip


def _depths(roles: _Roles) -> dict[str, int]:
    """Return the column of each stage: the longest way from a stage without parents."""
    depths: dict[str, int] = {}

    def depth(name: str, below: frozenset[str]) -> int:
        if name not in depths:
            # Manifests name only what was there before them; but others can write to the store, and a circle has no
            # end.
            above = [each for each in roles[name] if each not in below]
            depths[name] = max((depth(each, below | {each}) + 1 for each in above), default=0)
        return depths[name]

    for name in roles:
        depth(name, frozenset({name}))
    return depths


def _columns(roles: _Roles, depths: Mapping[str, int]) -> list[dict[_Place, list[_Place]]]:
    """Return the places of each column from top to bottom, each with the places of the column before that lead to it;
    near the places that it is connected with.
    """
    columns: list[dict[_Place, list[_Place]]] = [{} for _ in range(max(depths.values(), default=-1) + 1)]
    for name, column in depths.items():
        columns[column][name, column] = []
    for name, parents in roles.items():
        for parent in parents:
            if depths[parent] >= depths[name]:
                continue
            for column in range(depths[parent] + 1, depths[name]):
                columns[column][parent, column] = [(parent, column - 1)]
            columns[depths[name]][name, depths[name]].append((parent, depths[name] - 1))
    below: dict[_Place, list[_Place]] = {}
    for places in columns:
        for place, above in places.items():
            for each in above:
                below.setdefault(each, []).append(place)
    rows = {place: row for places in columns for row, place in enumerate(places)}
    for sweep in range(_SWEEPS):
        order = columns if sweep % 2 == 0 else columns[::-1]
        for places in order:
            near = {
                place: fmean(
                    [rows[each] for each in (above if sweep % 2 == 0 else below.get(place, []))] or [rows[place]]
                )
                for place, above in places.items()
            }
            for row, place in enumerate(sorted(places, key=near.__getitem__)):
                rows[place] = row
    return [dict(sorted(places.items(), key=lambda item: rows[item[0]])) for places in columns]


def _heights(columns: Sequence[Mapping[_Place, Sequence[_Place]]], depths: Mapping[str, int]) -> dict[_Place, int]:
    """Return the middle of each place: where the lines to it come from, if there is room."""
    heights: dict[_Place, int] = {}
    for places in columns:
        free = _MARGIN
        for place, above in places.items():
            name, column = place
            is_box = depths[name] == column
            half, pitch = (_BOX_HEIGHT // 2, _BETWEEN_BOXES) if is_box else (_BETWEEN_LINES // 2, _BETWEEN_LINES)
            wanted = round(fmean(heights[each] for each in above)) if above else 0
            heights[place] = max(wanted, free + half)
            free = heights[place] + pitch - half
    return heights


def _left(column: int) -> int:
    return _MARGIN + column * _COLUMN_WIDTH


def _path(parent: str, child: str, depths: Mapping[str, int], heights: Mapping[_Place, int]) -> str:
    y = heights[parent, depths[parent]]
    path = f"M{_left(depths[parent]) + _BOX_WIDTH} {y}"
    for column in range(depths[parent] + 1, depths[child] + 1):
        place = (child, column) if column == depths[child] else (parent, column)
        end, middle = _left(column), _left(column) - (_COLUMN_WIDTH - _BOX_WIDTH) // 2
        path += f"C{middle} {y} {middle} {heights[place]} {end} {heights[place]}"
        y = heights[place]
        if column < depths[child]:
            path += f"H{end + _BOX_WIDTH}"
    return path


def _words(node: NodeView, parents: Mapping[str, Sequence[str]]) -> str:
    made_from = [f"{parent} ({', '.join(read)})" for parent, read in parents.items()]
    return f"{node.name}, {node.state}" + (f"; made from {', '.join(made_from)}" if made_from else "")
