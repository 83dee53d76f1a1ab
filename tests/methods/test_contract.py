"""Requirements of every lossless method: vanilla's tokens, correct counters, correct states."""

from functools import partial

import pytest
import torch

from methods.mtp.method import MtpParams
from methods.sps import Sps, SpsParams
from specbench_cli import registry
from specbench_cli.audit.subject import max_draft_levels
from specbench_cli.engine.models.head import NORMED, Head, features
from specbench_cli.engine.types import Features, Outcome, Tokens
from specbench_cli.engine.verify.sampling import Sampling
from tests.audit.faults.methods import ForgetsNothing, OffByOne, SkipsAToken
from tests.audit.faults.trees import KeepsItsDraft, KeepsPredicted

GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.8, top_k=24, top_p=0.95, seed=3)
REJECTION = Sampling("rejection", 0.8, seed=3)
EXACT = pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
DRAWN = pytest.mark.parametrize("sampling", [REJECTION], ids=lambda s: s.rule)

SHORT = {"probe": 4, "checked": 5, "excess": 5, "limit": 2}
"""Takeovers."""

CONFIGURED = {
    "sps": [{"length": 1}, {}],
    "specdec++": [{"max": 6}],
    "sps-tree": [{"widths": (2, 2)}, {"shape": "dynamic", "nodes": 9}],
    "s2d": [{"length": 3, "threshold": 0.5}, {"length": 4, "threshold": 0.0}],
    "suffix": [{"depth": 12}, {"depth": 8, "shape": "tree", "scope": "prompt"}],
    "typical": [{"epsilon": 1.0, "delta": 1e9}],
    "lenient": [{"factor": 1.0, "length": 3}],
    "judge": [{"threshold": 1.0, "length": 4}],
    "cdsl": [{"weight": 0.0, "length": 4}, {"weight": 0.0, "mode": "cdlh"}],
    "specee": [{"threshold": 1.0}, {"threshold": 1.0, "gate": "random"}],
    "random-accept": [{"rate": 0.0, "length": 7}],
    "sam": [
        {"length": 10},
        {"length": 6, "beside": "draft", "threshold": 2, "bias": 1},
        {"length": 5, "beside": "eagle", "threshold": 2, "bias": 1},
    ],
    "rest": [{"shortest": 1, "nodes": 16}],
    "token-recycling": [{"nodes": 24, "depth": 4}],
    "stand": [{"nodes": 16, "depth": 4}],
    "sequoia": [{"profile": 4}],
    "layerskip": [{"exit": 1, "length": 3}, {"exit": 2, "length": 2}],
    "del": [{"length": 3}, {"length": 4, "stop": False, "keep": 0.5}],
    "swift": [{"depth": 4, "window": 6}],
    "dyspec": [{"nodes": 8}, {"growth": "threshold"}],
    "atts": [
        {"alpha": 1.0, "cap": n, "known": 4, "length": length} for n, length in ((5, 0), (9, 3))
    ],
    "speculative-thinking": [{"writer": "target", "cap": 9, "length": 3, **SHORT}],
    "specreason": [{"threshold": 10.0, "cap": 5}, {"threshold": 10.0, "cap": 9, "length": 3}],
    "eagle": [{}, {"nodes": 1}, {"shape": "chain", "depth": 3}],
    "eagle2": [
        {},
        {"nodes": 1, "depth": 1, "width": 1},
        {"nodes": 40, "depth": 3, "width": 9},
        {"nodes": "auto", "depth": 3},
    ],
    "eagle3": [{}, {"width": 1, "depth": 4}],
    "mtp": [
        {},
        {"length": 1},
        {"length": "confidence", "max": 6},
        {"length": "heuristic", "max": 6},
    ],
    "pld": [{}, {"ngram": 1, "length": 3}, {"ngram": 2, "length": 10, "rule": "transformers"}],
}
"""Parameters to test a method with. Other methods are tested with their defaults."""


def list_configurations():
    """List every lossless method with each of its parameter sets, as a function that makes it."""
    for name, entry in registry.built_in_methods().items():
        method = registry.load(name)
        for params in [] if entry.peer else CONFIGURED.get(name, [{}]):
            make = partial(method, method.Params(**params))
            if make().guarantee("greedy") == "exact_tokens":
                yield pytest.param(make, id="-".join(map(str, (name, *params.values()))))


LOSSLESS = list(list_configurations())
TURNS = {case.id: turn for turn, case in enumerate(LOSSLESS)}


def in_turn(request, prompts, n):
    """Return n of the prompts, in rotation over the methods, so that together they cover all."""
    turn = TURNS[request.node.callspec.id.partition("-")[2]]
    return [prompts[(n * turn + i) % len(prompts)] for i in range(n)]


METHODS = pytest.mark.parametrize("make", LOSSLESS)
DRAFTING = pytest.mark.parametrize(
    "make", [case for case in LOSSLESS if "draft" in case.values[0].func.needs]
)
LEARNING = pytest.mark.parametrize(
    "make", [case for case in LOSSLESS if case.values[0].func.state_scope != "prompt"]
)


def decode(method, session):
    """Return the output, after checking the counters of each step."""
    committed = 1
    for step in method.generate(session):
        accounts(session, step)
        committed += len(step.outcome.committed)
    assert committed == len(session.output())
    assert session.harness.text.origin[0] == "prefill"
    return session.output()


def accounts(session, step):
    outcome = step.outcome
    accepted = outcome.origin.count("accepted")
    assert accepted == len(outcome.path) <= outcome.tested <= step.draft.levels
    assert len(outcome.committed) == len(outcome.origin)
    assert accepted <= len(outcome.committed) <= accepted + 1
    ids = step.draft.tokens.tolist()
    assert [ids[node] for node in outcome.path] == list(outcome.committed[:accepted])
    # A fully accepted branch ends the path, even if other branches are deeper.
    parents = step.draft.parents or range(-1, step.draft.nodes - 1)
    if [-1, *outcome.path][-1] in parents and session.finish is None:
        assert outcome.tested == accepted + 1


def cut(ids, eos, budget):
    """Return where an output ends, by definition."""
    ends = [at + 1 for at, token in enumerate(ids) if token in eos]
    return ids[: min([*ends, budget])]


# ---- identity -----------------------------------------------------------------------------------


@pytest.mark.smoke
@METHODS
@EXACT
def test_the_output_is_that_of_plain_decoding(
    request, open_session, clear_prompts, plain, make, sampling
):
    """Use transformers, as in this whole file. tests/audit/test_checks.py uses tables, and also
    tests order and repetition."""
    for prompt in in_turn(request, clear_prompts(sampling, 16), 2):
        assert decode(make(), open_session(prompt, sampling)) == plain(prompt, sampling).ids


@pytest.mark.full
@DRAFTING
@EXACT
def test_an_unrelated_draft_model_does_not_change_the_output(
    request, open_session, clear_prompts, plain, make, sampling
):
    for prompt in in_turn(request, clear_prompts(sampling, 16), 1):
        output = decode(make(), open_session(prompt, sampling, draft="far"))
        assert output == plain(prompt, sampling).ids


@METHODS
@EXACT
def test_eos_and_budget_cut_the_output_and_change_nothing_before(
    request, open_session, clear_prompts, plain, make, sampling
):
    g = max_draft_levels(make().params, 5)
    turns = list(enumerate(clear_prompts(sampling, 6)))
    for turn, prompt in in_turn(request, turns, 3):
        ids = plain(prompt, sampling).ids
        budget = (1, 2, g, g + 1, g + 2, 40)[turn]
        for eos in ((), (ids[turn % 9],), (ids[turn % 17], ids[turn % 13])):
            if (eos, budget) == ((), 40):
                continue  # the first test
            output = decode(make(), open_session(prompt, sampling, eos=eos, budget=budget))
            assert output == cut(ids, eos, budget)


@pytest.mark.full
@DRAFTING
@EXACT
def test_a_draft_with_a_reduced_output_does_not_change_the_output(
    request, open_session, clear_prompts, plain, make, sampling
):
    for prompt in in_turn(request, clear_prompts(sampling, 16), 1):
        output = decode(make(), open_session(prompt, sampling, draft="cut"))
        assert output == plain(prompt, sampling).ids


@LEARNING
def test_a_request_of_a_learning_method_does_not_change_its_draws(open_session, make):
    """Outside of the session's memory; the audit's order check has the other rules and methods."""

    def decoded(method, prompt):
        session = open_session(prompt, REJECTION, budget=16)
        outcomes = [step.outcome for step in method.generate(session)]
        return session.output(), outcomes

    method = make()
    again = [decoded(method, prompt) for prompt in (30, 3)]
    assert again == [decoded(make(), prompt) for prompt in (30, 3)]


@METHODS
@DRAWN
def test_a_step_counts_what_it_drafted_tested_and_committed(request, open_session, make, sampling):
    """As it does in all decodings above, where tokens are chosen."""
    for prompt in in_turn(request, range(40), 2):
        decode(make(), open_session(prompt, sampling, eos=(7, 8)))


# ---- declarations of a method
# ---------------------------------------------------------------------


@pytest.mark.parametrize("name", registry.built_in_methods())
def test_the_registry_entry_agrees_with_the_class(name):
    entry, method = registry.built_in_methods()[name], registry.load(name)
    assert (method.name, method.peer, set(entry.needs)) == (name, entry.peer, set(method.needs))


@METHODS
def test_a_lossless_method_guarantees_tokens_or_under_rejection_the_distribution(make):
    promised = [make().guarantee(rule) for rule in ("greedy", "coupled", "rejection")]
    assert promised == ["exact_tokens", "exact_tokens", "exact_law"]


# ---- states are correct
# ---------------------------------------------------------------------------


def gap(ours, theirs):
    """Return the largest difference, as a share of the largest number."""
    return (ours - theirs).abs().max() / theirs.abs().max()


def read(session, decoder, rows):
    """Return what a decoder reads of the committed text, from its row 0 on."""
    ids = torch.tensor([session.tokens()])
    x = Tokens(ids[:, decoder.first : decoder.first + rows])
    if not isinstance(decoder, Head):
        return x
    target = session.target.decoder
    layers = [at for at in decoder.captured_layers if at != NORMED]
    out = target.forward(Tokens(ids[:, :rows]), target.new_state(rows), captured_layers=layers)
    return Features(x.ids, features(out, decoder.captured_layers, target)[None])


def last_row(x):
    if isinstance(x, Features):
        return Features(x.ids[:, -1:], x.rows[:, -1:])
    return Tokens(x.ids[:, -1:])


def audit(session):
    """Every state of the session against a computation from scratch over the committed tokens.

    Keys and values of all rows against the same decoder's in one forward, and the logits that
    follow them against its own: to 1e-5 of their scale. The target has a row for each committed
    token but the last; a head's are of the target's features.

    Returns:
        Each decoder with its rows and the logits that follow them.
    """
    results = []
    text = list(session.tokens())
    assert session.state.length() == len(text) - 1
    for decoder, state in session.held:
        n = state.length()
        assert decoder.first + n < len(text)
        fresh = decoder.new_state(n + 1)
        x = read(session, decoder, n + 1)
        lengths = [state.length(layer=layer) for layer in range(decoder.n_layers)]
        if lengths != [n] * len(lengths):  # a draft layer may be computed later
            assert decoder is not session.target.decoder
            decoder.forward(x, fresh)
            for layer, held in enumerate(lengths):
                for rows in ("keys", "values"):
                    ours, theirs = (getattr(s, rows)(layer)[:, :, :held] for s in (state, fresh))
                    assert gap(ours, theirs) < 1e-5
            continue
        truth = decoder.forward(x, fresh).logits[0, -1]
        following = decoder.forward(last_row(x), state).logits[0, -1]
        for layer in range(decoder.n_layers):
            assert state.length(layer=layer) == n + 1
            for rows in ("keys", "values"):
                ours, theirs = (getattr(s, rows)(layer)[:, :, : n + 1] for s in (state, fresh))
                assert gap(ours, theirs) < 1e-5
        state.rollback(0, n)
        agree(following, truth)
        results.append((decoder, n, following))
    return results


def agree(logits, truth):
    finite = truth.isfinite()  # a head may have a reduced vocabulary
    assert finite.equal(logits.isfinite())
    assert gap(logits[finite], truth[finite]) < 1e-5


@pytest.fixture
def audited(family, open_session):
    """Decode a few prompts, with an audit after every step. What was said after each is held
    against transformers' modules in the end: the text of a step begins that of all later ones, and
    a row sees none behind it."""
    modules = {id(decoder): family.modules[name] for name, decoder in family.decoders.items()}

    def run(method, sampling, prompts=(0, 13, 26), **request):
        for prompt in prompts:
            session = open_session(prompt, sampling, **request)
            results = [each for _ in method.generate(session) for each in audit(session)]
            text, truths = torch.tensor([session.tokens()]), {}
            for decoder, n, logits in results:
                if (module := modules.get(id(decoder))) is not None:
                    if decoder not in truths:
                        truths[decoder] = module(text).logits[0]
                    agree(logits, truths[decoder][n])

    return run


@METHODS
@pytest.mark.parametrize(
    "sampling",
    [pytest.param(GREEDY, marks=pytest.mark.smoke), REJECTION],
    ids=lambda s: s.rule,
)
def test_after_every_step_the_cache_equals_recomputation(audited, make, sampling):
    """Coupled tokens are chosen as greedy ones are; the audit has their states on tables."""
    prompts = {"greedy": (0, 13), "rejection": (26,)}[sampling.rule]
    audited(make(), sampling, prompts=prompts, budget=20)


@pytest.mark.full
@DRAFTING
def test_the_cache_of_a_draft_whose_output_is_cut_equals_recomputation(audited, make):
    audited(make(), REJECTION, prompts=(13,), budget=20, draft="cut")


@pytest.mark.full
@METHODS
def test_after_an_eos_inside_a_step_the_cache_equals_recomputation(audited, plain, make):
    for prompt, at, sampling in ((2, 3, GREEDY), (21, 7, COUPLED)):
        eos = plain(prompt, sampling).ids[at]
        audited(make(), sampling, prompts=(prompt,), eos=(eos,))


# ---- planted faults: these tests can fail -------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        *(partial(kind, SpsParams(length=3)) for kind in (ForgetsNothing, SkipsAToken, OffByOne)),
        *(partial(kind, MtpParams(length=3)) for kind in (KeepsItsDraft, KeepsPredicted)),
    ],
    ids=lambda make: make.func.__name__,
)
def test_a_draft_state_that_went_wrong_is_found(audited, fault):
    with pytest.raises(AssertionError):
        audited(fault(), GREEDY, prompts=(0, 13, 26, 5, 31))


@pytest.mark.parametrize("fault", [SkipsAToken, OffByOne])
def test_a_draft_state_that_went_wrong_costs_speed_and_no_exactness(
    open_session, clear_prompts, plain, fault
):
    for prompt in clear_prompts(GREEDY, 6):
        session = open_session(prompt)
        list(fault(SpsParams(length=3)).generate(session))
        assert session.output() == plain(prompt, GREEDY).ids


class TakesItsOwnWord(Sps):
    """Commits all that it drafted, whatever the target says."""

    def start(self, session):
        super().start(session)
        verify = session.verify

        def accept_all(draft, rows):
            ids = tuple(draft.tokens.tolist())
            return Outcome(
                path=tuple(range(len(ids))),
                committed=(*ids, verify(draft, rows).committed[-1]),
                origin=(*("accepted",) * len(ids), "bonus"),
                tested=len(ids),
            )

        session.verify = accept_all


def test_a_method_that_changes_the_output_is_found(open_session, clear_prompts, plain):
    prompt = clear_prompts(GREEDY, 1)[0]
    session = open_session(prompt, draft="far")
    list(TakesItsOwnWord(SpsParams(length=3)).generate(session))
    assert session.output() != plain(prompt, GREEDY).ids
