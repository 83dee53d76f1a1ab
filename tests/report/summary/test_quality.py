"""Tests of the quality figures of a model, which are computed from records."""

from dataclasses import replace

import pytest

from recipes.embedded.quality import distinct_4_grams, summarise_by_family
from specbench_cli.store.schema import Record, Steps


@pytest.mark.parametrize(
    ("ids", "share"),
    [([], 1.0), ([1, 2, 3], 1.0), ([1, 2, 3, 4, 5], 1.0), ([7] * 8, 1 / 5), ([1, 2] * 5, 2 / 7)],
)
def test_distinct_4_grams(ids: list[int], share: float) -> None:
    assert distinct_4_grams(ids) == pytest.approx(share)


def test_figures_are_computed_by_family_and_over_all(synthetic) -> None:
    (sps_record,) = synthetic.records([synthetic.sps], prompts=1)

    def make_record(family: str, score: float, ids: list[int], finish: str) -> Record:
        steps = Steps(*([[1] * (len(ids) - 1)] * 5))
        return replace(
            sps_record, family=family, score=score, output_ids=ids, finish=finish, steps=steps
        )

    records = [
        make_record("qa", 1.0, [1, 2, 3, 4, 5], "eos"),
        make_record("qa", 0.0, [7] * 9, "length"),
        make_record("rag", 1.0, [1, 2, 3], "eos"),
        replace(make_record("rag", 0.0, [1], "eos"), label="vanilla"),
        replace(make_record("rag", 0.5, [1], "eos"), error="ValueError"),
    ]
    found = summarise_by_family(records, "sps")
    assert list(found) == ["qa", "rag", "all"]
    assert (found["qa"].accuracy, found["qa"].ended, found["qa"].repetitive) == (0.5, 0.5, 0.5)
    assert (found["rag"].outputs, found["rag"].accuracy) == (1, 1.0)
    assert found["all"].accuracy == pytest.approx(2 / 3)
    assert all(figures.mat == 1.0 for figures in found.values())


def test_without_scores_there_is_no_accuracy(synthetic) -> None:
    (sps_record,) = synthetic.records([synthetic.sps], prompts=1)
    assert summarise_by_family([replace(sps_record, score=None)], "sps")["all"].accuracy is None
