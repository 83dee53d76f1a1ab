"""Tree speculative sampling: the shapes it drafts, what they cost, what bounds their acceptance."""

import pytest
from pydantic import ValidationError

from methods.sps import Sps, SpsParams
from methods.sps_tree import SpsTree, SpsTreeParams
from specbench_cli import registry
from specbench_cli.audit.choice import distance, walk
from specbench_cli.audit.models import table as table_model
from specbench_cli.audit.models.table import TableDecoder, rows_out_of_place
from specbench_cli.audit.reference import Reference
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import tree_of
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import UsageError

GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.8, top_k=24, top_p=0.95, seed=3)
REJECTION = Sampling("rejection", 0.8, top_k=24, seed=3)
RULES = pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=lambda s: s.rule)
EXACT = pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
PROMPT = (1, 0, 1)


def method(**params):
    return SpsTree(SpsTreeParams(**params))


def run(session, **params):
    return list(method(**params).generate(session))


def on_tables(tables, sampling, budget, **rest):
    """A session on a pair of tables."""
    decoders = dict(zip(("target", "draft"), map(TableDecoder, "td", tables), strict=True))
    request = Request("table/0", 0, PROMPT, StopRule(frozenset(), budget))
    return Session(Workspace(decoders, len(PROMPT) + budget), request, sampling, **rest)


# ---- parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["3,2,1", [3, 2, 1], (3, 2, 1), "3, 2, 1"])
def test_widths_are_typed_as_a_list(given):
    assert registry.build("sps-tree", {"widths": given}).params.widths == (3, 2, 1)


def test_a_single_number_is_a_tree_of_one_level():
    assert SpsTreeParams(widths=4).widths == (4,)


@pytest.mark.parametrize("given", ["3,0", "3,x", "", [], "3,,2"])
def test_widths_that_make_no_tree_are_refused(given):
    with pytest.raises(ValidationError):
        SpsTreeParams(widths=given)
    with pytest.raises(UsageError, match=r"sps-tree\.widths"):
        registry.parameters("sps-tree", {"widths": given})


def test_without_widths_the_root_alone_branches(open_session):
    step = run(open_session(3), width=4, depth=3)[0]
    assert tree_of(step.draft.parents).depths == (1,) * 4 + (2,) * 4 + (3,) * 4


# ---- shapes -------------------------------------------------------------------------------------


@RULES
def test_a_step_drafts_its_tree_or_the_levels_that_the_budget_leaves(open_session, sampling):
    session = open_session(5, sampling, budget=23)
    committed = 1
    for step in run(session, widths=(3, 2, 1)):
        levels = min(3, 23 - committed - 1)
        assert step.draft.levels == levels
        assert step.draft.nodes == (0, 3, 9, 15)[levels]
        committed += len(step.outcome.committed)
    assert committed == 23


@RULES
@pytest.mark.parametrize("shape", ["static", "dynamic"])
def test_a_step_is_one_draft_forward_a_level_and_one_of_the_target(open_session, sampling, shape):
    for step in run(open_session(7, sampling), width=2, depth=4, shape=shape, nodes=6):
        *drafting, verifying = step.forwards
        most = min(4, step.draft.levels + (shape == "dynamic") * 4)
        assert step.draft.levels <= len(drafting) <= most
        assert {(f.model, f.role) for f in drafting} <= {("near", "draft")}
        assert (verifying.model, verifying.role) == ("target", "verify")
        assert verifying.n_tokens == step.draft.nodes + 1


@EXACT
def test_a_tree_of_single_children_is_the_chain_of_sps(open_session, sampling):
    chain = list(Sps(SpsParams(length=3)).generate(open_session(11, sampling)))
    tree = run(open_session(11, sampling), widths=(1, 1, 1))
    assert [s.outcome for s in tree] == [s.outcome for s in chain]
    assert [s.draft.tokens.tolist() for s in tree] == [s.draft.tokens.tolist() for s in chain]
    # The rows that they feed the draft are the same as well: the accepted ones are kept.
    assert [[f.n_tokens for f in s.forwards] for s in tree] == [
        [f.n_tokens for f in s.forwards] for s in chain
    ]


def paths(draft):
    ids = draft.tokens.tolist()
    tree = tree_of(draft.parents)
    return {tuple(ids[node] for node in tree.path(at)) for at in range(len(ids))}


def test_a_dynamic_tree_with_room_for_all_is_the_complete_one(open_session):
    complete = run(open_session(9), widths=(2, 2))
    grown = run(open_session(9), shape="dynamic", width=2, depth=2, nodes=6)
    assert [paths(s.draft) for s in grown[:-1]] == [paths(s.draft) for s in complete[:-1]]


@RULES
def test_a_dynamic_tree_has_its_number_of_nodes(open_session, sampling):
    for step in run(open_session(9, sampling), shape="dynamic", width=4, depth=4, nodes=11):
        if step.draft.levels == 4:
            assert step.draft.nodes == 11
            assert (step.draft.law, step.draft.q) == ("point", None)


@pytest.mark.parametrize("law", ["wor", "iid", "point"])
def test_children_follow_the_law_asked_for(open_session, law):
    repeated = 0
    for step in run(open_session(4, REJECTION), widths=(4, 2), law=law):
        draft = step.draft
        if not draft.nodes:
            continue
        assert draft.law == law
        assert (draft.q is None) == (law == "point")
        ids = draft.tokens.tolist()
        for children in tree_of(draft.parents).children:
            repeated += len({ids[child] for child in children}) < len(children)
    assert (repeated > 0) == (law == "iid")


def test_nodes_have_at_most_as_many_children_as_there_are_tokens():
    tables = table_model.pair("near", 3)
    for sampling in (GREEDY, COUPLED, Sampling("rejection", 0.8)):
        first = run(on_tables(tables, sampling, 6), width=5, depth=2)[0]
        assert first.draft.nodes == 6


# ---- bounds -------------------------------------------------------------------------------------


@EXACT
@pytest.mark.parametrize(
    "params",
    [{"widths": (3, 2)}, {"shape": "dynamic", "width": 3, "depth": 2, "nodes": 12}],
    ids=["static", "dynamic"],
)
def test_a_draft_equal_to_the_target_has_every_level_accepted(
    open_session, clear_prompts, sampling, params
):
    for prompt in clear_prompts(sampling, 4):
        *full, _ = run(open_session(prompt, sampling, draft="target"), **params)
        assert [len(step.outcome.committed) for step in full] == [3] * len(full)


@pytest.mark.parametrize("shape", ["static", "dynamic"])
def test_a_useless_draft_commits_one_token_a_step(shape):
    tables = table_model.pair("disjoint", 8)
    for sampling in (GREEDY, COUPLED, Sampling("rejection", 0.8)):
        for step in run(on_tables(tables, sampling, 12), width=3, depth=3, shape=shape):
            assert (step.outcome.path, len(step.outcome.committed)) == ((), 1)


@RULES
@pytest.mark.parametrize("shape", ["static", "dynamic"])
def test_after_every_step_the_draft_has_rows_of_committed_tokens_alone(sampling, shape):
    session = on_tables(table_model.pair("near", 5), sampling, 40)
    drafting, kept = method(width=3, depth=3, shape=shape, nodes=9), 0
    for step in drafting.generate(session):
        state, text = drafting.levels.state, session.tokens()[:-1]
        assert rows_out_of_place(state, text) is None
        kept += state.length() > len(text) - len(step.outcome.path)
    assert kept > 3


# ---- the target's law ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "vocab"),
    [
        ({"widths": (2, 1), "law": "wor"}, 2),
        ({"widths": (2, 1), "law": "iid"}, 2),
        ({"widths": (2, 1), "law": "point"}, 3),
        ({"shape": "dynamic", "width": 2, "depth": 2, "nodes": 3}, 3),
        ({"widths": (3,), "law": "wor"}, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["flat", "near"])
def test_the_output_has_the_targets_law(kind, params, vocab):
    sampling, budget = Sampling("rejection", 0.8), 3
    tables = table_model.pair(kind, vocab)

    def decode(random):
        session = on_tables(tables, sampling, budget, random=random)
        list(method(**params).generate(session))
        return tuple(session.output())

    truth = Reference(tables[0], sampling).joint(PROMPT, (), budget)
    assert distance(walk(decode), truth) < 1e-9
