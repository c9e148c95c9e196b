"""Lists of tokens that keep the images among them."""

from __future__ import annotations

from rlhf_core.processes.engine_handle import Tokens


def test_joined_tokens_have_the_images_of_both_in_their_places() -> None:
    first, second = Tokens([1, 9, 9], [(0, 1)]), Tokens([9, 2], [(1, 0)])
    joined = first + [5] + second  # noqa: RUF005  # what is tested
    assert (joined, joined.images) == ([1, 9, 9, 5, 9, 2], [(0, 1), (1, 4)])
    after = [3, 4] + second  # noqa: RUF005
    assert (after, after.images) == ([3, 4, 9, 2], [(1, 2)])
    grown = first
    grown += second
    assert grown is first
    assert (grown, grown.images) == ([1, 9, 9, 9, 2], [(0, 1), (1, 3)])
    assert (second, second.images) == ([9, 2], [(1, 0)])
    assert Tokens([7]).images == []
