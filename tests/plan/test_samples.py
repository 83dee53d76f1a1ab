"""Tests of question selection, and of several samples of one question."""

from collections import Counter

import numpy as np
import pytest
import torch

from specbench_cli.config.run import RunConfig
from specbench_cli.engine.verify.random import SeededRandom
from specbench_cli.engine.verify.sampling import Noise
from specbench_cli.errors import UsageError
from specbench_cli.plan.plan import make_plan
from specbench_cli.tasks import load_task

pytestmark = pytest.mark.usefixtures("small_pair")

VOCAB = 4096


def make_plan_of(**config):
    rows = {"methods": ["vanilla", "pld"], "tasks": ["best-of-n"], **config}
    return make_plan(RunConfig.model_validate(rows))


@pytest.mark.parametrize("verify", ["greedy", "replay"])
def test_several_samples_are_rejected_for_greedy_decoding(verify):
    with pytest.raises(UsageError) as caught:
        make_plan_of(verify=verify)
    assert caught.value.message.startswith("best-of-n samples 8 answers per question")
    assert "--temperature 0.8" in caught.value.hint


def test_a_limit_applies_to_each_task_independently():
    three = make_plan_of(tasks=["mini", "agentic", "repair"], limit=6)
    assert Counter(question.task for question in three.questions) == {
        "mini": 6, "agentic": 6, "repair": 6
    }  # fmt: skip
    alone = make_plan_of(tasks=["agentic"], limit=6)
    assert [q for q in three.questions if q.task == "agentic"] == list(alone.questions)


def test_families_and_tasks_without_questions_have_a_note():
    assert make_plan_of(tasks=["mini"], limit=6).unused_notes == ()
    assert make_plan_of(tasks=["mini"], limit=6, category=["qa"]).unused_notes == ()
    (few,) = make_plan_of(tasks=["mini"], limit=4).unused_notes
    assert few.startswith("--limit 4 leaves no question of mini's ") and few.count(", ") == 1
    plan = make_plan_of(tasks=["mini", "repair"], category=["translation"])
    assert plan.unused_notes == ("repair is not used: it has no question of translation",)
    assert plan.facts()["not_asked"] == list(plan.unused_notes)


def test_a_limit_counts_questions_and_not_samples():
    questions = make_plan_of(limit=6, temperature=0.8).questions
    assert [question.sample for question in questions] == [*range(1, 9)] * 6
    assert len({question.family for question in questions}) == 6
    assert len({question.base_id for question in questions}) == 6


@pytest.mark.parametrize("source", ["noise", "draws"])
def test_random_numbers_of_samples_are_uncorrelated(source):
    ids = [question.prompt_id for question in load_task("best-of-n").questions[:8]]
    cpu = torch.device("cpu")
    if source == "noise":
        drawn = [Noise(0, id_, 1, VOCAB, cpu).rows(0, 4).flatten() for id_ in ids]
    else:
        p = torch.full((VOCAB, 16), 1 / 16)
        drawn = [SeededRandom(0, id_, 1, 1, cpu).categorical(p) for id_ in ids]
    correlations = np.corrcoef(torch.stack(drawn).double().numpy())[np.triu_indices(8, 1)]
    assert np.abs(correlations).max() < 5 / len(drawn[0]) ** 0.5


def test_samples_of_a_prompt_differ_but_share_a_cluster(specbench):
    hot = {"temperature": 2.0, "verify": "coupled"}
    outcome = specbench("pld", tasks=["best-of-n"], limit=1, max_new_tokens=6, threads=1, **hot)
    vanilla, pld = outcome.by_label("vanilla"), outcome.by_label("pld")
    assert len({tuple(record.output_ids) for record in vanilla}) > 4
    assert {record.verdict.kind for record in pld} <= {"identical", "near-tie"}
    assert len({record.prompt_id for record in pld}) == 8
    assert len({record.cluster for record in outcome.records}) == 1
    assert len({prompt.text for prompt in outcome.prompts}) == 1
