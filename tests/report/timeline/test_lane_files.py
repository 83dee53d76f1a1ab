"""Tests of the lane files of a prompt: a figure per turn and one Chrome trace."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from specbench_cli.errors import UsageError
from specbench_cli.report.timeline.files import write_lanes
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary.comparison import compare_outputs


@pytest.fixture
def run(synthetic, manifest, tmp_path):
    """A question of two turns; the peer shows no forwards."""
    run = RunDir.create(tmp_path / "run", manifest)
    records = synthetic.records([synthetic.sps, synthetic.vanilla, synthetic.hf_vanilla], prompts=1)
    for record in records:
        if record.peer:
            record.forwards = None
    run.append(replace(record, turn=turn) for record in records for turn in (1, 2))
    return run


def test_every_turn_has_a_figure_with_vanilla_first(run, tmp_path):
    files = write_lanes(run, compare_outputs(run, "mini/0", [], None), tmp_path)
    assert [file.name for file in files] == [
        *("lanes-turn1.svg", "lanes-turn1.png", "lanes-turn2.svg", "lanes-turn2.png"),
        "trace.json",
    ]
    events = json.loads(files[-1].read_text())["traceEvents"]
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [title.partition(", pass")[0] for title in titles] == [
        f"{label}, mini/0, turn {turn}" for turn in (1, 2) for label in ("vanilla", "sps")
    ]


def test_outputs_without_a_trace_have_no_lanes(run, tmp_path):
    found = compare_outputs(run, "mini/0", ["hf:vanilla"], None)
    hidden = [replace(record, forwards=None) for record in run.records()]
    run.records = lambda of=None: iter(hidden)
    with pytest.raises(UsageError, match="no lanes of vanilla, hf:vanilla on mini/0"):
        write_lanes(run, found, tmp_path)
