"""The resume command is printed only if something of a stopped run was stored."""

import errno

import pytest

from specbench_cli.commands._running import show_resume_command
from specbench_cli.errors import EnvironmentFault
from specbench_cli.store.run_dir import RunDir


class View:
    """View that collects notes."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


FAULTS = [OSError(errno.ENOSPC, "No space left on device", "records.jsonl"), BrokenPipeError()]


@pytest.mark.parametrize("fault", FAULTS, ids=["full", "pipe"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_resume_command_is_printed_only_if_a_run_was_stored(tmp_path, monkeypatch, fault, kept):
    monkeypatch.setattr("specbench_cli.output.drop_stdout", lambda: None)
    place = tmp_path / "run"
    if kept:
        RunDir.create(place, {"schema": 9})
    with (
        pytest.raises(EnvironmentFault) as error,
        show_resume_command(place, View(), is_repeat=False),
    ):
        raise fault
    assert (f"specbench run --resume {place}" in (error.value.hint or "")) == kept


@pytest.mark.parametrize("kept", [False, True])
def test_an_interrupt_names_the_run_only_if_one_was_stored(tmp_path, kept):
    place, view = tmp_path / "run", View()
    if kept:
        RunDir.create(place, {"schema": 9})
    with pytest.raises(KeyboardInterrupt), show_resume_command(place, view, is_repeat=False):
        raise KeyboardInterrupt
    assert view.said == ([f"to resume: specbench run --resume {place}"] if kept else [])
