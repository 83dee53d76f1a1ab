"""Losses of draft heads.

A head learns the target's next-token distributions over several draft steps.

A *slot* is a position in a text from which the head drafts. Training drafts from many slots of a
text in one forward.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM

from methods._heads.module import DraftHead, ParallelHead
from methods._heads.recipe import Objective
from methods._heads.slots import HeadInput, PastKeyValues, gather_slots
from specbench_cli.engine import host
from specbench_cli.engine.models.head import NORMED, FeatureHead, LookAhead, SequentialHead
from specbench_cli.training.losses import ChatMask, Loss, autocast, compile_loss, make_chat_mask
from specbench_cli.training.packing import EncodedChat, TrainingBatch
from specbench_cli.training.replies import (
    LOGITS_BLOCK_ROWS,
    HiddenStateFiles,
    TargetRows,
    TrainingReply,
)

SLOT_SHARE = 0.5
"""Share of a text's positions that are used as slots.

In the target's replies, 37% of the tokens belong to answers. The head still reads all tokens.
"""


Drafter = DraftHead | FeatureHead | ParallelHead
"""A draft head of any kind."""


class TargetOutput(NamedTuple):
    """Output of the frozen target for ids [sequences, n].

    Attributes:
        chat_mask: attention mask: a token attends only to tokens of its own chat.
        features: hidden states of the captured layers, concatenated, [sequences, n, layers *
            width].
        normed: hidden states after the final norm, [sequences, n, width].
    """

    chat_mask: ChatMask
    features: Tensor
    normed: Tensor


class TargetPrediction(NamedTuple):
    """Target's prediction of each next token, used as label of the loss.

    Attributes:
        logits: logits of the head's draft vocabulary, [sequences, n, draft vocab].
        draftable: whether the target's most likely token is in the draft vocabulary, [sequences,
            n].
    """

    logits: Tensor
    draftable: Tensor


class HeadStep(NamedTuple):
    """One draft step of a head, from all slots [sequences, slots].

    Attributes:
        logits: logits over the draft vocabulary.
        hidden: hidden states from which the logits were computed.
        positions: index in the text of the token before the draft token.
        valid: whether the draft token belongs to the same chat as the slot.
    """

    logits: Tensor
    hidden: Tensor
    positions: Tensor
    valid: Tensor


def run_target(
    target: LlamaForCausalLM,
    ids: Tensor,
    captured_layers: tuple[int, ...],
    starts: Tensor | None = None,
) -> TargetOutput:
    """Return the output of the frozen target. Call it under `autocast` and `no_grad`.

    Args:
        starts: for each position, the first position of its chat, [sequences, length]. None means
            that each sequence is one chat.
    """
    chats = make_chat_mask(ids, starts)
    body = target.model
    rows = body.embed_tokens(ids)
    rotary = body.rotary_emb(rows, position_ids=chats.positions)
    outputs = []
    for layer in body.layers:
        rows = layer(rows, attention_mask=chats.mask, position_embeddings=rotary)
        outputs.append(rows)
    normed = body.norm(rows)
    captured = [normed if at == NORMED else outputs[at] for at in captured_layers]
    return TargetOutput(chats, torch.cat(captured, -1), normed)


def unroll(
    head: Drafter,
    target: LlamaForCausalLM,
    ids: Tensor,
    target_output: TargetOutput,
    slots: Tensor,
    steps: int,
) -> Iterator[HeadStep]:
    """Draft `steps` tokens from each slot.

    In place of its own draft tokens, the head reads the tokens of the text (teacher forcing).

    A slot is a position of the text to draft from. The target's features are known up to the slot.
    The first draft step at slot t therefore reads token t + 1 and predicts token t + 2. A head
    without a KV cache, such as Medusa, predicts all tokens from the features at the slot.

    Args:
        ids: token ids, [sequences, n].
        target_output: the target's output for these ids.
        slots: positions in the text, [sequences, slots].
    """
    starts = torch.arange(ids.shape[1], device=ids.device) - target_output.chat_mask.positions
    if isinstance(head, FeatureHead):
        rows = gather_slots(target_output.features, slots)
        if isinstance(head, LookAhead):
            _, ahead = run_look_ahead(head, target, ids, target_output, slots)
            levels = iter(target.lm_head(ahead).flatten(0, 1).unbind(1))
        else:
            levels = _unroll_levels(head, rows.flatten(0, 1), ids, slots, steps)
        for step, logits in enumerate(levels):
            yield HeadStep(
                logits.unflatten(0, slots.shape), rows, *get_step_positions(starts, slots, step)
            )
        return
    if isinstance(head, ParallelHead):
        drafted = head.draft(target, ids, target_output, slots, steps)
        for step, (logits, step_slots) in enumerate(drafted):
            yield HeadStep(logits, logits, *get_step_positions(starts, step_slots, step))
        return
    past = PastKeyValues(gather_slots(target_output.chat_mask.mask[:, 0], slots)[:, None])
    embed = target.model.embed_tokens if head.embed_tokens is None else head.embed_tokens
    weight = target.lm_head.weight if head.lm_head is None else head.lm_head.weight
    if head.draft_ids is not None and head.lm_head is None:
        weight = weight[head.draft_ids]
    following = torch.cat([ids[:, 1:], ids[:, -1:]], 1)
    places = target_output.chat_mask.positions
    out = head(
        HeadInput(
            embed(following), head.project_features(target_output.features), places, past, slots
        )
    )
    steps = min(steps, head.levels or steps)
    for step in range(steps):
        inside, valid = get_step_positions(starts, slots, step)
        yield HeadStep(F.linear(out.normed, weight), out.normed, inside, valid)
        if step + 1 < steps:
            token = following.gather(1, inside)
            if head.mask is not None:
                token = torch.full_like(token, head.mask)
            at = places.gather(1, slots) + step + 1
            out = head(HeadInput(embed(token), out.hidden, at, past))


def get_step_positions(starts: Tensor, slots: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return `HeadStep.positions` and `HeadStep.valid` of a draft step.

    Args:
        starts: for each position, the first position of its chat, [sequences, n].
        step: number of the draft step, from 0.
    """
    at, last = slots + step + 1, starts.shape[1] - 1
    inside = at.clamp(max=last)
    return inside, (at <= last) & (starts.gather(1, inside) == starts.gather(1, slots))


def _unroll_levels(
    head: FeatureHead, rows: Tensor, ids: Tensor, slots: Tensor, steps: int
) -> Iterator[Tensor]:
    """Yield the logits [n, V] of each draft step, for a head without a KV cache such as Medusa.

    If the head reads earlier draft tokens, it gets the tokens of the text in their place.

    Args:
        rows: the target's features at the slots, [n, width].
    """
    if not isinstance(head, SequentialHead):
        yield from head(rows)[:steps]
        return
    last = ids.shape[1] - 1
    for level in range(min(steps, head.sizes["levels"])):
        token = ids.gather(1, (slots + level + 1).clamp(max=last)).flatten()
        logits, rows = head(rows, token, level)
        yield logits


def run_look_ahead(
    head: LookAhead,
    target: LlamaForCausalLM,
    ids: Tensor,
    target_output: TargetOutput,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run the target on a text, and on the extra input rows of a look-ahead head.

    A slot is a position of the text to draft from. At each slot the head makes one input row for
    each future token. The upper layers of the target process these rows, which attend to the text
    up to the slot.

    Returns:
        The target's normed hidden states of the text, [sequences, n, width], and of the extra rows,
        [sequences, slots, levels, width].
    """
    body, k = target.model, head.sizes["levels"]
    rows = target_output.features if head.layer else body.embed_tokens(ids)
    ahead = head(gather_slots(rows, slots).flatten(0, 1)).unflatten(0, slots.shape).flatten(1, 2)
    n, device = ids.shape[1], ids.device
    text_mask = target_output.chat_mask.mask[:, 0]
    at = slots[..., None].expand(-1, -1, n)
    chain = torch.ones(k, k, dtype=torch.bool, device=device).tril()
    ahead_mask = torch.block_diag(*[chain] * slots.shape[1]).expand(len(ids), -1, -1)
    mask = torch.cat(
        (
            F.pad(text_mask, (0, ahead_mask.shape[-1])),
            torch.cat((text_mask.gather(1, at).repeat_interleave(k, 1), ahead_mask), -1),
        ),
        1,
    )
    offsets = torch.arange(1, k + 1, device=device)
    positions = target_output.chat_mask.positions
    ahead_positions = (positions.gather(1, slots)[..., None] + offsets).flatten(1)
    rows = torch.cat((rows, ahead), 1)
    rotary = body.rotary_emb(rows, position_ids=torch.cat((positions, ahead_positions), 1))
    for layer in body.layers[head.layer :]:
        rows = layer(rows, attention_mask=mask[:, None], position_embeddings=rotary)
    rows = body.norm(rows)
    return rows[:, :n], rows[:, n:].unflatten(1, (-1, k))


StoredArray = Tensor | NDArray[np.generic]
"""Content of a file: a tensor on an accelerator, or a memory-mapped array."""

MEMORY_SHARE = 0.5
"""Maximum share of an accelerator's free memory that cached hidden states may use."""

BLOCK_ROWS = 1 << 16
"""Number of rows copied to an accelerator at a time."""


def _move_to_device(
    files: Sequence[NDArray[np.generic]], device: torch.device
) -> list[StoredArray]:
    """Copy arrays to the accelerator if its free memory is large enough.

    Otherwise return them unchanged.

    With the arrays on the accelerator, an update needs no transfer.
    """
    size = sum(file.nbytes for file in files)
    if device.type != "cuda" or size > MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]:
        return [np.asarray(file) for file in files]
    return [_copy_to_device(file, device) for file in files]


def _copy_to_device(file: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to a device in blocks. A complete copy may not fit in host memory."""
    dtype = torch.from_numpy(file[:0].copy()).dtype
    copied = torch.empty(file.shape, dtype=dtype, device=device)
    for first in range(0, len(file), BLOCK_ROWS):
        block = torch.from_numpy(file[first : first + BLOCK_ROWS].copy())
        copied[first : first + BLOCK_ROWS].copy_(host.send(block, device))
    return copied


class CachedTargetOutput:
    """Hidden states of a large target over its replies, computed once and read many times.

    Args:
        files: hidden states that were stored when the replies were sampled. Missing hidden states
            are computed and added.
        captured_layers: target layers whose hidden states the files contain.
        replies: training replies, in the order of their file.
    """

    def __init__(
        self,
        files: HiddenStateFiles,
        target: LlamaForCausalLM,
        captured_layers: tuple[int, ...],
        replies: Sequence[TrainingReply],
    ) -> None:
        self._target, self._captured_layers = target, captured_layers
        self._width = target.config.hidden_size
        self._feature_width = len(captured_layers) * self._width
        files.complete(replies, self._read_reply)
        rows, best = files.open_arrays()
        last = max(replies, key=lambda reply: reply.first_row)
        self._rows, self._best = _move_to_device(
            (rows[: last.first_row + last.size], best[: last.first_row + last.size]), target.device
        )

    def get_reply(self, reply: EncodedChat) -> tuple[Tensor, Tensor, Tensor]:
        """Return the token ids [n] of one reply, and its features and normed hidden states."""
        device = self._target.device
        end = reply.first_row + len(reply.ids)
        index = torch.arange(reply.first_row, end, device=device)
        rows = self._index_rows(self._rows, index).float()
        ids = torch.tensor(reply.ids, device=device)
        return ids, rows[:, : self._feature_width], rows[:, -self._width :]

    def get_output(self, batch: TrainingBatch) -> TargetOutput:
        """Return the target's output for a batch, as `run_target` does."""
        assert batch.rows is not None
        rows = self._index_rows(self._rows, batch.rows).float()
        chats = make_chat_mask(batch.inputs, batch.starts)
        features = rows[..., : self._feature_width]
        return TargetOutput(chats, features, rows[..., -self._width :])

    def predict(
        self, batch: TrainingBatch, normed: Tensor, draft_ids: Tensor | None
    ) -> TargetPrediction:
        """Return the target's prediction for a batch, as `predict_target` does."""
        assert batch.rows is not None
        weight = self._target.lm_head.weight
        if draft_ids is None:
            logits = F.linear(normed, weight)
            return TargetPrediction(logits, torch.ones_like(batch.inputs, dtype=torch.bool))
        best = self._index_rows(self._best, batch.rows).to(batch.inputs.dtype)
        index = torch.searchsorted(draft_ids, best).clamp(max=len(draft_ids) - 1)
        return TargetPrediction(F.linear(normed, weight[draft_ids]), draft_ids[index] == best)

    @staticmethod
    def _index_rows(stored: StoredArray, index: Tensor) -> Tensor:
        """Return the rows with these numbers, [*index, ...], on the device of `index`."""
        if isinstance(stored, Tensor):
            return stored[index]
        return torch.from_numpy(np.take(stored, index.cpu().numpy(), 0)).to(index.device)

    @torch.no_grad()
    def _read_reply(self, reply: Sequence[int]) -> TargetRows:
        target = self._target
        ids = torch.tensor([list(reply)], device=target.device)
        with autocast(ids.device):
            out = run_target(target, ids, self._captured_layers)
            best = target.lm_head(out.normed)[0].argmax(-1)
        only_normed = self._captured_layers == (NORMED,)
        parts = [out.features] if only_normed else [out.features, out.normed]
        return TargetRows(torch.cat(parts, -1)[0].half(), best)


def head_loss(
    head: Drafter,
    target: LlamaForCausalLM,
    objective: Objective,
    fast: bool,
    cached: CachedTargetOutput | None = None,
) -> Loss:
    """Return the loss of a head on a packed batch.

    Args:
        fast: whether to use torch.compile.
        cached: stored hidden states of the target. None means that the target runs for each batch.
    """
    draft_ids = get_draft_ids(head)

    def loss(batch: TrainingBatch, noise: Tensor | None) -> Tensor:
        ids = batch.inputs
        with autocast(ids.device):
            with torch.no_grad():
                if cached is None:
                    out = run_target(target, ids, head.captured_layers, batch.starts)
                else:
                    out = cached.get_output(batch)
                if objective.text_labels:
                    prediction = None
                elif cached is None:
                    prediction = predict_target(target, out.normed, draft_ids)
                else:
                    prediction = cached.predict(batch, out.normed, draft_ids)
            if noise is not None:
                out = out._replace(features=out.features + noise)
            weights = get_next_token_weights(batch, out.chat_mask)
            slots = choose_slots(weights)
            total = torch.zeros((), device=ids.device)
            for number, step in enumerate(unroll(head, target, ids, out, slots, objective.steps)):
                weight = weights.gather(1, step.positions) * step.valid
                each = torch.zeros_like(weight)
                if objective.ce:
                    entropy, draftable = _cross_entropy(step, prediction, batch, draft_ids)
                    each = each + objective.ce * entropy
                    weight = weight * draftable
                if objective.feature:
                    label = gather_slots(out.normed, step.positions).float()
                    error = F.smooth_l1_loss(step.hidden.float(), label, reduction="none")
                    each = each + objective.feature * error.mean(-1)
                mean = (each * weight).sum() / weight.sum().clamp(min=1e-6)
                total = total + objective.decay**number * mean
        return total / sum(objective.decay**number for number in range(objective.steps))

    step = compile_loss(loss) if fast else loss
    device = target.device

    def loss_with_noise(batch: TrainingBatch) -> Tensor:
        batch = batch.to_device(device)
        width = len(head.captured_layers) * target.config.hidden_size
        noise = _draw_noise(batch, width, objective.noise) if objective.noise else None
        return step(batch, noise)

    return loss_with_noise


def get_draft_ids(head: Drafter) -> Tensor | None:
    """Return the token ids that a head can draft, or None for the whole vocabulary."""
    return head.draft_ids if isinstance(head, DraftHead) else None


def predict_target(
    target: LlamaForCausalLM, normed: Tensor, draft_ids: Tensor | None
) -> TargetPrediction:
    """Return the target's prediction from its normed hidden states [sequences, n, width].

    With a draft vocabulary, the logits of the whole vocabulary are computed for a block of rows at
    a time, to save memory.
    """
    rows, logits, draftable = normed.flatten(0, 1), [], []
    for block in rows.split(len(rows) if draft_ids is None else LOGITS_BLOCK_ROWS):
        all_logits = target.lm_head(block).float()
        drafted = all_logits if draft_ids is None else all_logits.index_select(-1, draft_ids)
        logits.append(drafted)
        draftable.append(drafted.amax(-1) >= all_logits.amax(-1))
    return TargetPrediction(
        *(torch.cat(part).unflatten(0, normed.shape[:2]) for part in (logits, draftable))
    )


def _cross_entropy(
    step: HeadStep,
    prediction: TargetPrediction | None,
    batch: TrainingBatch,
    draft_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy at each slot, and whether the draft vocabulary contains the label.

    A slot is a position of the text from which the head drafts.

    Args:
        prediction: the target's prediction, used as label. None means that the tokens of the text
            are the labels.
    """
    logits = step.logits.float()
    if prediction is None:
        labels = batch.targets.gather(1, step.positions)
        draftable = torch.ones_like(labels, dtype=torch.bool)
        if draft_ids is not None:  # convert token ids to indices of the sorted draft vocabulary
            index = torch.searchsorted(draft_ids, labels).clamp(max=len(draft_ids) - 1)
            draftable, labels = draft_ids[index] == labels, index
        entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return entropy.view_as(labels), draftable
    label_logits = gather_slots(prediction.logits, step.positions)
    entropy = -(label_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return entropy, prediction.draftable.gather(1, step.positions)


def get_next_token_weights(batch: TrainingBatch, chats: ChatMask) -> Tensor:
    """Return the loss weight of each next token.

    It is 0 if the next token belongs to another chat.
    """
    places = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
    starts = places - chats.positions
    same_chat = torch.cat([starts[:, 1:] == starts[:, :-1], torch.ones_like(starts[:, :1]) > 0], 1)
    return batch.weights * same_chat


def choose_slots(weights: Tensor) -> Tensor:
    """Return the positions of the text to draft from, in ascending order.

    Their number is fixed. Positions before tokens of an answer are chosen first.
    """
    after = torch.cat([weights[:, 1:], torch.zeros_like(weights[:, :1])], 1)
    n = max(1, int(SLOT_SHARE * weights.shape[1]))
    return after.sort(descending=True, stable=True).indices[:, :n].sort().values


def _draw_noise(batch: TrainingBatch, width: int, amplitude: float) -> Tensor:
    """Return uniform noise that is added to the features, [sequences, n, width].

    The seed is computed from the batch, so a resumed run draws the same noise.
    """
    ids = batch.inputs
    rng = torch.Generator(ids.device).manual_seed(int((ids * (batch.weights > 0)).sum()))
    noise = torch.rand((*ids.shape, width), generator=rng, device=ids.device)
    return (noise - 0.5) * amplitude
