"""What the embedded models are trained towards. Forwards run in bf16, losses in fp32.

On a CPU with AMX bf16 is 2.4 times as fast, at the same loss; without such instructions forwards
run in fp32 too.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from specbench_cli.training.packing import Batch

P = ParamSpec("P")
Loss = Callable[[Batch], Tensor]

MAX_DROPOUT = 0.1
"""Probability of skipping the last layer while training for early exits (LayerSkip's p_max)."""


class Chats(NamedTuple):
    """Which tokens may see each other: those of one chat, none of its neighbours' in the sequence.

    mask: [sequences, 1, length, length], True where a token (row) sees another.
    positions: [sequences, length], counted from the beginning of each chat.
    """

    mask: Tensor
    positions: Tensor


def chats_of(ids: Tensor, starts: Tensor | None) -> Chats:
    """The chats of packed sequences of ids [sequences, length]; `starts` as of `Batch`."""
    places = torch.arange(ids.shape[1], device=ids.device)
    if starts is None:
        starts = torch.zeros_like(ids)
    same = starts[:, :, None] == starts[:, None, :]
    causal = places[:, None] >= places[None, :]
    return Chats((same & causal)[:, None], places - starts)


def text_loss(model: LlamaForCausalLM) -> Loss:
    """Weighted cross-entropy of the text in nats a token."""

    def loss(batch: Batch) -> Tensor:
        return _cross_entropy(_logits(model, batch), batch)

    return _on_device(loss, model.device)


def target_loss(
    model: LlamaForCausalLM,
    target: LlamaForCausalLM,
    distance: "Distance | None" = None,
    temperature: float = 1.0,
) -> Loss:
    """How far a model's distributions are from the target's, over the text of a batch.

    Args:
        distance: one of `DISTANCES`; else KL(target || model), in nats a token.
        temperature: both are taken at.
    """
    distance = distance or kl

    def loss(batch: Batch) -> Tensor:
        with torch.no_grad():
            p = F.log_softmax(_logits(target, batch) / temperature, -1)
        q = F.log_softmax(_logits(model, batch) / temperature, -1)
        return distance(q, p, batch.weights)

    return _on_device(loss, model.device)


Distance = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of log-probabilities of the draft q and of the target p, both [..., V], and of the weights [...]
of the rows: one number, whose gradient is q's."""

LK_RATE = 3.0
"""How fast LK goes over from KL to TVD as acceptance grows."""


def kl(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """KL(p || q): the draft has to be wherever the target is."""
    return _mean(F.kl_div(q, p, reduction="none", log_target=True).sum(-1), weights)


def reverse_kl(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """KL(q || p): the draft has to be nowhere that the target is not."""
    return _mean(F.kl_div(p, q, reduction="none", log_target=True).sum(-1), weights)


def jsd(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """Jensen-Shannon divergence: the mean of both to their mean distribution."""
    mean = torch.logaddexp(q, p) - math.log(2)
    of_p, of_q = (F.kl_div(mean, one, reduction="none", log_target=True).sum(-1) for one in (p, q))
    return _mean((of_p + of_q) / 2, weights)


def tvd(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """Total variation distance: 1 - the chance that speculative sampling accepts a draft."""
    return _mean((q.exp() - p.exp()).abs().sum(-1) / 2, weights)


def tvd_plus(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """TVD++ (Goel et al., arXiv:2403.00858, section 3), over the whole vocabulary.

    The gradient of TVD is the policy gradient of a reward of 1 where p > q. TVD++ takes the
    reward's mean from it and divides by its standard deviation, both over the tokens of the batch.
    Of the whole vocabulary the mean changes nothing, for the gradients of q sum to 0: what is left
    is TVD's gradient over the deviation, long where acceptance is near 0 or near 1. The value is no
    distance, its gradient alone means something.
    """
    with torch.no_grad():
        reward = (p > q).to(q.dtype)
        mean = _mean((q.exp() * reward).sum(-1), weights)
        spread = (mean * (1 - mean)).sqrt().clamp(min=1e-6)  # of what is 0 or 1
        advantage = (reward - mean) / spread
    return _mean(-(q.exp() * advantage).sum(-1), weights)


def lk(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """LK's hybrid (arXiv:2602.23881): KL where acceptance is low, TVD where it is high; row by
    row."""
    each = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    apart = (q.exp() - p.exp()).abs().sum(-1) / 2
    share = torch.exp(-LK_RATE * (1 - apart)).detach()
    return _mean(share * each + (1 - share) * apart, weights)


DISTANCES: dict[str, Distance] = {
    "kl": kl,
    "reverse-kl": reverse_kl,
    "jsd": jsd,
    "tvd": tvd,
    "tvd++": tvd_plus,
    "lk": lk,
}
"""What a draft can be aligned by, beside the cross-entropy of a text; the name, and how far."""


def exit_loss(model: LlamaForCausalLM, fast: bool) -> Loss:
    """Cross-entropy after the last layer plus that after one earlier layer, layers being skipped.

    Each sequence skips layer l of L with a probability that rises exponentially from 0 to
    `MAX_DROPOUT`; the earlier exit is drawn anew for each batch and uses the last norm and the
    output matrix (LayerSkip, Elhoushi et al., ACL 2024, arXiv:2404.16710;
    theirs weights all exits by depth, one drawn exit does so in the mean at a fraction of the
    cost). The draws are a function of the batch, so a resumed run repeats them.

    Args:
        fast: compile it; the draws stay outside.
    """
    n_layers = model.config.num_hidden_layers
    rise = torch.arange(n_layers) * math.log(2) / (n_layers - 1)
    keep_probability = 1 - MAX_DROPOUT * (rise.exp() - 1)
    depth_weight = torch.arange(1.0, n_layers)  # of the exit after each layer but the last

    def loss(batch: Batch, keep: Tensor, early: Tensor) -> Tensor:
        ids = batch.inputs
        with autocast(ids.device):
            hidden = model.model.embed_tokens(ids)
            chats = chats_of(ids, batch.starts)
            rotary = model.model.rotary_emb(hidden, position_ids=chats.positions)
            exits = []
            for layer, kept in zip(model.model.layers, keep.to(hidden.dtype), strict=True):
                after = layer(hidden, attention_mask=chats.mask, position_embeddings=rotary)
                hidden = hidden + kept[:, None, None] * (after - hidden)
                exits.append(hidden)
            ends = torch.stack([hidden, torch.stack(exits[:-1]).index_select(0, early)[0]])
            last, earlier = model.lm_head(model.model.norm(ends)).float()
        return _cross_entropy(last, batch) + _cross_entropy(earlier, batch)

    step = compiled(loss) if fast else loss

    def drawn(batch: Batch) -> Tensor:
        rng = torch.Generator().manual_seed(int((batch.inputs * (batch.weights > 0)).sum()))
        each = keep_probability[:, None].expand(n_layers, len(batch.inputs))
        keep = torch.bernoulli(each, generator=rng).to(batch.inputs.device)
        early = torch.multinomial(depth_weight, 1, generator=rng).to(batch.inputs.device)
        return step(batch, keep, early)

    return _on_device(drawn, model.device)


def first_layers(model: LlamaForCausalLM, n: int) -> LlamaForCausalLM:
    """A model of another's first n layers, its norm and its output matrix, which the two share."""
    part, inner = copy(model), copy(model.model)
    inner._modules = {**inner._modules, "layers": model.model.layers[:n]}
    part._modules = {**part._modules, "model": inner}
    return part


def together(losses: Sequence[Loss]) -> Loss:
    """The mean of several losses of a batch; of nested models this is sorted fine-tuning
    (Kavehzadeh et al., arXiv:2407.01955)."""

    def loss(batch: Batch) -> Tensor:
        return torch.stack([each(batch) for each in losses]).mean()

    return losses[0] if len(losses) == 1 else loss


def compiled(loss: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """`loss` through torch.compile where this machine has a C++ compiler."""
    if shutil.which("g++") or shutil.which("clang++"):
        fast: Callable[P, Tensor] = torch.compile(loss, dynamic=False)
        return fast
    return loss


def autocast(device: torch.device) -> torch.autocast:
    """Forwards in bf16 where the device multiplies it; elsewhere fp32 is faster."""
    known = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    has = device.type != "cpu" or any(
        known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")
    )
    return torch.autocast(device.type, torch.bfloat16, enabled=bool(has))


@torch.no_grad()
def overlap(
    model: LlamaForCausalLM, target: LlamaForCausalLM, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Of each token's place [sequences, length], the chance that speculative sampling at
    temperature 1 accepts what the model drafts there, and what it finds likeliest."""
    own, wanted = _logits(model, batch), _logits(target, batch)
    return torch.minimum(own.softmax(-1), wanted.softmax(-1)).sum(-1), own.argmax(-1)


def _logits(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """fp32 logits [sequences, length, vocabulary]."""
    chats = chats_of(batch.inputs, batch.starts)
    with autocast(batch.inputs.device):
        logits: Tensor = model(
            input_ids=batch.inputs,
            attention_mask=chats.mask,
            position_ids=chats.positions,
            use_cache=False,
        ).logits
    return logits.float()


def _cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    return _mean(each, batch.weights.flatten())


def _mean(each: Tensor, weights: Tensor) -> Tensor:
    return (each * weights).sum() / weights.sum()


def _on_device(loss: Loss, device: torch.device) -> Loss:
    return lambda batch: loss(batch.to(device))
