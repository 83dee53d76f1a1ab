"""The training loop: seeded, and resumed without a difference."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specbench_cli.errors import UsageError
from specbench_cli.training.loop import (
    CURVE,
    Optimization,
    TrainingPoint,
    TrainingStage,
    latest_checkpoint,
    train,
)
from specbench_cli.training.packing import TrainingBatch

VOCAB = 17
OPTIMIZATION = Optimization(peak_lr=0.05, end_lr=0.005, warmup_steps=3)


class Counting:
    """Batch source that counts; its state is one number."""

    def __init__(self, start: int = 0) -> None:
        self.at = start

    def batch(self, sequences: int, length: int) -> TrainingBatch:
        ids = torch.arange(self.at, self.at + sequences * length).view(sequences, length)
        self.at += sequences * length
        return TrainingBatch(ids % VOCAB, (ids * ids + 1) % VOCAB, torch.ones(sequences, length))

    def state(self) -> dict[str, Any]:
        return {"at": self.at}

    def restore(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Killed(Exception):
    """Exception in place of a signal during a run."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 8), nn.LayerNorm(8), nn.Linear(8, VOCAB))


def stages(net: nn.Module) -> list[TrainingStage]:
    def loss(batch: TrainingBatch) -> Tensor:
        return nn.functional.cross_entropy(net(batch.inputs).flatten(0, 1), batch.targets.flatten())

    often, once = Counting(), Counting(start=100)
    return [
        TrainingStage(4, 2, 8, loss, often),
        TrainingStage(3, 1, 16, loss, once),
        TrainingStage(3, 1, 16, loss, often),
    ]


def run(folder: Path, kill_after: int | None = None) -> tuple[list[float], nn.Module]:
    net = model()

    def maybe_die(point: TrainingPoint) -> None:
        if point.step == kill_after:
            raise Killed

    result = train(
        net,
        stages(net),
        OPTIMIZATION,
        folder,
        checkpoint_every=2,
        progress=maybe_die,
    )
    return [point.loss for point in result.curve], net


def test_two_runs_have_the_same_falling_loss_curve(tmp_path: Path) -> None:
    first, _ = run(tmp_path / "a")
    second, _ = run(tmp_path / "b")
    assert first == second
    assert first[-1] < first[0]


@pytest.mark.parametrize("kill_after", [1, 4, 5, 7, 9])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, kill_after: int) -> None:
    losses, net = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "parts", kill_after)
    resumed, other = run(tmp_path / "parts")
    assert resumed == pytest.approx(losses, abs=1e-5)
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    lines = (tmp_path / "parts" / CURVE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))


def test_training_time_excludes_progress_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, net = [0.0], model()
    monkeypatch.setattr("specbench_cli.training.loop.time.monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    def slow(stage: TrainingStage) -> TrainingStage:
        return replace(stage, loss=lambda batch: (passes(1), stage.loss(batch))[1])

    slowly = [slow(stage) for stage in stages(net)]
    result = train(net, slowly, OPTIMIZATION, tmp_path, progress=lambda _point: passes(50))
    assert result.seconds == len(result.curve) == 10


def test_checkpoints_are_saved_by_time_if_steps_are_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbench_cli.training.loop.LOST_SECONDS", 0)
    losses, _ = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "parts", 5)
    found = latest_checkpoint(tmp_path / "parts")
    assert found is not None
    assert found.name == "step-0000005"
    assert run(tmp_path / "parts")[0] == losses


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    losses, net = run(tmp_path)
    again, other = run(tmp_path)
    assert again == losses
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_one_checkpoint_is_kept_and_nothing_in_it_is_pickled(tmp_path: Path) -> None:
    run(tmp_path)
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert (
        [p.name for p in tmp_path.iterdir() if p.is_dir()] == [checkpoint.name] == ["step-0000010"]
    )
    assert sorted(p.name for p in checkpoint.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]


def test_a_half_written_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    (tmp_path / "step-0000008.part").mkdir()
    assert latest_checkpoint(tmp_path) is None


def test_resuming_another_plan_is_a_usage_error(tmp_path: Path) -> None:
    run(tmp_path)
    net = model()
    with pytest.raises(UsageError, match="another training"):
        train(net, stages(net)[:1], OPTIMIZATION, tmp_path)


def test_the_rate_warms_up_to_its_peak_and_ends_near_its_end() -> None:
    rates = [OPTIMIZATION.get_learning_rate(step, 100) for step in range(100)]
    assert rates[0] < rates[1] < rates[2] == pytest.approx(0.05)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.005, rel=0.01)


def test_a_horizon_delays_the_decay_of_the_learning_rate() -> None:
    cut = replace(OPTIMIZATION, horizon=100)
    assert [cut.get_learning_rate(step, 40) for step in range(40)] == [
        OPTIMIZATION.get_learning_rate(step, 100) for step in range(40)
    ]
