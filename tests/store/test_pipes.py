"""Tests that a pipe in place of a file does not block a reader."""

import json
import os
import signal

import pytest

from recipes.studies.points import _drafts
from specbench_cli.audit.certificate import load_reusable_certificate
from specbench_cli.errors import UsageError
from specbench_cli.judge.broken import find_certificates
from specbench_cli.measure.run_checks import load_resume_config
from specbench_cli.plan.power import _measured_spread
from specbench_cli.predict.recommend.journal import Journal, read_result
from specbench_cli.registry import load
from specbench_cli.store import matrix
from specbench_cli.store.run_dir import list_runs


@pytest.fixture(autouse=True)
def _limit():
    def stop(*_):
        pytest.fail("a reader waits for the pipe")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(2)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (".resume.json", load_resume_config),
        (".recommendation.resume.json", Journal.read),
        ("recommendation.json", read_result),
        (".matrix.resume.json", matrix.read_config),
        ("alignment.json", lambda folder: list(_drafts(folder))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pipe_in_place_of_a_required_file_is_an_error(tmp_path, name, read):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match=name):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "read", "found"),
    [
        (".elsewhere", list_runs, []),
        ("sps.json", lambda folder: find_certificates("sps", folder), []),
        (
            "sps.json",
            lambda folder: load_reusable_certificate(folder / "sps.json", load("sps")),
            None,
        ),
        ("run/summary.csv", lambda folder: _measured_spread("a", folder), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pipe_in_place_of_an_optional_file_is_ignored(tmp_path, name, read, found):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).parent.joinpath("manifest.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    assert read(tmp_path) in (found, [tmp_path])


def test_a_matrix_that_names_a_run_twice_is_rejected(tmp_path):
    (tmp_path / matrix.MATRIX).write_text(json.dumps({"runs": ["a", "b", "a"]}))
    with pytest.raises(UsageError, match="a folder is listed twice"):
        matrix.run_folders(tmp_path)
