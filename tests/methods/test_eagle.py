"""EAGLE, EAGLE-2, EAGLE-3 and MTP: plain decoding's tokens, tree shapes, and head states."""

from functools import partial

import pytest
import torch
from pydantic import ValidationError

from methods.eagle.head import EagleHead
from methods.eagle.method import AUTHORS, Eagle
from methods.eagle2 import Eagle2
from methods.eagle3.head import Eagle3Head
from methods.eagle3.method import Eagle3
from methods.mtp.head import MtpHead
from methods.mtp.method import Mtp, MtpParams
from methods.sam.method import Sam
from specbench_cli.api import Session
from specbench_cli.engine.models.head import NORMED, Head
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.types import ModelOutput, Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import build_tree
from specbench_cli.engine.workspace import Workspace

GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.8, top_k=24, top_p=0.95, seed=3)
REJECTION = Sampling("rejection", 0.8, seed=3)
EXACT = pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
RULES = pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=lambda s: s.rule)
LONGEST, CAPACITY = 40, 96


def method(kind, **params):
    return kind(kind.Params(**params))


MAKERS = {
    "eagle": partial(method, Eagle),
    "eagle-chain": partial(method, Eagle, shape="chain", depth=3),
    "eagle2": partial(method, Eagle2),
    "eagle2-wide": partial(method, Eagle2, nodes=40, depth=3, width=9),
    "eagle3": partial(method, Eagle3),
    "mtp": partial(method, Mtp),
}
METHODS = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@pytest.fixture(scope="module")
def open_heads(family):
    """Function that opens a session on prompt i with random heads, or those of `make`."""
    decoders = {"target": family.decoders["target"]}
    spaces = {}

    def at_random(wanted):
        return wanted.kind.random(decoders, seed=5)

    def make(prompt, sampling=GREEDY, *, heads=at_random, budget=LONGEST, eos=()):
        if heads not in spaces:
            costs = {"costs": lambda model, rows: 0.1}
            spaces[heads] = Workspace(decoders, CAPACITY, load_artifact=heads, **costs)
        stop = StopRule(frozenset(eos), budget)
        request = Request(f"tiny/{prompt}", 0, family.prompts[prompt], stop)
        return Session(spaces[heads], request, sampling)

    return make


def decode(eagle, session):
    steps = list(eagle.generate(session))
    assert 1 + sum(len(step.outcome.committed) for step in steps) == len(session.output())
    return session.output()


# ---- the head's state ---------------------------------------------------------------------------


@METHODS
def test_every_step_reads_the_new_committed_tokens(open_heads, make):
    session = open_heads(9, budget=16)
    eagle = make()
    behind = len(
        session.tokens()
    )  # the prompt without its first token, and the first committed token
    for step in eagle.generate(session):
        *drafting, verifying = step.forwards
        assert (verifying.model, verifying.n_tokens) == ("target", step.draft.nodes + 1)
        if drafting:
            assert drafting[0].n_tokens == behind
            behind = 0
        behind += len(step.outcome.committed)


# ---- trees --------------------------------------------------------------------------------------


@METHODS
def test_the_head_is_called_once_per_level(open_heads, make):
    session, eagle = open_heads(4), make()
    depth = getattr(eagle.params, "depth", None) or eagle.params.length
    left = LONGEST - 1
    for step in eagle.generate(session):
        *drafting, _ = step.forwards
        assert len(drafting) == min(depth, left - 1) >= step.draft.levels
        assert {forward.role for forward in drafting} <= {"draft"}
        left -= len(step.outcome.committed)


def test_eagles_tree_is_the_authors(open_heads):
    assert len(AUTHORS.nodes) == 25
    step = next(iter(Eagle().generate(open_heads(4))))
    tree = build_tree(step.draft.parents)
    assert [tree.depths.count(depth) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    assert [forward.n_tokens for forward in step.forwards[1:-1]] == [4, 4, 1, 1]


@pytest.mark.parametrize("nodes", [1, 16, 40])
def test_a_tree_has_the_requested_size(open_heads, nodes):
    step = next(iter(method(Eagle, nodes=nodes).generate(open_heads(4))))
    assert step.draft.nodes == nodes


@pytest.mark.parametrize("limit", range(1, 6))
def test_a_tree_is_not_deeper_than_the_limit(open_heads, limit):
    for kind in (Eagle, Eagle2, Eagle3, Mtp):
        eagle = method(kind)
        session = open_heads(4)
        eagle.start(session)
        session.prefill()
        levels = eagle.propose(session, limit).levels
        if kind in (Eagle, Mtp):
            assert levels == min(limit, 3 if kind is Mtp else 5)
        else:
            assert 1 <= levels <= limit


@pytest.mark.parametrize("kind", [Eagle, Eagle2, Eagle3])
def test_siblings_are_the_heads_most_likely_tokens(open_heads, kind):
    session = open_heads(4)
    eagle = method(kind)
    eagle.start(session)
    session.prefill()
    head, read = eagle.levels.model.decoder, []
    forward = head.forward
    head.forward = lambda *args, **rest: read.append(forward(*args, **rest)) or read[-1]
    draft = eagle.propose(session, 5)
    del head.forward
    children = build_tree(draft.parents).children
    ids = draft.tokens.tolist()
    ranked = read[0].logits[0, -1].argsort(descending=True, stable=True).tolist()
    found = [ids[node] for node in children[-1]]
    assert found == ranked[: len(found)]


def test_an_automatic_size_depends_on_the_costs(open_heads):
    for dear, least, most in ((0.0, 12, 63), (9.0, 0, 2)):
        session = open_heads(4)
        session._workspace.costs = lambda model, n, dear=dear: (
            1 + dear * n if model == "target" else 0.1
        )
        eagle = method(Eagle2, nodes="auto", depth=3)
        eagle.start(session)
        session.prefill()
        assert eagle.uses_costs and not eagle.timing_free
        assert least <= eagle.propose(session, 5).nodes <= most
    assert not Eagle2().uses_costs


def test_a_token_outside_the_heads_vocabulary_is_never_drafted(open_heads):
    for sampling in (GREEDY, COUPLED, REJECTION):
        for prompt in range(2):
            eagle = method(Eagle3, width=8, nodes=40, depth=3)
            session = open_heads(prompt, sampling, budget=16)
            for step in eagle.generate(session):
                vocabulary = eagle.levels.model.decoder._ids.tolist()
                assert set(step.draft.tokens.tolist()) <= set(vocabulary)


def test_the_children_of_a_wide_tree_are_limited_by_the_vocabulary(family):
    """Use trees wider than the vocabulary, as the audit's tables of three tokens do."""
    from specbench_cli.audit.models.table import TableDecoder

    table = TableDecoder("target", torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(1)))
    decoders = {"target": table}
    for kind in (Eagle, Eagle2, Eagle3, Mtp):
        space = Workspace(decoders, 64, load_artifact=lambda wanted: wanted.kind.random(decoders))
        session = Session(space, Request("t", 0, (1, 0), StopRule(frozenset(), 12)), GREEDY)
        decode(method(kind), session)


# ---- bounds -------------------------------------------------------------------------------------


class Shifted:
    """The target's state as a head's state.

    It includes the first token of the text, which heads never read and which does not count here.
    """

    def __init__(self, state):
        self.inner = state

    @property
    def nbytes(self):
        return self.inner.nbytes

    def length(self, seq=0, layer=0):
        return max(self.inner.length() - 1, 0)

    def position(self, seq=0):
        return self.length()

    def commit(self, seq, path):
        self.inner.commit(0, path if self.begun else (0, *(row + 1 for row in path)))
        self.begun = True

    def clear(self):
        self.inner.clear()
        self.begun = False


class Oracle(Head):
    """A head that is the target itself; `sharp` makes it as sure of its first choice.

    Its features are not read. Where they come from says what the text's first token is.
    """

    name = "oracle"
    captured_layers = (NORMED,)
    weight_bytes = 0

    def __init__(self, target, first_token, sharp):
        self.target, self.token, self.sharp = target, torch.tensor([[first_token]]), sharp
        for name in ("vocab_size", "n_layers", "hidden_size", "max_positions", "device", "dtype"):
            setattr(self, name, getattr(target, name))

    def new_state(self, capacity, n_seqs=1):
        return Shifted(self.target.new_state(capacity + 1, n_seqs))

    def embed(self, ids):
        return self.target.embed(ids)

    def norm(self, rows):
        return self.target.norm(rows)

    def unembed(self, rows):
        return self.target.unembed(rows)

    def forward(self, x, state, *, positions=None, mask=None, logits_at="last", **rest):
        ids = x.ids if state.inner.length() else torch.cat((self.token, x.ids), 1)
        if positions is not None:
            positions = positions + 1
        out = self.target.forward(
            Tokens(ids), state.inner, positions=positions, mask=mask, logits_at=logits_at
        )
        return ModelOutput(out.logits * self.sharp, out.hidden)


@pytest.mark.parametrize(
    ("kind", "depth", "sampling", "sharp"),
    [
        (Eagle, 5, GREEDY, 1),
        (Eagle, 5, COUPLED, 1),
        (Eagle2, 5, GREEDY, 50),
        (Eagle3, 5, GREEDY, 50),
        (Mtp, 3, GREEDY, 1),
        (Mtp, 3, COUPLED, 1),
    ],
)
def test_a_head_equal_to_the_target_has_its_whole_tree_depth_accepted(
    family, open_heads, clear_prompts, kind, depth, sampling, sharp
):
    for prompt in clear_prompts(sampling, 2):
        head = Oracle(family.decoders["target"], family.prompts[prompt][0], sharp)
        session = open_heads(prompt, sampling, heads=lambda wanted, head=head: head)
        *full, _ = method(kind).generate(session)
        assert {len(step.outcome.committed) for step in full} == {depth + 1}


@EXACT
def test_a_chain_of_eagle_drafts_what_a_tree_of_width_one_does(open_heads, sampling):
    drafts = []
    for eagle in (method(Eagle, shape="chain", depth=4), method(Eagle2, width=1, depth=4)):
        session = open_heads(6, sampling, budget=16)
        drafts.append([step.draft.tokens.tolist() for step in eagle.generate(session)])
    assert drafts[0] == drafts[1]


def test_mtp_reports_the_distribution_that_its_tokens_were_drawn_from(open_heads):
    for step in method(Mtp).generate(open_heads(6, REJECTION)):
        if step.draft.nodes:
            assert step.draft.draw_mode == "independent"
            drawn = step.draft.q.gather(1, step.draft.tokens[:, None])
            assert (drawn > 0).all()


@EXACT
def test_mtp_with_a_length_rule_stops_where_the_rule_stops(open_heads, sampling):
    wary = Mtp(MtpParams(length="confidence", threshold=1.0, max=6))
    bold = Mtp(MtpParams(length="confidence", threshold=0.0, max=6))
    for eagle, drafted in ((wary, 1), (bold, 6)):
        steps = list(eagle.generate(open_heads(0, sampling)))
        assert {step.draft.nodes for step in steps[:5]} == {drafted}


def test_mtp_refuses_the_rule_that_reads_a_draft_models_hidden_states():
    with pytest.raises(ValidationError, match="use it with sps or specdec"):
        MtpParams(length="acceptance-head")


def test_methods_request_the_head_of_their_kind():
    requested = [method(kind, head="here").artifacts() for kind in (Eagle, Eagle2, Eagle3, Mtp)]
    assert [(wanted.kind, wanted.source) for (wanted,) in requested] == [
        (EagleHead, "here"),
        (EagleHead, "here"),
        (Eagle3Head, "here"),
        (MtpHead, "here"),
    ]


def drafts(eagle, session):
    """Return each step's tokens and whether the head drafted them, by the text before it."""
    found, ids = {}, list(session.tokens())
    for step in eagle.generate(session):
        headed = any(forward.role == "draft" for forward in step.forwards)
        found[tuple(ids)] = (step.draft.tokens.tolist(), headed)
        ids += step.outcome.committed
    return found


@EXACT
def test_sam_with_a_head_drafts_the_heads_chain_whatever_the_automaton_drafted_before(
    open_heads, sampling
):
    chain = drafts(method(Eagle, shape="chain", depth=3), open_heads(0, sampling))
    alone = method(Sam, beside="eagle", threshold=1000, drafted=3)
    assert drafts(alone, open_heads(0, sampling)) == chain
    mixed = drafts(method(Sam, beside="eagle", threshold=2, drafted=3), open_heads(0, sampling))
    assert {headed for _, headed in mixed.values()} == {True, False}
    compared = [text for text, (_, headed) in mixed.items() if headed and text in chain]
    assert len(compared) > 3
    assert all(mixed[text] == chain[text] for text in compared)
