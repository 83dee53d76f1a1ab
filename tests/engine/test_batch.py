"""Batches: each sequence gets the results it gets alone, for any lengths, trees and ends."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli import registry
from specbench_cli.audit.models.tiny import create_tiny_models
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.models.decoder import ModelInput
from specbench_cli.engine.models.forward_plan import MAX_PADDING
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault

CAPACITY = 64
ATOL = 2e-5

TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
"""A root with two children. The first child has one child."""


@pytest.fixture(scope="module")
def target():
    return create_tiny_models().workspace.decoders["target"]


def ids(n: int, seed: int) -> torch.Tensor:
    return torch.randint(96, (1, n), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 7)), min_size=2, max_size=5),
    st.booleans(),
)
def test_a_ragged_forward_gives_every_sequence_its_own_results(shapes, pooled):
    target = create_tiny_models().workspace.decoders["target"]
    pool = target.new_state(CAPACITY, len(shapes))
    together = [
        pool.sequence_state(at) if pooled else target.new_state(CAPACITY)
        for at in range(len(shapes))
    ]
    alone = [target.new_state(CAPACITY) for _ in shapes]
    for own in (together, alone):
        for (n, _), state in zip(shapes, own, strict=True):
            target.forward(Tokens(ids(n, n)), state)
            state.commit(0, range(n))
    parts = []
    for at, (n, new) in enumerate(shapes):
        how = {}
        if new == 0:  # a tree
            depths = torch.tensor([[0, 1, 1, 2]]) + n
            how = {"positions": depths, "mask": TREE}
        x = Tokens(ids(new or 4, 50 + at))
        parts.append(ModelInput(x, together[at], logits_at="all" if at % 2 else "last", **how))
    outs = target.forward_batch(parts, captured_layers=(0,))
    for part, out, state in zip(parts, outs, alone, strict=True):
        due = target.forward(
            part.x,
            state,
            positions=part.positions,
            mask=part.mask,
            logits_at=part.logits_at,
            captured_layers=(0,),
        )
        assert torch.allclose(out.logits, due.logits, atol=ATOL * 10)
        assert torch.allclose(out.hidden, due.hidden, atol=ATOL * 10)
        assert torch.allclose(out.aux_hidden_states[0], due.aux_hidden_states[0], atol=ATOL * 10)
        n = state.length()
        assert part.state.length() == n
        for layer in range(target.n_layers):
            ours, theirs = part.state.keys(layer), state.keys(layer)
            assert torch.allclose(ours[:, :, :n], theirs[:, :, :n], atol=ATOL * 10)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 7)), min_size=2, max_size=8))
def test_no_sequence_pays_for_the_longest(shapes):
    target = create_tiny_models().workspace.decoders["target"]
    pool = target.new_state(CAPACITY, len(shapes))
    parts = []
    for at, (n, new) in enumerate(shapes):
        target.forward(Tokens(ids(n, n)), line := pool.sequence_state(at))
        parts.append(ModelInput(Tokens(ids(new, 50 + at)), line))
    plan = target._planner.plan_batch(parts, range(target.n_layers))
    own = [n + new for n, new in shapes]
    # Rows in the matrix products, and rows that attention reads per layer.
    assert len(plan.scratch.qkv) == sum(new for _, new in shapes)
    for layer in plan.views:
        read = sum(values.shape[:-3].numel() * values.shape[-2] for _, _, values, _, _ in layer)
        assert sum(own) <= read <= MAX_PADDING * sum(own)
        assert read <= len(shapes) * max(own)


def resident(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that are backed by memory pages."""
    pages = -(-tensor.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    start, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    assert ctypes.CDLL(None).mincore(start, size, found) == 0
    return mmap.PAGESIZE * sum(each & 1 for each in found)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' pages are not counted")
def test_memory_follows_the_rows_in_use_and_is_returned():
    models = create_tiny_models()
    prompts = [(models.prompts[1] * 200)[:n] for n in (400, 3, 130, 250)]
    requests = [
        Request(f"tiny/{at}", 0, prompt, StopRule(frozenset(), budget))
        for at, (prompt, budget) in enumerate(zip(prompts, (2, 9, 4, 6), strict=True))
    ]
    workspace = Workspace(models.workspace.decoders, 4000)  # longer texts exist in the run
    batch = Batch(workspace, requests, Sampling(), size=2)
    buffer, held = None, []
    for _ in registry.load("vanilla")().generate_batch(batch):
        seated = [each.state for each in batch.sessions if batch.has_slot(each)]
        buffer = seated[0].pool.buffers[0]
        layers, _, strips, _, dim = buffer.shape
        rows = mmap.PAGESIZE // (dim * buffer.itemsize)  # rounded up to a page
        pages = sum(-(-state.length() // rows) for state in seated)
        assert resident(buffer) == pages * layers * strips * mmap.PAGESIZE
        held.append(resident(buffer))
    assert 6 * max(held) < buffer.nbytes
    assert resident(buffer) == 0


RULES = ("greedy", "coupled", "rejection")


def list_cases():
    """List some methods with every rule, and the others with one rule each.

    The audit decodes the others in batches on tables.
    """
    yield from itertools.product(("vanilla", "sps", "sps-tree", "eagle2", "exspec"), RULES)
    others = "pld eqspec rsd-c rsd-s sequoia dyspec staged eagle eagle3 mtp".split()
    yield from zip(others, itertools.cycle(RULES), strict=False)


@pytest.mark.parametrize(("name", "rule"), list(list_cases()))
def test_token_ids_do_not_depend_on_the_batch_size(name, rule):
    models = create_tiny_models()
    sampling = Sampling() if rule == "greedy" else Sampling(rule, 0.8, seed=2)
    requests = []
    for at, budget in enumerate((24, 1, 9, 17, 2, 24, 13, 5)):
        eos = frozenset() if at % 2 else frozenset({3 * at + 1, 40})
        prompt = models.prompts[2 * at] * (1 + 2 * (at % 3))  # of 2 to 80 tokens
        requests.append(Request(f"tiny/{at}", 0, prompt, StopRule(eos, budget)))
    method = registry.load(name)()
    due = []
    for request in requests:
        session = Session(models.workspace, request, sampling)
        list(method.generate(session))
        due.append((list(session.output()), session.finish))
    for size in (1, 3, 8):
        found = []
        for first in range(0, len(requests), size):
            batch = Batch(models.workspace, requests[first : first + size], sampling)
            list(method.generate_batch(batch))
            found += [(list(each.output()), each.finish) for each in batch.sessions]
        assert found == due
    batch = Batch(
        models.workspace, requests, sampling, size=3, slots=method.max_sequences(3), chunk=5
    )
    list(method.generate_batch(batch))
    assert [(list(each.output()), each.finish) for each in batch.sessions] == due


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=3, max_size=6),
    st.integers(1, 40),
)
def test_prompts_are_read_in_chunks_beside_others_and_whole_otherwise(shapes, chunk):
    models = create_tiny_models()
    text = models.prompts[0] * 20
    requests = [
        Request(f"tiny/{at}", 0, text[at : at + n], StopRule(frozenset(), budget))
        for at, (n, budget) in enumerate(shapes)
    ]
    batch = Batch(models.workspace, requests, Sampling(), size=2, chunk=chunk)
    steps = list(registry.load("vanilla")().generate_batch(batch))
    assert len(steps) == sum(budget - 1 for _, budget in shapes)
    read, generated = [0] * len(shapes), [0] * len(shapes)
    for forward in batch.meter.forwards:
        reading = forward.rows.keys() if forward.role == "prefill" else forward.prompt_places
        assert (forward.role == "prefill") == (set(reading) == set(forward.rows))
        if forward.role == "verify":
            assert sum(forward.rows[place] for place in reading) <= chunk
        for place, n in forward.rows.items():
            if place in reading:
                assert not generated[place]
                read[place] += n
            else:  # with the first token of their prompt
                assert (n, read[place]) == (1, shapes[place][0])
                generated[place] += 1
        if forward.role == "prefill":
            assert all(read[place] == shapes[place][0] for place in reading)
    assert read == [n for n, _ in shapes]
    assert generated == [budget - 1 for _, budget in shapes]


def test_a_finished_sequence_takes_part_in_no_forward():
    models = create_tiny_models()
    requests = [
        Request(f"tiny/{at}", 0, models.prompts[at], StopRule(frozenset(), budget))
        for at, budget in enumerate((3, 12, 7))
    ]
    batch = Batch(models.workspace, requests, Sampling())
    list(registry.load("vanilla")().generate_batch(batch))
    prefill, *steps = batch.meter.forwards
    assert prefill.role == "prefill"
    assert prefill.rows == {at: len(models.prompts[at]) for at in range(3)}
    assert [sorted(step.rows) for step in steps] == [
        *[[0, 1, 2]] * 2,
        *[[1, 2]] * 4,
        *[[1]] * 5,
    ]


def test_sequences_join_as_others_leave_and_keep_their_results():
    models = create_tiny_models()
    budgets = (3, 9, 1, 6, 4, 2, 5)
    requests = [
        Request(f"tiny/{at}", 0, models.prompts[at] * (1 + at % 3), StopRule(frozenset(), budget))
        for at, budget in enumerate(budgets)
    ]
    method = registry.load("sps")()
    batch = Batch(models.workspace, requests, Sampling(), size=2)
    steps = list(method.generate_batch(batch))
    for at, request in enumerate(requests):
        alone = Session(models.workspace, request, Sampling())
        due = [step.outcome for step in method.generate(alone)]
        assert list(batch.sessions[at].output()) == list(alone.output())
        assert [step.outcome for step in steps if step.seq == at] == due
    target = [each for each in batch.meter.forwards if each.model == "target"]
    joined = [
        sorted(each.rows if each.role == "prefill" else each.prompt_places) for each in target
    ]
    assert sorted(itertools.chain(*joined)) == list(range(len(requests)))
    assert joined[0] == [0, 1] and max(map(len, joined)) <= 2
    verified = [each.rows for each in target if each.role == "verify"]
    assert max(map(len, verified)) == 2
    held = {id(session.state) for session in batch.sessions}
    assert len(held) == 2  # two batch slots, whose memory is reused


def test_waiting_sequences_have_no_state():
    models = create_tiny_models()
    request = Request("tiny/0", 0, models.prompts[0], StopRule(frozenset(), 4))
    batch = Batch(models.workspace, [request] * 3, Sampling(), size=1)
    (first,) = batch.join()
    assert first is batch.sessions[0] and first.state.length() == 0
    with pytest.raises(AttributeError):
        _ = batch.sessions[1].state
    assert (batch.join(), batch.active, batch.finished) == ([], [], False)
    batch.prefill()
    assert (batch.join(), batch.active, batch.finished) == ([], [first], False)


@pytest.mark.parametrize("chosen", [slice(0), slice(3), "twice", "others"])
def test_an_invalid_schedule_is_named(chosen):
    models = create_tiny_models()
    request = Request("tiny/0", 0, models.prompts[0], StopRule(frozenset(), 4))
    batch = Batch(models.workspace, [request] * 3, Sampling(), size=2, slots=3)
    stranger = Session(models.workspace, request, Sampling())

    class Chooses(registry.load("vanilla")):
        def schedule(self, members, size):
            if chosen == "twice":
                return [members[0], members[0]]
            return [(self, stranger)] if chosen == "others" else members[chosen]

    with pytest.raises(
        MethodFault, match=r"Chooses, `schedule`: invalid choice of \d sequences out of 3"
    ):
        list(Chooses().generate_batch(batch))


@pytest.mark.parametrize(
    ("hook", "returned", "message"),
    [
        ("schedule", None, "schedule must return a list of its members, got None"),
        ("schedule", [1, 2], "schedule must return a list of its members, got list"),
        ("propose_batch", None, "propose_batch must return a list of 2 Drafts, one for each"),
        ("propose_batch", [], "propose_batch must return a list of 2 Drafts, one for each"),
        ("propose_batch", [[1], [2]], "propose_batch must return a list of 2 Drafts, one for each"),
        ("observe", 3, "observe must return None or a dict of finite numbers by name, got int 3"),
    ],
)
def test_a_batch_hook_that_returns_a_wrong_type_is_named(hook, returned, message):
    models = create_tiny_models()
    request = Request("tiny/0", 0, models.prompts[0], StopRule(frozenset(), 4))
    batch = Batch(models.workspace, [request] * 2, Sampling())
    vanilla = registry.load("vanilla")
    wrong = type("Wrong", (vanilla,), {hook: lambda self, *rest: returned})
    with pytest.raises(MethodFault, match=message):
        list(wrong().generate_batch(batch))


def test_one_step_of_all_sequences_is_one_target_forward():
    models = create_tiny_models()
    requests = [
        Request(f"tiny/{at}", 0, models.prompts[at], StopRule(frozenset(), 10)) for at in range(4)
    ]
    batch = Batch(models.workspace, requests, Sampling())
    steps = [step.seq for step in registry.load("sps")().generate_batch(batch)]
    verified = [each for each in batch.meter.forwards if each.role == "verify"]
    assert len(verified) == max(steps.count(at) for at in range(4))
    assert all(each.n_tokens == sum(each.rows.values()) for each in verified)


def test_a_method_with_its_own_loop_declares_that_it_decodes_one_request():
    models = create_tiny_models()
    request = Request("tiny/0", 0, models.prompts[0], StopRule(frozenset(), 4))
    batch = Batch(models.workspace, [request, request], Sampling())
    with pytest.raises(MethodFault, match="pearl does not support batches"):
        list(registry.load("pearl")().generate_batch(batch))


def test_selected_rows_keep_their_positions(target):
    whole, part = target.new_state(CAPACITY), target.new_state(CAPACITY)
    for state in (whole, part):
        target.forward(Tokens(ids(20, 1)), state)
        state.commit(0, range(20))
    selected = [0, 1, *range(12, 20)]
    part.select(selected)
    assert (part.length(), part.position()) == (10, 20)
    # The reference: all rows, with a mask for the selected ones.
    seen = torch.zeros(1, 21, dtype=torch.bool)
    seen[0, [*selected, 20]] = True
    x = Tokens(ids(1, 9))
    due = target.forward(x, whole, mask=seen, positions=torch.tensor([[20]]))
    assert torch.allclose(target.forward(x, part).logits, due.logits, atol=ATOL * 10)
    part.rollback(0, 20)
    assert (part.length(), part.position()) == (10, 20)
    part.rollback(0, 15)
    assert (part.length(), part.position(), part.positions()) == (5, 15, [0, 1, 12, 13, 14])
    part.rollback(0, 8)  # rows 2 to 7 were dropped, so they are fed again
    assert (part.length(), part.position()) == (2, 2)
    with pytest.raises(ValueError, match="must be increasing numbers"):
        part.select([3, 2])
