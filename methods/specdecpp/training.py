"""Training of the acceptance head of SpecDec++: its module, its labels and its loss.

Huang et al., arXiv:2405.19715. Both models read the target's own answers X. The draft draws one
token Y_i per position, and the label is the probability min(1, p/q) that Y_i is accepted. The head
then reads the draft's hidden states over a mix Z, with X_i at a share of the positions and Y_i at
the others. Only the labels of the Y_i count, and only the head is trained.

The paper covers sampling. Greedy labels are for greedy decoding: X is the target's greedy answer
and Y_i is the draft's most likely token. Its label is 1 if the target has the same most likely
token.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM

Labels = Literal["sampled", "greedy"]

BATCH_SIZE = 16


class LabelledReply(NamedTuple):
    """Reply of the target with labels. Labels before `start` are meaningless.

    Attributes:
        ids: Token ids of prompt and answer, [n].
        drafted: The draft's token at each position, [n].
        chances: Probability that this token is accepted, [n].
        start: Position at which the answer starts.
    """

    ids: Tensor
    drafted: Tensor
    chances: Tensor
    start: int


class _Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class AcceptanceModule(nn.Module):
    """Maps the draft's normed hidden states [..., hidden] to two logits [..., 2], the second for
    acceptance.

    Its parameters have the names of the authors' checkpoints.
    """

    def __init__(self, hidden: int, depth: int, *, tied: bool = False) -> None:
        super().__init__()
        self.hidden, self.depth = hidden, depth
        blocks = [_Block(hidden)] * depth if tied else [_Block(hidden) for _ in range(depth)]
        self.model = nn.Sequential(*blocks, nn.Linear(hidden, 2))

    def forward(self, rows: Tensor) -> Tensor:
        """See the class."""
        logits: Tensor = self.model(rows)
        return logits


def weighted_bce(
    logits: Tensor, chances: Tensor, counts: Tensor, rejection_weight: float
) -> Tensor:
    """Return the paper's loss: cross-entropy with the soft labels, with a weight for rejections.

    Args:
        logits: [..., 2].
        chances: Soft labels, [...].
        counts: 1 where a label counts, else 0, [...].
        rejection_weight: Weight of rejections.
    """
    rejected, accepted = logits.log_softmax(-1).unbind(-1)
    stands, falls = counts * chances, rejection_weight * counts * (1 - chances)
    return -(stands * accepted + falls * rejected).sum() / (stands + falls).sum()


@torch.no_grad()
def collect_rows(
    draft: LlamaForCausalLM, replies: Sequence[LabelledReply], mixing: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the draft's normed hidden states [n, hidden] at tokens whose labels count, and the
    labels [n]."""
    random = torch.Generator().manual_seed(seed)
    rows, chances = [], []
    for first in range(0, len(replies), BATCH_SIZE):
        mixed = [mix(reply, mixing, random) for reply in replies[first : first + BATCH_SIZE]]
        ids, told, counts = (
            pad_sequence(list(part), batch_first=True) for part in zip(*mixed, strict=True)
        )
        hidden = draft.model(ids.to(draft.device), use_cache=False).last_hidden_state
        rows.append(hidden[counts > 0])
        chances.append(told[counts > 0].to(draft.device))
    return torch.cat(rows), torch.cat(chances)


def mix(
    reply: LabelledReply, mixing: float, random: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mix Z [n] of a reply, the labels [n], and 1 where they count [n]: at the draft's
    own tokens."""
    places = torch.arange(len(reply.ids))
    own = (torch.rand(len(reply.ids), generator=random) >= mixing) & (places >= reply.start)
    return torch.where(own, reply.drafted, reply.ids), reply.chances, own.float()


@torch.no_grad()
def label(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    replies: Sequence[tuple[Sequence[int], Sequence[int]]],
    labels: Labels,
    seed: int,
) -> Iterator[LabelledReply]:
    """Yield each reply with the draft's token at every position and its acceptance probability.

    Args:
        replies: Prompts and answers. Only the answers get labels.
    """
    random = torch.Generator(target.device).manual_seed(seed)
    for first in range(0, len(replies), BATCH_SIZE):
        group = replies[first : first + BATCH_SIZE]
        texts = [torch.tensor([*prompt, *answer]) for prompt, answer in group]
        ids = pad_sequence(texts, batch_first=True).to(target.device)
        # The logits that predict a token are at the position before it.
        says = [
            slice(len(prompt) - 1, len(text) - 1)
            for (prompt, _), text in zip(group, texts, strict=True)
        ]
        p, q = (_distributions(model, ids, says) for model in (target, draft))
        if labels == "greedy":
            drafted = q.argmax(-1)
            chances = (p.argmax(-1) == drafted).float()
        else:
            drafted = torch.multinomial(q.exp(), 1, generator=random)[:, 0]
            at = drafted[:, None]
            chances = (p.gather(-1, at) - q.gather(-1, at))[:, 0].exp().clamp(max=1.0)
        lengths = [len(answer) for _, answer in group]
        parts = (part.cpu().split(lengths) for part in (drafted, chances))
        for (prompt, _), text, token, chance in zip(group, texts, *parts, strict=True):
            start = len(prompt)
            yield LabelledReply(text, F.pad(token, (start, 0)), F.pad(chance, (start, 0)), start)


def _distributions(model: LlamaForCausalLM, ids: Tensor, says: Sequence[slice]) -> Tensor:
    """Return log-probabilities [n, V] at the given slices, one sequence after another."""
    hidden = model.model(ids, use_cache=False).last_hidden_state
    rows = torch.cat([line[part] for line, part in zip(hidden, says, strict=True)])
    distributions: Tensor = model.lm_head(rows).float().log_softmax(-1)
    return distributions
