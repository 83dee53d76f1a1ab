"""Drafting level by level: a node has the logits of its path as plain text."""

import random as chance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli.audit.models.table import TableDecoder
from specbench_cli.engine.drafting.levels import Levels
from specbench_cli.engine.models.fused import FusedDecoder
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.models.transformers_decoder import TransformersDecoder
from specbench_cli.engine.peer_session import PeerSession
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.types import Draft, Features, ModelOutput, Outcome, Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import build_tree
from specbench_cli.engine.workspace import Workspace

PROMPT = (7, 3, 11, 5, 19, 2, 13, 8, 4)
MODELS = {
    "shared heads": ("llama", {}, FusedDecoder),
    "all heads": ("llama", {"num_key_value_heads": 4}, FusedDecoder),
    "windows": ("mistral", {}, FusedDecoder),
    "hosted": ("gpt2", {}, TransformersDecoder),
}
MODEL = pytest.mark.parametrize("model", MODELS)
SHAPES = {
    "chain": (1, 1, 1),
    "bush": (3, 4, 2),
    "chain, then bush": (1, 1, 3, 4),
    "narrowing": (4, 1, 2),
}
SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture(scope="module")
def workspace(tiny_checkpoint):
    workspaces = {}

    def make(model):
        if model not in workspaces:
            family, overrides, kind = MODELS[model]
            decoder = load_decoder(tiny_checkpoint(family, **overrides), name="target")
            assert isinstance(decoder, kind)
            draft = load_decoder(tiny_checkpoint(family, **overrides), name="draft")
            workspaces[model] = Workspace({"target": decoder, "draft": draft}, capacity=64)
        return workspaces[model]

    return make


def opened(workspace, slack=30):
    session = PeerSession(  # a recurrent draft reads the text itself
        workspace, Request("tiny/0", 0, PROMPT, StopRule(frozenset(), 20)), Sampling()
    )
    model = session.draft()
    levels = Levels(session, model, session.new_state(model, slack=slack))
    levels.begin(session.pending_tokens(0))
    session.reserve(slack)
    session.prefill()
    return session, levels


def feed_tree(levels, shape, seed=0):
    """Feed levels of random nodes. Return the parents per level, the fed paths and the logits."""
    random = chance.Random(seed)
    paths, last, logits = [], [()], []
    for n in shape:
        parents = [random.randrange(len(last)) for _ in range(n)]
        tokens = [random.randrange(2, 190) for _ in range(n)]
        out = levels.feed(tokens, parents)
        last = [(*last[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        paths += last
        logits += list(out.logits[0])
    return paths, logits


def plain(decoder, ids):
    """Return the logits of a text from one plain forward."""
    return decoder.forward(Tokens(torch.tensor([ids])), decoder.new_state(len(ids))).logits[0, -1]


@MODEL
@SHAPE
def test_every_node_has_the_logits_of_its_own_path(workspace, model, shape):
    session, levels = opened(workspace(model))
    out = levels.begin(session.pending_tokens(levels.state.length()))
    text = session.tokens()
    torch.testing.assert_close(out.logits[0, -1], plain(levels.model.decoder, text))
    for path, row in zip(*feed_tree(levels, shape), strict=True):
        expected = plain(levels.model.decoder, [*text, *path])
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


def test_half_precision_is_close(tiny_checkpoint):
    folder = tiny_checkpoint("llama")
    decoder = load_decoder(folder, name="target", dtype=torch.bfloat16)
    models = Workspace({"target": decoder, "draft": decoder}, capacity=64)
    session, levels = opened(models)
    levels.begin(session.pending_tokens(levels.state.length()))
    for path, row in zip(*feed_tree(levels, (3, 4, 2)), strict=True):
        assert (row - plain(decoder, [*session.tokens(), *path])).abs().max() <= 0.15


@MODEL
def test_siblings_do_not_see_each_other(workspace, model):
    session, levels = opened(workspace(model))
    rows = []
    for sibling in (17, 99):
        levels.begin(session.pending_tokens(levels.state.length()))
        levels.feed([5, sibling], [0, 0])
        out = levels.feed([6, sibling], [0, 1])
        rows.append(out.logits[0, 0])
        levels.drop()
        levels.state.rollback(0, len(PROMPT))
    assert torch.equal(*rows)


@MODEL
@pytest.mark.parametrize("whole", [True, False], ids=["whole path fed", "deepest node unfed"])
def test_kept_rows_equal_recomputation(workspace, model, whole):
    session, levels = opened(workspace(model))
    levels.begin(session.pending_tokens(levels.state.length()))
    paths, _ = feed_tree(levels, (3, 4), seed=2)
    node = 6
    path = [next(i for i, p in enumerate(paths) if p == paths[node][:n]) for n in (1, 2)]
    ids = list(paths[node]) + ([] if whole else [77])
    nodes = path if whole else [*path, -1]
    session.adopt(Outcome((), (*ids, 23), ("accepted",) * len(ids) + ("bonus",), len(ids)))
    before = session.tokens()[: levels.state.length() - levels.fed]
    levels.keep(nodes)
    assert levels.state.length() == len(before) + 2
    text = session.tokens()
    out = levels.begin(Tokens(torch.tensor([text[levels.state.length() :]])))
    assert levels.state.length() == len(text)
    expected = plain(levels.model.decoder, text)
    torch.testing.assert_close(out.logits[0, -1], expected, rtol=1e-4, atol=1e-4)
    out = levels.feed([9, 10], [0, 0])  # positions continue from there
    expected = plain(levels.model.decoder, [*text, 10])
    torch.testing.assert_close(out.logits[0, 1], expected, rtol=1e-4, atol=1e-4)


def test_no_row_of_the_last_committed_token_is_kept(workspace):
    session, levels = opened(workspace("all heads"))
    levels.begin(session.pending_tokens(levels.state.length()))
    paths, _ = feed_tree(levels, (1, 1, 1))
    # The output ends inside the draft, so its last token was drafted and fed.
    session.adopt(Outcome((), paths[1], ("accepted", "accepted"), 2))
    levels.keep([0, 1])
    assert levels.state.length() == len(session.tokens()) - 1


def test_dropped_nodes_leave_no_rows(workspace):
    session, levels = opened(workspace("all heads"))
    levels.begin(session.pending_tokens(levels.state.length()))
    feed_tree(levels, (2, 3))
    levels.drop()
    assert (levels.fed, levels.state.length()) == (0, len(session.tokens()))


def test_a_chain_has_the_cost_of_plain_text(workspace, monkeypatch):
    session, levels = opened(workspace("all heads"))
    levels.begin(session.pending_tokens(levels.state.length()))
    arguments = []
    forward = type(levels.model).forward
    monkeypatch.setattr(
        type(levels.model),
        "forward",
        lambda self, x, state, **how: arguments.append(how) or forward(self, x, state, **how),
    )
    feed_tree(levels, (1, 1, 1))
    assert arguments == [{"logits_at": "all"}] * 3


@MODEL
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 999))
def test_permuting_a_trees_nodes_changes_nothing(workspace, model, seed):
    random = chance.Random(seed)
    models = workspace(model)
    found = []
    parents = tuple(random.randint(-1, node - 1) for node in range(12))
    tree = build_tree(parents)
    # The tree has the target's tokens among others.
    probe, _ = opened(models)
    text, truth = list(probe.tokens()), []
    for _ in range(tree.levels):
        truth.append(int(plain(probe.target.decoder, text).argmax()))
        text.append(truth[-1])
    lucky = random.randrange(12)
    ids = random.sample([token for token in range(2, 190) if token not in truth], 12)
    for node in tree.path(lucky):
        ids[node] = truth[tree.depths[node] - 1]
    order = sorted(range(12), key=lambda node: (tree.depths[node], random.random()))
    for numbering in (list(range(12)), order):
        place = {node: at for at, node in enumerate(numbering)} | {-1: -1}
        draft = Draft(
            torch.tensor([ids[node] for node in numbering]),
            tuple(place[parents[node]] for node in numbering),
        )
        session, _ = opened(models)
        rows = session.score(draft)
        outcome = session.commit(session.verify(draft, rows))
        tokens = outcome.committed, outcome.origin, outcome.tested
        by_node = rows[[0, *(1 + place[node] for node in range(12))]]
        found.append((tokens, by_node, plain_next(session)))
        assert len(outcome.path) == tree.depths[lucky]
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-4, atol=1e-4)


def plain_next(session):
    """Return the target's logits of the next step."""
    return session.score(session.chain(()))[-1]


# ---- heads --------------------------------------------------------------------------------------


class CountingHead(TableDecoder):
    """Head that adds one to each input row, and remembers its inputs."""

    first, reads = 1, Features

    def forward(self, x, state, **how):
        self.__dict__.setdefault("fed", []).append((x.ids[0].tolist(), x.rows[0, :, 0].tolist()))
        out = super().forward(x, state, **how)
        return ModelOutput(out.logits, x.rows + 1.0)


def test_the_nodes_of_a_head_read_their_parents_hidden_states(open_session, random_table):
    table = random_table(5, 1, 1.0)
    session = open_session(table, prompt=(1, 2, 3))
    head = CountingHead("head", table)
    levels = Levels(session, head, head.new_state(40))
    session.prefill()
    levels.begin(Features(torch.tensor([[2, 3, 4]]), torch.tensor([[[10.0], [20.0], [30.0]]])))
    levels.feed([0, 1], [0, 0])
    levels.feed([2, 3, 4], [1, 0, 1], torch.tensor([[7.0], [8.0], [9.0]]))
    levels.feed([1, 1], [2, 0])
    assert head.fed[1:] == [
        ([0, 1], [31.0, 31.0]),
        ([2, 3, 4], [7.0, 8.0, 9.0]),
        ([1, 1], [10.0, 8.0]),
    ]
    levels.drop()
    assert levels.state.length() == 3
    positions = levels.state.positions
    assert positions == [0, 1, 2]
