"""A run is not marked finished if its records disappear or another process writes to it."""

from __future__ import annotations

import pytest

from specbench_cli.errors import ConcurrentWriteError, ExitCode
from specbench_cli.measure import run as execute
from specbench_cli.plan.tune import FOLDER
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")


def without(*numbers):
    """Return a function that removes some lines of a file."""

    def harm(file):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for at, line in enumerate(lines) if at not in numbers))

    return harm


def remove(file):
    file.unlink()


def halve(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.fixture
def harmed(specbench, monkeypatch):
    """Return a function that damages a file during a run, and returns the error of the run."""

    def run(harm, *methods, after=None, name="records.jsonl", folder="", resume=None, **config):
        class Harm(specbench.log):
            def show_record(self, record):
                super().show_record(record)
                if len(self.record_keys) == after:
                    harm(self.folder / name)

            def started(self, cells, done, run_dir):
                super().started(cells, done, run_dir)
                self.folder = specbench.path(1) / folder

        def counted(plan, run_dir, resumed=None):
            if run_dir.path == specbench.path(1) / folder:
                harm(run_dir.path / name)
            count(plan, run_dir, resumed)

        count = execute.check_complete
        if after is None:
            monkeypatch.setattr(execute, "check_complete", counted)
        with pytest.raises(ConcurrentWriteError) as caught:
            specbench(*methods, log=Harm(), resume=resume, **config)
        monkeypatch.setattr(execute, "check_complete", count)
        assert caught.value.exit_code == ExitCode.ENVIRONMENT
        return caught.value

    return run


def keys(path):
    return sorted(record.key for record in RunDir.open(path).records())


@pytest.mark.parametrize("harm", [without(0), without(1, 3), without(3), remove, halve])
def test_records_that_vanish_at_the_end_are_counted_and_measured_again(specbench, harmed, harm):
    error = harmed(harm, "pld")
    assert f"specbench run --resume {specbench.path(1)}" in error.hint
    assert "records.jsonl lacks " in error.message
    assert RunDir.open(specbench.path(1)).manifest["status"] == "interrupted"
    again = specbench(resume=specbench.path(1))
    assert again.exit_code == ExitCode.OK
    assert again.manifest["status"] == "finished"
    whole = specbench("pld")
    assert keys(again.path) == keys(whole.path)


@pytest.mark.parametrize("harm", [without(0), remove, halve])
def test_records_that_vanish_between_two_are_noticed_before_the_next(specbench, harmed, harm):
    error = harmed(harm, "pld", after=2)
    assert "another program changed it" in error.message
    assert f"specbench run --resume {specbench.path(1)}" in error.hint
    assert specbench(resume=specbench.path(1)).exit_code == ExitCode.OK


def test_error_names_the_record_that_is_missing(harmed):
    error = harmed(without(1), "pld", limit=1)
    assert "lacks 1 records" in error.message
    assert " on mini/" in error.message
    assert "(turn 1, pass 1)" in error.message


def test_prompts_that_vanish_are_noticed(harmed):
    assert "prompts.jsonl lacks mini/" in harmed(remove, "pld", name="prompts.jsonl").message


def test_records_of_a_later_turn_are_counted_too(harmed):
    assert "turn 2" in harmed(without(2, 3), "pld", limit=1, category=["multi_turn"]).message


def test_records_of_a_tuning_are_counted_too(harmed, specbench):
    error = harmed(
        without(0), "pld", limit=4, category=["qa"], tune=2, tune_by="forwards", folder=FOLDER
    )
    assert f"{FOLDER}/records.jsonl lacks 1 records" in error.message
    assert f"--resume {specbench.path(1)}" in error.hint


def test_run_whose_lock_is_removed_stops_and_is_resumed_without_a_doubled_record(harmed, specbench):
    def unlock(file):
        file.unlink()

    error = harmed(unlock, "pld", after=2, name=".lock")
    assert ".lock was removed or replaced" in error.message
    assert len(keys(specbench.path(1))) < 4
    again = specbench(resume=specbench.path(1))
    assert len(set(keys(again.path))) == len(keys(again.path)) == 4


def test_records_of_a_second_writer_are_kept(harmed, specbench):
    others = []

    def enter(file):
        file.unlink()
        plan, run_dir = execute.resume_run(file.parent, specbench.log())
        others.append(execute.measure_run(plan, run_dir, specbench.log()))

    harmed(enter, "pld", after=2, name=".lock")
    (other,) = others
    assert other.exit_code == ExitCode.OK
    found = RunDir.open(other.run_dir)
    assert found.manifest["status"] == "finished"
    assert len(list(found.records())) == 4


def test_tuning_in_a_folder_that_is_a_link_is_refused(specbench, tmp_path):
    class Stop(specbench.log):
        def stage(self, text):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        specbench("pld", limit=4, category=["qa"], tune=2, tune_by="forwards", log=Stop())
    folder = specbench.path(1) / FOLDER
    if folder.exists():
        folder.rename(tmp_path / "kept")
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Exception, match="is a link"):
        specbench(resume=specbench.path(1))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_lock_that_a_killed_process_left_in_a_finished_run_goes_with_a_resumption(specbench):
    run = specbench("pld", limit=1).path
    lock = run / ".lock"
    lock.write_text('{"pid": 1, "host": "vm"}')
    assert execute.resume_run(run, specbench.log())[0] is None
    assert not lock.exists()
    lock.write_text("mine")
    execute.resume_run(run, specbench.log())
    assert lock.read_text() == "mine"
