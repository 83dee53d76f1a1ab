"""`python -m recipes.embedded`: short trainings of the family's models, and their files."""

import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from recipes.embedded import commands, family
from recipes.embedded.early_exit import exit_loss
from recipes.embedded.trainer import Trainer
from specbench_cli.app import with_all_options
from specbench_cli.errors import UsageError
from specbench_cli.training.loop import WORK
from specbench_cli.training.losses import load_model, target_loss, text_loss
from specbench_cli.training.packing import TrainingBatch

app = with_all_options(commands.app)


CPU = torch.device("cpu")
COMMANDS = ("pair", "exit", "foreign")
NAMES = ("embedded-7m-base", "embedded-7m", "embedded-1m", "embedded-exit", "embedded-xv")


Recipes = tuple[family.Recipe, family.Recipe, family.Recipe]


def train(command: str, out: Path) -> None:
    """Run a command with --smoke, on narrow models with the family's number of layers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, rate in (("BASE", 0.03), ("TARGET", 0.03), ("EXIT", 1e-3)):
            # with this rate, two steps teach the model to end its replies
            small = replace(getattr(family, name), hidden=64, mlp=128, peak_lr=rate)
            patch.setattr(family, name, small)
        for name in ("DRAFT", "FOREIGN"):
            patch.setattr(family, name, replace(getattr(family, name), hidden=32, mlp=64))
        done = CliRunner().invoke(app, [command, "--out", str(out), "--smoke", "--device", "cpu"])
    assert done.exit_code == 0, done.output


def trainer(out: Path) -> Trainer:
    return Trainer(out, [], 0, CPU, n_replies=32, fast=False)


@pytest.fixture(scope="module")
def smoke(
    tmp_path_factory: pytest.TempPathFactory,
    curves: Callable[[], AbstractContextManager[object]],
) -> Path:
    out = tmp_path_factory.mktemp("family")
    *others, last = COMMANDS
    for command in others:
        train(command, out)
    with curves():
        train(last, out)
    return out


@pytest.fixture(scope="module")
def tiny() -> Recipes:
    """Return the pair's recipes with very small models."""
    big = {"hidden": 32, "layers": 2, "mlp": 64}
    return (
        replace(family.BASE.for_smoke_test(), **big),
        replace(family.TARGET.for_smoke_test(), **big),
        replace(family.DRAFT.for_smoke_test(), hidden=16, mlp=32),
    )


def test_the_models_have_the_stated_sizes() -> None:
    recipes = (family.TARGET, family.DRAFT, family.EXIT, family.FOREIGN)
    sizes = [sum(p.numel() for p in family.build(r, 0, CPU).parameters()) for r in recipes]
    assert sizes == [7_475_456, 926_336, 7_475_456, 664_192]


def test_smoke_writes_every_model_and_one_file_of_curves(smoke: Path) -> None:
    facts = json.loads((smoke / "training_curve.json").read_text())
    assert tuple(facts) == NAMES
    assert all(f["curve"][-1]["step"] == f["steps"] for f in facts.values())
    assert (smoke / "training_curve.png").stat().st_size > 1_000


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_model_is_fp16_and_loads_without_a_warning(smoke: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(smoke / name)
        tokenizer = AutoTokenizer.from_pretrained(smoke / name)
    assert model.dtype == torch.float16
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.chat_template


def test_the_second_vocabulary_differs(smoke: Path) -> None:
    first, second = (
        AutoTokenizer.from_pretrained(smoke / name) for name in ("embedded-7m", "embedded-xv")
    )
    text = "The capital of Arvania is Belmar."
    assert len(first) > len(second) == 2048
    assert first.encode(text) != second.encode(text)
    assert second.decode(second.encode(text)) == text


def test_the_early_exit_model_starts_from_the_target(smoke: Path) -> None:
    target, variant = (
        load_model(smoke / name, CPU).state_dict() for name in ("embedded-7m", "embedded-exit")
    )
    largest_change = max(float((target[key] - variant[key]).abs().max()) for key in target)
    assert 0 < largest_change < 0.02  # four steps of AdamW at a rate of 0.001


def test_the_same_command_on_a_finished_folder_trains_nothing(smoke: Path) -> None:
    before = {p: p.read_bytes() for p in smoke.rglob("*") if p.suffix in (".safetensors", ".jsonl")}
    train("foreign", smoke)
    assert {p: p.read_bytes() for p in before} == before


def test_two_clean_starts_give_the_same_loss_curve(
    smoke: Path, tmp_path: Path, tiny: Recipes
) -> None:
    curves = []
    for name in ("first", "second"):
        tokenizer = tmp_path / name / WORK / "tokenizer"
        shutil.copytree(smoke / WORK / "tokenizer", tokenizer)
        results = trainer(tmp_path / name).train_pair(*tiny)
        curves.append([result.curve for result in results.values()])
    assert curves[0] == curves[1]


def test_a_resumed_run_keeps_its_replies_and_completes_them(
    smoke: Path, tmp_path: Path, tiny: Recipes
) -> None:
    shutil.copytree(smoke / WORK / "tokenizer", tmp_path / WORK / "tokenizer")
    trainer(tmp_path).train_pair(*tiny)
    file = tmp_path / WORK / "replies.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])  # cut in the middle of a line
    shutil.rmtree(tmp_path / WORK / tiny[-1].name)
    trainer(tmp_path).train_pair(*tiny)
    assert _by_chat(file.read_bytes()) == _by_chat(whole)


def _by_chat(lines: bytes) -> dict[int, list[int]]:
    rows = [json.loads(line) for line in lines.splitlines()]
    return {row["chat"]: row["answer"] for row in rows}


def test_another_recipe_in_the_same_folder_is_a_usage_error(smoke: Path) -> None:
    with pytest.raises(UsageError, match="another run"):
        trainer(smoke).train_pair(family.BASE.scale_steps(0.1), family.TARGET, family.DRAFT)


def test_kl_to_itself_is_0_and_initial_cross_entropy_is_that_of_the_uniform_distribution() -> None:
    model = family.build(family.DRAFT, 0, CPU)
    batch = some_batch()
    assert target_loss(model, model)(batch).item() == pytest.approx(0.0, abs=1e-4)
    assert text_loss(model)(batch).item() == pytest.approx(8.32, abs=0.1)


def test_without_layer_skipping_the_exit_loss_is_the_last_plus_one_early_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recipes.embedded.early_exit.MAX_DROPOUT", 0.0)
    model = family.build(replace(family.DRAFT, layers=2), 0, CPU)
    early = family.build(replace(family.DRAFT, layers=1), 0, CPU)
    early.load_state_dict(
        {key: value for key, value in model.state_dict().items() if ".layers.1." not in key}
    )
    batch = some_batch()
    both = text_loss(model)(batch) + text_loss(early)(batch)
    assert exit_loss(model, fast=False)(batch).item() == pytest.approx(both.item(), abs=0.02)


def test_the_exit_loss_is_reproducible() -> None:
    model = family.build(family.DRAFT, 0, CPU)
    loss = exit_loss(model, fast=False)
    assert loss(some_batch()).item() == loss(some_batch()).item()


def some_batch() -> TrainingBatch:
    ids = torch.randint(0, 4096, (2, 33), generator=torch.Generator().manual_seed(0))
    return TrainingBatch(ids[:, :-1], ids[:, 1:], torch.ones(2, 32))


def test_scaling_a_recipe_keeps_every_stage() -> None:
    tiny = family.DRAFT.scale_steps(1e-6)
    assert [stage.steps for stage in tiny.stages] == [1] * len(family.DRAFT.stages)
    assert tiny.warmup_steps == 1
