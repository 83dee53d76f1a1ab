"""Tests of Judge Decoding: the input of its judge head, its decisions and its training labels."""

import json

import pytest
import torch
from safetensors.torch import save_file

from methods._heads.held_out import area_under_roc
from methods.judge.head import JudgeHead
from methods.judge.method import Judge, JudgeParams, JudgeVerifier
from methods.judge.training import MinedTokens, fit
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.tasks import Question
from specbench_cli.training.heads.judge import JudgeQuestion, export, mine_labels

WIDTH = 32


class ConstantJudge:
    """A judge that returns one constant probability and keeps its input rows."""

    def __init__(self, probability):
        self.probability, self.rows = probability, []

    def __call__(self, rows):
        self.rows.append(rows.clone())
        return torch.full(rows.shape[:1], self.probability)


@pytest.fixture
def decode_with_judge(open_session, monkeypatch):
    """Return a function that decodes with a constant judge.

    It returns the steps, the session and the judge.
    """

    def decode(probability, threshold=0.5, **rest):
        judge = ConstantJudge(probability)
        session = open_session(7, Sampling(), budget=24, **rest)
        monkeypatch.setattr(type(session), "artifact", lambda *_: judge)
        method = Judge(JudgeParams(threshold=threshold))
        steps = list(method.generate(session))
        return steps, session, judge

    return decode


def test_a_judge_that_always_agrees_accepts_every_draft(decode_with_judge):
    steps, _, _ = decode_with_judge(0.9, draft="far")
    words = [word for step in steps for word in step.outcome.origin]
    assert "recovered" not in words and words.count("relaxed") > 8
    assert all(len(step.outcome.path) == step.draft.nodes for step in steps[:-1])


def test_a_judge_that_never_agrees_changes_nothing(decode_with_judge, open_session):
    _, session, judge = decode_with_judge(0.1, draft="far")
    _, exact, _ = decode_with_judge(0.1, threshold=1.0, draft="far")
    assert session.output() == exact.output() and judge.rows
    assert "relaxed" not in session.harness.text.origin


def test_a_token_is_judged_by_its_own_hidden_state(decode_with_judge, family):
    """The row before it, which predicts this token, is not used."""
    steps, session, judge = decode_with_judge(0.9)
    text = torch.tensor([list(session.tokens())])
    target = family.decoders["target"]
    out = target.forward(Tokens(text), target.new_state(text.shape[1]), logits_at=None)
    expected, at = target.norm(out.hidden[0]), text.shape[1] - len(session.output()) + 1
    for step, rows in zip(steps, judge.rows, strict=True):
        if step.draft.nodes:
            assert torch.allclose(rows, expected[at : at + step.draft.nodes], atol=1e-4)
        at += len(step.outcome.committed)


def test_a_stricter_judge_has_a_higher_threshold():
    rule = JudgeVerifier(0.2)
    assert [rule.stricter.threshold, rule.stricter.stricter.threshold] == [0.6, 0.8]
    assert (
        not rule.stricter.is_exact
        and JudgeVerifier(1.0).is_exact
        and str(rule) == "judge(threshold=0.2)"
    )


class RecordingJudge(JudgeHead):
    """A judge that keeps the probabilities that it returns."""

    def __init__(self):
        super().__init__(torch.randn(WIDTH, generator=torch.manual_seed(4)), torch.zeros(1))
        self.returned = []

    def __call__(self, rows):
        self.returned.append(super().__call__(rows))
        return self.returned[-1]


def test_logged_probabilities_reproduce_the_decisions(open_session, monkeypatch):
    origins = []
    judge = RecordingJudge()
    for prompt in range(12):
        session = open_session(prompt, Sampling(), budget=24, draft="far")
        monkeypatch.setattr(type(session), "artifact", lambda *_: judge)
        steps = list(Judge(JudgeParams(threshold=0.5)).generate(session))
        origins += [step.outcome.origin for step in steps if step.draft.nodes]
    assert len(origins) == len(judge.returned)
    for origin, probabilities in zip(origins, judge.returned, strict=True):
        for word, probability in zip(origin, probabilities.tolist(), strict=False):
            assert word != "relaxed" or probability > 0.5
            assert word != "recovered" or probability <= 0.5
    verdicts = torch.cat(judge.returned)
    passed = [int((verdicts > at / 10).sum()) for at in range(11)]
    assert passed == sorted(passed, reverse=True) and passed[10] == 0
    assert 0 < passed[5] < passed[0] == len(verdicts)


# ---- the head -----------------------------------------------------------------------------------


def test_training_does_not_write_through_a_symlink(tmp_path):
    own = tmp_path / "own"
    own.write_text("mine")
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge/model.safetensors").symlink_to(own)
    with pytest.raises(UsageError, match="specbench did not write this"):
        export(tmp_path / "judge", torch.ones(2), torch.ones(1), fit(separable())[2], {})
    assert own.read_text() == "mine"
    assert not (tmp_path / "judge/config.json").exists()


def test_a_trained_judge_can_be_loaded(tmp_path, family):
    weight, bias = torch.randn(WIDTH), torch.tensor([0.5])
    judged = fit(separable())[2]
    export(tmp_path, weight, bias, judged, {"target": "tiny"})
    head = JudgeHead.load(tmp_path, {"target": family.decoders["target"]})
    rows = torch.randn(3, WIDTH)
    assert torch.allclose(head(rows), (rows @ weight + bias).sigmoid(), atol=1e-6)
    assert head.weight_bytes == 4 * (WIDTH + 1)
    labels = json.loads((tmp_path / "config.json").read_text())["specbench"]
    assert labels["kind"] == "judge" and labels["held_out"]["auc"] == judged.auc


@pytest.mark.parametrize(
    ("config", "tensors", "why"),
    [
        (None, {}, "is not a judge for hidden size 32"),
        ({"hidden_size": 8}, {}, "is not a judge for hidden size 32"),
        ({"hidden_size": 32}, {"weight": torch.ones(32)}, "missing tensor 'bias'"),
        (
            {"hidden_size": 32},
            {"weight": torch.ones(31), "bias": torch.ones(1)},
            "tensors have wrong shapes",
        ),
        (
            {"hidden_size": 32},
            {"weight": torch.ones(32), "bias": torch.ones(1), "scale": torch.ones(1)},
            "holds the tensor scale, which nothing reads",
        ),
    ],
)
def test_a_file_that_does_not_fit_the_target_is_refused(tmp_path, family, config, tensors, why):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors or {"other": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentFault, match=why):
        JudgeHead.load(tmp_path, {"target": family.decoders["target"]})


# ---- training -----------------------------------------------------------------------------------


def join_ids(ids):
    return " ".join(map(str, ids))


@pytest.mark.parametrize(("reference", "harmless"), [("its own", False), ("nothing", True)])
def test_a_token_is_harmless_if_the_answer_scores_no_worse_with_it(
    family, monkeypatch, reference, harmless
):
    """A token is harmful if it turns a correct answer into a wrong one.

    If the reference is the target's own answer, every other token is harmful. If no answer can
    match the reference, no token is.
    """
    target, near = family.decoders["target"], family.decoders["near"]
    monkeypatch.setattr("specbench_cli.training.heads.judge.MAX_ANSWER", 24)

    def question_with_answer(answer):
        question = Question("judge/0", "0", "judge", "qa", "qa", ("?",), (answer,), "exact_match")
        return JudgeQuestion(question, family.prompts[9])

    first = []
    mine_labels(
        target,
        target,
        [question_with_answer("")],
        frozenset(),
        lambda ids: first.append(ids) or join_ids(ids),
    )
    answer = join_ids(first[0]) if reference == "its own" else "no"
    mined = mine_labels(target, near, [question_with_answer(answer)], frozenset(), join_ids)
    assert set(mined.harmless.tolist()) == {harmless}
    assert mined.rows.shape == (len(mined.harmless), WIDTH) and len(mined.harmless) > 2


def separable(n=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, WIDTH, generator=generator)
    harmless = rows[:, 0] + 0.3 * torch.randn(n, generator=generator) > 0.8
    return MinedTokens(rows, harmless, torch.arange(n) // 4)


def test_a_separable_label_is_learnt():
    mined = separable()
    weight, bias, judged = fit(mined)
    assert judged.auc > 0.95 and judged.tokens == 80
    assert int(weight.abs().argmax()) == 0 and weight[0] > 0
    caught, passed = (list(each.values()) for each in (judged.caught, judged.passed))
    assert caught == sorted(caught) and passed == sorted(passed, reverse=True)
    probabilities = (mined.rows @ weight + bias).sigmoid()
    assert (
        float(probabilities[mined.harmless].mean())
        > 0.7
        > 0.3
        > float(probabilities[~mined.harmless].mean())
    )


def test_the_area_under_the_curve_counts_a_tie_as_half_a_pair():
    scores, truth = torch.tensor([0.1, 0.4, 0.4, 0.9]), torch.tensor([False, False, True, True])
    assert area_under_roc(scores, truth) == pytest.approx((1 + 0.5 + 1 + 1) / 4)
    assert area_under_roc(scores, torch.ones(4).bool()) == 0.5
