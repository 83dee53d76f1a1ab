"""Training of SpecEE's exit predictors on each layer's hidden states of the target's own answers.

Xu et al., ISCA 2025, arXiv:2504.08850. The LM head reads each layer's hidden state of each token as
if the layer were the last. The label is 1 if the most likely token there is the target's own. A
predictor reads the logits of the draft's candidates at a layer, and their change since the previous
checked layer. Training must therefore check the same layers as decoding. The same rule chooses
them, and assumes that each exit is the first correct one.
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
"""Size of the hidden layer. The authors use 512, for models of 32 layers and more."""
STEPS, RATE, DECAY = 300, 0.02, 1e-4
"""Steps, learning rate and weight decay of Adam, on all examples at once."""
SHARE = 4
"""One in this many layers is always checked; the authors check 8 of 32."""
THRESHOLDS = (0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class EarlyLogits:
    """Early logits of n answer tokens, from all layers except the last.

    Attributes:
        logits: Logits of the candidates, [n, L - 1, k].
        right: Whether the most likely token there is the target's own, [n, L - 1] bool.
        taken: Whether that token is a candidate, [n, L - 1] bool.
        question: Number of the question of each token, [n]. Tokens of a question are adjacent.
    """

    logits: Tensor
    correct: Tensor
    is_candidate: Tensor
    question: Tensor


@dataclass(frozen=True)
class PredictorQuality:
    """Quality of the predictors on held-out questions.

    For the last three attributes each token follows the target's own text.

    Attributes:
        tokens: Number of tokens.
        right: Share of checks where the most likely token is the target's own, by layer.
        auc: Probability that such a check gets a higher score than another one, by layer.
        exits: Share of tokens with an exit before the last layer, by threshold.
        agree: Share of these that are the target's own, by threshold.
        layers: Mean number of layers that run, by threshold.
    """

    tokens: int
    right: dict[int, float]
    auc: dict[int, float]
    exits: dict[float, float]
    agree: dict[float, float]
    layers: dict[float, float]


# ---- layers to check ----------------------------------------------------------------------------


def choose_offline_layers(early_logits: EarlyLogits) -> tuple[int, ...]:
    """Return the layers, counted from 1, at which most tokens could exit for the first time."""
    could = early_logits.correct & early_logits.is_candidate
    first = could[could.any(1)].int().argmax(1) + 1
    most = max(1, (could.shape[1] + 1) // SHARE)
    return tuple(sorted(layer for layer, _ in Counter(first.tolist()).most_common(most)))


def schedule_checks(early_logits: EarlyLogits, layers: Sequence[int]) -> list[list[int]]:
    """Return the layers that decoding would check for each token, if it takes the first correct
    exit."""
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
        looks = choose_layers(layers, exits, len(each) + 1)
        found.append(looks)
        exits.extend([layer for layer in looks if each[layer - 1]][:1])
    return found


@dataclass(frozen=True)
class ExitChecks:
    """Checks of a schedule, in their order.

    Attributes:
        token: Token of each check, [m].
        layer: Number of layers that have run, [m].
        features: Input of the predictor, [m, 3 k].
    """

    token: Tensor
    layer: Tensor
    features: Tensor


def collect_checks(early_logits: EarlyLogits, planned: Sequence[Sequence[int]]) -> ExitChecks:
    """Return the checks of a schedule."""
    tokens, layers, features = list[int](), list[int](), list[Tensor]()
    for token, looks in enumerate(planned):
        local = None
        for layer in looks:
            read_there, local = make_predictor_input(early_logits.logits[token, layer - 1], local)
            tokens.append(token)
            layers.append(layer)
            features.append(read_there)
    return ExitChecks(torch.tensor(tokens), torch.tensor(layers), torch.stack(features))


# ---- the perceptrons ----------------------------------------------------------------------------


def fit(
    early_logits: EarlyLogits, seed: int = 0
) -> tuple[ExitPredictors, dict[str, Tensor], PredictorQuality]:
    """Return the predictors, their tensors by name, and their quality on held-out questions.

    Raises:
        ValueError: No early layer ever predicts the target's own token.
    """
    if not (early_logits.correct & early_logits.is_candidate).any():
        raise ValueError("no layer but the last ever says the target's own token")
    layers = choose_offline_layers(early_logits)
    looks = collect_checks(early_logits, schedule_checks(early_logits, layers))
    held = (early_logits.question % HELD_OUT == 0)[looks.token]
    right = early_logits.correct[looks.token, looks.layer - 1]
    parts = []
    for layer in range(1, early_logits.correct.shape[1] + 1):
        here = (looks.layer == layer) & ~held
        parts.append(_fit_perceptron(looks.features[here], right[here], seed + layer))
    stacked = map(torch.stack, zip(*parts, strict=True))
    named = dict(zip(("up", "up_bias", "down", "down_bias"), stacked, strict=True))
    made = ExitPredictors(*named.values(), layers=layers)
    return made, named, _measure_quality(early_logits, made, looks, held, right)


def _fit_perceptron(features: Tensor, right: Tensor, seed: int) -> tuple[Tensor, ...]:
    """Return up [3 k, width], up_bias [width], down [width] and down_bias [] of a layer.

    If there are no positive or no negative examples, the perceptron returns a constant: the
    smoothed share of positive ones, or almost 0 without examples.
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
    even, told = (features - mean) / spread, right.float()
    with torch.enable_grad():
        for _ in range(STEPS):
            adam.zero_grad()
            said = (even @ up + up_bias).relu() @ down + down_bias
            binary_cross_entropy_with_logits(said, told).backward()
            adam.step()
    # The normalisation of the features becomes part of the weights.
    scaled = up.detach() / spread[:, None]
    return scaled, up_bias.detach() - mean @ scaled, down.detach(), down_bias.detach()


def _measure_quality(
    early_logits: EarlyLogits, made: ExitPredictors, looks: ExitChecks, held: Tensor, right: Tensor
) -> PredictorQuality:
    chances = torch.zeros(len(right))
    for layer in range(1, early_logits.correct.shape[1] + 1):
        here = looks.layer == layer
        if here.any():
            chances[here] = made(layer, looks.features[here])
    shown = {
        layer: held & (looks.layer == layer) for layer in sorted(set(looks.layer[held].tolist()))
    }
    tokens = int((early_logits.question % HELD_OUT == 0).sum())
    exits, agree, layers = (dict[float, float]() for _ in range(3))
    for threshold in THRESHOLDS:
        leaves = (
            held & (chances > threshold) & early_logits.is_candidate[looks.token, looks.layer - 1]
        )
        first = dict[int, int]()  # first exit of each token
        for at in leaves.nonzero().flatten().tolist():
            first.setdefault(int(looks.token[at]), at)
        by = list(first.values())
        ran = float(looks.layer[by].sum()) + (tokens - len(by)) * (
            early_logits.correct.shape[1] + 1
        )
        exits[threshold] = len(by) / tokens
        agree[threshold] = float(right[by].double().mean()) if by else 1.0
        layers[threshold] = ran / tokens
    return PredictorQuality(
        tokens,
        {layer: float(right[here].double().mean()) for layer, here in shown.items()},
        {layer: area_under_roc(chances[here], right[here]) for layer, here in shown.items()},
        exits,
        agree,
        layers,
    )
