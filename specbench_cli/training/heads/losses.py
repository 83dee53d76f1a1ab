"""What draft heads are trained towards: the target's next distributions, drafted step by step."""

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
"""Share of the slots that are drafted from: answers are 0.37 of the tokens of the target's replies.
The others are still read."""


Drafter = DraftHead | FeatureHead | ParallelHead
"""What is trained to draft."""


class TargetOutput(NamedTuple):
    """What the frozen target gives for ids [sequences, n].

    features: rows of the captured layers side by side; normed: those its output matrix reads.
    """

    chat_mask: ChatMask
    features: Tensor
    normed: Tensor


class TargetPrediction(NamedTuple):
    """What the target says next.

    logits: [sequences, n, r] of the ids that a head can say. known: [sequences, n], whether the
    likeliest of all is among them.
    """

    logits: Tensor
    draftable: Tensor


class HeadStep(NamedTuple):
    """A drafted step at slots [sequences, slots].

    logits: over what the head says; at: the place whose next token is drafted; hidden: the rows
    that they are of; valid: whether that token is in the slot's chat.
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
    """The frozen target's rows; call it under autocast and no_grad. `starts` as of `Batch`."""
    chats = make_chat_mask(ids, starts)
    body = target.model
    rows = body.embed_tokens(ids)
    rotary = body.rotary_emb(rows, position_ids=chats.positions)
    leaving = []
    for layer in body.layers:
        rows = layer(rows, attention_mask=chats.mask, position_embeddings=rotary)
        leaving.append(rows)
    normed = body.norm(rows)
    read = [normed if layer == NORMED else leaving[layer] for layer in captured_layers]
    return TargetOutput(chats, torch.cat(read, -1), normed)


def unroll(
    head: Drafter,
    target: LlamaForCausalLM,
    ids: Tensor,
    target_output: TargetOutput,
    slots: Tensor,
    steps: int,
) -> Iterator[HeadStep]:
    """Draft `steps` tokens from each slot, reading the text's own tokens (teacher forcing).

    Args:
        ids: [sequences, n].
        read: of these ids.
        slots: [sequences, slots], places of the text whose features are the last that are known:
            the first step at slot t reads token t+1 and says token t+2. A head without a state
            says all of its levels from the slot's features.
    """
    starts = torch.arange(ids.shape[1], device=ids.device) - target_output.chat_mask.positions
    if isinstance(head, FeatureHead):
        rows = gather_slots(target_output.features, slots)
        if isinstance(head, LookAhead):
            _, behind = run_look_ahead(head, target, ids, target_output, slots)
            said = iter(target.lm_head(behind).flatten(0, 1).unbind(1))
        else:
            said = _unroll_levels(head, rows.flatten(0, 1), ids, slots, steps)
        for step, logits in enumerate(said):
            yield HeadStep(
                logits.unflatten(0, slots.shape), rows, *get_step_positions(starts, slots, step)
            )
        return
    if isinstance(head, ParallelHead):
        for step, (logits, kept) in enumerate(head.draft(target, ids, target_output, slots, steps)):
            yield HeadStep(logits, logits, *get_step_positions(starts, kept, step))
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
    """`Step.at` and `Step.valid` of a step from slots of texts.

    Args:
        starts: [sequences, n], where the chat of each place begins.
    """
    at, last = slots + step + 1, starts.shape[1] - 1
    inside = at.clamp(max=last)
    return inside, (at <= last) & (starts.gather(1, inside) == starts.gather(1, slots))


def _unroll_levels(
    head: FeatureHead, rows: Tensor, ids: Tensor, slots: Tensor, steps: int
) -> Iterator[Tensor]:
    """What a head without a state says at slots from features [n, width], level by level: [n, V].

    One that reads the drafted tokens is given the text's own.
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
    """What the target's output matrix reads: of a text [sequences, n, width], and of the rows that
    a head has go through the target at slots, [sequences, slots, levels, width]."""
    body, k = target.model, head.sizes["levels"]
    rows = target_output.features if head.layer else body.embed_tokens(ids)
    made = head(gather_slots(rows, slots).flatten(0, 1)).unflatten(0, slots.shape).flatten(1, 2)
    n, device = ids.shape[1], ids.device
    seen = target_output.chat_mask.mask[:, 0]
    at = slots[..., None].expand(-1, -1, n)
    chain = torch.ones(k, k, dtype=torch.bool, device=device).tril()
    own = torch.block_diag(*[chain] * slots.shape[1]).expand(len(ids), -1, -1)
    sight = torch.cat(
        (
            F.pad(seen, (0, own.shape[-1])),
            torch.cat((seen.gather(1, at).repeat_interleave(k, 1), own), -1),
        ),
        1,
    )
    ahead = torch.arange(1, k + 1, device=device)
    behind = (target_output.chat_mask.positions.gather(1, slots)[..., None] + ahead).flatten(1)
    rows = torch.cat((rows, made), 1)
    rotary = body.rotary_emb(
        rows, position_ids=torch.cat((target_output.chat_mask.positions, behind), 1)
    )
    for layer in body.layers[head.layer :]:
        rows = layer(rows, attention_mask=sight[:, None], position_embeddings=rotary)
    rows = body.norm(rows)
    return rows[:, :n], rows[:, n:].unflatten(1, (-1, k))


StoredArray = Tensor | NDArray[np.generic]
"""Numbers of a file: on an accelerator, or mapped into memory."""

MEMORY_SHARE = 0.5
"""How much of an accelerator's free memory the rows that are kept may have."""

BLOCK_ROWS = 1 << 16
"""Rows that are sent to it at a time."""


def _move_to_device(
    files: Sequence[NDArray[np.generic]], device: torch.device
) -> list[StoredArray]:
    """Files' numbers on an accelerator that has room for them, where an update's rows are taken
    without a transfer; else as they are."""
    size = sum(file.nbytes for file in files)
    if device.type != "cuda" or size > MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]:
        return [np.asarray(file) for file in files]
    return [_copy_to_device(file, device) for file in files]


def _copy_to_device(file: NDArray[np.generic], device: torch.device) -> Tensor:
    """A file's numbers on a device, block by block: the host need not hold them all."""
    like = torch.from_numpy(file[:0].copy())
    there = torch.empty(file.shape, dtype=like.dtype, device=device)
    for first in range(0, len(file), BLOCK_ROWS):
        block = torch.from_numpy(file[first : first + BLOCK_ROWS].copy())
        there[first : first + BLOCK_ROWS].copy_(host.send(block, device))
    return there


class CachedTargetOutput:
    """A large target's rows over replies, computed once: heads read them many times.

    Args:
        files: what was kept while the replies were made; the rest is computed.
        captured_layers: those of the files.
        replies: the first of the file that they lie in.
    """

    def __init__(
        self,
        files: HiddenStateFiles,
        target: LlamaForCausalLM,
        captured_layers: tuple[int, ...],
        replies: Sequence[TrainingReply],
    ) -> None:
        self._target, self._captured_layers, self._width = (
            target,
            captured_layers,
            target.config.hidden_size,
        )
        self._own = len(captured_layers) * self._width
        files.complete(replies, self._read_reply)
        rows, best = files.open_arrays()
        last = max(replies, key=lambda reply: reply.first_row)
        self._rows, self._best = _move_to_device(
            (rows[: last.first_row + last.size], best[: last.first_row + last.size]), target.device
        )

    def get_reply(self, reply: EncodedChat) -> tuple[Tensor, Tensor, Tensor]:
        """A reply's ids [n], features and normed rows, by themselves."""
        device = self._target.device
        span = slice(reply.first_row, reply.first_row + len(reply.ids))
        rows = self._index_rows(
            self._rows, torch.arange(span.start, span.stop, device=device)
        ).float()
        ids = torch.tensor(reply.ids, device=device)
        return ids, rows[:, : self._own], rows[:, -self._width :]

    def get_output(self, batch: TrainingBatch) -> TargetOutput:
        """As `read_target`."""
        assert batch.rows is not None
        rows = self._index_rows(self._rows, batch.rows).float()
        chats = make_chat_mask(batch.inputs, batch.starts)
        return TargetOutput(chats, rows[..., : self._own], rows[..., -self._width :])

    def predict(
        self, batch: TrainingBatch, normed: Tensor, draft_ids: Tensor | None
    ) -> TargetPrediction:
        """As `what_is_said`."""
        assert batch.rows is not None
        weight = self._target.lm_head.weight
        if draft_ids is None:
            logits = F.linear(normed, weight)
            return TargetPrediction(logits, torch.ones_like(batch.inputs, dtype=torch.bool))
        best = self._index_rows(self._best, batch.rows).to(batch.inputs.dtype)
        among = torch.searchsorted(draft_ids, best).clamp(max=len(draft_ids) - 1)
        return TargetPrediction(F.linear(normed, weight[draft_ids]), draft_ids[among] == best)

    @staticmethod
    def _index_rows(held: StoredArray, at: Tensor) -> Tensor:
        """Rows of what is held, [*at, ...], where the places `at` are."""
        if isinstance(held, Tensor):
            return held[at]
        return torch.from_numpy(np.take(held, at.cpu().numpy(), 0)).to(at.device)

    @torch.no_grad()
    def _read_reply(self, reply: Sequence[int]) -> TargetRows:
        target = self._target
        ids = torch.tensor([list(reply)], device=target.device)
        with autocast(ids.device):
            read = run_target(target, ids, self._captured_layers)
            best = target.lm_head(read.normed)[0].argmax(-1)
        parts = (
            [read.features] if self._captured_layers == (NORMED,) else [read.features, read.normed]
        )
        return TargetRows(torch.cat(parts, -1)[0].half(), best)


def head_loss(
    head: Drafter,
    target: LlamaForCausalLM,
    objective: Objective,
    fast: bool,
    cached: CachedTargetOutput | None = None,
) -> Loss:
    """The loss of a packed batch.

    Args:
        fast: compile it; the noise is drawn outside.
        kept: the target's rows; without them they are computed with the loss.
    """
    says = get_draft_ids(head)

    def loss(batch: TrainingBatch, noise: Tensor | None) -> Tensor:
        ids = batch.inputs
        with autocast(ids.device):
            with torch.no_grad():
                if cached is None:
                    read = run_target(target, ids, head.captured_layers, batch.starts)
                    said = (
                        None if objective.text_labels else predict_target(target, read.normed, says)
                    )
                else:
                    read = cached.get_output(batch)
                    said = (
                        None if objective.text_labels else cached.predict(batch, read.normed, says)
                    )
            if noise is not None:
                read = read._replace(features=read.features + noise)
            weights = get_next_token_weights(batch, read.chat_mask)
            slots = choose_slots(weights)
            total = torch.zeros((), device=ids.device)
            for number, step in enumerate(unroll(head, target, ids, read, slots, objective.steps)):
                weight = weights.gather(1, step.positions) * step.valid
                each = torch.zeros_like(weight)
                if objective.ce:
                    entropy, known = _cross_entropy(step, said, batch, says)
                    each = each + objective.ce * entropy
                    weight = weight * known
                if objective.feature:
                    wanted = gather_slots(read.normed, step.positions).float()
                    apart = F.smooth_l1_loss(step.hidden.float(), wanted, reduction="none")
                    each = each + objective.feature * apart.mean(-1)
                mean = (each * weight).sum() / weight.sum().clamp(min=1e-6)
                total = total + objective.decay**number * mean
        return total / sum(objective.decay**number for number in range(objective.steps))

    step = compile_loss(loss) if fast else loss
    device = target.device

    def drawn(batch: TrainingBatch) -> Tensor:
        batch = batch.to_device(device)
        wide = len(head.captured_layers) * target.config.hidden_size
        return step(batch, _noise(batch, wide, objective.noise) if objective.noise else None)

    return drawn


def get_draft_ids(head: Drafter) -> Tensor | None:
    """The ids that a head's logits are about; None: all."""
    return head.draft_ids if isinstance(head, DraftHead) else None


def predict_target(
    target: LlamaForCausalLM, normed: Tensor, draft_ids: Tensor | None
) -> TargetPrediction:
    """The target's logits of rows [sequences, n, hidden], a block of rows at a time: what is not
    kept of a large vocabulary is never held at once."""
    rows, logits, known = normed.flatten(0, 1), [], []
    for block in rows.split(len(rows) if draft_ids is None else LOGITS_BLOCK_ROWS):
        all_ = target.lm_head(block).float()
        kept = all_ if draft_ids is None else all_.index_select(-1, draft_ids)
        logits.append(kept)
        known.append(kept.amax(-1) >= all_.amax(-1))
    return TargetPrediction(
        *(torch.cat(part).unflatten(0, normed.shape[:2]) for part in (logits, known))
    )


def _cross_entropy(
    step: HeadStep, said: TargetPrediction | None, batch: TrainingBatch, says: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy at each slot, and whether the head can say what it should."""
    logits = step.logits.float()
    if said is None:
        labels = batch.targets.gather(1, step.positions)
        known = torch.ones_like(labels, dtype=torch.bool)
        if says is not None:  # their places among those it can say, which rise
            among = torch.searchsorted(says, labels).clamp(max=len(says) - 1)
            known, labels = says[among] == labels, among
        entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return entropy.view_as(labels), known
    wanted = gather_slots(said.logits, step.positions)
    return -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1), said.draftable.gather(
        1, step.positions
    )


def get_next_token_weights(batch: TrainingBatch, chats: ChatMask) -> Tensor:
    """The weight of each place's next token, 0 where that begins another chat."""
    places = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
    starts = places - chats.positions
    parent = torch.cat([starts[:, 1:] == starts[:, :-1], torch.ones_like(starts[:, :1]) > 0], 1)
    return batch.weights * parent


def choose_slots(weights: Tensor) -> Tensor:
    """The slots to draft from: those before an answer's tokens, in the order of the text."""
    after = torch.cat([weights[:, 1:], torch.zeros_like(weights[:, :1])], 1)
    n = max(1, int(SLOT_SHARE * weights.shape[1]))
    return after.sort(descending=True, stable=True).indices[:, :n].sort().values


def _noise(batch: TrainingBatch, wide: int, width: float) -> Tensor:
    """Uniform noise on the features; a function of the batch, so a resumed run repeats it."""
    ids = batch.inputs
    rng = torch.Generator(ids.device).manual_seed(int((ids * (batch.weights > 0)).sum()))
    drawn = torch.rand((*ids.shape, wide), generator=rng, device=ids.device)
    return (drawn - 0.5) * width
