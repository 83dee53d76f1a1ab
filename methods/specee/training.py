"""Training of SpecEE's exit predictors, on answers of the target.

Xu et al., ISCA 2025, arXiv:2504.08850. For each token of an answer, the output matrix is applied to
the hidden state after each layer, as if the layer were the last one. The label of a layer is 1 if
its most likely token is the token that the whole target predicts.

The input of a predictor includes the change of probabilities since the last checked layer. Training
must therefore check the same layers as decoding. Training uses the same schedule, and assumes that
decoding exits at the first checked layer whose label is 1.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from methods._heads.held_out import HELD_OUT, area_under_roc
from methods.specee.method import SpecEEParams
from methods.specee.predictors import ExitPredictors, choose_layers, make_predictor_input

WIDTH = 32
"""Size of a predictor's hidden layer. The authors use 512, for models with 32 layers or more."""
STEPS, RATE, DECAY = 300, 0.02, 1e-4
"""Number of steps, learning rate and weight decay of AdamW. Each step uses all examples."""
SHARE = 4
"""One of this number of layers is always checked. The authors always check 8 of 32 layers."""
THRESHOLDS = (0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class EarlyLogits:
    """Logits at early layers, for n tokens of answers and each of the L target layers except the
    last.

    Attributes:
        logits: Logits of the candidates, [n, L - 1, k].
        correct: Whether the layer's most likely token is the token that the whole target predicts,
            [n, L - 1] bool.
        is_candidate: Whether the layer's most likely token is a candidate, [n, L - 1] bool.
        question: Number of the question to which each token belongs, [n]. Tokens of a question are
            adjacent.
    """

    logits: Tensor
    correct: Tensor
    is_candidate: Tensor
    question: Tensor


@dataclass(frozen=True)
class PredictorQuality:
    """Quality of the predictors on held-out questions.

    Attributes:
        tokens: Number of answer tokens in the held-out questions.
        right: Share of checks with label 1. The key is the layer. The label is 1 if the layer
            predicts the target's token.
        auc: Area under the ROC curve: the probability that a check with label 1 gets a higher score
            than a check with label 0. The key is the layer.
        exits: Share of tokens for which an early layer would be trusted. The key is the threshold.
        agree: Share of these tokens for which the trusted layer is correct. The key is the
            threshold.
        layers: Mean number of layers that would run per token. The key is the threshold.
    """

    tokens: int
    right: dict[int, float]
    auc: dict[int, float]
    exits: dict[float, float]
    agree: dict[float, float]
    layers: dict[float, float]


# ---- layers to check ----------------------------------------------------------------------------


def choose_offline_layers(early_logits: EarlyLogits) -> tuple[int, ...]:
    """Return the layers to check always, counted from 1.

    They are the layers that are the first possible exit of the most tokens.
    """
    could = early_logits.correct & early_logits.is_candidate
    first = could[could.any(1)].int().argmax(1) + 1
    most = max(1, (could.shape[1] + 1) // SHARE)
    return tuple(sorted(layer for layer, _ in Counter(first.tolist()).most_common(most)))


def schedule_checks(early_logits: EarlyLogits, layers: Sequence[int]) -> list[list[int]]:
    """Return the layers that decoding would check, for each token.

    Decoding is assumed to exit at the first checked layer whose label is 1.

    Args:
        early_logits: Logits at early layers.
        layers: Layers that are always checked.
    """
    could, recent, last = (
        early_logits.correct & early_logits.is_candidate,
        SpecEEParams().recent,
        -1,
    )
    exits, found = deque[int](maxlen=recent), list[list[int]]()
    for each, question in zip(could.tolist(), early_logits.question.tolist(), strict=True):
        if question != last:
            exits.clear()
            last = question
        checks = choose_layers(layers, exits, len(each) + 1)
        found.append(checks)
        exits.extend([layer for layer in checks if each[layer - 1]][:1])
    return found


@dataclass(frozen=True)
class ExitChecks:
    """Training examples of the predictors: m checks. A check is one predictor call for one token.

    Attributes:
        token: Index of the token, [m].
        layer: Number of the checked layer, counted from 1, [m].
        features: Input of the predictor, [m, 3 * k].
    """

    token: Tensor
    layer: Tensor
    features: Tensor


def collect_checks(early_logits: EarlyLogits, planned: Sequence[Sequence[int]]) -> ExitChecks:
    """Return the training examples for the checks that `schedule_checks` chose."""
    tokens, layers, features = list[int](), list[int](), list[Tensor]()
    for token, checks in enumerate(planned):
        local = None
        for layer in checks:
            read_there, local = make_predictor_input(early_logits.logits[token, layer - 1], local)
            tokens.append(token)
            layers.append(layer)
            features.append(read_there)
    return ExitChecks(torch.tensor(tokens), torch.tensor(layers), torch.stack(features))


# ---- the perceptrons ----------------------------------------------------------------------------


def fit(
    early_logits: EarlyLogits, seed: int = 0
) -> tuple[ExitPredictors, dict[str, Tensor], PredictorQuality]:
    """Train the predictors. Return the predictors, their tensors by name, and their quality on
    held-out questions.

    Raises:
        ValueError: No early layer ever predicts the target's own token.
    """
    if not (early_logits.correct & early_logits.is_candidate).any():
        raise ValueError("no early layer ever predicts the token of the whole target")
    layers = choose_offline_layers(early_logits)
    checks = collect_checks(early_logits, schedule_checks(early_logits, layers))
    held = (early_logits.question % HELD_OUT == 0)[checks.token]
    right = early_logits.correct[checks.token, checks.layer - 1]
    parts = []
    for layer in range(1, early_logits.correct.shape[1] + 1):
        here = (checks.layer == layer) & ~held
        parts.append(_fit_perceptron(checks.features[here], right[here], seed + layer))
    stacked = map(torch.stack, zip(*parts, strict=True))
    named = dict(zip(("up", "up_bias", "down", "down_bias"), stacked, strict=True))
    predictors = ExitPredictors(*named.values(), layers=layers)
    return predictors, named, _measure_quality(early_logits, predictors, checks, held, right)


def _fit_perceptron(features: Tensor, right: Tensor, seed: int) -> tuple[Tensor, ...]:
    """Train one predictor. Return its tensors: up [3 * k, width], up_bias [width], down [width],
    down_bias [].

    If all labels are equal, the predictor returns a constant: the smoothed share of label 1.
    Without examples, the constant is almost 0.
    """
    reads = features.shape[1]
    if len(set(right.tolist())) < 2:
        share = torch.tensor((float(right.sum()) + 0.5) / (len(right) + 1))
        level = share.logit() if len(right) else torch.tensor(-10.0)
        return torch.zeros(reads, WIDTH), torch.zeros(WIDTH), torch.zeros(WIDTH), level
    mean, spread = features.mean(0), features.std(0).clamp_min(1e-3)
    generator = torch.Generator().manual_seed(seed)
    up = (torch.randn(reads, WIDTH, generator=generator) / reads**0.5).requires_grad_()
    down = (torch.randn(WIDTH, generator=generator) / WIDTH**0.5).requires_grad_()
    up_bias, down_bias = (torch.zeros(size, requires_grad=True) for size in ((WIDTH,), ()))
    adam = torch.optim.AdamW((up, up_bias, down, down_bias), RATE, weight_decay=DECAY)
    even, labels = (features - mean) / spread, right.float()
    with torch.enable_grad():
        for _ in range(STEPS):
            adam.zero_grad()
            logits = (even @ up + up_bias).relu() @ down + down_bias
            binary_cross_entropy_with_logits(logits, labels).backward()
            adam.step()
    # Training used normalised features. Fold the normalisation into the weights.
    scaled = up.detach() / spread[:, None]
    return scaled, up_bias.detach() - mean @ scaled, down.detach(), down_bias.detach()


def _measure_quality(
    early_logits: EarlyLogits,
    predictors: ExitPredictors,
    checks: ExitChecks,
    held: Tensor,
    right: Tensor,
) -> PredictorQuality:
    chances = torch.zeros(len(right))
    for layer in range(1, early_logits.correct.shape[1] + 1):
        here = checks.layer == layer
        if here.any():
            chances[here] = predictors(layer, checks.features[here])
    held_by_layer = {
        layer: held & (checks.layer == layer) for layer in sorted(set(checks.layer[held].tolist()))
    }
    tokens = int((early_logits.question % HELD_OUT == 0).sum())
    exits, agree, layers = (dict[float, float]() for _ in range(3))
    for threshold in THRESHOLDS:
        leaves = (
            held & (chances > threshold) & early_logits.is_candidate[checks.token, checks.layer - 1]
        )
        first = dict[int, int]()  # first exit of each token
        for at in leaves.nonzero().flatten().tolist():
            first.setdefault(int(checks.token[at]), at)
        by = list(first.values())
        ran = float(checks.layer[by].sum()) + (tokens - len(by)) * (
            early_logits.correct.shape[1] + 1
        )
        exits[threshold] = len(by) / tokens
        agree[threshold] = float(right[by].double().mean()) if by else 1.0
        layers[threshold] = ran / tokens
    return PredictorQuality(
        tokens,
        {layer: float(right[here].double().mean()) for layer, here in held_by_layer.items()},
        {
            layer: area_under_roc(chances[here], right[here])
            for layer, here in held_by_layer.items()
        },
        exits,
        agree,
        layers,
    )
