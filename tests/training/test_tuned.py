"""Fine-tuning of a target with its mask tokens: the loss, the files, and loading them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from methods.space.head import MaskToken
from recipes.embedded import family
from specbench_cli.errors import UsageError
from specbench_cli.models import resolve
from specbench_cli.models.adapter import CONFIG, WEIGHTS
from specbench_cli.training.heads import tuned
from specbench_cli.training.heads.build import TorchTarget, make_stateless_schedule
from specbench_cli.training.heads.trainer import HeadTrainer
from specbench_cli.training.loop import TrainingPoint
from specbench_cli.training.losses import autocast, load_model
from specbench_cli.training.packing import TrainingBatch

CPU = torch.device("cpu")


class Killed(Exception):
    """Exception in place of a signal during a run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny untrained model with the embedded family's tokenizer."""
    folder = tmp_path_factory.mktemp("targets") / "tiny"
    recipe = replace(family.TARGET, hidden=16, layers=2, heads=2, mlp=24)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve("embedded").path)
    family.export(family.build(recipe, 0, CPU), tokenizer, folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("specbench_cli.training.replies.MAX_ANSWER", 8)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))


def add_random_updates(model: LlamaForCausalLM, rank: int = 2) -> dict[str, tuned.LowRankUpdate]:
    """Add low-rank updates that are not zero to a model, and return them."""
    torch.manual_seed(1)
    parts = tuned.add_low_rank_updates(model, rank)
    with torch.no_grad():
        for part in parts.values():
            part.b.normal_(std=0.3)
            for each in part.parameters():
                each.copy_(each.half())
    return parts


def test_the_loss_includes_every_token_and_every_mask(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "N_MASK_GROUPS", 3)
    model = load_model(folder, CPU)
    head = MaskToken(TorchTarget(model), levels=2)
    ids = torch.randint(5, 4096, (1, 21), generator=torch.Generator().manual_seed(0))
    weights = torch.cat((torch.full((1, 8), 0.1), torch.ones(1, 12)), 1)
    batch = TrainingBatch(ids[:, :-1], ids[:, 1:], weights)
    loss = tuned.masked_loss(head, model)(batch)
    slots = tuned._sample_slots(tuned.choose_slots(weights), batch)[0].tolist()
    assert len(set(slots)) == 3
    with torch.no_grad(), autocast(CPU):
        text = model(input_ids=batch.inputs, use_cache=False).logits[0].float()
        total = float((F.cross_entropy(text, ids[0, 1:], reduction="none") * weights[0]).sum())
        count = float(weights.sum())
        for slot in slots:
            rows = model.model.embed_tokens(batch.inputs[:, : slot + 1])
            rows = torch.cat((rows, head.mask.expand(1, 2, -1)), 1)
            logits = model(inputs_embeds=rows, use_cache=False).logits[0, slot + 1 :].float()
            for mask, row in enumerate(logits):  # mask j predicts the token after its own position
                at = slot + 1 + mask
                if at < 20:
                    total += float(weights[0, at] * F.cross_entropy(row, ids[0, at + 1]))
                    count += float(weights[0, at])
    assert loss.item() == pytest.approx(total / count, rel=2e-3)
    parts = tuned.add_low_rank_updates(model, 2)
    torch.autograd.backward(tuned.masked_loss(head, model)(batch))
    assert head.mask.grad is not None
    assert all(part.b.grad is not None and part.b.grad.any() for part in parts.values())
    assert all(not each.requires_grad for name, each in model.named_parameters() if "." not in name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_a_fine_tuned_target_loads_as_the_trained_model(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in folder.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    stored = {name: each.to(dtype) for name, each in load_file(base / "model.safetensors").items()}
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    model = load_model(base, CPU)
    parts = add_random_updates(model)
    tuned.save_adapter(parts, tmp_path / "tuned", str(base))
    found = resolve(str(tmp_path / "tuned"))
    assert (found.label, found.heads) == ("tuned", {})
    merged = load_file(found.path / "model.safetensors")
    for name, part in parts.items():
        expected = (stored[f"{name}.weight"].double() + part.b.double() @ part.a.double()).to(dtype)
        assert merged[f"{name}.weight"].equal(expected)
    same = [name for name in stored if name.removesuffix(".weight") not in parts]
    assert same
    assert all(merged[name].equal(stored[name]) for name in same)
    if dtype == torch.float32:
        ids = torch.arange(5, 25)[None]
        logits = load_model(found.path, CPU)(ids).logits
        torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "has use_dora True; only plain LoRA adapters"),
        ({"peft_type": "IA3"}, "has peft_type 'IA3'"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank_pattern"),
        ({"r": 0}, "has r 0; it must be a number from 1 to 1e.06"),
        ({"r": float("inf")}, "has r inf; it must be a number"),
        ({"r": None}, "has r None; it must be a number"),
        ({"lora_alpha": float("nan")}, "has lora_alpha nan; it must be a number"),
        ({"lora_alpha": 10**400}, "has lora_alpha 1000"),
        ({"lora_alpha": "32"}, "has lora_alpha '32'; it must be a number"),
    ],
)
def test_a_fine_tuning_of_another_kind_is_named(
    folder: Path, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    tuned.save_adapter(add_random_updates(load_model(folder, CPU)), tmp_path, str(folder))
    facts = json.loads((tmp_path / CONFIG).read_text()) | settings
    (tmp_path / CONFIG).write_text(json.dumps(facts))
    with pytest.raises(UsageError, match=message):
        resolve(str(tmp_path))


def test_additions_to_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    tuned.save_adapter(add_random_updates(load_model(folder, CPU)), tmp_path, str(folder))
    parts = load_file(tmp_path / WEIGHTS)
    name = next(name for name in parts if name.endswith("q_proj.lora_B.weight"))

    def save_updates(stored: dict[str, Tensor]) -> str:
        save_file(stored, tmp_path / WEIGHTS)
        return str(tmp_path)

    with pytest.raises(
        UsageError, match=r"an update of shape \[7, 16\] for .*q_proj, which has shape \[16, 1"
    ):
        resolve(save_updates(parts | {name: torch.zeros(7, 2)}))
    more = {key.replace("layers.0", "layers.9"): each for key, each in parts.items()}
    with pytest.raises(UsageError, match=r"updates for 7 matrices that the model does not"):
        resolve(save_updates(more))
    assert not list((tmp_path / "cache" / "merged").glob("*.part"))


def test_a_resumed_fine_tuning_equals_an_uninterrupted_one(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbench_cli.training.heads.trainer.MEASURE_INTERVAL", 2)

    def trainer(out: Path, kill_after: int | None = None) -> HeadTrainer:
        def report(_name: str, point: TrainingPoint) -> None:
            if point.step == kill_after:
                raise Killed

        return HeadTrainer(out, folder, [], 0, CPU, 8, n_held_out=4, fast=False, report=report)

    schedule = make_stateless_schedule(MaskToken, label="embedded")
    stages = tuple(replace(stage, steps=2, sequences=1, length=256) for stage in schedule.stages)
    schedule = replace(schedule, stages=stages, warmup_steps=1)
    merged, resumed_dir = tmp_path / "whole", tmp_path / "parts"
    straight = trainer(merged).train_kind(MaskToken, schedule, "paper")
    with pytest.raises(Killed):
        trainer(resumed_dir, kill_after=3).train_kind(MaskToken, schedule, "paper")
    resumed = trainer(resumed_dir).train_kind(MaskToken, schedule, "paper")
    assert resumed.curve == straight.curve
    for file in ("model.safetensors", WEIGHTS):
        straight_weights, resumed_weights = (
            load_file(out / "embedded-space" / file) for out in (merged, resumed_dir)
        )
        assert all(
            torch.equal(straight_weights[name], resumed_weights[name]) for name in straight_weights
        )
    found = resolve(str(merged / "embedded-space"))
    assert found.heads == {"space": str(merged / "embedded-space")}
    with pytest.raises(UsageError, match=r"fine-tunes its target on texts and has no loss 'ttt'"):
        trainer(tmp_path).train_kind(MaskToken, schedule, "ttt")
