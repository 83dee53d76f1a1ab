"""A run is not marked finished if its records disappear or another process writes to it."""

from __future__ import annotations

import pytest

from specbench_cli.errors import ConcurrentWriteError, ExitCode
from specbench_cli.measure import run as execute
from specbench_cli.plan.tune import FOLDER
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")


def remove_lines(*numbers):
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
def run_with_damage(specbench, monkeypatch):
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

        def damage_and_check(plan, run_dir, resumed=None):
            if run_dir.path == specbench.path(1) / folder:
                harm(run_dir.path / name)
            count(plan, run_dir, resumed)

        count = execute.check_complete
        if after is None:
            monkeypatch.setattr(execute, "check_complete", damage_and_check)
        with pytest.raises(ConcurrentWriteError) as caught:
            specbench(*methods, log=Harm(), resume=resume, **config)
        monkeypatch.setattr(execute, "check_complete", count)
        assert caught.value.exit_code == ExitCode.ENVIRONMENT
        return caught.value

    return run


def keys(path):
    return sorted(record.key for record in RunDir.open(path).records())


@pytest.mark.parametrize(
    "harm", [remove_lines(0), remove_lines(1, 3), remove_lines(3), remove, halve]
)
def test_records_removed_at_the_end_are_detected_and_measured_again(
    specbench, run_with_damage, harm
):
    error = run_with_damage(harm, "pld")
    assert f"specbench run --resume {specbench.path(1)}" in error.hint
    assert "records.jsonl lacks " in error.message
    assert RunDir.open(specbench.path(1)).manifest["status"] == "interrupted"
    resumed = specbench(resume=specbench.path(1))
    assert resumed.exit_code == ExitCode.OK
    assert resumed.manifest["status"] == "finished"
    whole = specbench("pld")
    assert keys(resumed.path) == keys(whole.path)


@pytest.mark.parametrize("harm", [remove_lines(0), remove, halve])
def test_records_removed_between_two_outputs_are_detected(specbench, run_with_damage, harm):
    error = run_with_damage(harm, "pld", after=2)
    assert "another program changed it" in error.message
    assert f"specbench run --resume {specbench.path(1)}" in error.hint
    assert specbench(resume=specbench.path(1)).exit_code == ExitCode.OK


def test_error_has_the_key_of_the_missing_record(run_with_damage):
    error = run_with_damage(remove_lines(1), "pld", limit=1)
    assert "lacks 1 records" in error.message
    assert " on mini/" in error.message
    assert "(turn 1, pass 1)" in error.message


def test_removed_prompts_are_detected(run_with_damage):
    assert (
        "prompts.jsonl lacks mini/" in run_with_damage(remove, "pld", name="prompts.jsonl").message
    )


def test_removed_records_of_a_later_turn_are_detected(run_with_damage):
    assert (
        "turn 2"
        in run_with_damage(remove_lines(2, 3), "pld", limit=1, category=["multi_turn"]).message
    )


def test_removed_records_of_a_tuning_are_detected(run_with_damage, specbench):
    error = run_with_damage(
        remove_lines(0), "pld", limit=4, category=["qa"], tune=2, tune_by="forwards", folder=FOLDER
    )
    assert f"{FOLDER}/records.jsonl lacks 1 records" in error.message
    assert f"--resume {specbench.path(1)}" in error.hint


def test_run_without_its_lock_stops_and_is_resumed_without_duplicates(run_with_damage, specbench):
    def unlock(file):
        file.unlink()

    error = run_with_damage(unlock, "pld", after=2, name=".lock")
    assert ".lock was removed or replaced" in error.message
    assert len(keys(specbench.path(1))) < 4
    resumed = specbench(resume=specbench.path(1))
    assert len(set(keys(resumed.path))) == len(keys(resumed.path)) == 4


def test_records_of_a_second_writer_are_kept(run_with_damage, specbench):
    others = []

    def enter(file):
        file.unlink()
        plan, run_dir = execute.resume_run(file.parent, specbench.log())
        others.append(execute.measure_run(plan, run_dir, specbench.log()))

    run_with_damage(enter, "pld", after=2, name=".lock")
    (other,) = others
    assert other.exit_code == ExitCode.OK
    found = RunDir.open(other.run_dir)
    assert found.manifest["status"] == "finished"
    assert len(list(found.records())) == 4


def test_tuning_in_a_linked_folder_is_rejected(specbench, tmp_path):
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


def test_lock_of_a_killed_process_is_removed_when_a_finished_run_is_resumed(specbench):
    run = specbench("pld", limit=1).path
    lock = run / ".lock"
    lock.write_text('{"pid": 1, "host": "vm"}')
    assert execute.resume_run(run, specbench.log())[0] is None
    assert not lock.exists()
    lock.write_text("mine")
    execute.resume_run(run, specbench.log())
    assert lock.read_text() == "mine"
