"""Training of the acceptance head of SpecDec++: the torch module, the labels and the loss.

Huang et al., arXiv:2405.19715. Target and draft model read answers X of the target. At each
position i the draft model draws a token Y_i. The label of Y_i is the probability min(1, p/q) that
the target accepts it. The head reads the draft model's hidden states on a mixed text Z. Z has X_i
at some random positions and Y_i at the others. Only labels at positions with Y_i are used. Only the
head is trained.

The paper covers sampling. For greedy decoding, X is the target's greedy answer and Y_i is the draft
model's most likely token. The label is 1 if Y_i is also the target's most likely token, and 0
otherwise.
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
    """Answer of the target with labels. The prompt has no labels.

    Attributes:
        ids: Token ids of prompt and answer (X), [n].
        drafted: The draft model's token at each position (Y), [n].
        chances: Labels: the probability that the target accepts the draft model's token, [n].
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
    """Acceptance head as a torch module, for training.

    Its tensors have the names of the authors' checkpoints.

    Args:
        hidden: Hidden size of the draft model.
        depth: Number of residual blocks.
        tied: Whether all blocks share their weights, as in the authors' code.
    """

    def __init__(self, hidden: int, depth: int, *, tied: bool = False) -> None:
        super().__init__()
        self.hidden, self.depth = hidden, depth
        blocks = [_Block(hidden)] * depth if tied else [_Block(hidden) for _ in range(depth)]
        self.model = nn.Sequential(*blocks, nn.Linear(hidden, 2))

    def forward(self, rows: Tensor) -> Tensor:
        """Return two logits, for rejection and acceptance, [..., 2].

        Args:
            rows: The draft model's normed hidden states, [..., hidden].
        """
        logits: Tensor = self.model(rows)
        return logits


def weighted_bce(
    logits: Tensor, chances: Tensor, counts: Tensor, rejection_weight: float
) -> Tensor:
    """Return the paper's loss: a weighted binary cross-entropy with soft labels.

    Args:
        logits: Output of the head, [..., 2].
        chances: Labels, [...].
        counts: 1 at positions whose label is used, 0 at other positions, [...].
        rejection_weight: Weight of the rejection term (w_rej in the paper).
    """
    rejected, accepted = logits.log_softmax(-1).unbind(-1)
    accepted_weight, rejected_weight = counts * chances, rejection_weight * counts * (1 - chances)
    return (
        -(accepted_weight * accepted + rejected_weight * rejected).sum()
        / (accepted_weight + rejected_weight).sum()
    )


@torch.no_grad()
def collect_rows(
    draft: LlamaForCausalLM, replies: Sequence[LabelledReply], mixing: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the training examples: hidden states and labels at positions with the draft model's
    token.

    Args:
        draft: Draft model.
        replies: Answers with labels.
        mixing: Share of the positions that keep the target's token in the mixed text.
        seed: Random seed.

    Returns:
        The draft model's normed hidden states, [n, hidden], and the labels, [n].
    """
    random = torch.Generator().manual_seed(seed)
    rows, chances = [], []
    for first in range(0, len(replies), BATCH_SIZE):
        mixed = [mix(reply, mixing, random) for reply in replies[first : first + BATCH_SIZE]]
        ids, labels_of_ids, counts = (
            pad_sequence(list(part), batch_first=True) for part in zip(*mixed, strict=True)
        )
        hidden = draft.model(ids.to(draft.device), use_cache=False).last_hidden_state
        rows.append(hidden[counts > 0])
        chances.append(labels_of_ids[counts > 0].to(draft.device))
    return torch.cat(rows), torch.cat(chances)


def mix(
    reply: LabelledReply, mixing: float, random: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mixed text, the labels, and a mask of the labels to use (1 or 0), each [n].

    The mixed text has the draft model's token at some positions. Only the labels at these positions
    are used.
    """
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
    """Yield each answer with its acceptance labels.

    Args:
        target: Target.
        draft: Draft model.
        replies: Token ids of prompts and answers. Only answers get labels.
        labels: Kind of labels: for sampling or for greedy decoding.
        seed: Random seed.
    """
    random = torch.Generator(target.device).manual_seed(seed)
    for first in range(0, len(replies), BATCH_SIZE):
        group = replies[first : first + BATCH_SIZE]
        texts = [torch.tensor([*prompt, *answer]) for prompt, answer in group]
        ids = pad_sequence(texts, batch_first=True).to(target.device)
        # The logits at one position predict the token at the next position.
        answers = [
            slice(len(prompt) - 1, len(text) - 1)
            for (prompt, _), text in zip(group, texts, strict=True)
        ]
        p, q = (_distributions(model, ids, answers) for model in (target, draft))
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


def _distributions(model: LlamaForCausalLM, ids: Tensor, answers: Sequence[slice]) -> Tensor:
    """Return the model's log-probabilities at the answer positions of all sequences, concatenated,
    [n, vocab].
    """
    hidden = model.model(ids, use_cache=False).last_hidden_state
    rows = torch.cat([line[part] for line, part in zip(hidden, answers, strict=True)])
    distributions: Tensor = model.lm_head(rows).float().log_softmax(-1)
    return distributions
