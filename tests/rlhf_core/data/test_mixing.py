from __future__ import annotations

from rlhf_core.data.mixing import mix


def test_shares_are_exact_in_every_beginning_and_no_row_comes_twice() -> None:
    sources = [[f"a{i}" for i in range(100)], [f"b{i}" for i in range(30)]]
    mixed = mix(sources, [3.0, 1.0], seed=1, shuffle=True)
    for end in range(1, len(mixed) + 1):
        assert abs(sum(source == 0 for source, _ in mixed[:end]) - 0.75 * end) < 1
    assert len({row for _, row in mixed}) == len(mixed) == 122  # the 31st row of `b` is due next, and there is none


def test_the_same_seed_draws_the_same_rows() -> None:
    sources = [list(range(50)), list(range(50, 100))]
    assert mix(sources, [1, 1], seed=3, shuffle=True) == mix(sources, [1, 1], seed=3, shuffle=True)
    assert mix(sources, [1, 1], seed=3, shuffle=True) != mix(sources, [1, 1], seed=4, shuffle=True)


def test_without_shuffle_the_order_of_each_source_stays() -> None:
    assert mix([[1, 2, 3, 4], [10, 20]], [2, 1], seed=0, shuffle=False) == [
        (0, 1), (1, 10), (0, 2), (0, 3), (1, 20), (0, 4),
    ]  # fmt: skip
