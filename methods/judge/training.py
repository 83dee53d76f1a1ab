"""Training of a judge: a logistic regression over hidden states of the target.

The training examples are draft tokens that differ from the target's own token. AutoJudge (Garipov
et al., NeurIPS 2025, arXiv:2504.20039) finds these tokens and their labels automatically, which is
called mining. The features of a token are the target's hidden state at that token, after the final
norm (Bachmann et al., ICLR 2025, arXiv:2501.19309).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from methods._heads.held_out import HELD_OUT, area_under_roc

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Weights of the L2 penalty to try. The best one on held-out questions is used."""
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class MinedTokens:
    """Training examples: n draft tokens that differ from the target's own token.

    Attributes:
        rows: The target's normed hidden states at these tokens, [n, hidden].
        harmless: Whether the target's answer with the draft token is as good as with its own token,
            [n] bool.
        question: Number of the question in whose answer the token occurs, [n].
    """

    rows: Tensor
    harmless: Tensor
    question: Tensor


@dataclass(frozen=True)
class JudgeQuality:
    """Quality of a judge on held-out questions.

    Attributes:
        tokens: Number of draft tokens in the held-out questions.
        harmless: Share of these tokens that are harmless.
        auc: Area under the ROC curve: the probability that the judge ranks a harmless token above a
            harmful one.
        strength: Weight of the L2 penalty in training.
        caught: Share of the harmful tokens that the judge rejects. The key is the threshold.
        passed: Share of the harmless tokens that the judge accepts. The key is the threshold.
    """

    tokens: int
    harmless: float
    auc: float
    strength: float
    caught: dict[float, float]
    passed: dict[float, float]


def fit(mined: MinedTokens) -> tuple[Tensor, Tensor, JudgeQuality]:
    """Train judges, and return the best one: weight [hidden], bias [1], and quality on held-out
    questions.

    `STRENGTHS` lists the L2 penalties to try. The best judge has the highest AUC. In the loss,
    harmless and harmful tokens have the same total weight.
    """
    held = mined.question % HELD_OUT == 0
    inside, labels = mined.rows[~held].double(), mined.harmless[~held]
    rows, truth = mined.rows[held].double(), mined.harmless[held]
    tried = []
    for strength in STRENGTHS:
        weight, bias = _fit_logistic(inside, labels, strength)
        tried.append((area_under_roc(rows @ weight + bias, truth), strength, weight, bias))
    auc, strength, weight, bias = max(tried, key=lambda each: each[0])
    chances = (rows @ weight + bias).sigmoid()
    judged = JudgeQuality(
        tokens=len(truth),
        harmless=float(truth.double().mean()),
        auc=auc,
        strength=strength,
        caught={t: _share(chances[~truth] <= t) for t in THRESHOLDS},
        passed={t: _share(chances[truth] > t) for t in THRESHOLDS},
    )
    return weight.float(), bias.float(), judged


def _fit_logistic(rows: Tensor, labels: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    weight = torch.zeros(rows.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    n = len(labels)
    share = labels.double().mean().clamp(1 / max(n, 1), 1 - 1 / max(n, 2))
    counts = torch.where(labels, 0.5 / share, 0.5 / (1 - share))
    solver = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        missed = binary_cross_entropy_with_logits(rows @ weight + bias, labels.double(), counts)
        total: Tensor = missed + strength * weight.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        solver.step(loss)
    return weight.detach(), bias.detach()


def _share(of: Tensor) -> float:
    return float(of.double().mean()) if len(of) else 0.0
