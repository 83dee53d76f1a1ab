"""What a head in training would be worth: MAT of greedy chains on held-out replies."""

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
    """After `step` updates: committed tokens per verification, with chains of `CHAIN` drafts.

    accepted: by depth, how often a draft was right that followed right ones.
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
    """MAT of greedy chains from the target's true features, on its own greedy replies.

    As long as all drafts were right, what a chain reads is the text: so one teacher-forced pass
    tells how far it would get from every place. Then each answer is walked from its first token,
    the one that follows the prompt, in strides of accepted drafts and the target's own token.
    """
    head.eval()
    groups = (replies[first : first + BATCH_SIZE] for first in range(0, len(replies), BATCH_SIZE))
    walked = compute_mat(
        (
            (chat, far)
            for group in groups
            for chat, far in zip(
                group, _count_correct_drafts(head, target, group, chain).tolist(), strict=True
            )
        ),
        chain,
    )
    head.train()
    return MatEstimate(step, *walked)


def compute_mat(
    reached: Iterable[tuple[EncodedChat, Sequence[int]]], chain: int
) -> tuple[float, list[float]]:
    """MAT over replies, and how often a draft was right that followed right ones, by depth.

    Args:
        reached: of a reply, how many drafts are the text that follows, by the last slot but one
            that they know.
    """
    committed = verified = 0
    tried, right = [0] * chain, [0] * chain
    for chat, far in reached:
        root, end = find_answer_start(chat), len(chat.ids)
        while root < end - 1:
            most = min(chain, end - 1 - root)
            accepted = min(far[root - 1], most)
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
    group: Sequence[EncodedChat],
    chain: int,
) -> Tensor:
    """[chats, longest]: how many drafts from each slot are the text that follows."""
    longest = max(len(chat.ids) for chat in group)
    begin = group[0].ids[0]
    ids = torch.tensor([chat.ids + [begin] * (longest - len(chat.ids)) for chat in group])
    ids = ids.to(target.device)
    slots = torch.arange(longest, device=ids.device).expand(len(group), -1)
    says = get_draft_ids(head)
    with autocast(ids.device):
        read = run_target(target, ids, head.captured_layers)
        following = torch.cat([ids[:, 1:], ids[:, -1:]], 1)
        reach = torch.zeros_like(ids)
        alive = torch.ones_like(ids, dtype=torch.bool)
        for step in unroll(head, target, ids, read, slots, chain):
            width = step.logits.shape[-1]
            drafted = argmax(step.logits.reshape(-1, width)).view(step.positions.shape)
            drafted = drafted if says is None else says[drafted]
            alive = alive & step.valid & (drafted == following.gather(1, step.positions))
            reach = reach + alive
    return reach


def find_answer_start(chat: EncodedChat) -> int:
    """Where the answer begins: its tokens weigh 1, the prompt's less."""
    return chat.weights.index(1.0)


E = TypeVar("E", bound=MatEstimate)


class EstimateLog(Generic[E]):
    """The estimates of a training folder, one JSON line each; a resumed run cuts later ones off.

    Args:
        kind: what they are.
    """

    def __init__(self, folder: Path, kind: type[E]) -> None:
        self._path, self._kind = folder / FILE, kind

    def read(self) -> list[E]:
        """All, by step."""
        if not self._path.is_file():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines()
        return [self._kind(**json.loads(line)) for line in lines]

    def add(self, new: E) -> None:
        """Keep those before it, and it."""
        kept = [old for old in self.read() if old.step < new.step] + [new]
        text = "".join(json.dumps(asdict(each)) + "\n" for each in kept)
        files.replace(self._path, text)
