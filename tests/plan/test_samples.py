"""Which questions are asked; several samples of one: independent draws, one cluster, nothing at
temperature 0."""

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


def planned(**config):
    rows = {"methods": ["vanilla", "pld"], "tasks": ["best-of-n"], **config}
    return make_plan(RunConfig.model_validate(rows))


@pytest.mark.parametrize("verify", ["greedy", "replay"])
def test_samples_that_would_all_be_equal_are_refused_with_what_to_type(verify):
    with pytest.raises(UsageError) as caught:
        planned(verify=verify)
    assert caught.value.message.startswith("best-of-n samples 8 answers per question")
    assert "--temperature 0.8" in caught.value.hint


def test_a_limit_is_of_each_task_and_the_draw_is_the_one_that_the_task_has_alone():
    three = planned(tasks=["mini", "agentic", "repair"], limit=6)
    assert Counter(question.task for question in three.questions) == {
        "mini": 6, "agentic": 6, "repair": 6
    }  # fmt: skip
    alone = planned(tasks=["agentic"], limit=6)
    assert [q for q in three.questions if q.task == "agentic"] == list(alone.questions)


def test_what_a_limit_or_a_category_leaves_nothing_of_is_named():
    assert planned(tasks=["mini"], limit=6).unused_notes == ()
    assert planned(tasks=["mini"], limit=6, category=["qa"]).unused_notes == ()
    (few,) = planned(tasks=["mini"], limit=4).unused_notes
    assert few.startswith("--limit 4 leaves no question of mini's ") and few.count(", ") == 1
    plan = planned(tasks=["mini", "repair"], category=["translation"])
    assert plan.unused_notes == ("repair is not used: it has no question of translation",)
    assert plan.facts()["not_asked"] == list(plan.unused_notes)


def test_a_limit_counts_questions_and_their_samples_follow_one_another():
    questions = planned(limit=6, temperature=0.8).questions
    assert [question.sample for question in questions] == [*range(1, 9)] * 6
    assert len({question.family for question in questions}) == 6
    assert len({question.base_id for question in questions}) == 6


@pytest.mark.parametrize("source", ["noise", "draws"])
def test_chance_of_samples_of_a_prompt_is_uncorrelated(source):
    ids = [question.prompt_id for question in load_task("best-of-n").questions[:8]]
    cpu = torch.device("cpu")
    if source == "noise":
        drawn = [Noise(0, id_, 1, VOCAB, cpu).rows(0, 4).flatten() for id_ in ids]
    else:
        p = torch.full((VOCAB, 16), 1 / 16)
        drawn = [SeededRandom(0, id_, 1, 1, cpu).categorical(p) for id_ in ids]
    between = np.corrcoef(torch.stack(drawn).double().numpy())[np.triu_indices(8, 1)]
    assert np.abs(between).max() < 5 / len(drawn[0]) ** 0.5


def test_samples_of_a_prompt_differ_are_vanillas_and_share_a_cluster(specbench):
    hot = {"temperature": 2.0, "verify": "coupled"}
    outcome = specbench("pld", tasks=["best-of-n"], limit=1, max_new_tokens=6, threads=1, **hot)
    vanilla, pld = outcome.by_label("vanilla"), outcome.by_label("pld")
    assert len({tuple(record.output_ids) for record in vanilla}) > 4
    assert {record.verdict.kind for record in pld} <= {"identical", "near-tie"}
    assert len({record.prompt_id for record in pld}) == 8
    assert len({record.cluster for record in outcome.records}) == 1
    assert len({prompt.text for prompt in outcome.prompts}) == 1
