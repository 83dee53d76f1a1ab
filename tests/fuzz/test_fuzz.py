"""A few inputs of each class. `.ci/run` tries more, `python tests/fuzz --inputs N` any number."""

from __future__ import annotations

import importlib
from pathlib import Path
from random import Random

import pytest

FOLDER = Path(__file__).parent
INPUTS = {"records": 60, "prompts": 40, "manifests": 25, "baselines": 40}
INPUTS |= {"configs": 60, "tasks": 40, "questions": 100, "costs": 60, "arguments": 4, "sinks": 40}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr("specbench_cli.summary.summary.RESAMPLES", 19)


@pytest.mark.parametrize("name", INPUTS)
def test_no_input_ends_in_a_traceback_a_hang_or_an_invalid_value(tmp_path, name):
    subject = importlib.import_module("search").SUBJECTS[name](tmp_path / name)
    search = importlib.import_module("search").search
    assert not search(subject, first=0, inputs=INPUTS[name], seconds=60)


def test_an_exception_other_than_our_own_is_a_finding(tmp_path, capsys):
    subjects = importlib.import_module("subjects")

    class Fragile(subjects.Subject):
        name = "fragile"

        def tried(self, rng: Random) -> str | None:
            match rng.randrange(3):
                case 0:
                    raise KeyError("x")
                case 1:
                    return "accepted -1"
            return None

    found = importlib.import_module("search").search(Fragile(tmp_path / "x"), 0, 60, 60)
    assert len(found) == 2
    assert found.total() > 20
    assert "fragile: 60 inputs" in capsys.readouterr().out
