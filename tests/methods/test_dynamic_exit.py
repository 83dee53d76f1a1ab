"""DEL: the exit and the draft length that it chooses, and its statistics of exits."""

from itertools import product

import pytest
import torch

from methods.dynamic_exit import Del, DelParams, best_exit
from methods.vanilla import Vanilla
from specbench_cli.audit.models.table import TableDecoder, make_exit_table, random_table
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.sampling import Sampling, warp
from specbench_cli.engine.workspace import Workspace
from specbench_cli.models.resolve import resolve

GREEDY = Sampling()
PROMPT = (7, 300, 12, 2048, 99, 5, 640, 31)


@pytest.fixture(scope="module")
def target():
    return load_decoder(resolve("embedded-exit").path, name="target")


def opened(target, sampling=GREEDY, n=24, prompt=PROMPT):
    workspace = Workspace({"target": target}, capacity=len(prompt) + n + 20)
    return Session(workspace, Request("some/0", 0, prompt, StopRule(frozenset(), n)), sampling)


# ---- tokens per layer ---------------------------------------------------------------------------


def rate(alpha, cost, d):
    """Return tokens per target forward, over all outcomes of d acceptance tests."""
    tokens = 0.0
    for outcome in product((True, False), repeat=d):
        chance = 1.0
        for accepted in outcome:
            chance *= alpha if accepted else 1.0 - alpha
        tokens += chance * ([*outcome, False].index(False) + 1)
    return tokens / (d * cost + 1.0)


@pytest.mark.parametrize("seed", range(12))
def test_the_chosen_exit_and_length_are_the_best_of_all_pairs(seed):
    generator = torch.Generator().manual_seed(seed)
    alpha = torch.rand(4, generator=generator).tolist()
    if seed % 3 == 0:
        alpha = sorted(alpha)
    if seed % 4 == 0:
        alpha[seed % 3] = 1.0
    cost = [(at + 1) / 9 for at in range(4)]
    at, d = best_exit(alpha, cost, 5)
    best = max(rate(a, c, n) for a, c in zip(alpha, cost, strict=True) for n in range(6))
    assert rate(alpha[at], cost[at], d) == pytest.approx(best)


def test_an_exit_that_costs_more_than_it_gains_drafts_nothing():
    assert best_exit([0.1, 0.2], [0.3, 0.6], 8)[1] == 0
    assert best_exit([], [], 8) == (0, 0)


def test_an_exit_that_is_always_right_drafts_the_maximum():
    assert best_exit([0.5, 1.0], [0.25, 0.5], 7) == (1, 7)


# ---- statistics ---------------------------------------------------------------------------------


def exit_logits(target, text, end):
    """Return logits [n, V] of the first `end` layers, from one forward over the text."""
    out = target.forward(Tokens(torch.tensor([text])), target.new_state(64), layers=(0, end))
    return target.unembed(target.norm(out.hidden))[0]


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_statistics_equal_those_computed_from_the_whole_text(target, rule):
    """Each position before a committed token counts once. Rejected tokens do not count."""
    sampling = GREEDY if rule == "greedy" else Sampling(rule, 0.7, seed=3)
    method, session = Del(DelParams(keep=1.0, length=3)), opened(target, sampling)
    steps = list(method.generate(session))
    text, drafted = list(session.tokens()), len(session.output()) - 1
    rows = slice(len(PROMPT), len(text) - 1)
    assert method.n == 2 + drafted
    assert sum(step.draft.nodes for step in steps)
    all_rows = target.forward(
        Tokens(torch.tensor([text])), target.new_state(64), logits_at="all"
    ).rows[rows]
    for end in range(1, 8):
        early = exit_logits(target, text, end)[rows]
        if sampling.draws:
            agreed = torch.minimum(warp(early, sampling), warp(all_rows, sampling)).sum(-1)
        else:
            exit_choice, own = (session.scores(each, 1).argmax(-1) for each in (early, all_rows))
            agreed = (exit_choice == own).float()
        sure = early.softmax(-1).amax(-1)
        assert method.accepted_weight[end - 1] == pytest.approx(1 + float(agreed.sum()), abs=1e-3)
        assert method.accepted_confidence[end - 1] == pytest.approx(
            float((agreed * sure).sum()), abs=1e-3
        )
        unsure = float((sure - agreed * sure).sum())
        assert method.rejected_confidence[end - 1] == pytest.approx(unsure, abs=1e-3)


def test_an_exit_that_agrees_with_the_target_is_chosen():
    """Use a table whose first layer is the target's, at half of the cost, so alpha approaches
    one."""
    table = random_table(5, 3)
    method = Del(DelParams(length=6))
    session = opened(TableDecoder("target", table, table), n=60, prompt=(1, 2, 3))
    steps = list(method.generate(session))
    assert [len(step.outcome.path) for step in steps[-4:-1]] == [6] * 3
    assert method.accepted_weight[0] / method.n > 0.95


def test_an_exit_that_is_never_right_drafts_nothing():
    table = random_table(5, 3)
    session = opened(TableDecoder("target", table, -table), n=60, prompt=(1, 2, 3))
    steps = list(Del(DelParams()).generate(session))
    assert sum(step.draft.nodes for step in steps[8:]) == 0


@pytest.mark.parametrize("every", [1, 3])
def test_a_step_costs_its_exit_the_other_layers_and_one_output_matrix(target, every):
    steps = list(Del(DelParams(every=every, stop=False)).generate(opened(target)))
    exits = len(range(1, 8, every))
    for step in steps[:-1]:
        *forwards, shadow = step.forwards
        assert (shadow.role, shadow.layers) == ("aux", (0, 0))
        assert shadow.n_tokens == exits * len(step.outcome.committed)
        assert shadow.share == pytest.approx(target.share((0, 0)))
        verify = [f for f in forwards if f.role == "verify"]
        assert sum(f.share for f in verify) == pytest.approx(1.0)
        assert len(forwards) - len(verify) == step.draft.nodes


def test_a_model_of_one_layer_has_no_exit_and_is_decoded_plainly():
    target = TableDecoder("target", random_table(5, 3))
    session = opened(target, prompt=(1, 2, 3))
    steps = list(Del(DelParams()).generate(session))
    plain = opened(target, prompt=(1, 2, 3))
    list(Vanilla().generate(plain))
    assert session.output() == plain.output()
    assert not sum(step.draft.nodes for step in steps)


def test_table_exits_have_their_layers_own_logits():
    """`capture_layers` keeps the output of each layer of a table."""
    table = random_table(4, 1)
    decoder, ids = TableDecoder("target", table, make_exit_table(table)), torch.tensor([[1, 0, 2]])
    out = decoder.forward(Tokens(ids), decoder.new_state(4), captured_layers=(0, 1))
    assert torch.equal(out.aux_hidden_states[0][0], make_exit_table(table)[[0, 1, 0], [1, 0, 2]])
    assert torch.equal(out.aux_hidden_states[1][0], table[[0, 1, 0], [1, 0, 2]])
