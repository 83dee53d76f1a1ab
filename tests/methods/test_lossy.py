"""Lossy token rules: exact at their off position, and they accept what they define."""

import pytest
import torch

from methods.draft_alone import DraftAlone
from methods.judge.method import Judge, JudgeParams
from methods.lossy_presets import (
    Lenience,
    LenientParams,
    RandomAcceptance,
    RandomAcceptParams,
    TypicalAcceptance,
    TypicalParams,
)
from methods.sps import Sps, SpsParams
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.store.schema import LOSSLESS

SAMPLINGS = [Sampling(), Sampling("coupled", 0.8, top_k=24, seed=3), Sampling("rejection", 0.8)]
METHODS = [TypicalAcceptance, Lenience, Judge, RandomAcceptance]
ALL = pytest.mark.parametrize("method", METHODS, ids=lambda each: each.name)
EACH = pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda each: each.rule)


def decode(method, session):
    """Return the output and the origin of each token."""
    for _ in method.generate(session):
        pass
    return session.output(), list(session.harness.text.origin)


@pytest.fixture(scope="module")
def lossless(open_session, family):
    """Outputs of `sps` for 48 prompts, by decoding rule."""
    made = {}

    def outputs(sampling):
        if sampling not in made:
            made[sampling] = [decode(Sps(SpsParams(length=5)), each) for each in sessions(sampling)]
        return made[sampling]

    def sessions(sampling, prompts=48):
        n = len(family.prompts)
        for at in range(prompts):  # beyond the last prompt with another seed
            other = Sampling(sampling.rule, sampling.temperature, sampling.top_k, seed=at // n)
            yield open_session(at % n, other, budget=12)

    outputs.sessions = sessions
    return outputs


@EACH
@ALL
def test_switched_off_it_emits_its_lossless_variants_tokens_on_48_prompts(
    method, sampling, lossless
):
    off = method(method.Params(length=5, **method.exact_params))
    assert off.guarantee(sampling.rule) in LOSSLESS and method.lossless_counterpart == Sps.name
    made = [decode(off, session) for session in lossless.sessions(sampling)]
    assert made == lossless(sampling) and len(made) == 48


@EACH
@pytest.mark.parametrize(
    ("method", "params"),
    [
        (TypicalAcceptance, [TypicalParams(epsilon=e, delta=2 * e) for e in (0.4, 0.01)]),
        (Lenience, [LenientParams(factor=factor) for factor in (0.5, 0.01)]),
        (Judge, [JudgeParams(threshold=threshold) for threshold in (0.9, 0.1)]),
        (RandomAcceptance, [RandomAcceptParams(rate=rate) for rate in (0.3, 1.0)]),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_larger_parameter_relaxes_more_tokens(method, params, sampling, lossless):
    relaxed = []
    for each in params:
        assert method(each).guarantee(sampling.rule) == "quality_only"
        made = [decode(method(each), session) for session in lossless.sessions(sampling, 16)]
        relaxed.append(sum(words.count("relaxed") for _, words in made))
    assert relaxed[0] < relaxed[1]


def test_a_greedy_token_that_typical_relaxes_is_as_likely_as_it_says(open_session, family):
    params = TypicalParams(epsilon=0.2, delta=0.4)
    session = open_session(5, Sampling(), budget=30)
    _, words = decode(TypicalAcceptance(params), session)
    text = torch.tensor([list(session.tokens())])
    p = family.modules["target"](text).logits[0].softmax(-1)
    first = len(session.tokens()) - len(words)
    for at, word in enumerate(words, start=first):
        row, token = p[at - 1], int(text[0, at])
        bound = min(0.2, 0.4 * float((-torch.special.entr(row).sum()).exp()))
        if word == "relaxed":
            assert float(row[token]) > bound and token != int(row.argmax())
        elif word in ("accepted", "recovered", "bonus", "prefill"):
            assert token == int(row.argmax())
    assert "relaxed" in words


def test_the_draft_alone_runs_no_target(open_session, family):
    session = open_session(3, Sampling(), budget=10, alone="draft")
    output, words = decode(DraftAlone(), session)
    text = torch.tensor([list(session.tokens())])
    choices = family.modules["near"](text).logits[0].argmax(-1).tolist()
    assert output == choices[-len(output) - 1 : -1] and set(words[1:]) == {"plain"}
    assert {forward.model for forward in session.harness.meter.forwards} == {"near"}
    assert [forward.role for forward in session.harness.meter.forwards][1:] == ["draft"] * 9
    assert {DraftAlone().guarantee(rule) for rule in ("greedy", "rejection")} == {"quality_only"}
