"""Tests of staged decoding: lower stages save draft forwards and keep the drafted tree."""

import math

import pytest
from pydantic import ValidationError

from methods.staged.method import GuessTree, NgramStage, Staged, StagedParams
from methods.staged.ngram import KatzModel
from specbench_cli import registry
from specbench_cli.audit.cases import Case
from specbench_cli.audit.enumeration import enumerate_outcomes, sum_weights, total_variation
from specbench_cli.audit.models.table import (
    TableDecoder,
    find_wrong_rows,
    make_table_pair,
    random_table,
)
from specbench_cli.audit.reference import Reference
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import ROOT, build_tree
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault, UsageError
from tests.methods.exact import distance_from_target

GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.8, top_k=6, top_p=0.95, seed=3)
REJECTION = Sampling("rejection", 0.8, seed=3)
RULES = pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=lambda s: s.rule)
EXACT = pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
VOCAB = 12
PROMPTS = ((1, 0, 1), (5, 3, 2, 7, 11, 0), (4, 9))

TARGET = random_table(VOCAB, 1, 2.0)
DRAFT = TARGET + 0.5 * random_table(VOCAB, 2, 2.0)
SMALL = DRAFT + 0.5 * random_table(VOCAB, 3, 2.0)
UNRELATED = random_table(VOCAB, 4, 2.0)


class StateLog(Session):
    """A session that remembers each state that it created."""

    def new_state(self, decoder, slack=0):
        state = super().new_state(decoder, slack)
        self.__dict__.setdefault("states", []).append(state)
        return state


def on_tables(tables, sampling=GREEDY, *, prompt=PROMPTS[0], budget=30, eos=(), **rest):
    """Open a session on table models. `tables` maps each role to a table."""
    decoders = {role: TableDecoder(role, table) for role, table in tables.items()}
    request = Request(f"table/{prompt}", 0, prompt, StopRule(frozenset(eos), budget))
    return StateLog(Workspace(decoders, len(prompt) + budget), request, sampling, **rest)


def models(**others):
    return {"target": TARGET, "draft": DRAFT} | others


def run(session, **params):
    return list(Staged(StagedParams(**params)).generate(session))


def trees(steps):
    return [(step.draft.tokens.tolist(), step.draft.parents) for step in steps]


def count_generated_nodes(draft):
    """Return the number of nodes on the main path, without the branches."""
    parents = draft.parents or tuple(range(-1, draft.nodes - 1))
    return sum(parent == node - 1 and node < draft.levels for node, parent in enumerate(parents))


def forwards(steps, model="draft"):
    return [sum(f.model == model for f in step.forwards) for step in steps]


def vanilla(tables, sampling, prompt, budget):
    return Reference(tables["target"], sampling).decode(f"table/{prompt}", prompt, budget)


# ---- parameters ---------------------------------------------------------------------------------


def test_stages_are_typed_as_a_list():
    params = registry.declare("staged", {"stages": "ngram,small,draft"}).params
    assert params.stages == ("ngram", "small", "draft")


@pytest.mark.parametrize("typed", ["ngram", "draft,ngram", "draft,draft", []])
def test_stages_must_end_in_the_draft_and_not_repeat(typed):
    with pytest.raises(ValidationError):
        StagedParams(stages=typed)
    with pytest.raises(UsageError, match=r"staged\.stages"):
        registry.declare("staged", {"stages": typed})


def test_a_missing_stage_is_named():
    with pytest.raises(MethodFault, match="small"):
        run(on_tables(models()), stages=("small", "draft"))


# ---- the stages below change forwards and nothing else ------------------------------------------


class Nonsense(NgramStage):
    """An n-gram stage that proposes a tree of tokens that the draft does not choose."""

    def propose(self, path, depth):
        text = [*PROMPTS[0], *self.session.output(), *path]
        worst = int(DRAFT[text[-2], text[-1]].argmin())
        return GuessTree([worst, worst], (ROOT, 0)) if depth > 1 else GuessTree([], ())


def test_a_lower_stage_that_is_never_right_changes_nothing(monkeypatch):
    plain = run(on_tables(models()), stages=("draft",))
    assert forwards(plain) == [count_generated_nodes(step.draft) for step in plain]
    monkeypatch.setattr("methods.staged.method.NgramStage", Nonsense)
    session = on_tables(models())
    steps = run(session)
    assert trees(steps) == trees(plain)
    assert forwards(steps) == forwards(plain)


@pytest.mark.parametrize("lookahead", [1, 2, 3, 5, 9])
def test_a_lower_stage_equal_to_the_draft_saves_the_most_forwards(lookahead):
    steps = run(
        on_tables(models(small=DRAFT)),
        stages=("small", "draft"),
        lookahead=lookahead,
        width=1,
        depth=7,
        threshold=0,
    )
    full = [step for step in steps if step.draft.levels == 7]
    assert full
    assert forwards(full) == [math.ceil(7 / (lookahead + 1))] * len(full)


@EXACT
def test_a_better_lower_stage_saves_more_draft_forwards(sampling):
    forward_counts = []
    for small in (UNRELATED, SMALL, DRAFT):
        steps = []
        for prompt in PROMPTS:
            session = on_tables(models(small=small), sampling, prompt=prompt)
            steps += run(session, stages=("small", "draft"), depth=8, threshold=0)
        forward_counts.append(sum(forwards(steps)))
    assert forward_counts == sorted(forward_counts, reverse=True)
    assert forward_counts[0] > forward_counts[1] > forward_counts[2]


STAGES = [
    ("ngram", "draft"),
    ("small", "draft"),
    ("stranger", "draft"),
    ("ngram", "small", "draft"),
    ("ngram", "stranger", "small", "draft"),
]


@EXACT
@pytest.mark.parametrize("stages", [("draft",), *STAGES], ids="-".join)
def test_lower_stages_change_neither_output_nor_trees(sampling, stages):
    tables = models(small=SMALL, stranger=UNRELATED)
    for prompt in PROMPTS:
        for budget in (1, 2, 6, 7, 8, 30):
            expected = vanilla(tables, sampling, prompt, budget)
            alone = run(on_tables(tables, sampling, prompt=prompt, budget=budget), stages="draft")
            session = on_tables(tables, sampling, prompt=prompt, budget=budget)
            steps = run(session, stages=stages)
            assert list(session.output()) == expected
            assert trees(steps) == trees(alone)


@RULES
@pytest.mark.parametrize("stages", STAGES, ids="-".join)
@pytest.mark.parametrize("draw_mode", ["deterministic", "without_replacement"])
def test_after_a_step_all_states_contain_only_committed_tokens(sampling, stages, draw_mode):
    params = StagedParams(stages=stages, draw_mode=draw_mode, width=2)
    for prompt in PROMPTS:
        session = on_tables(models(small=SMALL, stranger=UNRELATED), sampling, prompt=prompt)
        for _ in Staged(params).generate(session):
            for state in session.states:
                assert find_wrong_rows(state, session.tokens()[:-1]) is None


# ---- the tree -----------------------------------------------------------------------------------


@EXACT
@pytest.mark.parametrize("nodes", [6, 9, 16])
def test_the_branches_are_the_likeliest_of_all_next_best_children(sampling, nodes):
    session = on_tables(models(), sampling)
    for step in Staged(StagedParams(depth=6, nodes=nodes, threshold=0)).generate(session):
        draft, n = step.draft, len(step.outcome.committed)
        if draft.levels < 6:
            continue
        ids, text = draft.tokens.tolist(), list(session.tokens()[:-n])
        first = len(text) - len(PROMPTS[0])
        others, reach = [], 0.0
        for node in range(6):
            context = [*text, *ids[:node]][-2:]
            scores = session.scores(DRAFT[context[0], context[1]][None], first + node)[0]
            values, best = scores.log_softmax(-1).topk(3)
            assert ids[node] == best[0]
            others += [
                (reach + v, node - 1, token)
                for v, token in zip(values[1:].tolist(), best[1:].tolist(), strict=True)
            ]
            reach += float(values[0])
        parents = draft.parents or tuple(range(-1, 5))
        assert parents[:6] == (-1, 0, 1, 2, 3, 4)
        expected = sorted((o for o in others if o[0] > -math.inf), reverse=True)[: nodes - 6]
        assert list(zip(parents[6:], ids[6:], strict=True)) == [o[1:] for o in expected]
        assert draft.nodes == 6 + len(expected)


def test_without_nodes_left_for_branches_the_draft_is_a_chain():
    steps = run(on_tables(models()), depth=9, nodes=5, threshold=0)
    assert all(step.draft.nodes <= 5 for step in steps)
    assert all(step.draft.parents is None for step in steps if step.draft.levels == 5)


@pytest.mark.parametrize("sampling", [GREEDY, REJECTION], ids=["chosen", "drawn"])
def test_generation_stops_after_the_first_token_below_the_threshold(sampling):
    stopped = 0
    for prompt in PROMPTS:
        session = on_tables(models(), sampling, prompt=prompt)
        method = Staged(
            StagedParams(threshold=0.4, draw_mode="without_replacement", width=1, depth=5)
        )
        for step in method.generate(session):
            text = list(session.tokens()[: -len(step.outcome.committed)])
            room, reach = 30 - (len(text) - len(prompt)) - 1, 1.0
            for level, token in enumerate(step.draft.tokens.tolist(), start=1):
                row = DRAFT[text[-2], text[-1]][None]
                distribution = row.softmax(-1) if sampling is GREEDY else session.warp(row)
                reach *= float(distribution[0, token])
                text.append(token)
                assert (level == step.draft.levels) == (reach < 0.4 or level == min(5, room))
            stopped += step.draft.levels < min(5, room)
    assert stopped > 5


# ---- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scope", "learns"), [("run", True), ("prompt", False)])
def test_counts_are_kept_for_the_run_or_for_the_prompt(scope, learns):
    memory = {}
    first, second = (
        sum(forwards(run(on_tables(models(), memory=memory), scope=scope))) for _ in range(2)
    )
    assert (second < first) == learns
    assert second == first or learns
    assert bool(memory) == learns


def test_only_tokens_that_the_draft_generates_are_counted():
    memory = {}
    run(on_tables(models(), memory=memory))
    model = memory["ngram"]
    seen = [
        (last, token, distribution[token])
        for last in range(VOCAB)
        for distribution in [model.distribution((last,))]
        for token in range(VOCAB)
    ]
    assert seen
    for context, after in model._after.items():
        if len(context) == 2:  # a table model depends on two tokens: one greedy choice
            assert list(after.counts) == [int(DRAFT[context].argmax())]


# ---- distributions ------------------------------------------------------------------------------


def make_learned_counts(table):
    """Return n-gram counts of a table's likeliest tokens."""
    model = KatzModel(table.shape[-1])
    for before in range(table.shape[-1]):
        for last in range(table.shape[-1]):
            for _ in range(3):
                model.add((before, last), int(table[before, last].argmax()))
    memory = Memory()
    memory["ngram"] = model
    return memory


@pytest.mark.parametrize("lower_stage", ["nothing", "ngram", "small"])
def test_the_last_stage_samples_from_the_drafts_distribution(lower_stage):
    target, draft = make_table_pair("near", 3)
    tables = {"target": target, "draft": draft, "small": random_table(3, 8, 2.0)}
    stages = ("draft",) if lower_stage == "nothing" else (lower_stage, "draft")
    params = StagedParams(
        stages=stages,
        draw_mode="without_replacement",
        depth=2,
        nodes=2,
        lookahead=1,
        width=1,
        threshold=0,
    )

    def first_draft(random):
        session = on_tables(
            tables, REJECTION, budget=8, random=random, memory=make_learned_counts(draft)
        )
        step = next(iter(Staged(params).generate(session)))
        return session.output()[0], tuple(step.draft.tokens.tolist())

    distribution = sum_weights(
        (drafted, weight) for drafted, weight in enumerate_outcomes(first_draft)
    )
    truth = {}
    own = Reference(draft, REJECTION)
    for first, p in enumerate(Reference(target, REJECTION).distribution(0, 1)):
        for a, pa in enumerate(own.distribution(1, first)):
            for b, pb in enumerate(own.distribution(first, a)):
                truth[first, (a, b)] = p * pa * pb
    assert total_variation(distribution, truth) < 1e-9


@pytest.mark.parametrize(
    ("params", "vocab"),
    [
        ({"draw_mode": "deterministic", "depth": 2, "nodes": 4, "width": 2}, 3),
        ({"draw_mode": "without_replacement", "depth": 2, "nodes": 2, "width": 1}, 3),
        ({"draw_mode": "without_replacement", "depth": 2, "nodes": 3, "width": 2}, 2),
    ],
    ids=str,
)
def test_the_output_has_the_targets_distribution(params, vocab):
    tables = make_table_pair("near", vocab)
    case = Case("near", tables, REJECTION, PROMPTS[0], budget=3)
    method = Staged(StagedParams(**params))
    assert distance_from_target(method, case, memory=lambda: make_learned_counts(tables[1])) < 1e-9


def test_children_of_a_node_are_distinct():
    for step in run(
        on_tables(models(), REJECTION), draw_mode="without_replacement", depth=5, nodes=12
    ):
        draft = step.draft
        if not draft.nodes:
            continue
        assert (draft.draw_mode, draft.nodes <= 12) == ("without_replacement", True)
        ids = draft.tokens.tolist()
        for children in build_tree(draft.parents).children:
            assert len({ids[child] for child in children}) == len(children) <= 3
