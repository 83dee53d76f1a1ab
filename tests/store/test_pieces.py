"""Tests of reading a large file of records with several processes."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from specbench_cli.errors import UsageError
from specbench_cli.store import pieces
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary.source import drop_details

PIECE = 20_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of 60 records in a dozen pieces."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "scale"))
    try:
        write = importlib.import_module("synthetic").write
    finally:
        sys.path.pop(0)
    made: RunDir = write(tmp_path_factory.mktemp("large") / "run", 12, 5, 1)
    return made


@pytest.fixture(autouse=True)
def treat_every_file_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MIN_PARALLEL_BYTES", 1)
    monkeypatch.setattr(pieces, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(pieces, "usable_cpus", lambda: 2)


def read_error(run: RunDir) -> str:
    with pytest.raises(UsageError) as error:
        list(run.map_records(drop_details))
    return str(error.value)


def test_pieces_end_at_lines_and_make_up_the_file(run: RunDir) -> None:
    file = run.path / "records.jsonl"
    spans = pieces._split_file(file)
    whole = file.read_bytes()
    assert len(spans) > 8
    assert b"".join(whole[start:end] for start, end in spans) == whole
    assert all(whole[end - 1 : end] == b"\n" for _, end in spans)


def test_several_processes_read_the_same_records_in_order(run: RunDir, tmp_path: Path) -> None:
    assert list(run.map_records(drop_details)) == [drop_details(record) for record in run.records()]

    lines = (run.path / "records.jsonl").read_text().splitlines(keepends=True)
    damaged = json.loads(lines[50]) | {"n_tokens": -1}
    bad = [*lines[:20], lines[3], *lines[20:50], json.dumps(damaged) + "\n", *lines[51:]]
    for name in ("manifest.json", "prompts.jsonl"):
        (tmp_path / name).write_bytes((run.path / name).read_bytes())
    (tmp_path / "records.jsonl").write_text("".join(bad))
    other = RunDir.open(tmp_path)
    assert "line 21: a second record of" in read_error(other)
    (tmp_path / "records.jsonl").write_text("".join([*bad[:20], *bad[21:]]))
    assert "line 51 is not a valid record: n_tokens" in read_error(other)


def test_piece_of_a_process_that_died_is_read_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "import os; os._exit(9)"]
    monkeypatch.setattr(pieces, "python_command", lambda *_, **__: command)
    assert list(run.map_records(drop_details)) == [drop_details(record) for record in run.records()]
