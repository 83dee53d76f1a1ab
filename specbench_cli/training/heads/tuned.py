"""Fine-tuning a target beside the masks that it is to answer, by low-rank additions.

Semi-autoregressive fine-tuning (SPACE, Yi et al., Findings of ACL 2024, arXiv:2402.11809, section
3.1): behind some places of a text stands a group of masks, and the loss is the cross-entropy of the
text's own tokens behind every place and behind every mask.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import LlamaForCausalLM

from specbench_cli.engine.models.head import LookAhead
from specbench_cli.models.adapter import CONFIG, PREFIX, WEIGHTS, A, B
from specbench_cli.training.heads.build import write_head
from specbench_cli.training.heads.losses import (
    TargetOutput,
    choose_slots,
    get_next_token_weights,
    get_step_positions,
    run_look_ahead,
)
from specbench_cli.training.losses import Loss, autocast, make_chat_mask
from specbench_cli.training.packing import TrainingBatch

N_MASK_GROUPS = 32
"""Groups of masks a sequence; the paper has one, behind half of the texts."""


class LowRankUpdate(nn.Module):
    """W + B A; begins as W.

    Args:
        weight: W, which stays as it is.
    """

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        to, of = weight.shape
        self.a = nn.Parameter(torch.randn(rank, of, device=weight.device) * of**-0.5)
        self.b = nn.Parameter(torch.zeros(to, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """The matrix, of W's size."""
        return weight + self.b @ self.a


def add_low_rank_updates(target: LlamaForCausalLM, rank: int) -> dict[str, LowRankUpdate]:
    """Put an addition to every matrix of a frozen target's layers; each by its matrix's name."""
    found = {
        name: module
        for name, module in target.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("model.layers.")
    }
    made = {name: LowRankUpdate(module.weight, rank) for name, module in found.items()}
    for name, module in found.items():
        register_parametrization(module, "weight", made[name])
    return made


def masked_loss(head: LookAhead, target: LlamaForCausalLM) -> Loss:
    """The loss of a packed batch in nats a token, masks counted as tokens; see the module. Where
    the groups stand is drawn anew for each batch, by a function of it."""

    def loss(batch: TrainingBatch) -> Tensor:
        batch = batch.to_device(target.device)
        ids = batch.inputs
        with autocast(ids.device):
            chats = make_chat_mask(ids, batch.starts)
            rows = target.model.embed_tokens(ids)
            weights = get_next_token_weights(batch, chats)
            slots = _sample_slots(choose_slots(weights), batch)
            text, behind = run_look_ahead(head, target, ids, TargetOutput(chats, rows, rows), slots)
            said = [(target.lm_head(text), batch.targets, batch.weights)]
            starts = torch.arange(ids.shape[1], device=ids.device) - chats.positions
            for step in range(head.sizes["levels"]):
                at, valid = get_step_positions(starts, slots, step)
                labels, weight = batch.targets.gather(1, at), weights.gather(1, at) * valid
                said.append((target.lm_head(behind[:, :, step]), labels, weight))
        total = torch.stack([_entropy(*each) for each in said]).sum()
        return total / torch.stack([weight.sum() for _, _, weight in said]).sum().clamp(min=1e-6)

    return loss


def save_adapter(parts: dict[str, LowRankUpdate], folder: Path, base: str) -> None:
    """Write the additions as PEFT's files have them, in fp16.

    Args:
        base: the model that they are of, as `--target` takes it.
    """
    named = {f"{PREFIX}{at}{end}": part for at, each in parts.items() for end, part in _ab(each)}
    rank = len(next(iter(parts.values())).a)
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": sorted({at.rpartition(".")[2] for at in parts}),
    }
    write_head(folder, named, facts, weights=WEIGHTS, config_name=CONFIG)


def _ab(part: LowRankUpdate) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    return (A, part.a.detach().half().cpu()), (B, part.b.detach().half().cpu())


def _sample_slots(slots: Tensor, batch: TrainingBatch) -> Tensor:
    rng = torch.Generator().manual_seed(int((batch.inputs * (batch.weights > 0)).sum()))
    order = torch.randperm(slots.shape[1], generator=rng)[:N_MASK_GROUPS].sort().values
    return slots[:, order.to(slots.device)]


def _entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    each = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return (each * weights.flatten()).sum()
