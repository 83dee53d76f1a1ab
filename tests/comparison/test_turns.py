"""Which runs of two sides stood side by side in time."""

from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.comparison.processes import pair_processes
from specbench_cli.stats.regression import MIN_PAIRS, UNPAIRED


def of(order):
    """The pairs of runs in the order of a word: b of BASE, n of NEW."""
    return pair_processes([f"{at:02}" for at in range(len(order))], [side == "n" for side in order])


def test_neighbours_of_both_sides_are_pairs():
    assert of("bnbnbnbnbn") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert of("bnnbbnnbbn") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_run_without_a_neighbour_of_the_other_side_stays_alone():
    assert of("bbnnbnbnbnb") == [UNPAIRED, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_sides_one_after_the_other_took_no_turns():
    assert of("bbbbnnnn") is None
    assert of("bnbnbnbn") is None


def test_passes_of_a_run_are_in_its_pair_and_unknown_times_in_none():
    began = ["0", "0", *"123456789", None]
    new = [False, *([False, True] * 5), True]
    assert pair_processes(began, new) == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, UNPAIRED]


@given(st.lists(st.booleans(), max_size=30), st.randoms())
def test_every_pair_has_one_run_of_each_side_with_none_between(new, random):
    began = [f"{at:02}" for at in range(len(new))]
    order = list(range(len(new)))
    random.shuffle(order)
    found = pair_processes([began[at] for at in order], [new[at] for at in order])
    if found is None:
        return
    by_time = dict(zip(order, found, strict=True))
    numbers = sorted(set(found) - {UNPAIRED})
    assert numbers == list(range(len(numbers))) and len(numbers) >= MIN_PAIRS
    for number in numbers:
        one, other = sorted(at for at in by_time if by_time[at] == number)
        assert other == one + 1 and new[one] != new[other]
