"""Estimates of the MAT (mean accepted tokens per verification) of a head during its training.

The estimates use replies that are held out from training.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specbench_cli import files
from specbench_cli.engine.verify.ranking import argmax
from specbench_cli.training.heads.losses import Drafter, get_draft_ids, run_target, unroll
from specbench_cli.training.losses import autocast
from specbench_cli.training.packing import EncodedChat

CHAIN_LENGTH = 5
BATCH_SIZE = 8
FILE = "mat.jsonl"


@dataclass(frozen=True)
class MatEstimate:
    """MAT (mean accepted tokens per verification) of a head after a number of updates.

    Attributes:
        step: number of updates.
        mat: committed tokens per verification, with greedy chains of `CHAIN_LENGTH` draft tokens.
        accepted: acceptance rate of draft token 1, 2, ..., given that all earlier draft tokens are
            accepted.
    """

    step: int
    mat: float
    accepted: list[float]


@torch.no_grad()
def estimate_mat(
    head: Drafter,
    target: LlamaForCausalLM,
    replies: Sequence[EncodedChat],
    step: int,
    chain: int = CHAIN_LENGTH,
) -> MatEstimate:
    """Estimate the MAT of a head on the target's greedy replies. The head drafts chains greedily.

    While all draft tokens are correct, a chain reads the tokens of the reply. One forward over the
    reply therefore gives the number of correct draft tokens from each position. `compute_mat` then
    simulates decoding with these numbers.

    Args:
        step: number of updates so far.
        chain: number of draft tokens per step.
    """
    head.eval()
    n_correct = list[tuple[EncodedChat, list[int]]]()
    for first in range(0, len(replies), BATCH_SIZE):
        batch = replies[first : first + BATCH_SIZE]
        counts = _count_correct_drafts(head, target, batch, chain)
        n_correct += zip(batch, counts.tolist(), strict=True)
    mat, rates = compute_mat(n_correct, chain)
    head.train()
    return MatEstimate(step, mat, rates)


def compute_mat(
    n_correct: Iterable[tuple[EncodedChat, Sequence[int]]], chain: int
) -> tuple[float, list[float]]:
    """Simulate decoding of replies. Return MAT and the acceptance rates of draft tokens 1, 2, ...

    Each step commits the correct draft tokens and one token of the target.

    Args:
        n_correct: pairs of a reply and, for each position t, the number of consecutive correct
            draft tokens. The first draft token predicts the token at t + 2.
        chain: number of draft tokens per step.
    """
    committed = verified = 0
    tried, right = [0] * chain, [0] * chain
    for chat, counts in n_correct:
        root, end = find_answer_start(chat), len(chat.ids)
        while root < end - 1:
            most = min(chain, end - 1 - root)
            accepted = min(counts[root - 1], most)
            for depth in range(min(accepted + 1, most)):
                tried[depth] += 1
                right[depth] += depth < accepted
            stride = min(accepted + 1, end - 1 - root)
            committed, verified, root = committed + stride, verified + 1, root + stride
    rates = [round(yes / max(1, all_), 4) for yes, all_ in zip(right, tried, strict=True)]
    return round(committed / max(1, verified), 4), rates


def _count_correct_drafts(
    head: Drafter,
    target: LlamaForCausalLM,
    batch: Sequence[EncodedChat],
    chain: int,
) -> Tensor:
    """Return the number of consecutive correct draft tokens from each position, [chats, n]."""
    longest = max(len(chat.ids) for chat in batch)
    padding = batch[0].ids[0]
    ids = torch.tensor([chat.ids + [padding] * (longest - len(chat.ids)) for chat in batch])
    ids = ids.to(target.device)
    slots = torch.arange(longest, device=ids.device).expand(len(batch), -1)
    draft_ids = get_draft_ids(head)
    with autocast(ids.device):
        out = run_target(target, ids, head.captured_layers)
        following = torch.cat([ids[:, 1:], ids[:, -1:]], 1)
        counts = torch.zeros_like(ids)
        correct = torch.ones_like(ids, dtype=torch.bool)
        for step in unroll(head, target, ids, out, slots, chain):
            vocab = step.logits.shape[-1]
            drafted = argmax(step.logits.reshape(-1, vocab)).view(step.positions.shape)
            drafted = drafted if draft_ids is None else draft_ids[drafted]
            correct = correct & step.valid & (drafted == following.gather(1, step.positions))
            counts = counts + correct
    return counts


def find_answer_start(chat: EncodedChat) -> int:
    """Return the index of the first token of the answer. Only answer tokens have loss weight 1."""
    return chat.weights.index(1.0)


E = TypeVar("E", bound=MatEstimate)


class EstimateLog(Generic[E]):
    """Log file of estimates in a training folder. Each line is one estimate in JSON.

    Args:
        kind: class of the estimates.
    """

    def __init__(self, folder: Path, kind: type[E]) -> None:
        self._path, self._kind = folder / FILE, kind

    def read(self) -> list[E]:
        """Return all estimates in the order of their steps."""
        if not self._path.is_file():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines()
        return [self._kind(**json.loads(line)) for line in lines]

    def add(self, new: E) -> None:
        """Append an estimate.

        Remove earlier estimates of the same or a later step. A stopped run may have written them.
        """
        kept = [old for old in self.read() if old.step < new.step] + [new]
        text = "".join(json.dumps(asdict(each)) + "\n" for each in kept)
        files.replace(self._path, text)
