"""Losses of models that learn from texts or from a target's distributions.

Losses are computed in fp32. Forwards run in bf16 if the device multiplies bf16 matrices, otherwise
in fp32. On a CPU with AMX, bf16 is 2.4 times as fast and reaches the same loss.
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
    """Load a frozen model in fp32."""
    model: LlamaForCausalLM = load_module(folder, device, torch.float32)
    return model


class ChatMask(NamedTuple):
    """Attention mask of packed sequences. A token attends only to tokens of its own chat.

    Attributes:
        mask: True where a token (row) attends to another token (column), [sequences, 1, length,
            length].
        positions: position of each token in its chat, from 0, [sequences, length].
    """

    mask: Tensor
    positions: Tensor


def make_chat_mask(ids: Tensor, starts: Tensor | None) -> ChatMask:
    """Return the attention mask of packed sequences.

    Args:
        ids: token ids, [sequences, length].
        starts: for each position, the first position of its chat. None means that each sequence is
            one chat.
    """
    places = torch.arange(ids.shape[1], device=ids.device)
    if starts is None:
        starts = torch.zeros_like(ids)
    same = starts[:, :, None] == starts[:, None, :]
    causal = places[:, None] >= places[None, :]
    return ChatMask((same & causal)[:, None], places - starts)


def text_loss(model: LlamaForCausalLM) -> Loss:
    """Return the loss function: weighted cross-entropy of the text, in nats per token.

    Tokens outside the model's output vocabulary have weight 0.
    """
    output_ids = get_output_ids(model)

    def loss(batch: TrainingBatch) -> Tensor:
        logits = _compute_logits(model, _run_model(model, batch))
        if output_ids is None:
            return cross_entropy(logits, batch)
        index_of_id = torch.full((model.config.vocab_size,), -1, device=output_ids.device)
        index_of_id[output_ids] = torch.arange(len(output_ids), device=output_ids.device)
        index = index_of_id[batch.targets]
        weights = batch.weights * (index >= 0)
        return cross_entropy(logits, batch._replace(targets=index.clamp(min=0), weights=weights))

    return on_device(loss, model.device)


def target_loss(
    model: LlamaForCausalLM,
    target: LlamaForCausalLM,
    distance: "Distance | None" = None,
    temperature: float = 1.0,
    rows: Callable[[TrainingBatch], Tensor] | None = None,
) -> Loss:
    """Return the loss function: distance of a model's distributions from the target's
    distributions.

    Args:
        distance: function from `DISTANCES`. None means KL(target || model), in nats per token.
        temperature: temperature that is applied to both distributions.
        rows: function that returns the target's normed hidden states for a batch, [sequences,
            length, width]. None means that the target runs for each batch.
    """
    distance, output_ids = distance or kl, get_output_ids(model)

    def loss(batch: TrainingBatch) -> Tensor:
        with torch.no_grad():
            hidden = _run_model(target, batch) if rows is None else rows(batch)
            p = compute_log_probs(target, hidden, output_ids, temperature)
        q = F.log_softmax(_compute_logits(model, _run_model(model, batch)) / temperature, -1)
        return distance(q, p, batch.weights)

    return on_device(loss, model.device)


Distance = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Distance of the draft's distribution q from the target's p, as a differentiable scalar.

The arguments are log-probabilities of q and p, both [..., vocab], and the weight of each row [...].

A draft may have a reduced output vocabulary. Then both arguments cover only that vocabulary, and p
sums to less than 1. The rest of p counts in JSD and TVD. In KL(q || p) it has no effect, because q
is 0 there. KL(p || q) would be infinite, so p is normalised over the reduced vocabulary, and the
result is multiplied by the probability of that vocabulary under p. Rows in which the draft cannot
produce the likely tokens thus count less.
"""

LK_RATE = 3.0
"""Rate at which LK moves from KL to TVD as the acceptance rate grows."""


def kl(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """Return KL(p || q), with target p and draft q. It is large if p is high where q is low."""
    return _mean(_kl(q, p), weights)


def reverse_kl(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """Return KL(q || p), with target p and draft q. It is large if q is high where p is low."""
    return _mean(F.kl_div(p, q, reduction="none", log_target=True).sum(-1), weights)


def jsd(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence: the mean of the KL of p and q from their average."""
    mean = torch.logaddexp(q, p) - math.log(2)
    of_p, of_q = (F.kl_div(mean, one, reduction="none", log_target=True).sum(-1) for one in (p, q))
    return _mean((of_p + of_q + math.log(2) * _get_excluded_probability(p)) / 2, weights)


def tvd(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """Return the total variation distance, which is 1 - the acceptance rate of speculative
    sampling.
    """
    return _mean(_compute_tvd(q, p), weights)


def tvd_plus(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """Return TVD++ (Goel et al., arXiv:2403.00858, section 3), over the whole vocabulary.

    The gradient of TVD is the policy gradient of a reward that is 1 where p > q. TVD++ subtracts
    the mean of the reward and divides by its standard deviation, over the tokens of the batch. Over
    the whole vocabulary the mean has no effect, because the gradients of q sum to 0. The result is
    therefore TVD's gradient, scaled up where acceptance is near 0 or 1. Only the gradient is
    meaningful. The value is not a distance.
    """
    with torch.no_grad():
        reward = (p > q).to(q.dtype)
        mean = _mean((q.exp() * reward).sum(-1), weights)
        deviation = (mean * (1 - mean)).sqrt().clamp(min=1e-6)  # the reward is 0 or 1
        advantage = (reward - mean) / deviation
    return _mean(-(q.exp() * advantage).sum(-1), weights)


def lk(q: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """Return the hybrid loss of LK (arXiv:2602.23881).

    For each token, the loss is close to KL if the acceptance rate is low. It is close to TVD if the
    acceptance rate is high.
    """
    distance = _compute_tvd(q, p)
    share = torch.exp(-LK_RATE * (1 - distance)).detach()
    return _mean(share * _kl(q, p) + (1 - share) * distance, weights)


def _get_excluded_probability(p: Tensor) -> Tensor:
    """Return the target's probability of all tokens outside the draft model's output vocabulary,
    [...].
    """
    return (1 - p.exp().sum(-1)).clamp(min=0)


def _compute_tvd(q: Tensor, p: Tensor) -> Tensor:
    """Return the total variation distance between p and q, for each token."""
    return ((q.exp() - p.exp()).abs().sum(-1) + _get_excluded_probability(p)) / 2


def _kl(q: Tensor, p: Tensor) -> Tensor:
    """Return KL(p || q) for each token."""
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
"""Distances for aligning a draft with its target, by name."""


def take_first_layers(model: LlamaForCausalLM, n: int) -> LlamaForCausalLM:
    """Return a model with the first n layers of `model`. Both models share their parameters."""
    part, inner = copy(model), copy(model.model)
    inner._modules = {**inner._modules, "layers": model.model.layers[:n]}
    part._modules = {**part._modules, "model": inner}
    return part


def average_losses(losses: Sequence[Loss]) -> Loss:
    """Return the loss function that is the mean of several loss functions.

    With the losses of nested models, this is sorted fine-tuning (Kavehzadeh et al.,
    arXiv:2407.01955).
    """

    def loss(batch: TrainingBatch) -> Tensor:
        return torch.stack([each(batch) for each in losses]).mean()

    return losses[0] if len(losses) == 1 else loss


def compile_loss(loss: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Compile a loss function with torch.compile, if this machine has a C++ compiler."""
    if shutil.which("g++") or shutil.which("clang++"):
        fast: Callable[P, Tensor] = torch.compile(loss, dynamic=False)
        return fast
    return loss


def supports_bf16(device: torch.device) -> bool:
    """Return True if the device has instructions for bf16. On other devices fp32 is faster."""
    known = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return device.type != "cpu" or any(
        bool(known.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16")
    )


def autocast(device: torch.device) -> torch.autocast:
    """Return a context in which forwards use bf16, if the device supports it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=supports_bf16(device))


@torch.no_grad()
def predict_acceptance(
    model: LlamaForCausalLM, target: LlamaForCausalLM, batch: TrainingBatch
) -> tuple[Tensor, Tensor]:
    """Return two tensors, each [sequences, length]: acceptance rates and most likely draft tokens.

    The rate is the probability that speculative sampling at temperature 1 accepts a token of the
    draft model.
    """
    output_ids, logits = get_output_ids(model), _compute_logits(model, _run_model(model, batch))
    p = compute_log_probs(target, _run_model(target, batch), output_ids).exp()
    best = logits.argmax(-1)
    accepted = torch.minimum(logits.softmax(-1), p).sum(-1)
    return accepted, best if output_ids is None else output_ids[best]


def get_output_ids(model: LlamaForCausalLM) -> Tensor | None:
    """Return the ids of a model's reduced output vocabulary, or None for the whole vocabulary."""
    return model.lm_head.output_ids if isinstance(model.lm_head, RestrictedOutput) else None


def compute_log_probs(
    target: LlamaForCausalLM, rows: Tensor, output_ids: Tensor | None, temperature: float = 1.0
) -> Tensor:
    """Return the target's log-probabilities [..., r] of r output ids.

    The softmax is computed over the whole vocabulary. The logits are computed for a block of rows
    at a time, to save memory.

    Args:
        rows: normed hidden states of the target, [..., width].
        output_ids: ids [r] of a reduced vocabulary. None means the whole vocabulary.
    """
    if output_ids is None:
        return F.log_softmax(_compute_logits(target, rows) / temperature, -1)
    parts = []
    for block in rows.flatten(0, -2).split(LOGITS_BLOCK_ROWS):
        logits = _compute_logits(target, block) / temperature
        parts.append(logits.index_select(-1, output_ids) - logits.logsumexp(-1, keepdim=True))
    return torch.cat(parts).view(*rows.shape[:-1], -1)


def _run_model(model: LlamaForCausalLM, batch: TrainingBatch) -> Tensor:
    """Return the normed hidden states of a model, [sequences, length, width]."""
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
    """Return a model's logits in fp32, [..., output vocabulary]."""
    with autocast(rows.device):
        return F.linear(rows, model.lm_head.weight).float()


def cross_entropy(logits: Tensor, batch: TrainingBatch) -> Tensor:
    """Return the weighted mean cross-entropy of logits [sequences, length, V] over a batch."""
    each = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    return _mean(each, batch.weights.flatten())


def _mean(each: Tensor, weights: Tensor) -> Tensor:
    return (each * weights).sum() / weights.sum()


def on_device(loss: Loss, device: torch.device) -> Loss:
    """Return a loss function that first moves its batch to a device."""
    return lambda batch: loss(batch.to_device(device))
