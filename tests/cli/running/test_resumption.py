"""The resume command is printed only if something of a stopped run was stored."""

import errno

import pytest

from specbench_cli.commands._running import show_resume_command
from specbench_cli.errors import EnvironmentFault
from specbench_cli.store.run_dir import RunDir


class View:
    """Progress view that collects notes."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


FAULTS = [OSError(errno.ENOSPC, "No space left on device", "records.jsonl"), BrokenPipeError()]


@pytest.mark.parametrize("fault", FAULTS, ids=["full", "pipe"])
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_resume_command_is_printed_only_if_a_run_was_stored(
    tmp_path, monkeypatch, fault, is_stored
):
    monkeypatch.setattr("specbench_cli.output.drop_stdout", lambda: None)
    folder = tmp_path / "run"
    if is_stored:
        RunDir.create(folder, {"schema": 9})
    with (
        pytest.raises(EnvironmentFault) as error,
        show_resume_command(folder, View(), is_repeat=False),
    ):
        raise fault
    assert (f"specbench run --resume {folder}" in (error.value.hint or "")) == is_stored


@pytest.mark.parametrize("is_stored", [False, True])
def test_an_interrupt_names_the_run_only_if_one_was_stored(tmp_path, is_stored):
    folder, view = tmp_path / "run", View()
    if is_stored:
        RunDir.create(folder, {"schema": 9})
    with pytest.raises(KeyboardInterrupt), show_resume_command(folder, view, is_repeat=False):
        raise KeyboardInterrupt
    assert view.notes == ([f"to resume: specbench run --resume {folder}"] if is_stored else [])
