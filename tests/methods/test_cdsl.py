"""CDSL: the token it takes after a failed draft, its reward, and its baseline."""

import pytest
import torch

from methods.cdsl import Cdsl, CdslParams
from methods.sps import Sps, SpsParams
from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.store.schema import LOSSLESS

SAMPLINGS = [Sampling(), Sampling("coupled", 0.8, top_k=24, seed=3), Sampling("rejection", 0.8)]
EACH = pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda each: each.rule)
MODES = pytest.mark.parametrize("mode", ["cdsl", "cdlh"])
QUOTE = 5
WORDS = Vocabulary([b'"' if token == QUOTE else b"<%d>" % token for token in range(96)])


@pytest.fixture(scope="module")
def opened(family):
    """Function that opens a session of the tiny pair, whose tokens are words: token 7 is `<7>`."""

    def make(prompt, sampling=SAMPLINGS[0], *, draft="far", budget=24, eos=()):
        decoders = {"target": family.decoders["target"], "draft": family.decoders[draft]}
        ids = family.prompts[prompt] if isinstance(prompt, int) else prompt
        request = Request(f"tiny/{prompt}", 0, ids, StopRule(frozenset(eos), budget))
        return Session(Workspace(decoders, 128, token_vocabulary=WORDS), request, sampling)

    return make


def decode(session, **params):
    return list(Cdsl(CdslParams(**params)).generate(session)), session.output()


def names(*ids):
    return tuple(f"<{token}>" for token in ids)


@pytest.fixture(scope="module")
def lacking(opened):
    """Return tokens that a prompt's lossless output lacks and that are likely somewhere in it."""

    def find(prompt, n=3):
        session, likely = opened(prompt), []
        for _ in Sps(SpsParams(length=5)).generate(session):
            likely += session.verified_logits()[0].topk(3).indices.tolist()
        return [t for t in dict.fromkeys(likely) if t not in session.output()][:n]

    return find


# ---- lossless cases
# -------------------------------------------------------------------------------


@EACH
@MODES
def test_switched_off_it_emits_the_tokens_of_sps_on_48_prompts(opened, family, sampling, mode):
    off = CdslParams(length=4, words=names(1, 2), mode=mode, **Cdsl.exact_params)
    assert Cdsl(off).guarantee(sampling.rule) in LOSSLESS and Cdsl.lossless_counterpart == Sps.name
    for at in range(48):
        n = len(family.prompts)
        other = Sampling(sampling.rule, sampling.temperature, sampling.top_k, seed=at // n)
        found = []
        for method in (Cdsl(off), Sps(SpsParams(length=4))):
            session = opened(at % n, other, budget=8)
            steps = [step.outcome for step in method.generate(session)]
            found.append((session.output(), steps))
        assert found[0] == found[1]


@EACH
@pytest.mark.parametrize("words", [(), ("",)], ids=["none", "any"])
def test_without_missing_words_it_is_sps(opened, sampling, words):
    """The prompt quotes no word. The empty word is in every text."""
    plain = opened(3, sampling)
    list(Sps(SpsParams(length=5)).generate(plain))
    steps, output = decode(opened(3, sampling), words=words)
    assert output == plain.output() and not any(step.extra["lookaheads"] for step in steps)
    assert Cdsl().guarantee(sampling.rule) == "quality_only"


# ---- lossy cases
# ----------------------------------------------------------------------------------


@EACH
@MODES
def test_more_of_the_words_appear_than_without_looking_ahead(opened, lacking, sampling, mode):
    held = [0, 0]
    for prompt in (3, 8, 14, 21):
        wanted = lacking(prompt)
        for at, weight in enumerate((0.0, 5.0)):
            session = opened(prompt, sampling)
            steps, output = decode(session, words=names(*wanted), mode=mode, weight=weight)
            assert any(step.extra["lookaheads"] for step in steps) == (weight > 0)
            held[at] += len({*wanted} & {*output})
    assert held[1] > held[0]


def test_words_quoted_in_the_prompt_are_wanted(opened, lacking, family):
    wanted = lacking(8, 1)
    prompt = (QUOTE, *wanted, QUOTE, *family.prompts[8])
    method, session = Cdsl(CdslParams()), opened(prompt)
    list(method.generate(session))
    assert method.wanted == names(*wanted)
    method = Cdsl(CdslParams(words=names(1)))
    list(method.generate(opened(prompt)))
    assert method.wanted == names(1)


def test_the_token_maximises_log_p_plus_reward(opened, lacking, family):
    """Check by hand every token chosen by a look-ahead, with transformers' own modules."""
    wanted = names(*lacking(14))
    session = opened(14)
    steps, output = decode(session, words=wanted, length=3, width=4, weight=4.0)
    target, draft = family.modules["target"], family.modules["far"]
    text, looked, shifted = list(session.tokens())[: -len(output) + 1], 0, 0
    start = len(text) - 1
    for step in steps:
        if step.extra["lookaheads"]:
            logs = target(torch.tensor([text])).logits[0, -1].log_softmax(-1)
            best = []
            for log, token in zip(*(each.tolist() for each in logs.topk(4)), strict=True):
                way = [*text, token]
                for _ in range(min(3, 24 - (len(text) - start) - 1)):
                    way.append(int(draft(torch.tensor([way])).logits[0, -1].argmax()))
                held = {*names(*way[start:])} & {*wanted}
                best.append((log + 4.0 * len(held) / len(wanted), token))
            assert step.outcome.committed == (max(best)[1],)
            looked, shifted = looked + 1, shifted + (max(best)[1] != int(logs.argmax()))
        text += step.outcome.committed
    assert looked > 3 and shifted


def test_it_looks_ahead_only_after_a_failed_or_too_short_draft(opened, lacking):
    wanted = names(*lacking(14))
    steps, _ = decode(opened(14, draft="near"), words=wanted)
    assert all(step.outcome.path for step in steps[:-1] if not step.extra["lookaheads"])
    strict, _ = decode(opened(14, draft="near"), words=wanted, margin=1.0)
    assert sum(s.extra["lookaheads"] for s in strict) > sum(s.extra["lookaheads"] for s in steps)


def test_the_baseline_drafts_nothing_and_the_target_looks_ahead(opened, lacking):
    session = opened(14)
    steps, output = decode(session, words=names(*lacking(14)), mode="cdlh", length=2, width=3)
    ahead = [step for step in steps if step.extra["lookaheads"]]
    assert len(ahead) > 2 and all(step.draft.nodes == 0 for step in ahead)
    assert all(step.outcome.origin == ("plain",) for step in ahead)
    forwards = [[f.model for f in step.forwards] for step in ahead[:-2]]
    assert forwards[1:] == [["target"] * 7] * (len(forwards) - 1)
    assert session.state.length() == len(session.tokens()) - 1 and output


def test_words_after_the_end_of_an_output_give_no_reward(opened):
    method = Cdsl(CdslParams(words=names(9)))
    session = opened(3, eos=(7,))
    list(method.generate(session))
    held = method.reward(session, ())
    assert method.reward(session, [8, 9]) >= method.reward(session, [7, 9]) == held
    session = opened(3, eos=(7,), budget=40)
    session.prefill()
    assert (method.reward(session, [8, 9]), method.reward(session, [7, 9])) == (1.0, 0.0)
