"""Contrastive targets: their distribution from independent code, and every method's output."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.sps import Sps, SpsParams
from specbench_cli import registry
from specbench_cli.audit.enumeration import total_variation
from specbench_cli.audit.models.head import make_table_artifact
from specbench_cli.audit.models.table import (
    RecurrentTable,
    TableDecoder,
    make_exit_table,
    make_table_pair,
)
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Outcome
from specbench_cli.engine.verify.sampling import Sampling, warp
from specbench_cli.engine.verify.uscd import Contrast, normalized_std
from specbench_cli.engine.verify.weakened_prompt import WeakenedPromptReader
from specbench_cli.engine.workspace import Workspace

PROMPT = (1, 0, 2, 1, 0)
CONTRAST = Contrast(beta=1.5, keep=0.5, below=0.7, floor=0.2)
WEAK = (1, 1, 0)

METHODS = {
    "vanilla": {},
    "sps": {"length": 2},
    "pld": {"ngram": 2, "length": 2},
    "sps-tree": {"width": 2, "depth": 2, "shape": "dynamic"},
    "eagle2": {"nodes": 4, "depth": 2, "width": 2},
    "medusa": {"nodes": 4},
    "layerskip": {"length": 2},
    "pearl": {"window": 2},
    "specreason": {"threshold": 10.0, "cap": 2},
}
"""Methods with chains, trees, look-ups, parts of the target, drafts in parallel, and steps."""


class PositionTable:
    """Table whose entries depend on the position, as those of a real model depend on the text."""

    def previous_token(self, state, row):
        return (super().previous_token(state, row) + state.rows[row].position) % self.vocab_size


class Placed(PositionTable, TableDecoder):
    pass


class PlacedRecurrent(PositionTable, RecurrentTable):
    pass


def workspace_of(tables, capacity, kind=Placed):
    target, draft = tables
    decoders = {
        "target": kind("target", target, make_exit_table(target), inner=2),
        "draft": TableDecoder("draft", draft, make_exit_table(draft), inner=2),
    }
    return Workspace(decoders, capacity, load_artifact=partial(make_table_artifact, decoders))


def build(name):
    method = registry.load(name)
    return method(method.Params(**METHODS[name]))


# ---- the expected result, from independent code --------------------------------------------------


def logits_after(table, text):
    """Return the logits after a text."""
    before = (text[-2] if len(text) > 1 else 0) + len(text) - 1
    return table[before % len(table), text[-1]].tolist()


def due_row(table, output, contrast=CONTRAST):
    whole, weak = logits_after(table, (*PROMPT, *output)), logits_after(table, (*WEAK, *output))
    mass = [math.exp(each - max(whole)) for each in whole]
    p = [each / sum(mass) for each in mass]
    even = 1 / len(p)
    deviation = math.sqrt(sum((each - even) ** 2 for each in p) / len(p))
    sure = math.sqrt(even * (1 - even) ** 2 + (1 - even) * even**2)
    if deviation / sure > contrast.below:
        return whole
    return [
        z + contrast.beta * (z - w) if own >= contrast.floor * max(p) else -math.inf
        for z, w, own in zip(whole, weak, p, strict=True)
    ]


def due_distribution(table, sampling, length=3):
    distribution, due = defaultdict(float), [((), 1.0)]
    while due:
        output, weight = due.pop()
        if len(output) == length:
            distribution[output] += weight
            continue
        row = torch.tensor(due_row(table, output), dtype=torch.float64)
        for token, p in enumerate(warp(row, sampling).tolist()):
            if p > 0:
                due.append(((*output, token), weight * p))
    return distribution


def due_tokens(table, sampling, noise, n):
    output = []
    while len(output) < n:
        row = torch.tensor(due_row(table, output), dtype=torch.float64)
        if sampling.rule == "coupled":
            row = warp(row, sampling).log() + noise[len(output)]
        output.append(int(row.argmax()))
    return output


@pytest.fixture
def distribution_of(open_session, exact_distribution):
    def walk(method, tables, sampling, budget=4, length=3):
        shared = workspace_of(tables, len(PROMPT) + budget + 16)

        def run(random):
            session = open_session(
                *tables,
                workspace=shared,
                random=random,
                prompt=PROMPT,
                sampling=sampling,
                budget=budget,
            )
            for _ in method.generate(session):
                if len(session.output()) >= length:
                    break
            return tuple(session.output()[:length])

        return exact_distribution(run)

    return walk


def opened(open_session, sampling, budget=20, kind=Placed, seed=21):
    tables = make_table_pair("near", seed=seed)
    shared = workspace_of(tables, len(PROMPT) + budget + 16, kind)
    request = {"prompt": PROMPT, "sampling": sampling, "budget": budget}
    return tables, open_session(*tables, workspace=shared, **request)


# ---- all methods --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in METHODS if name != "pearl"])
@pytest.mark.parametrize("heat", [1.0, 0.6])
def test_under_a_contrast_the_distribution_is_the_contrasted_targets(distribution_of, name, heat):
    tables, sampling = make_table_pair("near"), Sampling("rejection", heat, contrast=CONTRAST)
    distribution, due = (
        distribution_of(build(name), tables, sampling),
        due_distribution(tables[0], sampling),
    )
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-9)
    assert total_variation(distribution, due) < 1e-9


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_under_a_contrast_tokens_are_the_contrasted_targets(open_session, name, rule):
    for seed in (21, 31, 41):
        sampling = Sampling(*(() if rule == "greedy" else (rule, 0.9)), seed=3, contrast=CONTRAST)
        tables, session = opened(open_session, sampling, seed=seed)
        due = due_tokens(tables[0], sampling, session.noise(0, 20), 20)
        for _ in build(name).generate(session):
            pass
        assert session.output() == due


def test_a_contrast_changes_the_output(open_session):
    outputs = []
    for contrast in (None, CONTRAST):
        _, session = opened(open_session, Sampling(contrast=contrast))
        list(build("vanilla").generate(session))
        outputs.append(session.output())
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize(
    "off",
    [
        Contrast(beta=0.0, floor=0.0, below=1.0),
        Contrast(keep=1.0, floor=0.0, below=1.0),
        Contrast(beta=9.0, below=0.0),
    ],
    ids=["beta", "keep", "below"],
)
@pytest.mark.parametrize("rule", [(), ("coupled", 0.9)])
def test_switched_off_it_is_plain(open_session, off, rule):
    outputs = []
    for contrast in (None, off):
        _, session = opened(open_session, Sampling(*rule, contrast=contrast))
        list(build("sps").generate(session))
        outputs.append(session.output())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("rule", [(), ("coupled", 0.9)])
def test_a_recurrent_target_is_contrasted_in_the_same_way(open_session, rule):
    sampling = Sampling(*rule, seed=3, contrast=CONTRAST)
    tables, session = opened(open_session, sampling, kind=PlacedRecurrent)
    due = due_tokens(tables[0], sampling, session.noise(0, 20), 20)
    list(build("sps").generate(session))
    assert session.output() == due


def test_batched_sequences_are_contrasted_as_alone():
    tables, n = make_table_pair("near"), 12
    prompts = [PROMPT, (2, 1), (0, 1, 2, 0, 1, 2, 2)]
    stop = StopRule(frozenset(), n)
    requests = [Request(f"table/{at}", 0, each, stop) for at, each in enumerate(prompts)]
    sampling, shared = Sampling("coupled", 0.9, contrast=CONTRAST), workspace_of(tables, 64)
    alone = []
    for request in requests:
        session = Session(shared, request, sampling)
        list(build("sps").generate(session))
        alone.append(session.output())
    batch = Batch(shared, requests, sampling, size=2, chunk=3)
    for step in build("sps").generate_batch(batch):
        own = [f for f in step.forwards if f.model == "target" and step.seq in f.rows]
        assert len(own) >= 2  # the shared state, and the one after its own weakened prompt
    assert [session.output() for session in batch.sessions] == alone


# ---- the second state and its counters ----------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_second_state_holds_the_weakened_prompt_and_what_was_committed(open_session, name):
    _, session = opened(open_session, Sampling(contrast=CONTRAST))
    for _ in build(name).generate(session):
        second = session._verifier.weakened._scoring.state
        text = [*WEAK, *session.output()]
        assert second.ids == text[: len(second.ids)]
        assert second.positions == list(range(len(second.ids)))
        assert len(second.ids) == len(text) - 1


@pytest.mark.parametrize("name", ["vanilla", "sps", "pld", "eagle2"])
def test_its_forwards_are_counted_as_target_forwards_one_per_step_and_one_for_the_prompt(
    open_session, name
):
    _, session = opened(open_session, Sampling(contrast=CONTRAST))
    steps = list(build(name).generate(session))
    of_target = [f for f in session.harness.meter.forwards if f.model == "target"]
    roles = [f.role for f in of_target]
    assert roles.count("prefill") == 2
    assert roles.count("verify") == 2 * len(steps)
    for step in steps:
        first, second = (f for f in step.forwards if f.model == "target")
        assert (first.role, first.n_tokens) == (second.role, second.n_tokens)


def test_tokens_committed_without_verification_are_read_before_the_next_one(open_session):
    tables, session = opened(open_session, Sampling(contrast=CONTRAST))
    session.prefill()
    for tokens in ((2, 0), (1,)):
        draft = session.chain(tokens[:-1])
        session.score(draft)
        path = tuple(range(len(tokens) - 1))
        origin = ("accepted",) * len(path) + ("plain",)
        session.commit(Outcome(path, tokens, origin, len(path)))
    draft = session.chain((0, 1))
    outcome = session.verify(draft, session.score(draft))
    due = due_row(tables[0], session.output())
    assert outcome.committed[0] == max(range(3), key=due.__getitem__)


def test_a_draft_that_is_verified_again_is_read_again(open_session):
    _, session = opened(open_session, Sampling(contrast=CONTRAST))
    session.prefill()
    draft = session.chain((0, 1))
    rows = session.score(draft)
    assert session.verify(draft, rows) == session.verify(draft, rows)


def test_a_second_forward_that_ignores_the_draft_is_found(distribution_of, monkeypatch):
    """The planted fault contrasts all nodes with the logits after the root."""
    whole = WeakenedPromptReader._read
    forgets = lambda self, draft, n: whole(self, draft, n)[:1].expand(n, -1)  # noqa: E731
    tables, sampling = make_table_pair("near"), Sampling("rejection", 1.0, contrast=CONTRAST)
    monkeypatch.setattr(WeakenedPromptReader, "_read", forgets)
    distribution = distribution_of(Sps(SpsParams(length=2)), tables, sampling)
    assert total_variation(distribution, due_distribution(tables[0], sampling)) > 1e-3


# ---- the contrast itself ------------------------------------------------------------------------


@given(st.integers(1, 40), st.floats(0, 1))
def test_a_weakened_prompt_is_the_first_token_and_an_end_of_the_rest(n, keep):
    prompt = tuple(range(n))
    weak = Contrast(keep=keep).weaken(prompt)
    assert weak[0] == 0
    assert weak[1:] == prompt[n - len(weak) + 1 :]
    assert abs(len(weak) - 1 - keep * (n - 1)) <= max(0.5, float(keep * (n - 1) < 1)) or n == 1
    assert len(weak) > 1 or n == 1


def test_the_confidence_of_a_certain_distribution_is_one_and_of_a_uniform_one_zero():
    distributions = torch.tensor([[1.0, 0, 0, 0], [0.25] * 4, [0.5, 0.5, 0, 0]])
    assert normalized_std(distributions).tolist() == pytest.approx([1.0, 0.0, math.sqrt(1 / 3)])


def test_a_token_of_probability_zero_in_either_is_not_contrasted():
    whole, weak = torch.tensor([[1.0, -math.inf, 0.0]]), torch.tensor([[0.0, 3.0, -math.inf]])
    rows = Contrast(beta=1.0, below=1.0, floor=0.0).apply(whole, weak)
    assert rows.tolist() == [[2.0, -math.inf, 0.0]]


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_a_choice_changed_by_rounding_is_nearly_the_best(seed):
    error = 1e-3
    generator = torch.Generator().manual_seed(seed)

    def noise(scale):
        return scale * torch.randn(64, 5, generator=generator, dtype=torch.float64)

    whole, weak = noise(1.5), noise(1.5)
    middle = float(
        normalized_std(whole.softmax(-1)).median()
    )  # as many rows close to it as possible
    contrast = Contrast(beta=0.7, below=middle, floor=0.3)
    off = contrast.apply(*(each + noise(1.0).tanh() * error for each in (whole, weak)))
    around = [
        each.apply(whole, weak) for each in (contrast, *contrast.borderline_variants(5, error))
    ]
    allowed = contrast.error_factor * error + 1e-12
    for row, reading in enumerate(off):
        best = reading.argmax()
        lacks = [each[row].max() - each[row, best] for each in around]
        assert min(lacks) <= 2 * allowed
