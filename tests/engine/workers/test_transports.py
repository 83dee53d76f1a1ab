"""Drafters inline, in a thread and in a process: equal ids, and no process left at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from methods import pearl
from methods.pearl import Pearl, PearlParams
from specbench_cli import registry
from specbench_cli.audit.cases import Case
from specbench_cli.audit.models.table import make_table_pair
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workers.core_placement import CorePlacement, split_cores, use_placement
from specbench_cli.engine.workers.message import Message
from specbench_cli.engine.workers.process import ProcessTransport
from specbench_cli.engine.workers.shared_memory import SLOTS, MessageBuffer
from specbench_cli.engine.workers.thread import ThreadTransport
from specbench_cli.engine.workers.transport import InlineTransport, Transport, Worker
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import EnvironmentFault, MethodFault, WorkerLost
from specbench_cli.models.resolve import resolve

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)  # the drafter's process gets this path to import the test models

from slow_tables import Echo, SlowTable, no_table  # noqa: E402

NAP = 0.002
TABLES = make_table_pair("near", 5)
RULES = {
    "greedy": Sampling(),
    "coupled": Sampling("coupled", 0.9, seed=1),
    "rejection": Sampling("rejection", 0.9, seed=2),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def case_of(rule: str, prompt_id: str = "table/0", budget: int = 17) -> Case:
    return Case("near", TABLES, RULES[rule], budget=budget, prompt_id=prompt_id)


def workspace_of(transport: Transport, nap: float = 0.0) -> Workspace:
    """Return a workspace with the tables, both of which sleep at random."""
    target, draft = TABLES
    recipe = partial(SlowTable, "draft", draft, nap)
    decoders = {"target": SlowTable("target", target, nap), "draft": recipe()}
    return Workspace(decoders, 64, decoder_factories={"draft": recipe}, transport=transport)


@pytest.fixture(scope="module")
def process() -> Iterator[Workspace]:
    workspace = workspace_of(ProcessTransport(timeout=20.0), NAP)
    yield workspace
    workspace.close()


@pytest.fixture(scope="module")
def thread() -> Iterator[Workspace]:
    workspace = workspace_of(ThreadTransport(timeout=20.0), NAP)
    yield workspace
    workspace.close()


def decoded(workspace: Workspace, case: Case, window: int = 3) -> tuple[list[int], list[object]]:
    session = case.open(workspace)
    steps = [step.outcome for step in Pearl(PearlParams(window=window)).generate(session)]
    return list(session.output()), steps


@pytest.mark.parametrize("where", ["process", "thread"])
def test_ids_and_steps_are_the_same_over_200_runs_with_random_sleeps_in_either_worker(
    where, request
):
    workspace, inline = request.getfixturevalue(where), workspace_of(InlineTransport())
    due = {}
    for turn in range(100):  # and half as many in the other place
        rule, window = list(RULES)[turn % 3], (4, 1, 2)[turn // 3 % 3]
        key = rule, window
        if key not in due:
            due[key] = decoded(inline, case_of(rule), window)
        assert decoded(workspace, case_of(rule), window) == due[key], f"run {turn}, {key}"


def test_another_prompt_pass_or_seed_has_other_draws(process):
    base = case_of("rejection")
    outputs = [
        decoded(process, base),
        decoded(process, case_of("rejection", "table/1")),
        decoded(process, replace(base, sampling=replace(base.sampling, seed=3))),
    ]
    assert len({tuple(output) for output, _ in outputs}) == 3
    assert decoded(process, base) == outputs[0]


def test_a_draft_loaded_in_another_process_drafts_the_same():
    """Use the embedded pair. Distributions are sent in float32, and the draft computes the same
    numbers."""
    checkpoint = resolve("embedded")
    assert checkpoint.draft is not None
    recipe = partial(load_decoder, resolve(checkpoint.draft).path, name="draft")
    decoders = {"target": load_decoder(checkpoint.path, name="target"), "draft": recipe()}
    transport = ProcessTransport(*split_cores())
    remote = Workspace(decoders, 100, decoder_factories={"draft": recipe}, transport=transport)
    here, stop = Workspace(decoders, 100), StopRule(frozenset(), 24)
    for rule, sampling in RULES.items():
        request = Request("p", 1, tuple(range(100, 130)), stop)
        found = []
        for workspace in (remote, here):
            session = Session(workspace, request, sampling)
            with transport.pin_target():
                steps = list(Pearl(PearlParams(window=4)).generate(session))
            found.append((session.output(), [step.outcome for step in steps]))
        assert found[0] == found[1], rule
    remote.close()


@pytest.mark.parametrize("where", ["process", "thread"])
def test_the_drafters_forwards_and_messages_are_in_the_sessions_trace(where, request):
    session = case_of("greedy").open(request.getfixturevalue(where))
    steps = list(Pearl(PearlParams(window=3)).generate(session))
    session.harness.meter.resolve()
    end = session.harness.text.last_ns - session.harness.text.started_ns
    drafter = [f for f in session.harness.meter.forwards if f.worker == 1]
    assert {f.model for f in drafter} == {"draft"} and drafter[0].role == "prefill"
    assert [f.role for f in drafter[1:]] == ["draft"] * (len(drafter) - 1)
    assert sum(f.n_tokens for f in drafter if f.role == "prefill") == 5
    for forwards in (drafter, [f for f in session.harness.meter.forwards if f.worker == 0]):
        edges = [edge for f in forwards for edge in (f.t0_ns, f.t1_ns)]
        assert edges == sorted(edges) and edges[0] >= 0 and edges[-1] <= end
    messages = session.harness.meter.messages
    assert [(m.sender, m.receiver) for m in messages] == [(0, 1), (1, 0)] * len(steps)
    assert all(0 < m.t0_ns <= m.t1_ns <= end and m.nbytes for m in messages)


def test_a_plug_ins_drafter_works_in_another_process(process, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_plugin_methods", {})
    assert pearl.__file__ is not None
    source = Path(pearl.__file__).read_text().replace('= "pearl"', '= "pearl-of-another"')
    plugin = tmp_path / "another.py"
    plugin.write_text(source)
    registry.load_plugin(str(plugin))
    method = registry.load("pearl-of-another")
    assert method.__module__ != pearl.__name__
    session = case_of("coupled").open(process)
    for _ in method().generate(session):
        pass
    assert list(session.output()) == decoded(process, case_of("coupled"))[0]


def test_messages_arrive_unchanged(process):
    worker = case_of("greedy").open(process).start_worker(Echo, MethodParams())
    rows = torch.rand(3, 5)
    for sent in (
        Message((1, -2, 1 << 40), rows),
        Message((), rows[:0]),
        Message(tuple(range(1000))),
    ):
        worker.send(sent)
        got = worker.receive()
        assert got.ints == sent.ints
        assert got.rows is None if sent.rows is None else torch.equal(got.rows, sent.rows)


@pytest.mark.parametrize("where", ["inline", "process", "thread"])
def test_answers_to_cancelled_orders_are_dropped_and_their_forwards_marked_unused(where, request):
    workspace = (
        workspace_of(InlineTransport()) if where == "inline" else request.getfixturevalue(where)
    )
    session = case_of("greedy").open(workspace)
    worker = session.start_worker(Echo, MethodParams())
    for ints in ((1,), (2,), (0,)):  # the last one gets no answer
        worker.send(Message(ints))
    worker.cancel()
    worker.send(Message((3,)))
    assert worker.receive().ints == (3,)
    used = [f.used for f in session.harness.meter.forwards if f.worker == 1]
    assert used == [False, False, False, True]
    with pytest.raises(MethodFault, match="no order is open"):
        worker.receive()


def test_a_busy_worker_is_awaited_before_the_next_request(process):
    left = case_of("greedy").open(process).start_worker(Echo, MethodParams())
    left.send(Message((200,)))
    left.send(Message((-1,)))
    session = case_of("greedy").open(process)
    worker = session.start_worker(Echo, MethodParams())
    worker.send(Message((7, 7)))
    assert worker.receive().ints == (7, 7)
    assert len(session.harness.meter.forwards) == 1
    worker.send(Message((50,)))
    worker.drain()
    assert len(session.harness.meter.forwards) == 2 and not session.harness.meter.forwards[-1].used


def test_the_number_of_open_orders_is_limited(process):
    worker = case_of("greedy").open(process).start_worker(Echo, MethodParams())
    for _ in range(SLOTS - 1):  # the start counts as an order
        worker.send(Message((20,)))
    with pytest.raises(MethodFault, match=f"more than {SLOTS} orders are open"):
        worker.send(Message((20,)))


def fails(worker: Worker) -> None:
    worker.send(Message((-3,)))
    worker.receive()


@pytest.mark.parametrize("where", ["inline", "process", "thread"])
def test_an_error_of_the_drafter_is_reported_and_the_worker_goes_on(where, request):
    workspace = (
        workspace_of(InlineTransport()) if where == "inline" else request.getfixturevalue(where)
    )
    with pytest.raises((MethodFault, ZeroDivisionError), match="no -3"):
        fails(case_of("greedy").open(workspace).start_worker(Echo, MethodParams()))
    worker = case_of("greedy").open(workspace).start_worker(Echo, MethodParams())
    worker.send(Message((1,)))
    assert worker.receive().ints == (1,)


def test_a_message_that_is_too_large_is_refused():
    block = MessageBuffer.create(2, 4)
    with pytest.raises(MethodFault, match="3 rows of 4 numbers is too large"):
        block.write(1, (), torch.zeros(3, 4))
    block.close()


def has_ended(pid: int, within: float = 5.0) -> bool:
    """Return True if a process ends within these seconds. A zombie counts as ended."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_a_dead_or_hanging_worker_is_found_within_seconds_and_replaced():
    transport = ProcessTransport(timeout=0.7)
    workspace = workspace_of(transport)
    due = decoded(workspace_of(InlineTransport()), case_of("greedy"))
    for blow, message in (
        (signal.SIGKILL, "was killed by SIGKILL"),
        (signal.SIGSTOP, "did not answer within 0.7 s"),
    ):
        session = case_of("greedy", budget=40).open(workspace)
        steps = Pearl(PearlParams(window=2)).generate(session)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("specbench_cli.engine.workers.process.LOAD_TIMEOUT_S", 60.0)
            next(steps)
        pid = transport.pid
        assert pid is not None
        os.kill(pid, blow)
        start = time.monotonic()
        with pytest.raises(
            WorkerLost, match=rf"draft's worker \(process {pid}\) {message}"
        ) as lost:
            list(steps)
        assert time.monotonic() - start < 5.0 and lost.value.exit_code == 3 and lost.value.hint
        assert not psutil.pid_exists(pid)
        if blow == signal.SIGKILL:
            assert decoded(workspace, case_of("greedy")) == due
    workspace.close()
    assert transport.pid is None


def test_a_hanging_thread_is_found_and_replaced():
    workspace = workspace_of(ThreadTransport(timeout=0.05))
    worker = case_of("greedy").open(workspace).start_worker(Echo, MethodParams())
    worker.send(Message((300,)))
    with pytest.raises(WorkerLost, match=r"did not answer within 0\.05 s"):
        worker.receive()
    assert decoded(workspace, case_of("greedy")) == decoded(
        workspace_of(InlineTransport()), case_of("greedy")
    )
    workspace.close()


def test_a_draft_that_does_not_load_is_an_environment_fault():
    workspace = replace(workspace_of(ProcessTransport()), decoder_factories={"draft": no_table})
    with pytest.raises(EnvironmentFault, match="cannot load the draft: its folder is empty"):
        case_of("greedy").open(workspace).start_worker(Echo, MethodParams())
    workspace.close()


PARENT = """
import sys, time
sys.path[:0] = {path!r}
from functools import partial
import torch
from methods.pearl import Pearl, PearlParams
from specbench_cli.audit.cases import Case
from specbench_cli.audit.models.table import TableDecoder, make_table_pair
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workers.process import ProcessTransport

if __name__ == "__main__":
    case = Case("near", make_table_pair("near", 5), Sampling(), budget=1000)
    workspace, transport = case.create_workspace(), ProcessTransport()
    workspace.transport = transport
    workspace.decoder_factories = {{"draft": partial(TableDecoder, "draft", case.tables[1])}}
    for step in Pearl(PearlParams(window=2)).generate(case.open(workspace)):
        print(transport.pid, flush=True)
        time.sleep(0.05)
"""


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_the_process_that_started_it(blow, tmp_path):
    script = tmp_path / "parent.py"
    root = Path(__file__).parents[3]
    script.write_text(PARENT.format(path=[str(root)]))
    segments = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    family = [each.pid for each in psutil.Process(parent.pid).children(recursive=True)]
    assert child in family
    (os.killpg if blow == signal.SIGINT else os.kill)(
        parent.pid, blow
    )  # Ctrl-C reaches all of them
    parent.wait(10)
    parent.stdout.close()
    assert all(has_ended(pid) for pid in family)
    if Path("/dev/shm").is_dir():
        assert not {name for name in Path("/dev/shm").iterdir() if "specbench" in name.name}
        assert set(Path("/dev/shm").iterdir()) <= segments


def test_cores_and_threads_are_restored_afterwards():
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with suppress(KeyError), use_placement(CorePlacement((min(cores),))):
        assert os.sched_getaffinity(0) == {min(cores)} and torch.get_num_threads() == 1
        raise KeyError
    assert os.sched_getaffinity(0) == cores and torch.get_num_threads() == threads
    with use_placement(CorePlacement()):
        assert os.sched_getaffinity(0) == cores and torch.get_num_threads() == threads


def test_two_halves_use_all_cores():
    target, draft = split_cores()
    cores = os.sched_getaffinity(0)
    assert {*target.cores, *draft.cores} == cores
    assert len(cores) < 2 or not {*target.cores} & {*draft.cores}
