"""`specbench train eagle`, `eagle3` and `mtp`: what is refused before anything is loaded."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbench_cli.app import with_all_options
from specbench_cli.commands.training.app import app as train
from specbench_cli.errors import UsageError

app = with_all_options(train)


HEADS = ("eagle", "eagle3", "mtp")


@pytest.mark.parametrize("head", HEADS)
def test_each_head_has_its_command(head: str) -> None:
    done = CliRunner().invoke(app, [head, "--help"])
    assert done.exit_code == 0
    assert "--loss" in done.output


def test_a_loss_that_has_no_name_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["eagle", "--out", str(tmp_path), "--loss", "hinge"])
    assert done.exit_code == 2
    assert "paper" in done.output


def test_an_unknown_target_is_a_usage_error(tmp_path: Path) -> None:
    options = ["mtp", "--out", str(tmp_path), "--target", "embeded", "--smoke"]
    done = CliRunner().invoke(app, options)
    assert isinstance(done.exception, UsageError)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["judge", "specee"])
def test_training_for_a_pair_needs_a_draft(tmp_path: Path, command: str) -> None:
    options = [command, "--out", str(tmp_path), "--target", "embedded-1m", "--smoke"]
    done = CliRunner().invoke(app, options)
    assert isinstance(done.exception, UsageError)
    assert "embedded-1m has no default draft model" in str(done.exception)
    assert not any(tmp_path.iterdir())
