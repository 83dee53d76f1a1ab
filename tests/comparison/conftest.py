"""Runs of two prompts (the first has two turns) and a few rows, made without a model."""

import copy
from dataclasses import replace

import pytest

from specbench_cli.comparison.baselines.from_run import read_run
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import ForwardKind, Ns, Params, Steps, Trace, Verdict
from tests.records import record_of

VERIFY = ForwardKind("target", "verify", 0, 1, (0, 8))
PREFILL = ForwardKind("target", "prefill", 0, 1, (0, 8))
DRAFT = ForwardKind("draft", "draft", 0, 1, (0, 2))
PLACES = (("mini/qa-1", 1), ("mini/qa-1", 2), ("mini/rag-2", 1))
DRAFTING = {"sps": ["draft"], "pld": [], "eagle": ["eagle"]}
MANIFEST = {
    "schema": 4,
    "version": "0.1.0",
    "created_utc": "2026-11-21T10:24:03+00:00",
    "config": {
        "effective": {
            "seed": 0,
            "verify": "greedy",
            "temperature": 0.0,
            "max_new_tokens": None,
            "dtype": "float32",
            "device": "cpu",
            "threads": 2,
        }
    },
    "machine": {
        "id": "aaaabbbbcccc",
        "hardware": {"cpu": "some CPU", "cores": 2, "accelerators": []},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
    },
    "models": {
        "target": {"label": "embedded-7m", "sha256": "7a0d76f0fdd6"},
        "draft": {"label": "embedded-1m", "sha256": "1ff8701f0a96"},
    },
    "heads": {"eagle embedded-eagle": {"sha256": "aa00bb11cc22"}},
    "tasks": [{"name": "mini", "version": "2", "sha256": "42ac4d64714c"}],
    "noisy": False,
}


def make_record(label, prompt_id, turn, pass_=1, **changes):
    drafting = label in DRAFTING
    kinds, words = [VERIFY, PREFILL], ["prefill", "plain", "plain", "plain"]
    trace = Trace(kinds, [0, 0, 0, 1], [1, 1, 1, 9], [0, 10, 20, 0], [10, 18, 30, 0])
    steps = Steps([0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1])
    if drafting:
        kinds, words = [VERIFY, DRAFT, PREFILL], ["prefill", "accepted", "accepted", "recovered"]
        trace = Trace(kinds, [1, 0, 1, 0, 2], [1, 3, 2, 3, 9], [0, 4, 10, 12, 0], [3, 9, 12, 20, 0])
        steps = Steps([2, 2], [3, 3], [2, 1], [2, 0], [2, 1])
    values = {
        "cluster": "mini/lexicon",
        "category": "lexicon",
        "turn": turn,
        "params": Params({}, {"length": 5} if drafting else {}),
        "pass_": pass_,
        "output_ids": [5, 6, turn, 2],
        "origin": words,
        "finish": "eos",
        "steps": steps,
        "target_forwards": 3 if drafting else 4,
        "draft_forwards": 2 if drafting else 0,
        "forwards": trace,
        "ns": Ns(total=100, prefill=20, decode=80, draft=10, verify=65, host=5),
        "peak_bytes": 1000,
        "other_cpu": 0.01,
        "verdict": Verdict("reference" if label == "vanilla" else "identical"),
    }
    return record_of(label, prompt_id, 4, **(values | changes))


def make_row(label):
    return {
        "label": label,
        "method": label.partition(" ")[0],
        "params": {"length": 5} if label in DRAFTING else {},
        "source": "default",
        "timing_free": True,
        "uses": DRAFTING.get(label, []),
    }


def evened(record):
    """A record with as many draft forwards in its trace as it says, and in its counters as many of
    the target's as the trace has: tests change one thing at a time."""
    trace = record.forwards
    if record.error is not None or record.peer or trace is None:
        return record
    targets, found, _ = trace.count_forwards()
    columns = {name: list(getattr(trace, name)) for name in ("kind", "n_tokens", "t0_ns", "t1_ns")}
    drafts = [at for at, kind in enumerate(trace.kind) if trace.kinds[kind].role == "draft"]
    for column in columns.values():
        column += [column[at] for at in drafts[:1]] * (record.draft_forwards - found)
        for at in reversed(drafts[record.draft_forwards :]):
            del column[at]
    return replace(record, forwards=replace(trace, **columns), target_forwards=targets)


@pytest.fixture
def make_run(tmp_path):
    """Makes a run's folder: its name, labels, (prompt, turn)s and passes; what to change of the
    manifest; what to make of each record (None: leave it out); its status."""

    def make(
        name="run",
        labels=("vanilla", "sps"),
        *,
        places=PLACES,
        passes=1,
        change=lambda manifest: None,
        edit=lambda record: record,
        text="Who sells tea in {}?",
        status="finished",
    ):
        manifest = copy.deepcopy(MANIFEST) | {"rows": [make_row(label) for label in labels]}
        change(manifest)
        run = RunDir.create(tmp_path / name, manifest)
        run.append_prompts(
            Prompt(
                *(id_, "mini/lexicon", id_.partition("/")[0], "qa", "lexicon"),
                *(turn, text.format(id_), [7, turn]),
            )
            for id_, turn in places
        )
        made = (
            make_record(label, *place, pass_)
            for pass_ in range(1, passes + 1)
            for place in places
            for label in labels
        )
        run.append(evened(record) for record in map(edit, made) if record is not None)
        run.update(status=status)
        return run.path

    return make


@pytest.fixture
def make_side(make_run):
    """Makes a run as `make_run` does, and reads it as a side."""
    return lambda *args, **more: read_run(make_run(*args, **more))
