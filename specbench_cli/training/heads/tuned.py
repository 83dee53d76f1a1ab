"""Semi-autoregressive fine-tuning of a target (SPACE), with low-rank updates.

SPACE (Yi et al., Findings of ACL 2024, arXiv:2402.11809, section 3.1) inserts groups of mask tokens
into a text. The target learns to predict the next token of the text at each position and at each
mask. The loss is cross-entropy.
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
"""Number of mask groups per sequence. The paper has one group in half of the texts."""


class LowRankUpdate(nn.Module):
    """Low-rank update of a frozen matrix: W + B A. B starts as 0.

    Args:
        weight: the matrix W.
        rank: rank of B A.
    """

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        n_out, n_in = weight.shape
        self.a = nn.Parameter(torch.randn(rank, n_in, device=weight.device) * n_in**-0.5)
        self.b = nn.Parameter(torch.zeros(n_out, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the updated matrix."""
        return weight + self.b @ self.a


def add_low_rank_updates(target: LlamaForCausalLM, rank: int) -> dict[str, LowRankUpdate]:
    """Add a low-rank update to each matrix in the layers of a frozen target.

    Returns:
        The low-rank updates. The key is the name of the updated matrix.
    """
    modules = {
        name: module
        for name, module in target.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("model.layers.")
    }
    updates = {name: LowRankUpdate(module.weight, rank) for name, module in modules.items()}
    for name, module in modules.items():
        register_parametrization(module, "weight", updates[name])
    return updates


def masked_loss(head: LookAhead, target: LlamaForCausalLM) -> Loss:
    """Return the loss function of SPACE for a batch, in nats per token. A mask counts as a token.

    The positions of the mask groups are drawn for each batch, with a seed computed from the batch.
    """

    def loss(batch: TrainingBatch) -> Tensor:
        batch = batch.to_device(target.device)
        ids = batch.inputs
        with autocast(ids.device):
            chats = make_chat_mask(ids, batch.starts)
            rows = target.model.embed_tokens(ids)
            weights = get_next_token_weights(batch, chats)
            slots = _sample_slots(choose_slots(weights), batch)
            text, masks = run_look_ahead(head, target, ids, TargetOutput(chats, rows, rows), slots)
            terms = [(target.lm_head(text), batch.targets, batch.weights)]
            starts = torch.arange(ids.shape[1], device=ids.device) - chats.positions
            for step in range(head.sizes["levels"]):
                at, valid = get_step_positions(starts, slots, step)
                labels, weight = batch.targets.gather(1, at), weights.gather(1, at) * valid
                terms.append((target.lm_head(masks[:, :, step]), labels, weight))
        total = torch.stack([_sum_cross_entropy(*term) for term in terms]).sum()
        return total / torch.stack([weight.sum() for _, _, weight in terms]).sum().clamp(min=1e-6)

    return loss


def save_adapter(updates: dict[str, LowRankUpdate], folder: Path, base: str) -> None:
    """Write the low-rank updates as a LoRA adapter in PEFT's format, in fp16.

    Args:
        updates: low-rank updates. The key is the name of the updated matrix.
        base: the base model, as given to `--target`.
    """
    named = dict[str, Tensor]()
    for name, update in updates.items():
        named[f"{PREFIX}{name}{A}"] = update.a.detach().half().cpu()
        named[f"{PREFIX}{name}{B}"] = update.b.detach().half().cpu()
    rank = len(next(iter(updates.values())).a)
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in updates}),
    }
    write_head(folder, named, facts, weights=WEIGHTS, config_name=CONFIG)


def _sample_slots(slots: Tensor, batch: TrainingBatch) -> Tensor:
    """Return at most `N_MASK_GROUPS` random positions after which masks are inserted, in ascending
    order.
    """
    rng = torch.Generator().manual_seed(int((batch.inputs * (batch.weights > 0)).sum()))
    order = torch.randperm(slots.shape[1], generator=rng)[:N_MASK_GROUPS].sort().values
    return slots[:, order.to(slots.device)]


def _sum_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    each = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return (each * weights.flatten()).sum()
