"""Recursive speculative decoding: which trees are drawn, and acceptance per verified node."""

import math
from itertools import permutations, product

import pytest
import torch

from methods.rsd_c import RsdC, RsdCParams
from methods.rsd_s import RsdS, RsdSParams
from methods.sps import Sps, SpsParams
from methods.sps_tree import SpsTree, SpsTreeParams
from specbench_cli.audit.cases import Case
from specbench_cli.audit.enumeration import (
    compute_distribution,
    enumerate_outcomes,
    sum_weights,
    total_variation,
)
from specbench_cli.audit.models import table as table_model
from specbench_cli.engine.verify.sampling import Sampling, warp
from specbench_cli.engine.verify.tree import build_tree
from tests.methods.exact import distance_from_target

GREEDY = Sampling()
REJECTION = Sampling("rejection", 0.8)
PROMPT = (1, 0, 1)


def on_tables(tables, sampling=REJECTION, budget=5, **rest):
    """Open a session on a pair of tables, after its prefill."""
    return Case("pair", tables, sampling, PROMPT, budget=budget).open(**rest)


def nodes_drawn(method, tables, random):
    """Return the path of each node of the first draft, in numbering order."""
    session = on_tables(tables, random=random)
    method.start(session)
    session.prefill()
    draft = method.propose(session, session.max_draft_length())
    ids, tree = draft.tokens.tolist(), build_tree(draft.parents)
    return tuple(tuple(ids[at] for at in tree.path(node)) for node in range(len(ids)))


def without_replacement(weights, n):
    """The distribution of n draws in order (Plackett-Luce), by definition: [(items,
    probability)]."""
    for order in permutations(weights, n):
        left, chance = 1.0, 1.0
        for item in order:
            chance *= weights[item] / left
            left -= weights[item]
        yield order, chance


def path_distribution(draft, text, length):
    """Return the draft's probability of every continuation of this length."""
    found = {(): 1.0}
    for _ in range(length):
        found = {
            (*path, token): chance * p
            for path, chance in found.items()
            for token, p in enumerate(warp(draft[tuple((*text, *path)[-2:])], REJECTION).tolist())
        }
    return found


# ---- which trees are drawn ----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stochastic_beam_is_paths_drawn_without_replacement(depth):
    """Compare each level, with its order, with an enumeration of all orders of all paths."""
    tables = table_model.fix_token(table_model.make_table_pair("near", 3), PROMPT, 2)

    def newest(random):
        nodes = nodes_drawn(RsdS(RsdSParams(width=3, depth=depth)), tables, random)
        return tuple(node for node in nodes if len(node) == depth)

    weights = path_distribution(tables[1], (*PROMPT, 2), depth)
    assert (
        total_variation(compute_distribution(newest), sum_weights(without_replacement(weights, 3)))
        < 1e-6
    )


def test_constant_branching_draws_the_children_of_every_node_without_replacement():
    tables = table_model.fix_token(table_model.make_table_pair("near", 3), PROMPT, 2)
    text, due = (*PROMPT, 2), []
    for first, chance in without_replacement(path_distribution(tables[1], text, 1), 2):
        below = (
            without_replacement(path_distribution(tables[1], (*text, *each), 1), 2)
            for each in first
        )
        for (left, p), (right, q) in product(*below):
            nodes = (*first, *(first[0] + x for x in left), *(first[1] + x for x in right))
            due.append((nodes, chance * p * q))
    method = RsdC(RsdCParams(width=2, depth=2))
    drawn = compute_distribution(lambda random: nodes_drawn(method, tables, random))
    assert total_variation(drawn, sum_weights(due)) < 1e-6


@pytest.mark.parametrize(("vocab", "top_k", "sizes"), [(3, 0, [3, 4, 4]), (5, 2, [2, 4, 4])])
def test_a_beam_is_full_or_has_all_existing_paths(vocab, top_k, sizes):
    sampling = Sampling("rejection", 0.8, top_k=top_k)
    tables = table_model.make_table_pair("near", vocab)
    method = RsdS(RsdSParams(width=4, depth=3))
    for step in method.generate(on_tables(tables, sampling, 40)):
        depths = build_tree(step.draft.parents).depths
        assert [depths.count(level) for level in (1, 2, 3)][: step.draft.levels] == (
            sizes[: step.draft.levels]
        )


@pytest.mark.parametrize("sampling", [GREEDY, Sampling("coupled", 0.8)], ids=lambda s: s.rule)
def test_single_children_are_the_chain_of_sps(open_session, sampling):
    chain = list(Sps(SpsParams(length=3)).generate(open_session(11, sampling)))
    for make in (RsdC(RsdCParams(width=1)), RsdS(RsdSParams(width=1, depth=3))):
        steps = list(make.generate(open_session(11, sampling)))
        assert [step.outcome for step in steps] == [step.outcome for step in chain]


def test_widths_override_width_and_depth():
    assert RsdC(RsdCParams(widths="3,2")).params.widths == (3, 2)
    step = next(
        RsdC(RsdCParams(widths=(3, 2))).generate(on_tables(table_model.make_table_pair("near", 4)))
    )
    assert build_tree(step.draft.parents).depths == (1,) * 3 + (2,) * 6


# ---- the target's distribution, and what a verified node is worth
# ----------------------------------------


@pytest.mark.parametrize(
    ("make", "vocab"),
    [
        (lambda: RsdC(RsdCParams(width=2, depth=2)), 2),
        (lambda: RsdS(RsdSParams(width=2, depth=2)), 2),
        (lambda: RsdC(RsdCParams(widths=(2, 1))), 3),
        (lambda: RsdS(RsdSParams(width=3, depth=1)), 3),
    ],
    ids=["c-2-2", "s-2-2", "c-2-1", "s-3-1"],
)
@pytest.mark.parametrize("kind", ["flat", "near"])
def test_the_output_has_the_targets_distribution(make, vocab, kind):
    case = Case(kind, table_model.make_table_pair(kind, vocab), REJECTION, PROMPT, budget=3)
    assert distance_from_target(make(), case) < 1e-9


def tokens_a_step(make, tables):
    """Mean tokens that a first step commits, over every outcome, and the nodes verified for it."""

    def first(random):
        step = next(make().generate(on_tables(tables, random=random)))
        return len(step.outcome.committed), step.draft.nodes

    found = list(enumerate_outcomes(first))
    assert len({nodes for (_, nodes), _ in found}) == 1
    return sum(n * weight for (n, _), weight in found), found[0][0][1]


def test_with_equal_nodes_draws_without_replacement_commit_more_than_independent_ones():
    """RSD's comparison at a fixed budget: four nodes each, the mean over all outcomes."""
    tables = table_model.fix_token(table_model.make_table_pair("flat", 3, seed=33), PROMPT, 2)
    trees = [
        tokens_a_step(make, tables)
        for make in (
            lambda: SpsTree(SpsTreeParams(widths=(2, 1), draw_mode="independent")),
            lambda: RsdC(RsdCParams(widths=(2, 1))),
            lambda: RsdS(RsdSParams(width=2, depth=2)),
        )
    ]
    assert [nodes for _, nodes in trees] == [4, 4, 4]
    independent, constant, stochastic = (mean for mean, _ in trees)
    assert independent < constant
    assert independent < stochastic


def test_with_equal_draft_and_target_the_first_child_is_accepted():
    table = table_model.random_table(3, 5, 1.5)
    for make in (RsdC(RsdCParams(width=2, depth=2)), RsdS(RsdSParams(width=2, depth=2))):
        for step in make.generate(on_tables((table, table), budget=30)):
            tree, node = build_tree(step.draft.parents), -1
            for child in step.outcome.path:
                assert child == tree.children[node][0]
                node = child
            assert not tree.children[node]


def test_gumbel_keys_of_the_paper_keep_the_same_nodes():
    """Stochastic beam search as printed (Kool et al.), by its keys, in the mean."""
    tables = table_model.fix_token(table_model.make_table_pair("near", 3), PROMPT, 2)
    generator = torch.Generator().manual_seed(1)
    n, text = 20_000, (*PROMPT, 2)
    log_q = [warp(tables[1][text[-2], text[-1]], REJECTION).log()]
    log_q += [warp(tables[1][text[-1], token], REJECTION).log() for token in range(3)]

    def gumbel(*shape):
        return -(-torch.rand(shape, generator=generator, dtype=torch.float64).log()).log()

    def below(phi, key):
        """Keys of children whose largest is their parent's: [n, 3] from [n] and log q [n, 3]."""
        g = phi + gumbel(n, 3)
        z = g.max(-1, keepdim=True).values
        v = key[:, None] - g + torch.log1p(-torch.exp(g - z))
        return key[:, None] - v.clamp_min(0) - torch.log1p(torch.exp(-v.abs()))

    top = (log_q[0] + gumbel(n, 3)).topk(2, -1)
    rows = torch.stack(log_q[1:])
    second = [
        below(
            log_q[0][top.indices[:, beam], None] + rows[top.indices[:, beam]], top.values[:, beam]
        )
        for beam in (0, 1)
    ]
    best = torch.cat(second, -1).topk(2, -1).indices
    parent = top.indices.gather(1, best // 3)
    said = torch.stack((parent, best % 3), -1).flatten(1).tolist()
    counts = {}
    for row in said:
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1 / n

    def newest(random):
        nodes = nodes_drawn(RsdS(RsdSParams(width=2, depth=2)), tables, random)
        return tuple(x for node in nodes if len(node) == 2 for x in node)

    ours = compute_distribution(newest)
    for beam, chance in ours.items():
        error = math.sqrt(chance * (1 - chance) / n)
        assert abs(counts.get(beam, 0.0) - chance) < 5 * error + 1e-12
