"""Tests of plug-in processes, and of methods that hang or fail repeatedly.

`benchmarks/soundness/bad_plugins.py` tests many more misbehaving plug-ins.
"""

import os
import pickle
import signal
import textwrap
import time
from unittest.mock import Mock

import pytest
import torch

from specbench_cli.config.run import RunConfig
from specbench_cli.errors import ExitCode, MethodFault, UsageError
from specbench_cli.measure import run as execute
from specbench_cli.measure.isolation import plugin_process, replies, state
from specbench_cli.measure.measurement import DecodedOutput
from specbench_cli.measure.method_code import describe_failure, enforce_time_limit
from specbench_cli.plan.plan import make_plan
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Ns
from specbench_cli.summary import text
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.summary import summarise

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
    """Return a function that writes a plug-in and returns its path."""

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
def test_a_plugin_that_ends_its_process_is_dropped_and_affects_no_other_method(specbench, plugin):
    alone = specbench("sps", limit=4, category=["qa"], max_new_tokens=4)
    path = plugin("ending", "os._exit(len(session.requests[0].topic))")
    settings = {"limit": 4, "category": ["qa"], "max_new_tokens": 4, "threads": 1}
    with_plugin = specbench("sps", "ending", plugins=[path], isolation="process", **settings)
    for label in ("vanilla", "sps"):
        assert counters(with_plugin, label) == counters(alone, label)
    failed_records = with_plugin.by_label("ending")
    assert [record.error for record in failed_records] == [
        f"ending: its process ended with exit code {len(record.category)}"
        for record in failed_records
    ]
    assert len(failed_records) == 3  # of four prompts
    assert with_plugin.exit_code == ExitCode.BAD_ANSWER
    assert "ending failed 3 times in a row and is dropped" in "".join(with_plugin.log.notes)
    assert with_plugin.manifest["dropped"].keys() == {"ending"}
    assert not plugin_process._processes


def test_a_method_that_fails_three_times_in_a_row_is_dropped_with_a_note(specbench, plugin):
    path = plugin("failing", "raise ValueError(session.requests[0].topic)")
    outcome = specbench("failing", "pld", limit=5, max_new_tokens=2, plugins=[path])
    failed = outcome.by_label("failing")
    assert len(failed) == 3
    assert all(record.category in record.error for record in failed)  # the request has its topic
    assert len(outcome.by_label("vanilla")) == len(outcome.prompts) > 3
    assert outcome.manifest["status"] == "finished"
    assert outcome.manifest["dropped"]["failing"].startswith("ValueError")
    assert "failing failed 3 times in a row and is dropped" in "".join(outcome.log.notes)
    assert outcome.exit_code == ExitCode.BAD_ANSWER


def table_of(outcome):
    """Return the notes below the table, as one text."""
    summary = summarise(outcome.records, outcome.manifest, resamples=20)
    return "\n".join(text.warnings(summary, Facts.from_manifest(outcome.manifest)))


@pytest.mark.parametrize(
    ("in_warm_up", "prompts", "note"),
    [(True, 1, "failed on its first prompt too"), (False, 3, "failed 3 times in a row")],
)
def test_a_run_ends_early_if_only_vanilla_is_left(
    specbench, plugin, tmp_path, in_warm_up, prompts, note
):
    path = plugin("failing", "raise ValueError('no such table')")
    if in_warm_up:
        file = tmp_path / "failing.py"
        file.write_text(file.read_text().replace('!= "warm-up"', "is not None"))
    outcome = specbench("failing", limit=6, category=["qa"], max_new_tokens=2, plugins=[path])
    assert len(outcome.by_label("failing")) == len(outcome.by_label("vanilla")) == prompts
    notes = "".join(outcome.log.notes)
    assert note in notes
    assert f"only vanilla is left: the run ends after {prompts} of 6 prompts" in notes
    assert outcome.manifest["status"] == "finished"
    assert outcome.exit_code == ExitCode.BAD_ANSWER
    assert "ended early: only vanilla was left" in table_of(outcome)
    assert "failing: ValueError: no such table (failing.py, line" in table_of(outcome)


def test_a_method_that_recovers_after_its_warm_up_is_not_dropped(specbench, plugin, tmp_path):
    path = plugin("failing", "return")
    file = tmp_path / "failing.py"
    file.write_text(
        file.read_text().replace("return\n", "return\n        raise ValueError('cold')\n", 1)
    )
    outcome = specbench("failing", limit=4, category=["qa"], max_new_tokens=2, plugins=[path])
    assert "failing failed while warming up: ValueError: cold" in "".join(outcome.log.notes)
    assert [record.error for record in outcome.by_label("failing")] == [None] * 4
    assert outcome.exit_code == ExitCode.OK and not outcome.manifest["dropped"]


def test_errors_of_a_method_that_was_not_dropped_are_in_the_table(specbench, plugin):
    path = plugin("failing", "raise ValueError('x' * 900)")
    outcome = specbench("failing", limit=1, max_new_tokens=2, plugins=[path])
    (line,) = (each for each in table_of(outcome).splitlines() if "outputs failed: " in each)
    assert line.startswith("failing: 1 of 1 outputs failed: ValueError: xxx")
    assert len(line) < 300


def test_no_later_pass_starts_if_only_vanilla_is_left(specbench, plugin, monkeypatch):
    path = plugin("failing", "raise ValueError('no such table')")
    passes = []

    def run_here(run_dir, number, *_, **__):
        passes.append(number)
        plan, part = make_plan(config), RunDir.open(run_dir.path)
        part.share_lock_of(run_dir)
        execute.measure_repeat(plan, part, specbench.log(), number, None, False)

    monkeypatch.setattr(execute, "run_repeat", run_here)
    settings = {"limit": 6, "category": ["qa"], "max_new_tokens": 2, "isolation": "none"}
    config = RunConfig.model_validate(
        {"methods": [{"name": "vanilla"}, {"name": "failing"}], "plugins": [path], **settings}
    )
    outcome = specbench("failing", plugins=[path], repeats=3, **settings)
    assert passes == [1]
    assert len(outcome.by_label("vanilla")) == 3
    assert outcome.exit_code == ExitCode.BAD_ANSWER


@pytest.mark.long
def test_a_run_ends_if_the_process_of_its_only_method_dies_in_warm_up(specbench, plugin, tmp_path):
    path = plugin("ending", "os._exit(7)")
    file = tmp_path / "ending.py"
    file.write_text(file.read_text().replace('!= "warm-up"', "is not None"))
    settings = {"limit": 4, "category": ["qa"], "max_new_tokens": 4, "threads": 1}
    outcome = specbench("ending", plugins=[path], isolation="process", **settings)
    assert len(outcome.by_label("vanilla")) == len(outcome.by_label("ending")) == 1
    assert "ending: its process ended with exit code 7" in table_of(outcome)
    assert outcome.exit_code == ExitCode.BAD_ANSWER


@pytest.mark.parametrize(
    "fault", ["raise SystemExit(0)", "raise GeneratorExit", "while True: pass"]
)
def test_an_exit_or_a_hang_without_isolation_fails_only_the_output(specbench, plugin, fault):
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
        "specbench_cli.engine.verify.decide.decide_by_choice", lambda *_: None
    ),
}


def test_only_environment_variables_set_later_count_as_changed(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    before = state.capture_state()
    assert state.find_changes(before) == []
    monkeypatch.setenv("GOMP_SPINCOUNT", "10")
    assert state.find_changes(before) == ["the environment"]


@pytest.mark.parametrize("name", CHANGES)
def test_process_state_changed_by_an_import_is_detected(name):
    handler = signal.getsignal(signal.SIGUSR1)
    before = state.capture_state()
    assert state.find_changes(before) == []
    with pytest.MonkeyPatch.context() as patch:
        CHANGES[name](patch)
        changed = state.find_changes(before)
    torch.set_default_dtype(torch.float32)
    signal.signal(signal.SIGUSR1, handler)
    assert name in changed
    assert state.find_changes(before) == []


def test_messages_of_a_plugin_process_are_data_and_run_no_code():
    class Evil:
        def __reduce__(self):
            return os.abort, ()

    found = replies.MeasurementReply(DecodedOutput.failed("why"), 3, None)
    sent = ("done", [found, Ns(total=3), {"a": (None, 1.5, b"x")}])
    assert replies.load(replies.dump(sent)) == sent
    with pytest.raises(pickle.UnpicklingError, match="abort"):
        replies.load(replies.dump(("done", Evil())))


def _named(module, name):
    """Return the opcodes that put a name of a module on the stack."""
    words = (pickle.SHORT_BINUNICODE + bytes([len(w)]) + w.encode() for w in (module, name))
    return b"".join(words) + pickle.STACK_GLOBAL


SCHEMA, MEASUREMENT = "specbench_cli.store.schema", "specbench_cli.measure.measurement"
RAN = b"X\x10\x00\x00\x00raise SystemExit" + pickle.TUPLE1 + pickle.REDUCE
NS_DATA = pickle.NONE + b"}\x8c\x05totalK\x01s" + pickle.TUPLE2 + pickle.BUILD


@pytest.mark.parametrize(
    "content",
    [
        _named(SCHEMA, "json.codecs.builtins.exec") + RAN,
        _named(SCHEMA, "first_problem.__globals__") + pickle.NONE,
        _named(SCHEMA, "cache"),
        _named(SCHEMA, "TypeAdapter"),
        _named(MEASUREMENT, "DecodedOutput.failed"),
        _named(SCHEMA, "Ns") + NS_DATA,
        _named("builtins", "exec") + RAN,
        b"\x8c\x04exec}" + pickle.TUPLE2 + pickle.BINPERSID,
        b"\x8c\x0bTypeAdapter}" + pickle.TUPLE2 + pickle.BINPERSID,
        b"\x8c\x02Ns}\x8c\x09__class__K\x01s" + pickle.TUPLE2 + pickle.BINPERSID,
        b"]K\x01" + pickle.TUPLE2 + pickle.BINPERSID,
        b"K\x01" + pickle.BINPERSID,
    ],
)
def test_hostile_bytes_of_a_plugin_process_run_no_code(content):
    before = dict(vars(Ns))
    process, worker = plugin_process.PluginProcess("plugin.py"), Mock()
    process._worker = worker
    worker.receive.return_value = b"\x80\x04" + content + b"."
    with pytest.raises(plugin_process.PluginProcessLost, match="sent an invalid answer"):
        process.call("measure")
    worker.end.assert_called_once_with()
    assert dict(vars(Ns)) == before


def test_a_method_that_exceeds_its_time_limit_is_interrupted():
    message = r"not finished after 0\.05 s \(--timeout-per-prompt\)"
    with pytest.raises(MethodFault, match=message), enforce_time_limit(0.05):
        time.sleep(5)


def test_ctrl_c_is_not_a_failure_of_the_method():
    with pytest.raises(KeyboardInterrupt):
        describe_failure(KeyboardInterrupt())


def test_a_plugin_that_changes_process_state_is_rejected():
    with pytest.raises(UsageError, match=r"my\.py changes the clock, threads when it is imported"):
        plugin_process._check_unchanged("my.py", "imported", ["the clock", "threads"])
