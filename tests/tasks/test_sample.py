"""Samples of questions: balanced, seeded, nested and in dataset order."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.errors import UsageError
from specbench_cli.tasks import FAMILIES, Question, sample_questions


def questions(available: dict[tuple[str, str], int]) -> list[Question]:
    """Return `available` questions of each (family, category), interleaved."""
    result = []
    for index in range(max(available.values(), default=0)):
        for (family, category), n in available.items():
            if index < n:
                name = f"t/{family}-{category}-{index}"
                result.append(Question(name, name, "t", family, category, ("?",)))
    return result


AVAILABLE = st.dictionaries(
    st.tuples(st.sampled_from(FAMILIES), st.sampled_from("abc")),
    st.integers(1, 9),
    min_size=1,
    max_size=8,
)


def is_balanced(chosen: dict[str, int], available: dict[str, int]) -> bool:
    """Return True if counts differ by more than one only where no more questions are available."""
    most = max(chosen.values(), default=0)
    return all(chosen[name] >= min(most - 1, available[name]) for name in available)


@given(available=AVAILABLE, limit=st.integers(1, 60), seed=st.integers(0, 5))
def test_a_sample_is_a_balanced_subset_in_dataset_order(available, limit, seed):
    everything = questions(available)
    chosen = sample_questions(everything, limit, seed)

    assert len(chosen) == min(limit, len(everything))
    assert [q for q in everything if q in chosen] == chosen
    assert sample_questions(everything, limit, seed) == chosen

    available_by_family, chosen_by_family = (
        Counter(q.family for q in everything),
        Counter(q.family for q in chosen),
    )
    assert is_balanced({f: chosen_by_family[f] for f in available_by_family}, available_by_family)
    for family in available_by_family:
        had_in = Counter(q.category for q in everything if q.family == family)
        got_in = Counter(q.category for q in chosen if q.family == family)
        assert is_balanced({c: got_in[c] for c in had_in}, had_in)


@given(available=AVAILABLE, limit=st.integers(1, 40), seed=st.integers(0, 5))
def test_a_smaller_sample_is_part_of_a_larger_one(available, limit, seed):
    everything = questions(available)
    assert set(sample_questions(everything, limit, seed)) <= set(
        sample_questions(everything, limit + 1, seed)
    )


@given(available=AVAILABLE, limit=st.integers(1, 40), seed=st.integers(0, 5))
def test_a_question_with_samples_counts_once_and_keeps_all_samples(available, limit, seed):
    plain = questions(available)
    with_samples = [
        replace(question, prompt_id=f"{question.prompt_id}/{n}", sample=n)
        for question in plain
        for n in (1, 2, 3)
    ]
    prompt_ids = [question.prompt_id for question in sample_questions(plain, limit, seed)]
    assert [q.prompt_id for q in sample_questions(with_samples, limit, seed)] == [
        f"{prompt_id}/{n}" for prompt_id in prompt_ids for n in (1, 2, 3)
    ]


def test_the_draw_does_not_depend_on_the_order_of_the_dataset():
    everything = questions({("qa", "a"): 30, ("rag", "b"): 30})
    assert set(sample_questions(everything, 10, 3)) == set(
        sample_questions(everything[::-1], 10, 3)
    )


def test_48_questions_of_six_families_are_8_each():
    families = [f for f in FAMILIES if f not in ("code", "other")]
    everything = questions({(family, family): 80 for family in families})
    assert set(Counter(q.family for q in sample_questions(everything, 48, 0)).values()) == {8}


def test_another_seed_draws_other_questions():
    everything = questions({("qa", "a"): 50})
    assert sample_questions(everything, 5, 0) != sample_questions(everything, 5, 1)


def test_no_limit_is_everything():
    everything = questions({("qa", "a"): 3})
    assert sample_questions(everything, None, 0) == everything
    assert sample_questions(everything, 99, 0) == everything


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one_is_refused(limit):
    with pytest.raises(UsageError, match="at least 1"):
        sample_questions(questions({("qa", "a"): 3}), limit, 0)


def test_a_known_sample_does_not_change_between_versions():
    everything = questions({("qa", "a"): 20, ("rag", "b"): 20})
    prompt_ids = [question.prompt_id for question in sample_questions(everything, 4, 7)]
    assert prompt_ids == ["t/qa-a-2", "t/rag-b-7", "t/qa-a-11", "t/rag-b-14"]
