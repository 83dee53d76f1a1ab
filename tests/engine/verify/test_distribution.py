"""Exact output distribution of every lossless method under rejection, from all random outcomes.

Acceptance is tested too: counters agree with the overlap of p and q.
"""

import math
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from methods.sps import Sps, SpsParams
from specbench_cli import registry
from specbench_cli.audit.enumeration import total_variation
from specbench_cli.audit.models.table import make_table_pair as pair_of
from specbench_cli.audit.reference import Reference
from specbench_cli.engine.verify import chain as verify
from specbench_cli.engine.verify.grammar import GrammarMask, RequestGrammarMask
from specbench_cli.engine.verify.sampling import Sampling, warp
from tests.audit.faults.engine import accept_more_likely, residual_from_p
from tests.audit.faults.methods import GreedyDraft, UnwarpedDistribution
from tests.engine.verify.contexts import Matcher

CONFIGURED = {
    "sps": [{"length": 1}, {"length": 2}, {"length": "confidence", "max": 2}],
    "eqspec": [{"length": 2}],
    "exspec": [{"length": 2}],
    "specreason": [{"threshold": 10.0, "cap": 2}],
    "speculative-thinking": [{"writer": "target", "cap": 2, "length": 2}],
    "atts": [{"alpha": 1.0, "cap": 2, "known": 2}],
    "specdec++": [{"min": 1, "max": 2}],
    "sps-tree": [
        {"width": 2, "depth": 1, "draw_mode": "deterministic"},
        {"shape": "dynamic", "width": 2, "depth": 2},
    ],
    "rsd-c": [{"width": 2, "depth": 1}],
    "rsd-s": [{"width": 2, "depth": 1}],
    "sequoia": [{"width": 2, "depth": 2, "nodes": 2, "profile": 1}],
    "rest": [{"longest": 2, "shortest": 1, "depth": 2, "nodes": 4}],
    "layerskip": [{"length": 1}, {"length": 2}],
    "del": [{"length": 1}, {"length": 2, "keep": 0.0}],
    "swift": [{"depth": 1, "width": 2, "skip": skip} for skip in (0.45, 0.9)],
    "dyspec": [{"nodes": 2}, {"nodes": 3, "growth": "threshold", "depth": 1}],
    "staged": [{"depth": 2, "nodes": 3, "width": 2, "lookahead": 1}],
    "mirror": [{"length": 1, "candidates": 1}],
    "ssd": [{"length": 1, "guesses": 1}],
    "eagle": [{"depth": 2, "nodes": 6}],
    "eagle2": [{"nodes": 4, "depth": 2, "width": 2}],
    "eagle3": [{"nodes": 4, "depth": 1, "width": 2}],
    "medusa": [{"nodes": 4}],
    "hydra": [{"nodes": 4, "width": 2}],
    "hydra++": [{"nodes": 4, "width": 2, "depth": 2}],
    "clover": [{"nodes": 4, "width": 2, "depth": 2}],
    "hidden-transfer": [{"nodes": 4}],
    "p-eagle": [{"length": 1}, {"length": 2}],
    "space": [{"length": 1}, {"length": 2}],
    "chimera": [{"depth": 2, "nodes": 6}],
    "falcon": [{"depth": 2, "nodes": 6}],
    "mtp": [{"length": 2}, {"length": "confidence", "max": 2}],
    "dflash": [{"length": 2}],
    "pard": [{"length": 2}],
    "tli": [{"length": 2}],
    "osd": [{"length": 2}],
    "s2d": [{"length": 2, "threshold": 0.5}, {"length": 2, "exits": (1,), "threshold": 0.6}],
    "uag": [{"length": 2, "behind": 1}],
    "omnidraft": [{"length": 2}],
    "pld": [{"ngram": 2, "length": 1}, {"ngram": 2, "length": 2, "rule": "transformers"}],
}
"""Parameters for which all outcomes can be enumerated. Other methods use their defaults."""


TREES = (
    "sps-tree",
    "rsd-c",
    "rsd-s",
    "sequoia",
    "dyspec",
    "swift",
    "rest",
    "token-recycling",
    "lookahead",
    "stand",
    "staged",
    "eagle",
    "eagle2",
    "eagle3",
    "medusa",
    "hydra",
    "hydra++",
    "clover",
    "hidden-transfer",
    "chimera",
    "falcon",
)
"""Methods that draft trees, which block verification refuses."""


def list_configurations():
    """List every method that is lossless under rejection, with each of its parameter sets."""
    for name, entry in registry.built_in_methods().items():
        method = registry.load(name)
        for params in [] if entry.peer else CONFIGURED.get(name, [{}]):
            make = partial(method, method.Params(**params))
            if make().guarantee("rejection") in ("exact_tokens", "exact_law"):
                yield pytest.param(make, id="-".join(map(str, (name, *params.values()))))


NARROWED = ("pearl", "stand")
"""Methods with very many outcomes per step.

Three tokens are enumerated with top-k 2, and two tokens without.
"""


def narrowed(make, sampling):
    return replace(sampling, top_k=2) if make.func.name in NARROWED else sampling


CASES = list(list_configurations())


def test_swift_is_enumerated_with_skipped_sublayers(open_session, pair):
    """Skip one of four sublayers, and three of them, so that some of the draft is rejected."""
    for params, share in zip(CONFIGURED["swift"], (0.875, 0.625), strict=True):
        method = registry.load("swift")
        session = open_session(*pair("peaked"), prompt=PROMPT, sampling=PLAIN, budget=40)
        steps = list(method(method.Params(**params)).generate(session))
        drafting = {f.share for step in steps for f in step.forwards if f.role == "draft"}
        assert drafting == {share}
        assert 0 < sum(len(step.outcome.path) for step in steps) < len(steps)


def pair_cases(cases, all_of):
    """Pair each case with one of several values, in rotation. The audit tests the other
    combinations."""
    for at, case in enumerate(cases):
        yield pytest.param(*case.values, all_of[at % len(all_of)], id=case.id)


METHODS = pytest.mark.parametrize("make", CASES)
CHAINS = [case for case in CASES if case.values[0].func.name not in TREES]
PROMPT = (1, 0, 2, 1, 0)  # the suffix (1, 0) occurs twice, so that a lookup finds it
PLAIN = Sampling("rejection", 1.0)
SAMPLINGS = {
    "T=1": PLAIN,
    "T=0.5": Sampling("rejection", 0.5),
    "T=2 top-k 2": Sampling("rejection", 2.0, top_k=2),
    "T=0.8 top-p 0.7": Sampling("rejection", 0.8, top_p=0.7),
    "T=1.5 top-k 3 top-p 0.9": Sampling("rejection", 1.5, top_k=3, top_p=0.9),
}


def distribution_of_target(table, sampling, eos=(), length=3):
    """Return the distribution of the first `length` tokens after PROMPT, computed from the
    table."""
    return Reference(table, sampling).joint_distribution(PROMPT, eos, length)


@pytest.fixture
def distribution_of_method(open_session, open_workspace, exact_distribution):
    """Function that returns the distribution of the first tokens that a method commits after
    PROMPT."""

    def walk(method, pair, sampling, budget=6, eos=(), length=3):
        shared = open_workspace(*pair, len(PROMPT) + budget)

        def run(random):
            request = {"prompt": PROMPT, "sampling": sampling, "budget": budget, "eos": eos}
            session = open_session(*pair, workspace=shared, random=random, **request)
            for _ in method.generate(session):
                if len(session.output()) >= length:
                    break
            return tuple(session.output()[:length])

        return exact_distribution(run)

    return walk


@pytest.fixture
def pair():
    """Function that makes the tables of a target and a draft, by their relation."""

    def make(kind, vocab=3) -> tuple[Tensor, Tensor]:
        target, draft = pair_of("near" if kind == "cut" else kind, vocab)
        if kind == "cut":
            draft[..., 0] = -math.inf
        return target, draft

    return make


# ---- exactness ----------------------------------------------------------------------------------


KINDS = ("peaked", "flat", "near", "equal", "disjoint", "cut")


def list_crossed_cases():
    """Combine every method with one kind of pair and one sampling, in rotation.

    Together they cover every pair with every sampling. tests/audit/test_checks.py runs the other
    combinations.
    """
    for at, case in enumerate(CASES):
        kind = KINDS[at % len(KINDS)]
        name = list(SAMPLINGS)[at // len(KINDS) % len(SAMPLINGS)]
        yield pytest.param(*case.values, kind, name, id=f"{case.id}-{kind}-{name}")


@pytest.mark.smoke
@pytest.mark.parametrize(("make", "kind", "sampling"), list(list_crossed_cases()))
def test_the_first_three_tokens_follow_the_targets_distribution(
    distribution_of_method, pair, make, kind, sampling
):
    tables = pair(kind, vocab=4 if kind == "disjoint" else 3)
    sampling = narrowed(make, SAMPLINGS[sampling])
    distribution = distribution_of_method(make(), tables, sampling)
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-9)
    assert total_variation(distribution, distribution_of_target(tables[0], sampling)) < 1e-9


@pytest.mark.parametrize("name", NARROWED)
def test_the_first_two_tokens_follow_it_without_top_k(distribution_of_method, pair, name):
    tables = pair("near")
    distribution = distribution_of_method(registry.build(name, {}), tables, PLAIN, length=2)
    assert total_variation(distribution, distribution_of_target(tables[0], PLAIN, length=2)) < 1e-9


ENDINGS = [((0,), 6), ((0, 2), 6), ((2,), 1), ((2,), 2), ((1,), 3)]


@pytest.mark.full
@pytest.mark.parametrize(("make", "ending"), [*pair_cases(CASES, ENDINGS)])
def test_eos_and_budget_do_not_change_the_distribution(distribution_of_method, pair, make, ending):
    (eos, budget), tables, sampling = ending, pair("near"), narrowed(make, PLAIN)
    distribution = distribution_of_method(make(), tables, sampling, budget=budget, eos=eos)
    expected = distribution_of_target(tables[0], sampling, eos, length=min(3, budget))
    assert total_variation(distribution, expected) < 1e-9


def test_a_longer_draft_over_a_larger_vocabulary_is_exact(distribution_of_method, pair):
    sampling = Sampling("rejection", 0.7, top_k=2)
    tables = pair("near", vocab=5)
    distribution = distribution_of_method(Sps(SpsParams(length=3)), tables, sampling, eos=(4,))
    assert total_variation(distribution, distribution_of_target(tables[0], sampling, (4,))) < 1e-9


@pytest.mark.full
@pytest.mark.parametrize(("make", "kind"), [*pair_cases(CHAINS, ("peaked", "near", "disjoint"))])
def test_block_verification_has_the_targets_distribution(distribution_of_method, pair, make, kind):
    sampling = narrowed(make, Sampling("block", 0.8, top_k=3))
    tables = pair(kind, vocab=4 if kind == "disjoint" else 3)
    distribution = distribution_of_method(make(), tables, sampling, eos=(2,))
    assert total_variation(distribution, distribution_of_target(tables[0], sampling, (2,))) < 1e-9


# ---- planted faults: the same test finds them ----------------------------------------------------


@pytest.mark.parametrize("fault", [UnwarpedDistribution, GreedyDraft])
def test_a_method_with_a_wrong_q_is_found(distribution_of_method, pair, fault):
    sampling, tables = SAMPLINGS["T=0.5"], pair("flat")
    distribution = distribution_of_method(fault(SpsParams(length=1)), tables, sampling)
    assert total_variation(distribution, distribution_of_target(tables[0], sampling)) > 1e-3


@pytest.mark.parametrize(
    ("function", "faulty"),
    [
        ("residual", residual_from_p),
        ("residual", lambda p, q: torch.where(p > q, p, 0.0).softmax(-1)),
        ("rejection", accept_more_likely),
    ],
    ids=["rejected tokens redrawn from p", "residual not p - q", "accepted where p exceeds q"],
)
def test_a_faulty_verifier_is_found(distribution_of_method, pair, monkeypatch, function, faulty):
    tables = pair("peaked")
    monkeypatch.setattr(verify, function, faulty)
    distribution = distribution_of_method(Sps(SpsParams(length=1)), tables, PLAIN)
    assert total_variation(distribution, distribution_of_target(tables[0], PLAIN)) > 1e-3


# ---- acceptance ---------------------------------------------------------------------------------


def overlap(tables, sampling, before, last):
    """Return the acceptance probability in a context: the sum of min(p, q)."""
    p, q = (warp(table[before, last], sampling) for table in tables)
    return torch.minimum(p, q).sum().item()


@pytest.mark.parametrize("kind", ["peaked", "flat", "near"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_acceptance_counts_agree_with_the_overlap_of_the_distributions(
    open_session, pair, kind, sampling
):
    tables = pair(kind, vocab=5)
    session = open_session(*tables, prompt=PROMPT, sampling=sampling, budget=500)
    accepted, expected, variance = 0, 0.0, 0.0
    for step in Sps(SpsParams(length=3)).generate(session):
        text = session.tokens()
        root = len(text) - len(step.outcome.committed)
        context = [*text[:root], *step.draft.tokens.tolist()]
        for level in range(step.outcome.tested):
            chance = overlap(tables, sampling, *context[root + level - 2 : root + level])
            expected += chance
            variance += chance * (1 - chance)
        accepted += len(step.outcome.path)
    assert abs(accepted - expected) <= 3 * math.sqrt(variance) + 1e-9


@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("kind", ["flat", "near"])
def test_mat_agrees_with_the_formula_where_acceptance_is_independent(
    open_session, pair, kind, length
):
    # All contexts share one distribution, so all levels have one acceptance rate (Leviathan et al.,
    # equation 1).
    tables = tuple(table[:1, :1].expand_as(table) for table in pair(kind, vocab=5))
    a = overlap(tables, PLAIN, 0, 0)
    session = open_session(*tables, prompt=PROMPT, sampling=PLAIN, budget=2500)
    steps = Sps(SpsParams(length=length)).generate(session)
    committed = torch.tensor(
        [len(step.outcome.committed) for step in steps if step.draft.levels == length]
    ).double()
    mean = (1 - a ** (length + 1)) / (1 - a)
    assert abs(committed.mean() - mean) < 3 * committed.std() / math.sqrt(len(committed))


@pytest.mark.parametrize("kind", ["peaked", "flat"])
def test_a_draft_with_the_targets_distribution_is_never_rejected(
    distribution_of_method, pair, kind, open_session
):
    target, _ = pair(kind, vocab=5)
    session = open_session(target, target, prompt=PROMPT, sampling=SAMPLINGS["T=0.5"], budget=61)
    steps = list(Sps(SpsParams(length=4)).generate(session))
    assert [len(step.outcome.committed) for step in steps] == [5] * 12


# ---- with a grammar ------------------------------------------------------------------------------


def fitting(text):
    """Return the tokens that the grammar allows after a text. Token 2 ends the text."""
    return ({0, 1}, {0, 1, 2}, {1, 2})[(len(text) + sum(text)) % 3]


def held(sampling):
    return replace(sampling, processor=GrammarMask(Matcher(fitting), [2]))


def processed(table, output):
    """Return a row of the target's table without the forbidden tokens."""
    before, last = (*PROMPT, *output)[-2:]
    forbidden = torch.tensor([token not in fitting(output) for token in range(3)])
    return table[before, last].masked_fill(forbidden, -math.inf)


def processed_distribution(table, sampling, length=3):
    """Return the distribution of allowed texts, as `distribution_of_target`."""
    distribution, due = defaultdict(float), [((), 1.0)]
    while due:
        output, weight = due.pop()
        if len(output) == length or 2 in output:
            distribution[output] += weight
            continue
        for token, p in enumerate(warp(processed(table, output), sampling).tolist()):
            if p > 0:
                due.append(((*output, token), weight * p))
    return distribution


# Swift's parameters with more draws take as long as all other cases.
@pytest.mark.full
@pytest.mark.parametrize("make", [case for case in CASES if case.id != "swift-1-2-0.45"])
def test_under_a_grammar_the_distribution_is_the_masked_targets(distribution_of_method, pair, make):
    tables, sampling = pair("near"), narrowed(make, PLAIN)
    distribution = distribution_of_method(make(), tables, held(sampling), budget=4, eos=(2,))
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-9)
    assert total_variation(distribution, processed_distribution(tables[0], sampling)) < 1e-9


@pytest.mark.parametrize("name", ["sps", "pld"])
def test_block_verification_has_the_masked_distribution(distribution_of_method, pair, name):
    tables, sampling = pair("near"), Sampling("block", 0.8)
    distribution = distribution_of_method(
        registry.build(name, {}), tables, held(sampling), budget=4, eos=(2,)
    )
    assert total_variation(distribution, processed_distribution(tables[0], sampling)) < 1e-9


@pytest.mark.full
@METHODS
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_under_a_grammar_tokens_are_the_masked_targets(open_session, pair, make, rule):
    tables = pair("near")
    sampling = held(Sampling() if rule == "greedy" else Sampling(rule, 0.9, seed=3))
    session = open_session(*tables, prompt=PROMPT, sampling=sampling, budget=24, eos=(2,))
    due, noise = [], session.noise(0, 24)
    while len(due) < 24 and 2 not in due:
        scores = processed(tables[0], due)
        if rule == "coupled":
            scores = warp(scores, sampling).log() + noise[len(due)]
        due.append(int(scores.argmax()))
    for _ in make().generate(session):
        pass
    assert session.output() == due


def test_a_mask_that_ignores_the_path_is_found(distribution_of_method, pair, monkeypatch):
    """The faulty mask depends on the output only, not on the draft."""
    whole = RequestGrammarMask.__call__

    def forgets(self, rows, output, tokens, parents=None):
        root = whole(self, rows[:1], output, ())
        return rows.masked_fill(root.isinf(), -math.inf)

    tables = pair("near")
    monkeypatch.setattr(RequestGrammarMask, "__call__", forgets)
    distribution = distribution_of_method(
        Sps(SpsParams(length=2)), tables, held(PLAIN), budget=4, eos=(2,)
    )
    assert total_variation(distribution, processed_distribution(tables[0], PLAIN)) > 1e-3
