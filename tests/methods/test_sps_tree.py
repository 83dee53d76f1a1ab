"""Tests of tree speculative sampling: tree shapes, forwards per step and exact distributions."""

import pytest
from pydantic import ValidationError

from methods.sps import Sps, SpsParams
from methods.sps_tree import SpsTree, SpsTreeParams
from specbench_cli import registry
from specbench_cli.audit.cases import Case
from specbench_cli.audit.models import table as table_model
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import build_tree
from specbench_cli.errors import UsageError
from tests.methods.exact import distance_from_target

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
    """Open a session on two table models, whose logits depend on the last two tokens."""
    return Case("pair", tables, sampling, PROMPT, budget=budget).open(**rest)


# ---- parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", ["3,2,1", [3, 2, 1], (3, 2, 1), "3, 2, 1"])
def test_widths_may_be_a_string_or_a_list(typed):
    assert registry.build("sps-tree", {"widths": typed}).params.widths == (3, 2, 1)


def test_a_single_number_is_a_tree_of_one_level():
    assert SpsTreeParams(widths=4).widths == (4,)


@pytest.mark.parametrize("typed", ["3,0", "3,x", "", [], "3,,2"])
def test_widths_that_make_no_tree_are_refused(typed):
    with pytest.raises(ValidationError):
        SpsTreeParams(widths=typed)
    with pytest.raises(UsageError, match=r"sps-tree\.widths"):
        registry.declare("sps-tree", {"widths": typed})


def test_without_widths_only_the_root_branches(open_session):
    step = run(open_session(3), width=4, depth=3)[0]
    assert build_tree(step.draft.parents).depths == (1,) * 4 + (2,) * 4 + (3,) * 4


# ---- shapes -------------------------------------------------------------------------------------


@RULES
def test_a_tree_is_cut_at_the_levels_that_the_budget_allows(open_session, sampling):
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
def test_a_step_runs_one_draft_forward_per_level_and_one_target_forward(
    open_session, sampling, shape
):
    for step in run(open_session(7, sampling), width=2, depth=4, shape=shape, nodes=6):
        *drafting, verifying = step.forwards
        most_forwards = min(4, step.draft.levels + (shape == "dynamic") * 4)
        assert step.draft.levels <= len(drafting) <= most_forwards
        assert {(f.model, f.role) for f in drafting} <= {("near", "draft")}
        assert (verifying.model, verifying.role) == ("target", "verify")
        assert verifying.n_tokens == step.draft.nodes + 1


@EXACT
def test_a_tree_of_single_children_is_the_chain_of_sps(open_session, sampling):
    chain = list(Sps(SpsParams(length=3)).generate(open_session(11, sampling)))
    tree = run(open_session(11, sampling), widths=(1, 1, 1))
    assert [s.outcome for s in tree] == [s.outcome for s in chain]
    assert [s.draft.tokens.tolist() for s in tree] == [s.draft.tokens.tolist() for s in chain]
    # The draft model's inputs are equal as well, because the tree keeps the accepted rows.
    assert [[f.n_tokens for f in s.forwards] for s in tree] == [
        [f.n_tokens for f in s.forwards] for s in chain
    ]


def paths(draft):
    ids = draft.tokens.tolist()
    tree = build_tree(draft.parents)
    return {tuple(ids[node] for node in tree.path(at)) for at in range(len(ids))}


def test_a_dynamic_tree_with_room_for_all_is_the_complete_one(open_session):
    complete = run(open_session(9), widths=(2, 2))
    grown = run(open_session(9), shape="dynamic", width=2, depth=2, nodes=6)
    assert [paths(s.draft) for s in grown[:-1]] == [paths(s.draft) for s in complete[:-1]]


@RULES
def test_a_dynamic_tree_has_the_configured_number_of_nodes(open_session, sampling):
    for step in run(open_session(9, sampling), shape="dynamic", width=4, depth=4, nodes=11):
        if step.draft.levels == 4:
            assert step.draft.nodes == 11
            assert (step.draft.draw_mode, step.draft.q) == ("deterministic", None)


@pytest.mark.parametrize("draw_mode", ["without_replacement", "independent", "deterministic"])
def test_children_are_drawn_by_the_chosen_draw_mode(open_session, draw_mode):
    repeated = 0
    for step in run(open_session(4, REJECTION), widths=(4, 2), draw_mode=draw_mode):
        draft = step.draft
        if not draft.nodes:
            continue
        assert draft.draw_mode == draw_mode
        assert (draft.q is None) == (draw_mode == "deterministic")
        ids = draft.tokens.tolist()
        for children in build_tree(draft.parents).children:
            repeated += len({ids[child] for child in children}) < len(children)
    assert (repeated > 0) == (draw_mode == "independent")


def test_nodes_have_at_most_as_many_children_as_there_are_tokens():
    tables = table_model.make_table_pair("near", 3)
    for sampling in (GREEDY, COUPLED, Sampling("rejection", 0.8)):
        first = run(on_tables(tables, sampling, 6), width=5, depth=2)[0]
        assert first.draft.nodes == 6


# ---- the target's distribution ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "vocab"),
    [
        ({"widths": (2, 1), "draw_mode": "without_replacement"}, 2),
        ({"widths": (2, 1), "draw_mode": "independent"}, 2),
        ({"widths": (2, 1), "draw_mode": "deterministic"}, 3),
        ({"shape": "dynamic", "width": 2, "depth": 2, "nodes": 3}, 3),
        ({"widths": (3,), "draw_mode": "without_replacement"}, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["flat", "near"])
def test_the_output_has_the_targets_distribution(kind, params, vocab):
    case = Case(
        kind, table_model.make_table_pair(kind, vocab), Sampling("rejection", 0.8), PROMPT, budget=3
    )
    assert distance_from_target(method(**params), case) < 1e-9


def combine_cases():
    """Yield each kind of pair with each draw mode, and alternate between the tree shapes."""
    shapes = [((2, 2), 2, 4), ((2,), 3, 3), ((3,), 3, 3)]
    for i, kind in enumerate(("peaked", "flat", "near", "equal", "disjoint")):
        for j, draw_mode in enumerate(("deterministic", "independent", "without_replacement")):
            yield kind, draw_mode, *shapes[(i + j) % 3]


@pytest.mark.parametrize(("kind", "draw_mode", "widths", "vocab", "n"), list(combine_cases()))
def test_a_complete_tree_has_the_targets_distribution_on_every_kind_of_pair(
    kind, draw_mode, widths, vocab, n
):
    tables = table_model.make_table_pair(kind, vocab)
    case = Case(kind, tables, Sampling("rejection", 0.8), PROMPT, budget=n, length=n)
    assert distance_from_target(method(widths=widths, draw_mode=draw_mode), case) < 1e-9
