"""Training labels and files of a Judge Decoding head. `methods.judge.training` trains it.

AutoJudge (Garipov et al., NeurIPS 2025, arXiv:2504.20039) mines labels from the models themselves.
Mining goes through the target's greedy answer. If the draft model predicts another token, this
draft token replaces the target's token, and the target completes a new answer. If the task's scorer
rates the new answer no worse, the draft token is harmless, and mining continues with the new
answer. Otherwise the draft token is harmful, and the old answer is kept.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from methods.judge.training import JudgeQuality, MinedTokens
from specbench_cli import files, registry
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
"""Default number of questions."""
MAX_ANSWER = 96
"""Maximum length of an answer in tokens."""


@dataclass(frozen=True)
class JudgeQuestion:
    """Question to mine labels from, with the token ids of its prompt."""

    question: Question
    ids: tuple[int, ...]


def mine_labels(
    target: Decoder,
    draft: Decoder,
    questions: Sequence[JudgeQuestion],
    ends: frozenset[int],
    decode: Callable[[Sequence[int]], str],
    report: Callable[[int], None] = lambda _: None,
) -> MinedTokens:
    """Find draft tokens that differ from the target's token, and label them as harmless or not.

    Args:
        ends: tokens that end an answer.
        decode: function that returns the text of token ids.
        report: function that is called with the number of questions done.
    """
    longest = max((len(each.ids) for each in questions), default=0) + MAX_ANSWER
    workspace = Workspace({"target": target, "draft": draft}, longest)
    found: list[tuple[Tensor, bool, int]] = []
    for at, each in enumerate(questions):
        found += [(row, good, at) for row, good in _mine_question(workspace, each, ends, decode)]
        report(at + 1)
    if not found:
        return MinedTokens(
            torch.empty(0, target.hidden_size), torch.empty(0).bool(), torch.empty(0)
        )
    rows, harmless, question = zip(*found, strict=True)
    return MinedTokens(torch.stack(rows), torch.tensor(harmless), torch.tensor(question))


@torch.inference_mode()
def _mine_question(
    workspace: Workspace,
    question: JudgeQuestion,
    ends: frozenset[int],
    decode: Callable[[Sequence[int]], str],
) -> Iterator[tuple[Tensor, bool]]:
    """Yield a hidden state and a label for each draft token that differs from the target's token.

    The hidden state is the target's hidden state at the draft token. The label is True if the token
    is harmless.
    """
    prompt = list(question.ids)

    def score_answer(answer: Sequence[int]) -> float:
        return score(question.question, 1, decode(answer)) or 0.0

    answer = complete_answer(workspace, prompt, (), ends)
    best_score, at = score_answer(answer), 0
    drafted = _draft_greedily(workspace.decoders["draft"], prompt, answer)
    while at < len(answer):
        token = drafted[at]
        if token != answer[at]:
            start = [*answer[:at], token]
            row = _get_hidden_state(workspace.decoders["target"], [*prompt, *start])
            other = complete_answer(workspace, prompt, start, ends)
            harmless = score_answer(other) >= best_score
            yield row, harmless
            if harmless:
                answer, best_score = other, score_answer(other)
                drafted = _draft_greedily(workspace.decoders["draft"], prompt, answer)
        at += 1


def complete_answer(
    workspace: Workspace, prompt: Sequence[int], start: Sequence[int], ends: frozenset[int]
) -> list[int]:
    """Complete an answer greedily with the target. The answer begins with `start`."""
    if (start and start[-1] in ends) or len(start) >= MAX_ANSWER:
        return list(start)
    rule = StopRule(ends, MAX_ANSWER - len(start))
    session = Session(workspace, Request("judge", 1, (*prompt, *start), rule), Sampling())
    for _ in registry.build("sps", {}).generate(session):
        pass
    return [*start, *session.output()]


def _draft_greedily(draft: Decoder, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Return the draft model's most likely token at each position of an answer."""
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=draft.device)
    out = draft.forward(Tokens(ids), draft.new_state(ids.shape[1]), logits_at="all")
    found: list[int] = out.rows[len(prompt) - 1 :].argmax(-1).tolist()
    return found


def _get_hidden_state(target: Decoder, ids: Sequence[int]) -> Tensor:
    """Return the target's normed hidden state [width] after the last token."""
    x = Tokens(torch.tensor([list(ids)], device=target.device))
    out = target.forward(x, target.new_state(len(ids)), logits_at=None)
    row: Tensor = target.norm(out.hidden[0, -1:])[0].float().cpu()
    return row


def export(
    folder: Path, weight: Tensor, bias: Tensor, quality: JudgeQuality, facts: dict[str, Any]
) -> None:
    """Write model.safetensors and config.json of a judge head.

    Args:
        quality: quality on held-out questions. It is stored under "specbench" in config.json.
        facts: further entries under "specbench".
    """
    named = {"weight": weight.contiguous(), "bias": bias.contiguous()}
    origin = {"kind": "judge", **facts, "held_out": asdict(quality)}
    config = {"hidden_size": len(weight), "specbench": origin}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    with files.staging_folder(folder, overwrite=None) as staging:
        save_file(named, staging / "model.safetensors", metadata={"format": "pt"})
        (staging / "config.json").write_text(text, encoding="utf-8")
