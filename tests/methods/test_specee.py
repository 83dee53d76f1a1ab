"""Tests of SpecEE: its early exits, the cache of the layers that it skips, and its training."""

import json
from collections import deque

import pytest
import torch
from safetensors.torch import save_file

from methods.specee.method import SpecEE, SpecEEParams
from methods.specee.predictors import ExitPredictors, choose_layers, make_predictor_input
from methods.specee.training import (
    EarlyLogits,
    choose_offline_layers,
    collect_checks,
    fit,
    schedule_checks,
)
from methods.vanilla import Vanilla
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.store.schema import LOSSLESS
from specbench_cli.training.heads.exits import collect_logits, export

SAMPLINGS = [Sampling(), Sampling("coupled", 0.8, top_k=24, seed=3), Sampling("rejection", 0.8)]
EACH = pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda each: each.rule)
FILLS = pytest.mark.parametrize("fill", ["none", "copy"])


class ConstantPredictors:
    """Exit predictors that return one constant probability and keep their inputs."""

    def __init__(self, probability, top=4):
        self.probability, self.top, self.layers, self.calls = probability, top, (1,), []

    def __call__(self, layer, features):
        self.calls.append((layer, features.clone()))
        return torch.full(features.shape[:1], self.probability)


@pytest.fixture
def decode_with_exits(open_session, monkeypatch):
    """Return a function that decodes with constant predictors.

    It returns the steps, the session and the predictors.
    """

    def decode(probability, prompt=7, sampling=SAMPLINGS[0], top=4, budget=24, **params):
        predictors = ConstantPredictors(probability, top)
        session = open_session(prompt, sampling, budget=budget)
        monkeypatch.setattr(type(session), "artifact", lambda *_: predictors)
        return [*SpecEE(SpecEEParams(**params)).generate(session)], session, predictors

    return decode


# ---- decoding -----------------------------------------------------------------------------------


@EACH
@FILLS
def test_without_exits_48_outputs_equal_those_of_vanilla(open_session, family, sampling, fill):
    off = SpecEE(SpecEEParams(fill=fill, **SpecEE.exact_params))
    assert off.guarantee(sampling.rule) in LOSSLESS
    for at in range(48):
        n = len(family.prompts)
        other = Sampling(sampling.rule, sampling.temperature, sampling.top_k, seed=at // n)
        found = []
        for method in (off, Vanilla()):
            session = open_session(at % n, other, budget=8)
            list(method.generate(session))
            found.append((session.output(), session.harness.text.origin))
        assert found[0] == found[1]


@FILLS
def test_layers_above_an_exit_have_a_row_only_if_it_is_copied(decode_with_exits, fill):
    """Layer 1 has a row per token except the last. Layer 2 has rows of exits only if copied."""
    steps, session, _ = decode_with_exits(1.0, fill=fill, top=96)
    exits = sum(step.extra["exits"] for step in steps)
    rows = len(session.tokens()) - 1
    assert exits == len(steps) == sum(step.extra["exit_layers"] for step in steps) == 23
    above = session.state.length(layer=1)
    assert session.state.length() == rows and above == (rows if fill == "copy" else rows - exits)
    shares = [sum(f.share for f in step.forwards if f.model == "target") for step in steps]
    assert max(shares) < 1 and all(step.outcome.origin == ("plain",) for step in steps)


def test_a_greedy_exit_emits_the_best_token_of_layer_1(decode_with_exits, family):
    """Layer 1 attends to the whole text, even if the layer above skipped some tokens."""
    _, session, _ = decode_with_exits(1.0, top=96)
    text = torch.tensor([list(session.tokens())])
    hidden = family.modules["target"](text, output_hidden_states=True).hidden_states[1]
    target = family.decoders["target"]
    expected = target.unembed(target.norm(hidden[0])).argmax(-1).tolist()
    output = session.output()
    assert output[1:] == expected[-len(output) : -1]


def test_an_exit_needs_a_token_that_the_draft_predicted(decode_with_exits, family):
    steps, session, _ = decode_with_exits(1.0, top=1)
    exits = [step for step in steps if step.extra["exits"]]
    assert 0 < len(exits) < len(steps)
    text = torch.tensor([list(session.tokens())])
    draft_predictions = family.modules["near"](text).logits[0].argmax(-1).tolist()
    at = len(session.tokens()) - len(steps)
    for step in steps:
        if step.extra["exits"]:
            assert step.outcome.committed[0] == draft_predictions[at - 1]
        at += 1


def test_predictors_read_the_layers_logits_of_the_drafts_candidates(decode_with_exits, family):
    steps, session, predictors = decode_with_exits(0.0)
    assert len(predictors.calls) == len(steps)
    text = torch.tensor([list(session.tokens())])
    target = family.decoders["target"]
    hidden = family.modules["target"](text, output_hidden_states=True).hidden_states[1]
    layer_logits = target.unembed(target.norm(hidden[0]))
    ids = family.modules["near"](text).logits[0].topk(4).indices
    for at, (layer, features) in enumerate(predictors.calls, start=text.shape[1] - 1 - len(steps)):
        z = layer_logits[at, ids[at]]
        expected = torch.cat((z, z.softmax(-1), z.softmax(-1)))
        assert layer == 1 and torch.allclose(features[0], expected, atol=1e-3)


def test_an_exit_needs_a_probability_above_the_threshold(decode_with_exits, open_session):
    _, session, _ = decode_with_exits(0.5, threshold=0.5)
    plain = open_session(7, SAMPLINGS[0], budget=24)
    list(Vanilla().generate(plain))
    assert session.output() == plain.output()
    steps, *_ = decode_with_exits(0.51, threshold=0.5, top=96)
    assert all(step.extra["exits"] for step in steps)


class MarginPredictors(ConstantPredictors):
    """Exit predictors that return the probability of the draft's first candidate."""

    def __call__(self, layer, features):
        super().__call__(layer, features)
        return features[:, self.top]


def test_logged_probabilities_reproduce_the_exits(open_session, monkeypatch):
    predictors, exited = MarginPredictors(0.0, top=96), []
    for prompt in range(12):
        session = open_session(prompt, SAMPLINGS[0], budget=24)
        monkeypatch.setattr(type(session), "artifact", lambda *_: predictors)
        steps = SpecEE(SpecEEParams(threshold=0.3, fill="copy")).generate(session)
        exited += [bool(step.extra["exits"]) for step in steps]
    probabilities = [float(features[0, 96]) for _, features in predictors.calls]
    assert exited == [probability > 0.3 for probability in probabilities]
    exits = [sum(probability > at / 20 for probability in probabilities) for at in range(21)]
    assert exits == sorted(exits, reverse=True) and exits[20] == 0
    assert 0 < exits[6] < exits[0] == len(exited)


def test_the_random_gate_exits_by_chance_and_calls_no_predictor(decode_with_exits):
    steps, _, predictors = decode_with_exits(1.0, gate="random", rate=0.5, top=96, budget=40)
    assert 8 < sum(step.extra["exits"] for step in steps) < 31 and not predictors.calls


def test_under_rejection_tokens_are_sampled_from_the_exit_layer(decode_with_exits):
    steps, session, _ = decode_with_exits(1.0, sampling=SAMPLINGS[2], top=96)
    assert all(step.extra["exits"] for step in steps)
    rows = session.verified_logits()
    assert rows.shape == (1, 96) and SpecEE().guarantee("rejection") == "quality_only"


def test_layers_near_recent_exits_are_checked_once_there_are_enough():
    exits = deque([3, 3], maxlen=3)
    assert choose_layers((6,), exits, 9) == [6]
    exits.append(8)
    assert choose_layers((6,), exits, 9) == [1, 3, 5, 6, 8]
    assert choose_layers((6,), deque(maxlen=0), 9) == [6]


def test_the_change_is_measured_from_the_previously_checked_layer():
    first, local = make_predictor_input(torch.tensor([1.0, 2.0]), None)
    assert torch.equal(first[2:4], first[4:]) and torch.equal(local, first[2:4])
    second, _ = make_predictor_input(torch.tensor([2.0, 1.0]), local)
    assert torch.allclose(second[4:], second[2:4] - local) and second[4] > 0


# ---- the predictors -----------------------------------------------------------------------------


def make_early_logits(n=900, layers=4, seed=0):
    """Return early logits that are correct where the first candidate is ahead.

    Layer 1 is never correct.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, layers, 4, generator=generator)
    right = logits[..., 0] > logits[..., 1:].amax(-1)
    right[:, 0] = False
    return EarlyLogits(logits, right, torch.ones_like(right), torch.arange(n) // 6)


def test_a_separable_label_is_learnt():
    predictors, weights, quality = fit(make_early_logits())
    assert {layer for layer, auc in quality.auc.items() if auc > 0.97} >= set(predictors.layers)
    assert weights["up"].shape == (4, 12, 32) and quality.tokens == 180
    exits, agree, layers = (
        list(each.values()) for each in (quality.exits, quality.agree, quality.layers)
    )
    assert exits == sorted(exits, reverse=True) and exits[1] > 0.2
    assert min(agree[1:]) > 0.9 and layers == sorted(layers)


def test_offline_layers_are_the_most_frequent_first_exits():
    right = torch.tensor([[0, 1, 1], [0, 1, 0], [1, 1, 1], [0, 0, 1], [0, 0, 0]]).bool()
    early_logits = EarlyLogits(torch.zeros(5, 3, 4), right, torch.ones_like(right), torch.zeros(5))
    assert choose_offline_layers(early_logits) == (2,)
    early_logits = EarlyLogits(
        early_logits.logits, right, torch.tensor([[1, 0, 1]] * 5).bool(), early_logits.question
    )
    assert choose_offline_layers(early_logits) == (3,)


def test_training_checks_the_layers_that_decoding_checks():
    right = torch.tensor([[0, 0, 1, 0, 0, 0, 0]] * 8).bool()
    question = torch.tensor([0] * 7 + [1])
    early_logits = EarlyLogits(torch.zeros(8, 7, 4), right, torch.ones_like(right), question)
    planned = schedule_checks(early_logits, (3,))
    assert planned == [[3]] * 5 + [[1, 3, 5]] * 2 + [[3]]  # a new answer has no recent exits
    checks = collect_checks(early_logits, planned)
    assert checks.layer.tolist() == [3] * 5 + [1, 3, 5] * 2 + [3]
    assert checks.features[-1].tolist() == [0.0] * 4 + [0.25] * 8


def test_training_fails_if_no_early_layer_is_ever_correct():
    early_logits = make_early_logits(60)
    with pytest.raises(ValueError, match="no early layer ever predicts"):
        fit(
            EarlyLogits(
                early_logits.logits,
                torch.zeros_like(early_logits.correct),
                early_logits.is_candidate,
                early_logits.question,
            )
        )


def test_collected_logits_are_those_of_the_layers(family):
    target, near = family.decoders["target"], family.decoders["near"]
    prompts = [family.prompts[9], family.prompts[11]]
    early_logits = collect_logits(target, near, prompts, frozenset())
    n = len(early_logits.question) // 2
    assert (
        early_logits.logits.shape == (2 * n, 1, 4)
        and early_logits.question.tolist() == [0] * n + [1] * n
    )
    module = family.modules["target"]
    text = list(prompts[0])
    for _ in range(n + 1):
        text.append(int(module(torch.tensor([text])).logits[0, -1].argmax()))
    hidden = module(torch.tensor([text]), output_hidden_states=True).hidden_states[1][0]
    early_ids = target.unembed(target.norm(hidden))[len(prompts[0]) : -1].argmax(-1)
    own = torch.tensor(text[len(prompts[0]) + 1 :])
    assert early_logits.correct[:n, 0].tolist() == (early_ids == own).tolist()


def test_training_does_not_write_through_a_symlink(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "exits").mkdir()
    (tmp_path / "exits/config.json").symlink_to(mine)
    with pytest.raises(UsageError, match="specbench did not write this"):
        export(tmp_path / "exits", *fit(one_layer()), {})
    assert mine.read_text() == "mine"
    assert not (tmp_path / "exits/model.safetensors").exists()


def test_trained_predictors_can_be_loaded(tmp_path, family):
    predictors, weights, quality = fit(one_layer())
    export(tmp_path, predictors, weights, quality, {"target": "tiny"})
    head = ExitPredictors.load(tmp_path, {"target": family.decoders["target"]})
    features = torch.randn(3, 12)
    assert torch.allclose(head(1, features), predictors(1, features), atol=1e-6)
    assert (head.top, head.layers, head.weight_bytes) == (4, (1,), 4 * (12 * 32 + 2 * 32 + 1))
    facts = json.loads((tmp_path / "config.json").read_text())["specbench"]
    assert facts["kind"] == "exits" and facts["held_out"]["tokens"] == quality.tokens


def one_layer():
    early_logits = make_early_logits(300, layers=2)
    return EarlyLogits(
        *(
            each[:, 1:]
            for each in (early_logits.logits, early_logits.correct, early_logits.is_candidate)
        ),
        early_logits.question,
    )


def tensors(**other):
    shapes = {"up": (1, 12, 8), "up_bias": (1, 8), "down": (1, 8), "down_bias": (1,)} | other
    return {name: torch.zeros(shape) for name, shape in shapes.items() if shape is not None}


@pytest.mark.parametrize(
    ("config", "weights", "why"),
    [
        (None, tensors(), "contains no predictors for a target with 2 layers"),
        ({"n_layers": 3, "layers": [1]}, tensors(), "contains no predictors for a target with 2"),
        ({"n_layers": 2}, tensors(), "contains no predictors for a target with 2 layers"),
        (
            {"n_layers": 2, "layers": [2]},
            tensors(),
            r"layers is \[2\]; it must contain numbers from 1 to 1",
        ),
        ({"n_layers": 2, "layers": [1]}, tensors(down=None), "missing tensor 'down'"),
        ({"n_layers": 2, "layers": [1]}, tensors(up=(1, 11, 8)), "tensors have wrong shapes"),
        ({"n_layers": 2, "layers": [1]}, tensors(up_bias=(2, 8)), "tensors have wrong shapes"),
        (
            {"n_layers": 2, "layers": [1]},
            tensors(norm=(8,)),
            "the tensor norm, which nothing reads",
        ),
    ],
)
def test_a_file_that_does_not_fit_the_target_is_refused(tmp_path, family, config, weights, why):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentFault, match=why):
        ExitPredictors.load(tmp_path, {"target": family.decoders["target"]})
