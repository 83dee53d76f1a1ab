"""Training a judge: labels mined from the models themselves, a logistic regression, export.

Mining (AutoJudge: Garipov et al., NeurIPS 2025, arXiv:2504.20039). The target's greedy answer is
walked; where the draft would say another token, that token takes the place of the target's and the
target goes on behind it. If the task's scorer then finds the answer no worse, the token was
harmless and the new answer is walked on; else it was important and the old one stays. The features
of a token are the target's normed row that has read it (Bachmann et al., ICLR 2025,
arXiv:2501.19309).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specbench_cli import registry
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.scoring import score
from specbench_cli.tasks import Question

N_QUESTIONS = 1500
"""That are mined."""
HELD_OUT = 5
"""One question in so many measures, and is not trained on."""
MOST = 96
"""Tokens of an answer."""
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Of the squared weights in the loss, tried on what is held out."""
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Asked:
    """A question to mine: as it is scored, and its prompt's tokens."""

    question: Question
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Mined:
    """Drafted tokens that are not the target's own, n of them.

    rows: [n, hidden], the target's normed rows that have read each. harmless: [n] bool. question:
    [n], the number of the question that each is from.
    """

    rows: Tensor
    harmless: Tensor
    question: Tensor


@dataclass(frozen=True)
class Judged:
    """What a judge is worth on questions held out.

    tokens: how many it was asked of; harmless: the share of these that were. auc: the chance that
    it finds a harmless token more so than an important one. caught: by threshold, the share of
    important tokens that it stops; passed: of the harmless ones, the share that it lets pass.
    """

    tokens: int
    harmless: float
    auc: float
    strength: float
    caught: dict[float, float]
    passed: dict[float, float]


def mine(
    target: Decoder,
    draft: Decoder,
    asked: Sequence[Asked],
    ends: frozenset[int],
    text: Callable[[Sequence[int]], str],
    report: Callable[[int], None] = lambda _: None,
) -> Mined:
    """Mine questions.

    Args:
        ends: tokens that end an answer.
        text: an answer's, by its tokens.
        report: called with the number of questions done.
    """
    longest = max((len(each.ids) for each in asked), default=0) + MOST
    workspace = Workspace({"target": target, "draft": draft}, longest)
    found: list[tuple[Tensor, bool, int]] = []
    for at, each in enumerate(asked):
        found += [(row, good, at) for row, good in _walked(workspace, each, ends, text)]
        report(at + 1)
    if not found:
        return Mined(torch.empty(0, target.hidden_size), torch.empty(0).bool(), torch.empty(0))
    rows, harmless, question = zip(*found, strict=True)
    return Mined(torch.stack(rows), torch.tensor(harmless), torch.tensor(question))


@torch.inference_mode()
def _walked(
    workspace: Workspace,
    asked: Asked,
    ends: frozenset[int],
    text: Callable[[Sequence[int]], str],
) -> Iterator[tuple[Tensor, bool]]:
    """Of each place where the draft would part from the answer: the row of its token, and whether
    that is harmless."""
    prompt = list(asked.ids)

    def worth(answer: Sequence[int]) -> float:
        return score(asked.question, 1, text(answer)) or 0.0

    answer = finished(workspace, prompt, (), ends)
    kept, at = worth(answer), 0
    said = _likeliest(workspace.decoders["draft"], prompt, answer)
    while at < len(answer):
        token = said[at]
        if token != answer[at]:
            start = [*answer[:at], token]
            row = _row(workspace.decoders["target"], [*prompt, *start])
            other = finished(workspace, prompt, start, ends)
            good = worth(other) >= kept
            yield row, good
            if good:
                answer, kept = other, worth(other)
                said = _likeliest(workspace.decoders["draft"], prompt, answer)
        at += 1


def finished(
    workspace: Workspace, prompt: Sequence[int], start: Sequence[int], ends: frozenset[int]
) -> list[int]:
    """An answer that begins so, as the target greedily goes on with it."""
    if (start and start[-1] in ends) or len(start) >= MOST:
        return list(start)
    rule = StopRule(ends, MOST - len(start))
    session = Session(workspace, Request("judge", 1, (*prompt, *start), rule), Sampling())
    for _ in registry.build("sps", {}).generate(session):
        pass
    return [*start, *session.output()]


def _likeliest(draft: Decoder, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """The draft's token in each of an answer's places."""
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=draft.device)
    out = draft.forward(Tokens(ids), draft.new_state(ids.shape[1]), logits_at="all")
    found: list[int] = out.rows[len(prompt) - 1 :].argmax(-1).tolist()
    return found


def _row(target: Decoder, ids: Sequence[int]) -> Tensor:
    """The normed row [hidden] that has read the last of some tokens."""
    x = Tokens(torch.tensor([list(ids)], device=target.device))
    out = target.forward(x, target.new_state(len(ids)), logits_at=None)
    row: Tensor = target.norm(out.hidden[0, -1:])[0].float().cpu()
    return row


# ---- the regression -----------------------------------------------------------------------------


def fit(mined: Mined) -> tuple[Tensor, Tensor, Judged]:
    """Weight [hidden] and bias [1] of the strength that ranks held-out tokens best, and what they
    are worth there. Both labels weigh as much as each other in the loss."""
    held = mined.question % HELD_OUT == 0
    inside, told = mined.rows[~held].double(), mined.harmless[~held]
    rows, truth = mined.rows[held].double(), mined.harmless[held]
    tried = []
    for strength in STRENGTHS:
        weight, bias = _logistic(inside, told, strength)
        tried.append((area_under(rows @ weight + bias, truth), strength, weight, bias))
    auc, strength, weight, bias = max(tried, key=lambda each: each[0])
    chances = (rows @ weight + bias).sigmoid()
    judged = Judged(
        tokens=len(truth),
        harmless=float(truth.double().mean()),
        auc=auc,
        strength=strength,
        caught={t: _share(chances[~truth] <= t) for t in THRESHOLDS},
        passed={t: _share(chances[truth] > t) for t in THRESHOLDS},
    )
    return weight.float(), bias.float(), judged


def _logistic(rows: Tensor, told: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    weight = torch.zeros(rows.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    n = len(told)
    share = told.double().mean().clamp(1 / max(n, 1), 1 - 1 / max(n, 2))
    counts = torch.where(told, 0.5 / share, 0.5 / (1 - share))
    solver = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        missed = binary_cross_entropy_with_logits(rows @ weight + bias, told.double(), counts)
        total: Tensor = missed + strength * weight.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        solver.step(loss)
    return weight.detach(), bias.detach()


def area_under(scores: Tensor, truth: Tensor) -> float:
    """The chance that a true one's score is above a false one's, ties half: the area under the ROC
    curve; one half where all are of one kind."""
    good, bad = scores[truth], scores[~truth]
    if not len(good) or not len(bad):
        return 0.5
    ahead = (good[:, None] > bad).double() + 0.5 * (good[:, None] == bad).double()
    return float(ahead.mean())


def _share(of: Tensor) -> float:
    return float(of.double().mean()) if len(of) else 0.0


def export(
    folder: Path, weight: Tensor, bias: Tensor, judged: Judged, facts: dict[str, Any]
) -> None:
    """Write model.safetensors and config.json; `facts` and what it is worth go under
    "specbench"."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {"weight": weight.contiguous(), "bias": bias.contiguous()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    told = {"kind": "judge", **facts, "held_out": asdict(judged)}
    config = {"hidden_size": len(weight), "specbench": told}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
