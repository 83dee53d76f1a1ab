"""Losses of models that learn from a text or from a target. Forwards run in bf16, losses in fp32.

On a CPU with AMX bf16 is 2.4 times as fast, at the same loss; without such instructions forwards
run in fp32 too.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import NamedTuple, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from specbench_cli.engine.models.load import RestrictedOutput, load_module
from specbench_cli.training.packing import TrainingBatch
from specbench_cli.training.replies import LOGITS_BLOCK_ROWS

P = ParamSpec("P")
Loss = Callable[[TrainingBatch], Tensor]


def load_model(folder: Path, device: torch.device) -> LlamaForCausalLM:
    """A stored model upcast to fp32, frozen; one of Llama's kind has the class of its family."""
    found: LlamaForCausalLM = load_module(folder, device, torch.float32)
    return found


class ChatMask(NamedTuple):
    """Which tokens may see each other: those of one chat, none of its neighbours' in the sequence.

    mask: [sequences, 1, length, length], True where a token (row) sees another.
    positions: [sequences, length], counted from the beginning of each chat.
    """

    mask: Tensor
    positions: Tensor


def make_chat_mask(ids: Tensor, starts: Tensor | None) -> ChatMask:
    """The chats of packed sequences of ids [sequences, length]; `starts` as of `Batch`."""
    places = torch.arange(ids.shape[1], device=ids.device)
    if starts is None:
        starts = torch.zeros_like(ids)
    same = starts[:, :, None] == starts[:, None, :]
    causal = places[:, None] >= places[None, :]
    return ChatMask((same & causal)[:, None], places - starts)


def text_loss(model: LlamaForCausalLM) -> Loss:
    """Weighted cross-entropy of the text in nats a token; tokens that the model cannot say weigh
    nothing."""
    says = get_output_ids(model)

    def loss(batch: TrainingBatch) -> Tensor:
        logits = _compute_logits(model, _run_model(model, batch))
        if says is None:
            return cross_entropy(logits, batch)
        places = torch.full((model.config.vocab_size,), -1, device=says.device)
        places[says] = torch.arange(len(says), device=says.device)
        among = places[batch.targets]
        known = batch._replace(targets=among.clamp(min=0), weights=batch.weights * (among >= 0))
        return cross_entropy(logits, known)

    return on_device(loss, model.device)


def target_loss(
    model: LlamaForCausalLM,
    target: LlamaForCausalLM,
    distance: "Distance | None" = None,
    temperature: float = 1.0,
    rows: Callable[[TrainingBatch], Tensor] | None = None,
) -> Loss:
    """How far a model's distributions are from the target's, over the text of a batch.

    Args:
        distance: one of `DISTANCES`; else KL(target || model), in nats a token.
        temperature: both are taken at.
        rows: gives what the target's output matrix reads over a batch, [sequences, length, hidden];
            else the target is run.
    """
    distance, says = distance or kl, get_output_ids(model)

    def loss(batch: TrainingBatch) -> Tensor:
        with torch.no_grad():
            read = _run_model(target, batch) if rows is None else rows(batch)
            p = compute_log_probs(target, read, says, temperature)
        q = F.log_softmax(_compute_logits(model, _run_model(model, batch)) / temperature, -1)
        return distance(q, p, batch.weights)

    return on_device(loss, model.device)


Distance = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of log-probabilities of the draft q and of the target p, both [..., V], and of the weights [...]
of the rows: one number, whose gradient is q's.

Of a draft whose output is cut, both are over what it can say, where p adds up to less than 1: the
target is given no chances that it does not have. What is outside counts in full in JSD and TVD, and
nothing in KL(q || p), where q is not. KL(p || q) is infinite there whatever the draft does; it is
that of p over the cut, times the chance that p is in there, so that a place where the target says
what the draft cannot teaches as much less.
"""

LK_RATE = 3.0
"""How fast LK goes over from KL to TVD as acceptance grows."""


def kl(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """KL(p || q): the draft has to be wherever the target is."""
    return _mean(_kl(q, p), weights)


def reverse_kl(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """KL(q || p): the draft has to be nowhere that the target is not."""
    return _mean(F.kl_div(p, q, reduction="none", log_target=True).sum(-1), weights)


def jsd(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """Jensen-Shannon divergence: the mean of both to their mean distribution."""
    mean = torch.logaddexp(q, p) - math.log(2)
    of_p, of_q = (F.kl_div(mean, one, reduction="none", log_target=True).sum(-1) for one in (p, q))
    return _mean((of_p + of_q + math.log(2) * _get_excluded_probability(p)) / 2, weights)


def tvd(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """Total variation distance: 1 - the chance that speculative sampling accepts a draft."""
    return _mean(_compute_tvd(q, p), weights)


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
    apart = _compute_tvd(q, p)
    share = torch.exp(-LK_RATE * (1 - apart)).detach()
    return _mean(share * _kl(q, p) + (1 - share) * apart, weights)


def _get_excluded_probability(p: Tensor) -> Tensor:
    """The chance [...] that the target says something else than what p is over."""
    return (1 - p.exp().sum(-1)).clamp(min=0)


def _compute_tvd(q: Tensor, p: Tensor) -> Tensor:
    """Total variation distance [...]."""
    return ((q.exp() - p.exp()).abs().sum(-1) + _get_excluded_probability(p)) / 2


def _kl(q: Tensor, p: Tensor) -> Tensor:
    """KL(p || q) [...]; of p within a cut, weighted by its chance there."""
    inside = p.logsumexp(-1)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1) - inside.exp() * inside


DISTANCES: dict[str, Distance] = {
    "kl": kl,
    "reverse-kl": reverse_kl,
    "jsd": jsd,
    "tvd": tvd,
    "tvd++": tvd_plus,
    "lk": lk,
}
"""What a draft can be aligned by, beside the cross-entropy of a text; the name, and how far."""


def take_first_layers(model: LlamaForCausalLM, n: int) -> LlamaForCausalLM:
    """A model of another's first n layers, its norm and its output matrix, which the two share."""
    part, inner = copy(model), copy(model.model)
    inner._modules = {**inner._modules, "layers": model.model.layers[:n]}
    part._modules = {**part._modules, "model": inner}
    return part


def average_losses(losses: Sequence[Loss]) -> Loss:
    """The mean of several losses of a batch; of nested models this is sorted fine-tuning
    (Kavehzadeh et al., arXiv:2407.01955)."""

    def loss(batch: TrainingBatch) -> Tensor:
        return torch.stack([each(batch) for each in losses]).mean()

    return losses[0] if len(losses) == 1 else loss


def compile_loss(loss: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """`loss` through torch.compile where this machine has a C++ compiler."""
    if shutil.which("g++") or shutil.which("clang++"):
        fast: Callable[P, Tensor] = torch.compile(loss, dynamic=False)
        return fast
    return loss


def supports_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16; elsewhere fp32 is faster."""
    known = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return device.type != "cpu" or any(
        bool(known.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16")
    )


def autocast(device: torch.device) -> torch.autocast:
    """Forwards in bf16 where the device multiplies it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=supports_bf16(device))


@torch.no_grad()
def predict_acceptance(
    model: LlamaForCausalLM, target: LlamaForCausalLM, batch: TrainingBatch
) -> tuple[Tensor, Tensor]:
    """Of each token's place [sequences, length], the chance that speculative sampling at
    temperature 1 accepts what the model drafts there, and what it finds likeliest."""
    says, own = get_output_ids(model), _compute_logits(model, _run_model(model, batch))
    wanted = compute_log_probs(target, _run_model(target, batch), says).exp()
    best = own.argmax(-1)
    accepted = torch.minimum(own.softmax(-1), wanted).sum(-1)
    return accepted, best if says is None else says[best]


def get_output_ids(model: LlamaForCausalLM) -> Tensor | None:
    """The ids [r] that a model's output is cut to; None: it says all."""
    return model.lm_head.output_ids if isinstance(model.lm_head, RestrictedOutput) else None


def compute_log_probs(
    target: LlamaForCausalLM, rows: Tensor, output_ids: Tensor | None, temperature: float = 1.0
) -> Tensor:
    """The target's log-probabilities [..., r] of the ids `says`, from what its output matrix reads,
    [..., hidden]; over its whole vocabulary they add up to 1. Of a part of it a block of rows is
    held at a time.
    """
    if output_ids is None:
        return F.log_softmax(_compute_logits(target, rows) / temperature, -1)
    parts = []
    for block in rows.flatten(0, -2).split(LOGITS_BLOCK_ROWS):
        logits = _compute_logits(target, block) / temperature
        parts.append(logits.index_select(-1, output_ids) - logits.logsumexp(-1, keepdim=True))
    return torch.cat(parts).view(*rows.shape[:-1], -1)


def _run_model(model: LlamaForCausalLM, batch: TrainingBatch) -> Tensor:
    """What a model's output matrix reads, [sequences, length, hidden]."""
    chats = make_chat_mask(batch.inputs, batch.starts)
    with autocast(batch.inputs.device):
        rows: Tensor = model.model(
            input_ids=batch.inputs,
            attention_mask=chats.mask,
            position_ids=chats.positions,
            use_cache=False,
        ).last_hidden_state
    return rows


def _compute_logits(model: LlamaForCausalLM, rows: Tensor) -> Tensor:
    """fp32 logits [..., r] of all that a model can say."""
    with autocast(rows.device):
        return F.linear(rows, model.lm_head.weight).float()


def cross_entropy(logits: Tensor, batch: TrainingBatch) -> Tensor:
    """Return the weighted mean cross-entropy of logits [sequences, length, V] over a batch."""
    each = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    return _mean(each, batch.weights.flatten())


def _mean(each: Tensor, weights: Tensor) -> Tensor:
    return (each * weights).sum() / weights.sum()


def on_device(loss: Loss, device: torch.device) -> Loss:
    """Return the loss of a batch that is first moved to a device."""
    return lambda batch: loss(batch.to_device(device))
