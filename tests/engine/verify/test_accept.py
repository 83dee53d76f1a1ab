"""Accept rules that are not exact: which tokens they accept, and how verification uses them."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.sps import Sps, SpsParams
from specbench_cli.engine import host
from specbench_cli.engine.types import Draft
from specbench_cli.engine.verify import decide
from specbench_cli.engine.verify.accept import (
    NEVER,
    AcceptParams,
    AcceptRule,
    DraftContext,
    Lenient,
    RandomAccept,
    Threshold,
    Typical,
)
from specbench_cli.engine.verify.decide import relaxed_mask
from specbench_cli.engine.verify.random import SeededRandom
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import ROOT, build_tree
from specbench_cli.errors import MethodFault

CPU = torch.device("cpu")
OFF = [Threshold(1.5), Typical(1.0, NEVER), Lenient(1.0), RandomAccept(0.0)]
RULES = [Threshold(0.2), Typical(0.3, 0.6), Lenient(0.5), RandomAccept(0.4)]
SAMPLINGS = [Sampling(), Sampling("coupled", 0.9, seed=1), Sampling("rejection", 0.9, seed=1)]
SHAPES = [(-1, 0, 1), (-1, -1, 0), (-1, -1, 0, 0, 1), (-1, -1, -1, 2, 2)]
NAMED = pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda each: each.rule)


def distributions(n, vocab=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(n, vocab, generator=generator, dtype=torch.float64)).softmax(-1)


def chance(seed=0):
    return SeededRandom(seed, "p", 0, 1, CPU)


# ---- rules --------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.floats(0, 1.1), st.floats(0, 2))
@settings(max_examples=60)
def test_rules_are_their_inequalities(seed, epsilon, delta):
    p = distributions(5, seed=seed)
    tokens = torch.tensor([seed % 4, 1, 2, 3, 0])
    rows = [list(map(float, row)) for row in p]
    entropies = [-math.fsum(x * math.log(x) for x in row) for row in rows]
    own = [row[token] for row, token in zip(rows, tokens.tolist(), strict=True)]
    assert Threshold(epsilon).lets_pass(p, tokens).tolist() == [x >= epsilon for x in own]
    assert Typical(epsilon, delta).lets_pass(p, tokens).tolist() == [
        x > min(epsilon, delta * math.exp(-entropy))
        for x, entropy in zip(own, entropies, strict=True)
    ]
    assert RandomAccept(0.1).lets_pass(p, tokens).tolist() == [True] * 5


def test_typical_acceptance_adapts_epsilon_to_the_entropy():
    p = distributions(50, seed=3)
    tokens = torch.arange(50) % 4
    above, typical = (rule.lets_pass(p, tokens) for rule in (Threshold(0.3001), Typical(0.3, 9.0)))
    assert not (above & ~typical).any()
    sure = torch.tensor([[1.0, 0.0, 0.0]])
    for token, passes in ((0, True), (1, False)):
        assert Typical(0.3, 0.5).lets_pass(sure, torch.tensor([token])).tolist() == [passes]


@pytest.mark.parametrize(
    ("rule", "off"),
    [*((rule, True) for rule in OFF), (Threshold(1.0), False), (Typical(1.0, 0.3), False)],
    ids=str,
)
def test_a_rule_that_accepts_nothing_is_off(rule, off):
    assert rule.is_exact == off


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_has_its_control(rule):
    assert rule.guarantee == "quality_only"
    assert rule.control(0.25) == RandomAccept(0.25)
    assert str(rule).startswith(f"{rule.name}(")


def test_one_random_number_decides_for_all_siblings():
    tree, seen = build_tree((-1, -1, 0, 0, 1)), set()
    for seed in range(40):
        rule, tokens = RandomAccept(0.5), torch.tensor([0, 1, 2, 3, 0])
        passes = relaxed_mask(rule, distributions(6), Draft(tokens), tree, chance(seed)).tolist()
        assert passes[0] == passes[1] and passes[2] == passes[3]
        seen.add(tuple(passes))
    assert len(seen) == 8


@pytest.mark.parametrize("wrong", [torch.ones(2), torch.ones(3, dtype=torch.bool)])
def test_a_rule_that_returns_a_wrong_shape_is_at_fault(wrong):
    @dataclass(frozen=True)
    class Wrong(AcceptRule):
        name: ClassVar[str] = "wrong"

        def lets_pass(self, p, tokens):
            return wrong

    with pytest.raises(MethodFault, match=r"accept rule 'wrong': .* for 2 tokens"):
        relaxed_mask(Wrong(), distributions(3), Draft(torch.tensor([0, 1])), None, chance())


class RecordingRandom:
    """Random source that records the probabilities of its trials."""

    def bernoulli(self, chances):
        self.chances = chances
        return torch.ones_like(chances, dtype=torch.int64)


@given(st.integers(0, 1000), st.floats(0.01, 0.99), st.booleans())
@settings(max_examples=60)
def test_lenience_accepts_as_if_p_were_multiplied(seed, factor, drawn):
    p, q, tokens, trials = (
        distributions(5, seed=seed),
        distributions(5, seed=seed + 1),
        torch.tensor([0, 1, 2, 3, 0]),
        RecordingRandom(),
    )
    Lenient(factor).relaxed_mask(
        DraftContext(tokens, range(-1, 4), p, q if drawn else None), trials
    )
    at = tokens[:, None]
    ratio = (p.gather(1, at) / (q.gather(1, at) if drawn else 1))[:, 0]
    accepted = ratio.clamp_max(1)
    total = accepted + (1 - accepted) * trials.chances
    due = (ratio / factor).clamp_max(1)
    assert torch.allclose(total, torch.where(accepted < 1, due, 1.0), atol=1e-9)
    assert ((trials.chances >= 0) & (trials.chances <= 1)).all()


@given(st.integers(0, 1000), st.floats(0, 1))
@settings(max_examples=40)
def test_for_deterministic_tokens_lenience_accepts_within_its_factor_of_the_best(seed, factor):
    p, tokens = distributions(5, seed=seed), torch.tensor([0, 1, 2, 3, 0])
    own = p.gather(1, tokens[:, None])[:, 0]
    places = DraftContext(tokens, range(-1, 4), p, scores=p.log())
    passes = Lenient(factor).relaxed_mask(places, chance())
    for passed, x, best in zip(passes.tolist(), own.tolist(), p.amax(1).tolist(), strict=True):
        assert passed == (x >= factor * best) or x == pytest.approx(factor * best)


@given(st.integers(0, 1000), st.floats(0.01, 0.99), st.floats(0.01, 2))
@settings(max_examples=60)
def test_no_rule_accepts_more_if_it_is_stricter(seed, a, b):
    p, tokens = distributions(5, seed=seed), torch.tensor([0, 1, 2, 3, 0])
    places = DraftContext(tokens, range(-1, 4), p, distributions(5, seed=seed + 1), p.log())
    for rule in (Threshold(a), Typical(a, b), Lenient(a)):
        for _ in range(4):
            strict = rule.stricter
            passes, fewer = (each.relaxed_mask(places, chance()) for each in (rule, strict))
            assert not (fewer & ~passes).any()
            rule = strict
    assert RandomAccept(0.5).stricter is None


# ---- parameters and guarantee -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "rule", "dumped"),
    [
        ({}, None, {}),
        ({"epsilon": 0.5}, None, {}),
        ({"accept": "threshold"}, Threshold(0.09), {"accept": "threshold", "epsilon": 0.09}),
        ({"accept": "random", "rate": 0.5}, RandomAccept(0.5), {"accept": "random", "rate": 0.5}),
        ({"accept": "typical"}, Typical(0.09, 0.3),
         {"accept": "typical", "epsilon": 0.09, "delta": 0.3}),
    ],
    ids=str,
)  # fmt: skip
def test_parameters_make_a_rule_and_list_what_it_uses(values, rule, dumped):
    params = AcceptParams(**values)
    assert params.rule == rule
    assert params.model_dump() == dumped
    assert AcceptParams(**params.model_dump()).rule == rule


def test_an_accept_rule_makes_a_method_lossy():
    promises = {
        accept: [Sps(SpsParams(accept=accept)).guarantee(rule) for rule in ("greedy", "rejection")]
        for accept in ("exact", "threshold", "typical", "random")
    }
    lossy = ["quality_only"] * 2
    assert promises.pop("exact") == ["exact_tokens", "exact_law"]
    assert list(promises.values()) == [lossy] * 3
    off = Sps(SpsParams(accept="threshold", epsilon=1.5))
    assert off.guarantee("coupled") == "exact_tokens"


def test_the_guarantee_is_the_weakest_of_rule_and_sampling():
    class Bounded(Threshold):
        guarantee = "bounded"

    class Boasts(Threshold):
        guarantee = "exact_tokens"

    for rule, greedy, drawn in ((Bounded(0.5), "bounded", "bounded"),
                                (Boasts(0.5), "exact_tokens", "exact_law")):  # fmt: skip
        method = type("Own", (Sps,), {"accept": rule})()
        assert (method.guarantee("greedy"), method.guarantee("rejection")) == (greedy, drawn)


# ---- deterministic tokens: brute force -----------------------------------------------------------


def by_hand(parents, ids, choices, passes, order=None):
    """Return path, origins and the following token, as the documentation defines them."""
    node, path, origin = ROOT, [], []
    while True:
        children = [c for c in (order or range(len(ids))) if parents[c] == node]
        exact = [child for child in children if ids[child] == choices[node + 1]]
        may = [child for child in children if passes[child]]
        if not exact and not may:
            word = "recovered" if children else "bonus" if path else "plain"
            return tuple(path), (*origin, word), choices[node + 1]
        node = (exact or may)[0]
        path.append(node)
        origin.append("accepted" if exact else "relaxed")


@st.composite
def trees(draw, most=6):
    m = draw(st.integers(0, most))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(m))
    small = st.integers(0, 2)
    ids, passes = ([draw(each) for _ in range(m)] for each in (small, st.booleans()))
    choices = [draw(small) for _ in range(m + 1)]
    return parents, ids, choices, passes, tuple(draw(st.permutations(range(m))))


@given(trees())
@settings(max_examples=300)
def test_a_deterministic_tree_is_verified_as_documented(case):
    parents, ids, choices, passes, order = case
    draft = Draft(torch.tensor(ids, dtype=torch.int64), parents, order=order)
    tree = build_tree(parents, order)
    outcome, root = decide.decide_by_choice(
        draft, tree, torch.tensor(choices), torch.tensor(passes)
    )
    path, origin, last = by_hand(parents, ids, choices, passes, order)
    assert (outcome.path, outcome.origin) == (path, origin)
    assert outcome.committed == (*(ids[node] for node in path), last)
    assert root.tolist() == [last]
    assert outcome.tested == len(path) + (origin[-1] == "recovered")


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=6), st.data())
@settings(max_examples=200)
def test_a_deterministic_chain_is_verified_as_documented(drafted, data):
    ids, passes = [list(each) for each in zip(*drafted, strict=True)] or [[], []]
    choices = [data.draw(st.integers(0, 2)) for _ in range(len(ids) + 1)]
    draft = Draft(torch.tensor(ids, dtype=torch.int64))
    may = torch.tensor(passes, dtype=torch.bool)
    outcome, root = decide.decide_by_choice(draft, None, torch.tensor(choices), may)
    parents = tuple(range(-1, len(ids) - 1))
    path, origin, last = by_hand(parents, ids, choices, passes)
    assert (outcome.path, outcome.origin, outcome.committed[-1]) == (path, origin, last)
    assert root.tolist() == [last]
    if ids:  # without the last row
        short, _ = decide.decide_by_choice(draft, None, torch.tensor(choices[:-1]), may)
        whole = len(path) == len(ids)
        assert short.path == path
        assert short.origin == (origin[:-1] if whole else origin)


# ---- drawn tokens: the distribution by hand ------------------------------------------------------


def add(distribution, key, weight):
    if weight > 1e-15:
        distribution[key] += weight


def chain_distribution(ids, q, p, passes):
    """Return the probability of each (origins, following token), level by level."""
    distribution, weight = defaultdict(float), {(): 1.0}
    for level, token in enumerate(ids):
        taken = min(1.0, float(p[level, token] / q[level, token]))
        rest = [max(0.0, float(a - b)) for a, b in zip(p[level], q[level], strict=True)]
        following = {}
        for origin, had in weight.items():
            following[*origin, "accepted"] = had * taken
            if passes[level]:
                following[*origin, "relaxed"] = had * (1 - taken)
            else:
                for other, mass in enumerate(rest):
                    share = mass / sum(rest) if sum(rest) else 0.0
                    add(distribution, (*origin, "recovered", other), had * (1 - taken) * share)
        weight = following
    for origin, had in weight.items():
        for other, mass in enumerate(p[len(ids)].tolist()):
            add(distribution, (*origin, "bonus", other), had * mass)
    return distribution


@given(st.integers(0, 200), st.integers(1, 3), st.lists(st.booleans(), min_size=3, max_size=3))
@settings(max_examples=25)
def test_a_drawn_chain_has_the_documented_distribution(exact_distribution, seed, m, passes):
    p, q = distributions(m + 1, seed=2 * seed), distributions(m, seed=2 * seed + 1)
    ids = [(seed + level) % 4 for level in range(m)]
    may = torch.tensor(passes[:m])

    def run(random):
        draft = Draft(torch.tensor(ids), draw_mode="independent", q=q)
        outcome, root = decide.decide_by_draw(draft, None, p, random, "rejection", may)
        assert outcome.committed[:-1] == tuple(ids[: len(outcome.path)])
        assert root.tolist() == [outcome.committed[-1]]
        return (*outcome.origin, outcome.committed[-1])

    found, due = exact_distribution(run), chain_distribution(ids, q, p, passes)
    assert found.keys() == due.keys()
    for key, weight in due.items():
        assert found[key] == pytest.approx(weight, abs=1e-9)


def node_distribution(r, children, ids, distribution_of_child):
    """Return the probability of each accepted child of a node, and the residual."""
    accepted, open_ = {}, 1.0
    for child in children:
        d = distribution_of_child(child)
        taken = min(1.0, r[ids[child]] / d[ids[child]]) if d[ids[child]] else 0.0
        accepted[child] = open_ * taken
        open_ *= 1 - taken
        excess = [max(0.0, a - b) for a, b in zip(r, d, strict=True)]
        r = [x / sum(excess) for x in excess] if sum(excess) > 1e-12 else r
    return accepted, open_, r


@pytest.mark.parametrize("how", ["deterministic", "independent"])
@pytest.mark.parametrize("parents", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_drawn_tree_has_the_documented_distribution(exact_distribution, how, parents, seed):
    m = len(parents)
    p, rows = distributions(m + 1, seed=seed), distributions(m + 1, seed=seed + 50)
    q = torch.stack([rows[parent] for parent in parents])  # siblings share their distribution
    ids = [(node + seed) % 3 for node in range(m)]
    passes = [(node + seed) % 2 == 0 for node in range(m)]
    tree, due = build_tree(parents), defaultdict(float)

    def walk(node, path, origin, weight):
        children, r = tree.children[node], p[node + 1].tolist()
        if how == "deterministic":
            accepted = {}
            for child in children:
                if ids[child] not in [ids[other] for other in accepted]:
                    accepted[child] = r[ids[child]]
            taken = {ids[child] for child in accepted}
            left = 1 - sum(accepted.values())
            rest = [0.0 if x in taken else mass / left for x, mass in enumerate(r)]
        else:
            accepted, left, rest = node_distribution(
                r, children, ids, lambda child: q[child].tolist()
            )
        for child, chance_ in accepted.items():
            if weight * chance_ > 0:
                walk(child, (*path, child), (*origin, "accepted"), weight * chance_)
        passed = next((child for child in children if passes[child]), None)
        if passed is not None:
            if weight * left > 1e-15:
                walk(passed, (*path, passed), (*origin, "relaxed"), weight * left)
            return
        word = "recovered" if children else "bonus"
        for token, mass in enumerate(rest):
            add(due, (path, (*origin, word), token), weight * left * mass)

    walk(ROOT, (), (), 1.0)

    def run(random):
        distribution = {"draw_mode": "independent", "q": q} if how == "independent" else {}
        draft = Draft(torch.tensor(ids), parents, **distribution)
        outcome, _ = decide.decide_by_draw(
            draft, tree, p, random, "rejection", torch.tensor(passes)
        )
        return outcome.path, outcome.origin, outcome.committed[-1]

    found = {key: weight for key, weight in exact_distribution(run).items() if weight > 1e-15}
    assert found.keys() == due.keys()
    for key, weight in due.items():
        assert found[key] == pytest.approx(weight, abs=1e-9)


# ---- the off position ---------------------------------------------------------------------------


@NAMED
@pytest.mark.parametrize("rule", OFF, ids=str)
@pytest.mark.parametrize("parents", [None, (-1, -1, 0, 0)], ids=["chain", "tree"])
def test_at_its_off_position_a_rule_changes_no_token_and_no_draw(
    open_session, random_table, sampling, rule, parents
):
    def decoded(*accept):
        session = open_session(random_table(5, 1), random_table(5, 2), budget=30, sampling=sampling)
        session.reserve(8)
        session.prefill()
        outcomes = []
        while session.max_draft_length() > 4:
            draft = session.tree((0, 1, 2, 3), parents) if parents else session.chain((1, 2))
            outcome = session.verify(draft, session.score(draft), *accept)
            outcomes.append(session.commit(outcome))
        return outcomes, session.random.categorical(torch.full((8, 9), 1 / 9)).tolist()

    assert decoded(rule) == decoded()


@pytest.mark.parametrize("seed", range(20))
def test_a_rule_that_never_accepts_leaves_a_chain_unchanged(seed):
    p, q = distributions(6, seed=seed).float(), distributions(5, seed=seed + 30).float()
    draft = Draft(chance(seed).categorical(q), draw_mode="independent", q=q)

    def decided(passes):
        random = chance(seed)
        outcome, _ = decide.decide_by_draw(draft, None, p, random, "rejection", passes)
        return outcome, float(random.categorical(distributions(1)))

    assert decided(torch.zeros(5, dtype=torch.bool)) == decided(None)


# ---- sessions -----------------------------------------------------------------------------------


@NAMED
@pytest.mark.parametrize("rule", [Threshold(0.0), RandomAccept(1.0)], ids=str)
def test_a_rule_that_accepts_all_accepts_every_draft(open_session, random_table, sampling, rule):
    session = open_session(random_table(5, 1), random_table(5, 2), budget=20, sampling=sampling)
    method = type("Lax", (Sps,), {"accept": rule})(SpsParams(length=3))
    steps = list(method.generate(session))
    words = {word for step in steps for word in step.outcome.origin}
    assert words == {"accepted", "relaxed", "bonus"}
    assert all(len(step.outcome.path) == step.draft.levels for step in steps)


def test_under_greedy_decoding_p_is_softmax_of_the_logits(open_session, random_table):
    seen = []

    @dataclass(frozen=True)
    class Spy(AcceptRule):
        name: ClassVar[str] = "spy"

        def lets_pass(self, p, tokens):
            seen.append((p, tokens))
            return torch.zeros_like(tokens, dtype=torch.bool)

    table = random_table(5, 1)
    for sampling in (Sampling(), Sampling("coupled", 0.5, top_k=3)):
        session = open_session(table, budget=9, sampling=sampling)
        session.prefill()
        draft = session.tree((1, 2, 3), (-1, -1, 1))
        rows = session.score(draft)
        session.verify(draft, rows, Spy())
        p, tokens = seen.pop()
        due = rows.softmax(-1) if sampling.rule == "greedy" else session.warp(rows)
        assert torch.equal(p, due[[0, 0, 2]]) and torch.equal(tokens, draft.tokens)


@NAMED
def test_an_output_with_a_rule_is_cut_like_any_other(open_session, random_table, sampling):
    for budget in range(1, 9):
        session = open_session(
            random_table(5, 3), random_table(5, 4), budget=budget, eos=[4], sampling=sampling
        )
        method = Sps(SpsParams(length=4, accept="random", rate=0.7))
        steps = list(method.generate(session))
        assert 1 + sum(len(step.outcome.committed) for step in steps) == len(session.output())
        assert session.finish is not None and 4 not in session.output()[:-1]


def test_block_verification_and_replay_ignore_the_rule(open_session, random_table):
    block = Sampling("block", 0.9)
    for how, words in (({"sampling": block}, "block verification decides"),
                       ({"recording": [1, 2, 3, 4]}, "this run replays tokens")):  # fmt: skip
        session = open_session(random_table(5, 1), random_table(5, 2), budget=9, **how)
        with pytest.raises(MethodFault, match=f"^sps, accept rule 'typical' .*{words}") as fault:
            list(Sps(SpsParams(accept="typical")).generate(session))
        assert "--verify" in fault.value.hint
        off = Sps(SpsParams(accept="threshold", epsilon=2.0))
        if how == {"sampling": block}:
            session = open_session(random_table(5, 1), random_table(5, 2), budget=9, **how)
            assert list(off.generate(session))


@pytest.mark.parametrize("sampling", [*SAMPLINGS], ids=lambda each: each.rule)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_chain_is_verified_with_one_wait(open_session, random_table, monkeypatch, sampling, rule):
    session = open_session(random_table(5, 1), random_table(5, 2), budget=40, sampling=sampling)
    session.prefill()
    draft = session.chain((1, 2, 3, 0))
    if sampling.draws:
        q = distributions(4, vocab=5).float()
        draft = replace(draft, draw_mode="independent", q=q)
    rows = session.score(draft)
    waits = []

    def waiting(name):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *rest: (waits.append(name), real(self, *rest))[1]
        )

    # As on a device, where several tensors come in one transfer.
    monkeypatch.setattr(host, "lists", host.read_together)
    for name in ("tolist", "item", "__bool__", "__int__", "__float__"):
        waiting(name)
    session.verify(draft, rows, rule)
    monkeypatch.undo()
    assert waits == ["tolist"]
