"""`specbench train eagle`, `eagle3` and `mtp` on a tiny target: output files and resumption."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from methods._heads.module import ParallelHead, get_head_classes, get_parallel_head_classes
from recipes.embedded import family
from specbench_cli import registry
from specbench_cli.app import with_all_options
from specbench_cli.commands.training._shared import prepare_recipes
from specbench_cli.commands.training.app import app as train
from specbench_cli.config.train import HeadLoss
from specbench_cli.engine.models.checkpoint import Weights
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.errors import UsageError
from specbench_cli.models import resolve
from specbench_cli.training.heads import trainer as head_trainer
from specbench_cli.training.heads.build import SCHEDULES, HeadSchedule, make_parallel_schedule
from specbench_cli.training.heads.mat import EstimateLog, MatEstimate
from specbench_cli.training.heads.trainer import HeadResult, HeadTrainer
from specbench_cli.training.loop import WORK, TrainingPoint

app = with_all_options(train)


class Killed(Exception):
    """Exception in place of a signal during a run."""


@pytest.fixture(scope="module", autouse=True)
def _short_answers() -> Iterator[None]:
    """Limit the length of answers, since an untrained target never ends one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbench_cli.training.replies.MAX_ANSWER", 8)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny untrained model with the embedded family's tokenizer."""
    folder = tmp_path_factory.mktemp("targets") / "tiny"
    recipe = replace(family.TARGET, hidden=16, layers=8, heads=2, mlp=24)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve("embedded").path)
    family.export(family.build(recipe, 0, torch.device("cpu")), tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    target: Path,
    curves: Callable[[], AbstractContextManager[object]],
) -> Path:
    out = tmp_path_factory.mktemp("heads")
    *others, last = SCHEDULES
    for kind in others:
        run(kind, out, target)
    with curves():
        run(last, out, target)
    return out


def run(kind: str, out: Path, target: Path, *more: str) -> Any:
    options = ("--out", str(out), "--target", str(target), "--smoke", "--device", "cpu", *more)
    return CliRunner().invoke(app, [kind, *options], catch_exceptions=False)


def shorten(recipe: HeadSchedule) -> HeadSchedule:
    stages = tuple(replace(stage, steps=3, sequences=1, length=256) for stage in recipe.stages)
    return replace(recipe, mlp=24, stages=stages, warmup_steps=1)


def trainer(out: Path, target: Path, kill_after: int | None = None) -> HeadTrainer:
    def report(_name: str, point: TrainingPoint) -> None:
        if point.step == kill_after:
            raise Killed

    device = torch.device("cpu")
    return HeadTrainer(out, target, [], 0, device, 8, n_held_out=4, fast=False, report=report)


def test_training_time_excludes_the_generation_of_replies(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: Any, **__: Any) -> None:
        assert (tmp_path / WORK / "replies-greedy.jsonl").is_file()
        raise Killed

    monkeypatch.setattr(head_trainer.loop, "train", train)
    with pytest.raises(Killed):
        trainer(tmp_path, target).train(shorten(SCHEDULES["eagle"]), "ttt")


@pytest.mark.parametrize("recipe", SCHEDULES.values(), ids=SCHEDULES)
def test_a_head_stores_the_digest_of_its_target(
    recipe: HeadSchedule, trained: Path, target: Path
) -> None:
    facts = json.loads((trained / recipe.name / "config.json").read_text())["specbench"]
    assert facts["kind"] == recipe.kind
    assert facts["target"] == "tiny"
    assert facts["target_sha256"] == Weights(target).sha256()
    assert facts["taps"] == ([1, 4, 7] if recipe.kind in ("eagle3", "p-eagle") else [-1])
    assert facts["loss"] == "ttt"


def test_curves_include_mat_estimates_during_training(trained: Path) -> None:
    facts = json.loads((trained / "training_curve.json").read_text())
    assert list(facts) == [recipe.name for recipe in SCHEDULES.values()]
    for fact in facts.values():
        assert fact["curve"][-1]["step"] == fact["steps"]
        assert [each["step"] for each in fact["mat"]] == [
            1,
            2,
            3,
            4,
        ]  # estimated at every step of this short training
        assert fact["mat"][-1]["mat"] >= 1.0
    assert (trained / "training_curve.png").stat().st_size > 1_000


def test_the_same_command_on_a_finished_folder_trains_nothing(trained: Path, target: Path) -> None:
    before = {p: p.read_bytes() for p in trained.rglob("*") if p.suffix in (".jsonl", ".json")}
    assert run("eagle", trained, target).exit_code == 0
    assert {p: p.read_bytes() for p in before} == before


def test_another_loss_in_the_same_folder_is_a_usage_error(trained: Path, target: Path) -> None:
    with pytest.raises(UsageError, match="another training"):
        run("eagle", trained, target, "--loss", "paper")


def test_another_target_in_the_same_folder_is_a_usage_error(trained: Path) -> None:
    with pytest.raises(UsageError, match="another training"):
        run("eagle", trained, resolve("embedded-1m").path)


@pytest.mark.parametrize("recipe", SCHEDULES.values(), ids=SCHEDULES)
def test_a_resumed_training_equals_an_uninterrupted_one(
    recipe: HeadSchedule,
    tmp_path: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_trainer, "MEASURE_INTERVAL", 2)
    straight_dir, resumed_dir, plan = tmp_path / "whole", tmp_path / "parts", shorten(recipe)
    straight = trainer(straight_dir, target).train(plan, "ttt")
    with pytest.raises(Killed):
        trainer(resumed_dir, target, kill_after=3).train(plan, "ttt")
    resumed = trainer(resumed_dir, target).train(plan, "ttt")
    assert resumed.curve == straight.curve
    assert resumed.mat == straight.mat
    assert [estimate.step for estimate in resumed.mat] == [2, 4, 6]
    straight_weights, resumed_weights = (
        load_file(out / recipe.name / "model.safetensors") for out in (straight_dir, resumed_dir)
    )
    assert all(
        torch.equal(straight_weights[name], resumed_weights[name]) for name in straight_weights
    )


@pytest.mark.parametrize(
    "kind", get_parallel_head_classes().values(), ids=get_parallel_head_classes()
)
def test_a_parallel_drafter_resumes_and_is_loaded_by_decoding(
    kind: type[ParallelHead], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_trainer, "MEASURE_INTERVAL", 2)
    straight_dir, resumed_dir = tmp_path / "whole", tmp_path / "parts"
    plan = make_parallel_schedule(kind, "tiny", is_embedded=True)
    stage = replace(plan.stages[0], steps=4, sequences=1, length=256)
    plan = replace(plan, stages=(stage,), warmup_steps=1)

    def train(out: Path, kill_after: int | None = None) -> HeadResult:
        pair_trainer = replace(trainer(out, target, kill_after), draft=lambda: target)
        return pair_trainer.train_kind(kind, plan, "ttt")

    straight = train(straight_dir)
    with pytest.raises(Killed):
        train(resumed_dir, kill_after=3)
    resumed = train(resumed_dir)
    assert (resumed.curve, resumed.mat) == (straight.curve, straight.mat)
    assert [estimate.step for estimate in resumed.mat] == [1, 2, 3, 4]
    name, decoder = f"tiny-{kind.kind}", load_decoder(target, name="target")
    straight_weights, resumed_weights = (
        load_file(out / name / "model.safetensors") for out in (straight_dir, resumed_dir)
    )
    assert all(
        torch.equal(straight_weights[each], resumed_weights[each]) for each in straight_weights
    )
    (artifact,) = registry.build(kind.kind, {}).artifacts()
    head = artifact.kind.load(resumed_dir / name, {"target": decoder})
    assert head.mask == 4  # the padding token


def test_a_pard_draft_is_adapted_from_a_draft_model(tmp_path: Path, target: Path) -> None:
    with pytest.raises(UsageError, match="no default draft model"):
        run("pard", tmp_path, target)


def test_estimates_after_the_resumed_step_are_repeated(tmp_path: Path) -> None:
    log = EstimateLog(tmp_path, MatEstimate)
    for step in (2, 4, 6, 4):
        log.add(MatEstimate(step, 1.0, [0.0]))
    assert [estimate.step for estimate in log.read()] == [2, 4]


def test_replies_are_made_once_for_all_heads(trained: Path) -> None:
    names = {path.name for path in (trained / WORK).glob("*.jsonl")}
    assert names == {"replies.jsonl", "replies-greedy.jsonl", "replies-held-out.jsonl"}


@pytest.mark.parametrize("tokens", [None, 2_048_000])
def test_larger_batches_need_fewer_updates_for_the_same_tokens(
    tokens: int | None, tmp_path: Path
) -> None:
    schedule = HeadSchedule.for_target(get_head_classes()["eagle3"], "smollm2", 1536)
    (plain,) = prepare_recipes((schedule,), 1.0, False, tmp_path, True, tokens)
    (wide,) = prepare_recipes((schedule,), 1.0, False, tmp_path, True, tokens, 16, 4e-3)
    assert (plain.stages[0].sequences, wide.stages[0].sequences) == (4, 16)
    assert wide.stages[0].steps * 4 == plain.stages[0].steps
    assert wide.tokens == plain.tokens == (tokens or schedule.tokens)
    assert (plain.peak_lr, wide.peak_lr) == (schedule.peak_lr, 4e-3)
    assert wide.warmup_steps == plain.warmup_steps // 4


def test_every_loss_is_an_option_for_every_kind_of_head() -> None:
    assert all(
        set(get_args(HeadLoss)) == set(kind.recipe.losses) for kind in get_head_classes().values()
    )
