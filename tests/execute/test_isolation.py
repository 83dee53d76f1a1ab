"""Plug-ins in processes of their own, and methods that hang or fail time after time.

Every way of being bad is tried by `benchmarks/soundness/bad_plugins.py`, in forks.
"""

import os
import pickle
import signal
import textwrap
import time

import pytest
import torch

from specbench_cli.errors import ExitCode, MethodFault, UsageError
from specbench_cli.execute.cell import limited, one_line
from specbench_cli.execute.isolation import inside, rooms, state
from specbench_cli.store.schema import Ns

pytestmark = pytest.mark.usefixtures("small_pair")

BAD = """
    import os
    from specbench_cli.api import Method

    class {name}(Method):
        '''Fails.'''
        name = "{word}"

        def start(self, session):
            if session.requests[0].prompt_id != "warm-up":
                {fault}

        def propose(self, session, limit):
            return session.chain([session.tokens()[-1]] * min(2, limit))
"""


@pytest.fixture
def plugin(tmp_path):
    """Writes a plug-in and gives its path."""

    def write(word, fault):
        path = tmp_path / f"{word}.py"
        text = BAD.format(name=word.title(), word=word, fault=fault)
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def counters(outcome, label):
    return [
        (r.key, r.output_ids, r.steps, r.target_forwards, r.draft_forwards)
        for r in outcome.by_label(label)
    ]


@pytest.mark.long
def test_a_plug_in_that_ends_its_process_fails_its_cells_is_dropped_and_no_other_row_differs(
    specbench, plugin
):
    alone = specbench("sps", limit=4, category=["qa"], max_new_tokens=4)
    path = plugin("ending", "os._exit(len(session.requests[0].topic))")
    settings = {"limit": 4, "category": ["qa"], "max_new_tokens": 4, "threads": 1}
    beside = specbench("sps", "ending", plugins=[path], isolation="process", **settings)
    for label in ("vanilla", "sps"):
        assert counters(beside, label) == counters(alone, label)
    ended = beside.by_label("ending")
    assert [record.error for record in ended] == [
        f"ending: it ended its process (exit code {len(record.category)})" for record in ended
    ]
    assert len(ended) == 3  # of four prompts
    assert beside.exit_code == ExitCode.BAD_ANSWER
    assert "ending failed 3 times in a row and is dropped" in "".join(beside.log.notes)
    assert beside.manifest["dropped"].keys() == {"ending"}
    assert not rooms._rooms


def test_a_method_that_fails_three_times_in_a_row_is_dropped_and_said_to_be(specbench, plugin):
    path = plugin("failing", "raise ValueError(session.requests[0].topic)")
    outcome = specbench("failing", limit=5, max_new_tokens=2, plugins=[path])
    failed = outcome.by_label("failing")
    assert len(failed) == 3
    assert all(record.category in record.error for record in failed)  # it was told its topic
    assert len(outcome.by_label("vanilla")) == len(outcome.prompts) > 3
    assert outcome.manifest["status"] == "finished"
    assert outcome.manifest["dropped"]["failing"].startswith("ValueError")
    assert "failing failed 3 times in a row and is dropped" in "".join(outcome.log.notes)
    assert outcome.exit_code == ExitCode.BAD_ANSWER


@pytest.mark.parametrize(
    "fault", ["raise SystemExit(0)", "raise GeneratorExit", "while True: pass"]
)
def test_even_in_the_runs_own_process_an_exit_and_a_hang_fail_the_cell_alone(
    specbench, plugin, fault
):
    word = f"bad{abs(hash(fault)) % 1000}"
    path, settings = plugin(word, fault), {"max_new_tokens": 2, "timeout_per_prompt": 0.2}
    outcome = specbench(word, limit=1, plugins=[path], **settings)
    assert all(record.error for record in outcome.by_label(word))
    assert outcome.exit_code == ExitCode.BAD_ANSWER


CHANGES = {
    "torch's settings": lambda patch: torch.set_default_dtype(torch.float64),
    "the working folder": lambda patch: patch.chdir("/"),
    "the environment": lambda patch: patch.setenv("OMP_NUM_THREADS", "77"),
    "signal handlers": lambda patch: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "the clock": lambda patch: patch.setattr(time, "perf_counter_ns", lambda: 0),
    "built-in functions": lambda patch: patch.setattr("builtins.sorted", lambda each: each),
    "specbench's code": lambda patch: patch.setattr(
        "specbench_cli.engine.verify.decide.chosen", lambda *_: None
    ),
}


def test_a_variable_that_was_set_is_none_that_changed_and_one_more_is(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    before = state.seen()
    assert state.changed(before) == []
    monkeypatch.setenv("GOMP_SPINCOUNT", "10")
    assert state.changed(before) == ["the environment"]


@pytest.mark.parametrize("name", CHANGES)
def test_what_an_import_changes_for_others_is_seen_and_named(name):
    handler = signal.getsignal(signal.SIGUSR1)
    before = state.seen()
    assert state.changed(before) == []
    with pytest.MonkeyPatch.context() as patch:
        CHANGES[name](patch)
        changed = state.changed(before)
    torch.set_default_dtype(torch.float32)
    signal.signal(signal.SIGUSR1, handler)
    assert name in changed
    assert state.changed(before) == []


def test_what_a_plug_ins_process_sends_is_data_and_runs_nothing():
    class Evil:
        def __reduce__(self):
            return os.abort, ()

    def read(thing):
        return rooms._Reader(rooms.io.BytesIO(pickle.dumps(thing))).load()

    found = inside.Found(None, 3, None)
    assert read(("done", [found, Ns(total=3)])) == ("done", [found, Ns(total=3)])
    with pytest.raises(pickle.UnpicklingError, match="abort"):
        read(("done", Evil()))


def test_a_method_that_does_not_end_is_interrupted_and_told_which_option_says_when():
    says = r"no end after 0\.05 s \(--timeout-per-prompt\)"
    with pytest.raises(MethodFault, match=says), limited(0.05):
        time.sleep(5)


def test_ctrl_c_is_no_fault_of_a_method():
    with pytest.raises(KeyboardInterrupt):
        one_line(KeyboardInterrupt())


def test_a_plug_in_that_changes_what_others_need_is_refused_by_name():
    with pytest.raises(UsageError, match=r"my\.py changes the clock, threads when it is imported"):
        rooms._refuse("my.py", "imported", ["the clock", "threads"])
