"""Run folders written without a model: two prompts (the first has two turns), a few methods."""

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
    kinds, origins = [VERIFY, PREFILL], ["prefill", "plain", "plain", "plain"]
    trace = Trace(kinds, [0, 0, 0, 1], [1, 1, 1, 9], [0, 10, 20, 0], [10, 18, 30, 0])
    steps = Steps([0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1])
    if drafting:
        kinds, origins = [VERIFY, DRAFT, PREFILL], ["prefill", "accepted", "accepted", "recovered"]
        trace = Trace(kinds, [1, 0, 1, 0, 2], [1, 3, 2, 3, 9], [0, 4, 10, 12, 0], [3, 9, 12, 20, 0])
        steps = Steps([2, 2], [3, 3], [2, 1], [2, 0], [2, 1])
    values = {
        "cluster": "mini/lexicon",
        "category": "lexicon",
        "turn": turn,
        "params": Params({}, {"length": 5} if drafting else {}),
        "pass_": pass_,
        "output_ids": [5, 6, turn, 2],
        "origin": origins,
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


def match_forwards(record):
    """Return the record with a trace and counters that agree.

    The trace gets as many draft forwards as `draft_forwards`, and `target_forwards` becomes the
    number of target forwards in the trace. A test can then change one value at a time.
    """
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
    """Return a function that writes a run folder and returns its path.

    `change` edits the manifest in place. `edit` returns the changed record, or None to leave the
    record out.
    """

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
        records = (
            make_record(label, *place, pass_)
            for pass_ in range(1, passes + 1)
            for place in places
            for label in labels
        )
        run.append(match_forwards(record) for record in map(edit, records) if record is not None)
        run.update(status=status)
        return run.path

    return make


@pytest.fixture
def make_side(make_run):
    """Return a function that writes a run as `make_run` does, and reads it as a side."""
    return lambda *args, **more: read_run(make_run(*args, **more))
