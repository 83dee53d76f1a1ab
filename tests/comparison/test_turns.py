"""Tests of `pair_processes`, which pairs runs of the two sides that are neighbours in time."""

from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.comparison.processes import pair_processes
from specbench_cli.stats.regression import MIN_PAIRS, UNPAIRED


def pair_order(order):
    """Return the pair numbers of runs in this order: b is a run of BASE, n a run of NEW."""
    return pair_processes([f"{at:02}" for at in range(len(order))], [side == "n" for side in order])


def test_neighbours_of_both_sides_are_pairs():
    assert pair_order("bnbnbnbnbn") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert pair_order("bnnbbnnbbn") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_run_without_a_neighbour_of_the_other_side_is_unpaired():
    assert pair_order("bbnnbnbnbnb") == [UNPAIRED, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_sides_that_ran_one_after_the_other_have_no_pairs():
    assert pair_order("bbbbnnnn") is None
    assert pair_order("bnbnbnbn") is None


def test_passes_of_a_run_share_its_pair_and_unknown_times_are_unpaired():
    start_times = ["0", "0", *"123456789", None]
    new = [False, *([False, True] * 5), True]
    assert pair_processes(start_times, new) == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, UNPAIRED]


@given(st.lists(st.booleans(), max_size=30), st.randoms())
def test_every_pair_has_one_run_of_each_side_with_none_between(new, random):
    start_times = [f"{at:02}" for at in range(len(new))]
    order = list(range(len(new)))
    random.shuffle(order)
    pairs = pair_processes([start_times[at] for at in order], [new[at] for at in order])
    if pairs is None:
        return
    by_time = dict(zip(order, pairs, strict=True))
    numbers = sorted(set(pairs) - {UNPAIRED})
    assert numbers == list(range(len(numbers))) and len(numbers) >= MIN_PAIRS
    for number in numbers:
        one, other = sorted(at for at in by_time if by_time[at] == number)
        assert other == one + 1 and new[one] != new[other]
