"""Tests of EQSPEC and EXSPEC on batches whose sequences accept different numbers of tokens.

"Batch Speculative Decoding Done Right" (2025) lists the errors that other programs make here.
"""

from __future__ import annotations

import itertools

import pytest

from methods.eqspec import EqSpec, EqSpecParams
from methods.exspec import ExSpec, ExSpecParams
from methods.sps import Sps, SpsParams
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace

GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.8, seed=3)
BOTH = pytest.mark.parametrize("kind", [EqSpec, ExSpec])


@pytest.fixture
def decode(family):
    """Return a function that decodes `(prompt, budget, eos)` triples as one batch.

    It returns the batch and one list of steps per sequence.
    """

    def run(method, specs, size=None, draft="near", sampling=GREEDY):
        decoders = {"target": family.decoders["target"], "draft": family.decoders[draft]}
        requests = [
            Request(
                f"tiny/{prompt}", 0, prompt_ids(family, prompt), StopRule(frozenset(eos), budget)
            )
            for prompt, budget, eos in specs
        ]
        size = size or len(specs)
        batch = Batch(
            Workspace(decoders, 96), requests, sampling, size=size, slots=method.max_sequences(size)
        )
        steps = [[] for _ in specs]
        for step in method.generate_batch(batch):
            steps[step.seq].append(step)
        return batch, steps

    return run


def prompt_ids(family, prompt):
    return family.prompts[prompt] if isinstance(prompt, int) else prompt


@BOTH
def test_full_acceptance_adds_the_bonus_token(decode, clear_prompts, kind):
    specs = [(prompt, 25, ()) for prompt in clear_prompts(GREEDY, 4)]
    method = kind(kind.Params(length=3))
    _, steps = decode(method, specs, draft="target")
    for sequence_steps in steps:  # 24 tokens after the first one: 4 per step
        assert [len(step.outcome.committed) for step in sequence_steps] == [4] * 6
        assert {step.outcome.origin[-1] for step in sequence_steps} == {"bonus"}


@BOTH
def test_an_eos_inside_a_prompt_does_not_end_the_sequence(
    decode, clear_prompts, plain, kind, family
):
    # The EOS token, which other programs also use for padding, occurs inside the prompts.
    chosen = clear_prompts(GREEDY, 8)
    outputs = [plain(prompt, GREEDY).ids for prompt in chosen]
    eos = next(
        token
        for prompt in chosen
        for token in family.prompts[prompt]
        if not any(token in ids[:20] for ids in outputs)
    )
    batch, _ = decode(kind(), [(prompt, 20, (eos,)) for prompt in chosen])
    assert any(eos in family.prompts[prompt] for prompt in chosen)
    for session, ids in zip(batch.sessions, outputs, strict=True):
        assert (session.output(), session.finish) == (ids[:20], "length")


@BOTH
def test_tokens_after_an_accepted_eos_are_dropped(decode, clear_prompts, plain, kind):
    chosen = clear_prompts(GREEDY, 4)
    outputs = [plain(prompt, GREEDY).ids for prompt in chosen]
    ends = [(ids[2 + at],) for at, ids in enumerate(outputs)]
    specs = [(prompt, 30, eos) for prompt, eos in zip(chosen, ends, strict=True)]
    batch, _ = decode(kind(), specs, draft="target")
    for session, ids, (eos,) in zip(batch.sessions, outputs, ends, strict=True):
        assert session.output() == ids[: ids.index(eos) + 1]
        assert session.finish == "eos"


@BOTH
def test_the_draft_processes_each_token_once_and_skips_finished_sequences(
    decode, clear_prompts, kind
):
    chosen = clear_prompts(GREEDY, 3)
    method = kind(kind.Params(length=4))
    batch, _ = decode(method, [(chosen[0], 3, ()), (chosen[1], 30, ()), (chosen[2], 12, ())])
    drafted = [each for each in batch.meter.forwards if each.role == "draft"]
    assert max(max(each.rows.values()) for each in drafted) <= 2
    for at, session in enumerate(batch.sessions):
        last = max(n for n, each in enumerate(batch.meter.forwards) if at in each.rows)
        after = [each.rows for each in batch.meter.forwards[last + 1 :]]
        assert session.finish == "length" and all(at not in rows for rows in after)


@BOTH
def test_a_small_budget_shortens_only_its_own_drafts(decode, clear_prompts, kind):
    chosen = clear_prompts(GREEDY, 2)
    _, (short, long) = decode(kind(), [(chosen[0], 3, ()), (chosen[1], 30, ())])
    assert max(step.draft.nodes for step in short) == 1
    assert long[0].draft.nodes == 5


@BOTH
def test_one_sequence_may_reject_all_while_another_accepts_all(family, clear_prompts, plain, kind):
    """The two lengths diverge by K tokens per step. Each sequence keeps its own positions."""
    chosen = clear_prompts(GREEDY, 2)

    class WrongDrafts(kind):
        def propose_batch(self, members):
            drafts = super().propose_batch(members)
            wrong = [
                session.chain([(token + 1) % 96 for token in draft.tokens.tolist()])
                for draft, (_, session) in zip(drafts, members, strict=True)
            ]
            gets_wrong_draft = [
                session.requests[0].prompt_id == f"tiny/{chosen[1]}" for _, session in members
            ]
            return [
                wrong_draft if replace else draft
                for replace, wrong_draft, draft in zip(gets_wrong_draft, wrong, drafts, strict=True)
            ]

    decoders = {"target": family.decoders["target"], "draft": family.decoders["target"]}
    requests = [
        Request(f"tiny/{prompt}", 0, family.prompts[prompt], StopRule(frozenset(), 40))
        for prompt in chosen
    ]
    batch = Batch(Workspace(decoders, 96), requests, GREEDY)
    steps = list(WrongDrafts().generate_batch(batch))
    counts = [[len(s.outcome.path) for s in steps if s.seq == at] for at in (0, 1)]
    assert set(counts[0][:-1]) == {5} and set(counts[1]) == {0}
    for session, prompt in zip(batch.sessions, chosen, strict=True):
        assert session.output() == plain(prompt, GREEDY).ids


def test_outputs_belong_to_their_prompts_in_any_order(decode, clear_prompts, plain):
    chosen = clear_prompts(GREEDY, 4)
    for order in itertools.islice(itertools.permutations(chosen), 0, 24, 7):
        batch, _ = decode(ExSpec(ExSpecParams(window=4)), [(p, 12, ()) for p in order], size=2)
        for session, prompt in zip(batch.sessions, order, strict=True):
            assert session.output() == plain(prompt, GREEDY).ids[:12]


def test_rows_count_as_realigned_only_if_their_padding_changes(decode, family):
    n = len(family.prompts[7])
    other = next(at for at in range(8, 40) if len(family.prompts[at]) != n)
    method = EqSpec(EqSpecParams(length=2))
    # Both sequences accept every draft token, so the padding of the first step never changes.
    _, steps = decode(method, [(7, 22, ()), (other, 22, ())], draft="target")
    moved = [[step.extra["realigned_rows"] for step in sequence_steps] for sequence_steps in steps]
    assert moved == [[0] * 7] * 2
    # A batch of one sequence needs no padding.
    _, (single_steps,) = decode(method, [(7, 22, ())], draft="far")
    assert {step.extra["realigned_rows"] for step in single_steps} == {0}
    # The sequences accept different numbers of tokens. The padding of the shorter one changes, so
    # all of its rows move.
    _, steps = decode(method, [(7, 22, ()), (other, 22, ())], draft="near")
    lengths = [len(family.prompts[each]) + 1 for each in (7, other)]
    pads, rounds = None, zip(*steps, strict=False)
    for both in rounds:
        now = [max(lengths) - length for length in lengths]
        expected = [
            length - 1 if pads is not None and new != old else 0
            for length, new, old in zip(lengths, now, pads or now, strict=True)
        ]
        assert [step.extra["realigned_rows"] for step in both] == expected
        pads = now
        lengths = [a + len(s.outcome.committed) for a, s in zip(lengths, both, strict=True)]
    assert (
        sum(step.extra["realigned_rows"] for sequence_steps in steps for step in sequence_steps) > 0
    )


def test_the_first_full_group_of_equal_lengths_is_scheduled():
    class Text:
        def __init__(self, n):
            self.n = n

        def tokens(self):
            return range(self.n)

    window = [(None, Text(n)) for n in (4, 7, 5, 7, 4, 7, 4)]
    method = ExSpec(ExSpecParams(window=7))
    chosen = method.schedule(window, 3)
    assert [session.n for _, session in chosen] == [7, 7, 7]
    assert [session.n for _, session in method.schedule(window, 2)] == [7, 7]
    assert (
        list(method.schedule(window, 4)) == window[:4]
    )  # no group of equal lengths fills the batch
    assert (method.max_sequences(4), method.max_sequences(9)) == (7, 9)


def test_sequences_of_equal_length_share_a_step_without_realignment(decode, family):
    specs = [(at, 16, ()) for at in (7, 27, 8, 28)]  # lengths repeat every 20 prompts
    assert len({len(family.prompts[at]) for at, *_ in specs}) == 2
    method = ExSpec(ExSpecParams(length=2, window=4))
    batch, steps = decode(method, specs, size=2, draft="target")
    every = [step for sequence_steps in steps for step in sequence_steps]
    assert {step.extra["unpadded_steps"] for step in every} == {1}
    assert sum(step.extra["realigned_rows"] for step in every) == 0
    verified = [sorted(f.rows) for f in batch.meter.forwards if f.role == "verify"]
    assert {tuple(rows) for rows in verified} == {(0, 1), (2, 3)}


@pytest.mark.parametrize("length", ["synergy", "smartspec"])
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda each: each.rule)
def test_draft_lengths_that_depend_on_load_keep_the_output(
    family, clear_prompts, plain, length, sampling
):
    def costs(model, rows, *step):  # a cheap draft model; the target's cost grows with its rows
        return 0.05 if model != "target" else 1 + rows**2 / 200

    decoders = {"target": family.decoders["target"], "draft": family.decoders["near"]}
    workspace = Workspace(decoders, 96, costs=costs)
    chosen = clear_prompts(sampling, 6)
    requests = [
        Request(f"tiny/{prompt}", 0, family.prompts[prompt], StopRule(frozenset(), 8 + 3 * at))
        for at, prompt in enumerate(chosen)
    ]
    drafts_per_step = {}
    for method in (EqSpec(EqSpecParams(length=length)), Sps(SpsParams(length=length))):
        assert method.uses_costs and method.by_load and not method.timing_free
        for size in (1, 6):
            batch = Batch(workspace, requests, sampling, size=size)
            steps = list(method.generate_batch(batch))
            drafts_per_step[size] = sum(step.draft.nodes for step in steps) / len(steps)
            for at, session in enumerate(batch.sessions):
                assert session.output() == plain(chosen[at], sampling).ids[: 8 + 3 * at]
        assert drafts_per_step[6] < drafts_per_step[1]
