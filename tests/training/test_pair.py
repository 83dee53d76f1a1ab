"""The embedded pair's recipe, on tiny runs, and what `specbench train pair` leaves behind."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from specbench_cli.commands.train import app
from specbench_cli.errors import UsageError
from specbench_cli.training import pair
from specbench_cli.training.corpus import Batch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pair")
    done = CliRunner().invoke(app, ["pair", "--out", str(out), "--smoke", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    return out


def test_the_models_have_the_stated_sizes() -> None:
    sizes = [
        sum(p.numel() for p in pair.build(recipe, 0, CPU).parameters())
        for recipe in (pair.TARGET, pair.DRAFT)
    ]
    assert sizes == [7_475_456, 926_336]


def test_smoke_writes_both_models_and_a_curve(smoke: Path) -> None:
    facts = json.loads((smoke / "training_curve.json").read_text())
    assert set(facts) == {"embedded-7m", "embedded-1m"}
    assert all(f["curve"][-1]["step"] == f["steps"] for f in facts.values())
    assert (smoke / "training_curve.png").stat().st_size > 1_000


@pytest.mark.parametrize("name", ["embedded-7m", "embedded-1m"])
def test_an_export_loads_without_a_warning_and_is_fp16(smoke: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(smoke / name)
        tokenizer = AutoTokenizer.from_pretrained(smoke / name)
    assert model.dtype == torch.float16
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.chat_template


def test_the_same_command_on_a_finished_folder_trains_nothing(smoke: Path) -> None:
    before = {p: p.read_bytes() for p in smoke.rglob("*") if p.suffix in (".safetensors", ".jsonl")}
    done = CliRunner().invoke(app, ["pair", "--out", str(smoke), "--smoke", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert {p: p.read_bytes() for p in before} == before


def test_two_clean_starts_give_the_same_loss_curve(smoke: Path, tmp_path: Path) -> None:
    curves = []
    for name in ("first", "second"):
        tokenizer = tmp_path / name / pair.WORK / "tokenizer"
        shutil.copytree(smoke / pair.WORK / "tokenizer", tokenizer)
        recipes = [pair.TARGET.smoke(), pair.DRAFT.smoke()]
        curves.append(
            pair.train_pair(tmp_path / name, recipes, [], seed=0, device=CPU, compiled=False)
        )
    assert [result.curve for result in curves[0].values()] == [
        result.curve for result in curves[1].values()
    ]


def test_another_recipe_in_the_same_folder_is_a_usage_error(smoke: Path) -> None:
    with pytest.raises(UsageError, match="another run"):
        pair.train_pair(smoke, [pair.TARGET.scaled(0.1)], [], seed=0, device=CPU, compiled=False)


def test_kl_to_itself_is_zero_and_cross_entropy_starts_at_a_uniform_guess() -> None:
    model = pair.build(pair.DRAFT, 0, CPU)
    ids = torch.randint(0, 4096, (1, 33), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(1, 32))
    assert pair.target_loss(model, model)(batch).item() == pytest.approx(0.0, abs=1e-4)
    assert pair.text_loss(model)(batch).item() == pytest.approx(8.32, abs=0.1)


def test_scaling_a_recipe_keeps_every_stage() -> None:
    tiny = pair.DRAFT.scaled(1e-6)
    assert [stage.steps for stage in tiny.stages] == [1] * len(pair.DRAFT.stages)
    assert tiny.warmup_steps == 1


def test_a_scale_of_zero_is_a_usage_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["pair", "--out", str(tmp_path), "--steps-scale", "0"])
    assert isinstance(done.exception, UsageError)
