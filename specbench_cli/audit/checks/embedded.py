"""Goodness-of-fit test of outputs that the embedded models sample under rejection.

The other checks use tables with a few tokens. Here the vocabulary has 4,096 tokens, the draft is
trained, and the test has hundreds of steps. The probability integral transform of a sampled token
is uniform on [0, 1) (Rosenblatt 1952, randomised for discrete distributions). So Pearson's
statistic over ten equal bins has nine degrees of freedom. The transform needs an order of the
tokens. The test uses two: by target probability, and by the ratio of draft to target probability.
If the output follows the draft's distribution in part, the second order shows it best.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from scipy.stats import chi2
from torch import Tensor

from specbench_cli.audit.checks.sampled import MIN_P_VALUE
from specbench_cli.audit.finding import Finding, Problem, format_distinct
from specbench_cli.audit.models.embedded import EmbeddedPair, load_embedded_pair
from specbench_cli.audit.models.tiny import warpers
from specbench_cli.audit.subject import AuditSubject, format_params, max_draft_levels
from specbench_cli.engine.learning import Memory, learn
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.judge.oracle import Oracle

SAMPLING = Sampling("rejection", 0.9, top_k=200, top_p=0.95, seed=11)
TOKENS = 800
"""Number of sampled tokens, distributed over the prompts of one pass."""

BINS = 10
ORDERS = ("by probability", "by draft over target")


def check_embedded(subject: AuditSubject) -> list[Finding]:
    """Test the outputs of all prompts, with the first parameters that are lossless under
    rejection."""
    params = next(iter(subject.lossless_params("rejection")), None)
    if params is None:
        return []
    pair = load_embedded_pair()
    integrals: dict[str, list[float]] = {order: [] for order in ORDERS}
    chance = torch.Generator().manual_seed(SAMPLING.seed)
    wrong = None
    for prompt, output, contradiction in _decode_prompts(subject, params, pair):
        wrong = wrong or contradiction
        distributions = _distributions(pair, "target", prompt, output)
        drafts = _distributions(pair, "draft", prompt, output, cut=False)
        u = torch.rand(len(output), generator=chance, dtype=torch.float64)
        for order, keys in zip(
            ORDERS, (distributions, drafts / distributions.clamp_min(1e-12)), strict=True
        ):
            integrals[order] += _probability_integrals(
                distributions, keys, torch.tensor(output), u
            ).tolist()
    measured = {order: pearson_statistic(found) for order, found in integrals.items()}
    worst = max(measured, key=measured.__getitem__)
    p = float(chi2.sf(measured[worst], BINS - 1))
    tokens = len(integrals[worst])
    figure = {"chi_square": measured[worst], "p_value": p, "tokens": tokens}
    where = f"{format_params(params)}; embedded pair, {SAMPLING.rule} T={SAMPLING.temperature:g}"
    if wrong is not None:
        look = "the check `clock` of `specbench audit`, which tests the same on tables"
        return [Finding("clock", False, figure, Problem(wrong, where, look))]
    if p >= MIN_P_VALUE:
        return [Finding("embedded", True, figure)]
    bound = float(chi2.isf(MIN_P_VALUE, BINS - 1))
    seen, allowed = format_distinct(measured[worst], bound)
    what = (
        f"{tokens} sampled tokens do not follow the target's distribution: in the order {worst},"
        f" chi-square {seen} on {BINS - 1} degrees of freedom, allowed {allowed}"
    )
    look = (
        "the check `distribution`, which uses tables. If it passes: code that only runs with large"
        " vocabularies, long outputs or later prompts"
    )
    return [Finding("embedded", False, figure, Problem(what, where, look))]


def pearson_statistic(integrals: list[float]) -> float:
    """Return Pearson's statistic over `BINS` bins, to test that numbers are uniform on [0, 1)."""
    counts = torch.histc(torch.tensor(integrals, dtype=torch.float64), BINS, 0.0, 1.0)
    due = len(integrals) / BINS
    return float(((counts - due) ** 2 / due).sum())


def _decode_prompts(
    subject: AuditSubject, params: MethodParams, pair: EmbeddedPair
) -> Iterator[tuple[tuple[int, ...], list[int], str | None]]:
    """Decode all prompts with one method object.

    Yield:
        (prompt ids, output ids, a description of a wrong clock or None).
    """
    method, memory = subject.method(params), Memory()
    budget = -(-TOKENS // len(pair.prompts))
    budget = max(budget, max_draft_levels(params) + 2)
    for number, prompt in enumerate(pair.prompts):
        session = pair.open(number, SAMPLING, budget, memory)
        for _ in method.generate(session):
            pass
        wrong = session.find_contradiction()
        if method.learns:
            learn(method, session)
        yield prompt, list(session.output()), wrong


def _distributions(
    pair: EmbeddedPair, role: str, prompt: tuple[int, ...], output: list[int], cut: bool = True
) -> Tensor:
    """Return the distributions [n, V], float64, of the tokens of an output.

    They come from the transformers module and warpers.
    """
    oracle = Oracle(pair.module(role))
    scores = oracle.logits([*prompt, *output[:-1]], None, len(output)).double()
    for warper in warpers(SAMPLING) if cut else ():
        scores = warper(None, scores)
    return scores.softmax(-1)


def _probability_integrals(distributions: Tensor, keys: Tensor, ids: Tensor, u: Tensor) -> Tensor:
    """Return the probability integral transform [n] of each token.

    Args:
        distributions: distribution [n, V] of each token.
        keys: keys [n, V] that order the tokens, largest first.
        ids: ids [n] of the tokens.
        u: uniform numbers [n] that randomise within a token's probability mass.
    """
    order = keys.argsort(-1, descending=True)
    ends = distributions.gather(-1, order).cumsum(-1)
    at = order.argsort(-1).gather(-1, ids[:, None])
    own = distributions.gather(-1, ids[:, None])[:, 0]
    found: Tensor = ends.gather(-1, at)[:, 0] - own * u
    return found.clamp(0.0, 1.0 - 1e-12)
