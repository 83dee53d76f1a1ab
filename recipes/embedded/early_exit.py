"""Loss of `embedded-exit`: the target fine-tuned so that its earlier layers can draft."""

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specbench_cli.training.losses import (
    Loss,
    autocast,
    compile_loss,
    cross_entropy,
    make_chat_mask,
    on_device,
)
from specbench_cli.training.packing import TrainingBatch

MAX_DROPOUT = 0.1
"""Probability of skipping the last layer while training for early exits (LayerSkip's p_max)."""


def exit_loss(model: LlamaForCausalLM, fast: bool) -> Loss:
    """Return the training loss of LayerSkip: cross-entropy after the last and one earlier layer.

    Each sequence skips layer l of L with a probability that rises exponentially from 0 to
    `MAX_DROPOUT`. The earlier layer is drawn for each batch, and uses the model's last norm and
    output matrix (LayerSkip, Elhoushi et al., ACL 2024, arXiv:2404.16710). The paper sums over all
    layers, weighted by depth. One layer drawn with these weights costs less and has the same mean.

    The random numbers depend only on the batch, so a resumed training repeats them.

    Args:
        fast: compile the loss with torch.compile, without the random draws.
    """
    n_layers = model.config.num_hidden_layers
    rise = torch.arange(n_layers) * math.log(2) / (n_layers - 1)
    keep_probability = 1 - MAX_DROPOUT * (rise.exp() - 1)
    depth_weight = torch.arange(1.0, n_layers)  # one weight per layer, except the last layer

    def loss(batch: TrainingBatch, keep: Tensor, early: Tensor) -> Tensor:
        ids = batch.inputs
        with autocast(ids.device):
            hidden = model.model.embed_tokens(ids)
            chats = make_chat_mask(ids, batch.starts)
            rotary = model.model.rotary_emb(hidden, position_ids=chats.positions)
            exits = []
            for layer, kept in zip(model.model.layers, keep.to(hidden.dtype), strict=True):
                after = layer(hidden, attention_mask=chats.mask, position_embeddings=rotary)
                hidden = hidden + kept[:, None, None] * (after - hidden)
                exits.append(hidden)
            ends = torch.stack([hidden, torch.stack(exits[:-1]).index_select(0, early)[0]])
            last, earlier = model.lm_head(model.model.norm(ends)).float()
        return cross_entropy(last, batch) + cross_entropy(earlier, batch)

    step = compile_loss(loss) if fast else loss

    def sampled_loss(batch: TrainingBatch) -> Tensor:
        rng = torch.Generator().manual_seed(int((batch.inputs * (batch.weights > 0)).sum()))
        each = keep_probability[:, None].expand(n_layers, len(batch.inputs))
        keep = torch.bernoulli(each, generator=rng).to(batch.inputs.device)
        early = torch.multinomial(depth_weight, 1, generator=rng).to(batch.inputs.device)
        return step(batch, keep, early)

    return on_device(sampled_loss, model.device)
