"""Training of heads without a KV state: levels, loss, output files and errors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from methods._heads.recipe import Objective
from recipes.embedded import family
from specbench_cli import registry
from specbench_cli.app import with_all_options
from specbench_cli.commands.training._shared import show_bars
from specbench_cli.commands.training.app import app as train
from specbench_cli.engine.models.checkpoint import Weights
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.head import FeatureHead
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.errors import UsageError
from specbench_cli.models import resolve
from specbench_cli.training.heads import trainer as head_trainer
from specbench_cli.training.heads.build import (
    TorchTarget,
    build_stateless_head,
    make_stateless_schedule,
)
from specbench_cli.training.heads.losses import head_loss, run_target, unroll
from specbench_cli.training.heads.mat import estimate_mat
from specbench_cli.training.heads.trainer import HeadTrainer
from specbench_cli.training.loop import TrainingPoint
from specbench_cli.training.losses import autocast
from specbench_cli.training.packing import EncodedChat, TrainingBatch

app = with_all_options(train)


FILE = Path(__file__).parents[1] / "capabilities" / "plugins" / "stateless_head.py"
BEGIN, VOCABULARY, LENGTH = 3, 40, 24


class Killed(Exception):
    """Exception in place of a signal during a run."""


class Lines(FeatureHead):
    """Head with one linear map per level over two target layers."""

    kind = "lines"
    captured_layers = (1, -1)

    def __init__(self, target: Decoder, levels: int = 3) -> None:
        super().__init__(target, levels=levels)
        self.maps = nn.Parameter(torch.randn(levels, self.width, target.hidden_size) / 4)

    def forward(self, rows: Tensor) -> Tensor:
        return self.target.unembed(rows @ self.maps)


class Sequential(Lines):
    """Head that does not return logits per level."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows)[0]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=24,
        bos_token_id=BEGIN,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def text(seed: int = 0, chats: tuple[int, ...] = (11, 13)) -> Tensor:
    """Return chats of these lengths, packed into one sequence `[1, LENGTH + 1]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (1, sum(chats) + 1), generator=generator)
    first = 0
    for length in chats:
        ids[0, first] = BEGIN
        first += length
    return ids


def test_level_k_predicts_the_token_k_places_after_the_next(target: LlamaForCausalLM) -> None:
    head, ids = Lines(TorchTarget(target)), text()[:, :-1]
    slots = torch.tensor([[2, 9, 15]])
    with torch.no_grad():
        read = run_target(target, ids, head.captured_layers, torch.tensor([[0] * 11 + [11] * 13]))
        logits = head(read.features[0, slots[0]])
        steps = list(unroll(head, target, ids, read, slots, 3))
    assert len(steps) == 3
    for level, step in enumerate(steps):
        torch.testing.assert_close(step.logits[0], logits[level])
        assert step.positions.tolist() == [[3 + level, 10 + level, 16 + level]]
    assert [step.valid.tolist() for step in steps] == [  # the chat of slot 9 ends at position 10
        [[True, True, True]],
        [[True, False, True]],
        [[True, False, True]],
    ]


def test_the_loss_is_the_cross_entropy_to_the_targets_distributions(
    target: LlamaForCausalLM,
) -> None:
    head, ids = Lines(TorchTarget(target)), text(chats=(LENGTH,))
    weights = torch.zeros(1, LENGTH)
    weights[:, 10:15] = 1.0
    batch = TrainingBatch(ids[:, :-1], ids[:, 1:], weights)
    loss = head_loss(head, target, Objective(steps=3, decay=0.5), fast=False)(batch)
    with torch.no_grad(), autocast(ids.device):
        read = run_target(target, batch.inputs, head.captured_layers, batch.starts)
        target_probs = target.lm_head(read.normed).float()[0].softmax(-1)
        logits = head(read.features[0]).float().log_softmax(-1)
    total = 0.0
    for level, share in enumerate((1.0, 0.5, 0.25)):
        at = torch.arange(10 + level, 15)  # slots 9 to 13 draft these tokens
        each = -(target_probs[at] * logits[level, at - level - 1]).sum(-1)
        total += share * float(each.mean())
    assert loss.item() == pytest.approx(total / 1.75, rel=2e-3)
    torch.autograd.backward(loss)
    assert head.maps.grad is not None


def test_a_perfect_head_has_acceptance_1_up_to_its_depth(
    target: LlamaForCausalLM,
) -> None:
    ids = torch.tensor([text(chats=(LENGTH,))[0, :-1].tolist()])
    rows = run_target(target, ids, (-1,)).features[0]

    class Knows(FeatureHead):
        kind = "knows"

        def forward(self, features: Tensor) -> Tensor:
            place = torch.cdist(features.float(), rows.float()).argmin(-1)
            after = [(place + 2 + level).clamp(max=LENGTH - 1) for level in range(2)]
            return nn.functional.one_hot(ids[0, torch.stack(after)], VOCABULARY).float()

    chat = EncodedChat(ids[0].tolist(), [0.1] * 6 + [1.0] * (LENGTH - 6))
    found = estimate_mat(Knows(TorchTarget(target)), target, [chat], step=1, chain=5)
    assert found.accepted[:3] == [1.0, 1.0, 0.0]


def test_a_head_without_logits_per_level_is_refused(target: LlamaForCausalLM) -> None:
    with pytest.raises(UsageError, match=r"returns the shape \[1, 40\] .* \[levels, 1, 40\]"):
        build_stateless_head(Sequential, target, 0)


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny untrained model with the embedded family's tokenizer."""
    path = tmp_path_factory.mktemp("targets") / "tiny"
    recipe = replace(family.TARGET, hidden=16, layers=4, heads=2, mlp=24)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve("embedded").path)
    family.export(family.build(recipe, 0, torch.device("cpu")), tokenizer, path)
    return path


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench_cli.training.replies.MAX_ANSWER", 8)


def run(out: Path, target: Path, *more: str) -> Any:
    options = ("--out", str(out), "--target", str(target), "--smoke", "--device", "cpu", *more)
    return CliRunner().invoke(app, ["head", *options], catch_exceptions=False)


def test_the_command_writes_a_head_that_the_method_loads(tmp_path: Path, folder: Path) -> None:
    assert run(tmp_path, folder, "--plugin", str(FILE)).exit_code == 0
    (artifact,) = registry.build("linear", {}).artifacts()
    decoder = load_decoder(folder, name="target")
    head = artifact.kind.load(tmp_path / "linear", {"target": decoder})
    assert head(torch.randn(2, 16)).shape == (3, 2, decoder.vocab_size)
    facts = json.loads((tmp_path / "linear" / "config.json").read_text())["specbench"]
    sha = Weights(folder).sha256()
    assert facts == {"kind": "linear", "loss": "ttt", "target": "tiny", "target_sha256": sha}
    stored = load_file(tmp_path / "linear" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    curves = json.loads((tmp_path / "training_curve.json").read_text())["linear"]
    assert curves["mat"][-1]["step"] == curves["steps"] == 4


def trainer(out: Path, target: Path, kill_after: int | None = None) -> HeadTrainer:
    def report(_name: str, point: TrainingPoint) -> None:
        if point.step == kill_after:
            raise Killed

    device = torch.device("cpu")
    return HeadTrainer(out, target, [], 0, device, 8, n_held_out=4, fast=False, report=report)


def test_a_resumed_training_equals_an_uninterrupted_one(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_trainer, "MEASURE_INTERVAL", 2)
    schedule = make_stateless_schedule(Lines)
    stages = tuple(replace(stage, steps=3, sequences=1, length=256) for stage in schedule.stages)
    schedule = replace(schedule, stages=stages, warmup_steps=1)
    straight_dir, resumed_dir = tmp_path / "whole", tmp_path / "parts"
    straight = trainer(straight_dir, folder).train_stateless(Lines, schedule)
    with pytest.raises(Killed):
        trainer(resumed_dir, folder, kill_after=3).train_stateless(Lines, schedule)
    resumed = trainer(resumed_dir, folder).train_stateless(Lines, schedule)
    assert (resumed.curve, resumed.mat) == (straight.curve, straight.mat)
    straight_weights, resumed_weights = (
        load_file(out / "lines" / "model.safetensors") for out in (straight_dir, resumed_dir)
    )
    assert all(
        torch.equal(straight_weights[name], resumed_weights[name]) for name in straight_weights
    )


def test_an_interrupted_training_prints_its_resume_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt), show_bars():
        raise KeyboardInterrupt
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith("to resume: run the same command again, without --fresh")
    )


def test_a_method_without_a_stateless_head_is_a_usage_error(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "several.py"
    file.write_text(
        "from specbench_cli.api import Method\n"
        "class One(Method):\n    pass\n"
        "class Two(Method):\n    pass\n"
    )
    with pytest.raises(UsageError, match="choose one of one, two"):
        run(tmp_path, folder, "--plugin", str(file))
    with pytest.raises(UsageError, match="must have one head that specbench can train"):
        run(tmp_path, folder, "two", "--plugin", str(file))
