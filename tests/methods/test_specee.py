"""SpecEE: where it looks, what makes it stop, what the layers above keep, and its training."""

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


class Told:
    """Predictors that keep what they are asked, and always say the same."""

    def __init__(self, says, top=4):
        self.says, self.top, self.layers, self.asked = says, top, (1,), []

    def __call__(self, layer, features):
        self.asked.append((layer, features.clone()))
        return torch.full(features.shape[:1], self.says)


@pytest.fixture
def told(open_session, monkeypatch):
    """A decoding with such predictors: its steps, its session and the predictors."""

    def decode(says, prompt=7, sampling=SAMPLINGS[0], top=4, budget=24, **params):
        predictors = Told(says, top)
        session = open_session(prompt, sampling, budget=budget)
        monkeypatch.setattr(type(session), "artifact", lambda *_: predictors)
        return [*SpecEE(SpecEEParams(**params)).generate(session)], session, predictors

    return decode


# ---- decoding -----------------------------------------------------------------------------------


@EACH
@FILLS
def test_off_it_makes_vanillas_tokens_on_48_prompts(open_session, family, sampling, fill):
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
def test_layers_above_an_exit_hold_rows_of_it_or_none(told, fill):
    """The prompt, and every token but the last, is in layer 1; exits are in layer 2 if copied."""
    steps, session, _ = told(1.0, fill=fill, top=96)
    exits = sum(step.extra["exits"] for step in steps)
    rows = len(session.tokens()) - 1
    assert exits == len(steps) == sum(step.extra["exit_layers"] for step in steps) == 23
    above = session.state.length(layer=1)
    assert session.state.length() == rows and above == (rows if fill == "copy" else rows - exits)
    shares = [sum(f.share for f in step.forwards if f.model == "target") for step in steps]
    assert max(shares) < 1 and all(step.outcome.origin == ("plain",) for step in steps)


def test_a_greedy_exit_says_what_layer_1_says_of_the_text(told, family):
    """Layer 1 sees the whole text, whatever the layers above have left out."""
    _, session, _ = told(1.0, top=96)
    text = torch.tensor([list(session.tokens())])
    left = family.modules["target"](text, output_hidden_states=True).hidden_states[1]
    target = family.decoders["target"]
    due = target.unembed(target.norm(left[0])).argmax(-1).tolist()
    output = session.output()
    assert output[1:] == due[-len(output) : -1]


def test_a_token_that_the_draft_did_not_foresee_is_no_exit(told, family):
    steps, session, _ = told(1.0, top=1)
    exits = [step for step in steps if step.extra["exits"]]
    assert 0 < len(exits) < len(steps)
    text = torch.tensor([list(session.tokens())])
    foreseen = family.modules["near"](text).logits[0].argmax(-1).tolist()
    at = len(session.tokens()) - len(steps)
    for step in steps:
        if step.extra["exits"]:
            assert step.outcome.committed[0] == foreseen[at - 1]
        at += 1


def test_predictors_read_what_the_layer_says_of_the_drafts_candidates(told, family):
    steps, session, predictors = told(0.0)
    assert len(predictors.asked) == len(steps)
    text = torch.tensor([list(session.tokens())])
    target = family.decoders["target"]
    left = family.modules["target"](text, output_hidden_states=True).hidden_states[1]
    said = target.unembed(target.norm(left[0]))
    ids = family.modules["near"](text).logits[0].topk(4).indices
    for at, (layer, features) in enumerate(predictors.asked, start=text.shape[1] - 1 - len(steps)):
        z = said[at, ids[at]]
        due = torch.cat((z, z.softmax(-1), z.softmax(-1)))
        assert layer == 1 and torch.allclose(features[0], due, atol=1e-3)


def test_what_is_not_trusted_is_not_left(told, open_session):
    _, session, _ = told(0.5, threshold=0.5)
    plain = open_session(7, SAMPLINGS[0], budget=24)
    list(Vanilla().generate(plain))
    assert session.output() == plain.output()
    steps, *_ = told(0.51, threshold=0.5, top=96)
    assert all(step.extra["exits"] for step in steps)


class Unsure(Told):
    """Predictors that are surer the further the draft's first candidate is ahead."""

    def __call__(self, layer, features):
        super().__call__(layer, features)
        return features[:, self.top]


def test_trusts_that_were_logged_replay_to_the_same_exits_and_stricter_ones_to_fewer(
    open_session, monkeypatch
):
    predictors, left = Unsure(0.0, top=96), []
    for prompt in range(12):
        session = open_session(prompt, SAMPLINGS[0], budget=24)
        monkeypatch.setattr(type(session), "artifact", lambda *_: predictors)
        steps = SpecEE(SpecEEParams(threshold=0.3, fill="copy")).generate(session)
        left += [bool(step.extra["exits"]) for step in steps]
    trusts = [float(features[0, 96]) for _, features in predictors.asked]
    assert left == [trust > 0.3 for trust in trusts]
    exits = [sum(trust > at / 20 for trust in trusts) for at in range(21)]
    assert exits == sorted(exits, reverse=True) and exits[20] == 0
    assert 0 < exits[6] < exits[0] == len(left)


def test_its_control_leaves_by_chance_and_asks_no_predictor(told):
    steps, _, predictors = told(1.0, gate="random", rate=0.5, top=96, budget=40)
    assert 8 < sum(step.extra["exits"] for step in steps) < 31 and not predictors.asked


def test_drawn_tokens_are_of_what_the_exit_says(told):
    steps, session, _ = told(1.0, sampling=SAMPLINGS[2], top=96)
    assert all(step.extra["exits"] for step in steps)
    rows = session.verified_logits()
    assert rows.shape == (1, 96) and SpecEE().guarantee("rejection") == "quality_only"


def test_recent_exits_are_looked_at_once_there_are_enough():
    exits = deque([3, 3], maxlen=3)
    assert choose_layers((6,), exits, 9) == [6]
    exits.append(8)
    assert choose_layers((6,), exits, 9) == [1, 3, 5, 6, 8]
    assert choose_layers((6,), deque(maxlen=0), 9) == [6]


def test_change_is_since_the_layer_that_was_looked_at_before():
    first, local = make_predictor_input(torch.tensor([1.0, 2.0]), None)
    assert torch.equal(first[2:4], first[4:]) and torch.equal(local, first[2:4])
    second, _ = make_predictor_input(torch.tensor([2.0, 1.0]), local)
    assert torch.allclose(second[4:], second[2:4] - local) and second[4] > 0


# ---- the predictors -----------------------------------------------------------------------------


def planted(n=900, layers=4, seed=0):
    """Reads of which the first candidate's lead tells whether layers 2 to 4 are right; layer 1
    never is."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, layers, 4, generator=generator)
    right = logits[..., 0] > logits[..., 1:].amax(-1)
    right[:, 0] = False
    return EarlyLogits(logits, right, torch.ones_like(right), torch.arange(n) // 6)


def test_what_can_be_told_is_learnt():
    made, named, worth = fit(planted())
    assert {layer for layer, auc in worth.auc.items() if auc > 0.97} >= set(made.layers)
    assert named["up"].shape == (4, 12, 32) and worth.tokens == 180
    exits, agree, layers = (
        list(each.values()) for each in (worth.exits, worth.agree, worth.layers)
    )
    assert exits == sorted(exits, reverse=True) and exits[1] > 0.2
    assert min(agree[1:]) > 0.9 and layers == sorted(layers)


def test_layers_that_are_always_looked_at_are_those_of_most_first_exits():
    right = torch.tensor([[0, 1, 1], [0, 1, 0], [1, 1, 1], [0, 0, 1], [0, 0, 0]]).bool()
    early_logits = EarlyLogits(torch.zeros(5, 3, 4), right, torch.ones_like(right), torch.zeros(5))
    assert choose_offline_layers(early_logits) == (2,)
    early_logits = EarlyLogits(
        early_logits.logits, right, torch.tensor([[1, 0, 1]] * 5).bool(), early_logits.question
    )
    assert choose_offline_layers(early_logits) == (3,)


def test_training_looks_where_decoding_does():
    right = torch.tensor([[0, 0, 1, 0, 0, 0, 0]] * 8).bool()
    question = torch.tensor([0] * 7 + [1])
    early_logits = EarlyLogits(torch.zeros(8, 7, 4), right, torch.ones_like(right), question)
    planned = schedule_checks(early_logits, (3,))
    assert planned == [[3]] * 5 + [[1, 3, 5]] * 2 + [[3]]  # a new answer knows no exits
    looks = collect_checks(early_logits, planned)
    assert looks.layer.tolist() == [3] * 5 + [1, 3, 5] * 2 + [3]
    assert looks.features[-1].tolist() == [0.0] * 4 + [0.25] * 8


def test_without_a_layer_that_is_ever_right_nothing_is_trained():
    early_logits = planted(60)
    with pytest.raises(ValueError, match="no early layer ever predicts"):
        fit(
            EarlyLogits(
                early_logits.logits,
                torch.zeros_like(early_logits.correct),
                early_logits.is_candidate,
                early_logits.question,
            )
        )


def test_what_is_read_is_what_the_layers_say(family):
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
    left = module(torch.tensor([text]), output_hidden_states=True).hidden_states[1][0]
    said = target.unembed(target.norm(left))[len(prompts[0]) : -1].argmax(-1)
    own = torch.tensor(text[len(prompts[0]) + 1 :])
    assert early_logits.correct[:n, 0].tolist() == (said == own).tolist()


def test_training_writes_through_no_link(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "exits").mkdir()
    (tmp_path / "exits/config.json").symlink_to(mine)
    with pytest.raises(UsageError, match="specbench did not write this"):
        export(tmp_path / "exits", *fit(one_layer()), {})
    assert mine.read_text() == "mine"
    assert not (tmp_path / "exits/model.safetensors").exists()


def test_what_training_wrote_is_read(tmp_path, family):
    made, named, worth = fit(one_layer())
    export(tmp_path, made, named, worth, {"target": "tiny"})
    head = ExitPredictors.load(tmp_path, {"target": family.decoders["target"]})
    features = torch.randn(3, 12)
    assert torch.allclose(head(1, features), made(1, features), atol=1e-6)
    assert (head.top, head.layers, head.weight_bytes) == (4, (1,), 4 * (12 * 32 + 2 * 32 + 1))
    facts = json.loads((tmp_path / "config.json").read_text())["specbench"]
    assert facts["kind"] == "exits" and facts["held_out"]["tokens"] == worth.tokens


def one_layer():
    early_logits = planted(300, layers=2)
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
def test_what_is_no_predictor_of_this_target_is_refused(tmp_path, family, config, weights, why):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentFault, match=why):
        ExitPredictors.load(tmp_path, {"target": family.decoders["target"]})
