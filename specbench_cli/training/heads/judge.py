"""Mining of labels for a judge, and the files of one; `methods.judge.training` trains it.

AutoJudge (Garipov et al., NeurIPS 2025, arXiv:2504.20039) mines labels from the models themselves.
Mining walks through the target's greedy answer. Where the draft predicts another token, that token
replaces the target's, and the target continues after it. If the task's scorer finds the new answer
no worse, the token is harmless and mining continues with the new answer. Otherwise the token is
important and the old answer is kept.
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
"""That are mined."""
MAX_ANSWER = 96
"""Tokens of an answer."""


@dataclass(frozen=True)
class JudgeQuestion:
    """A question to mine: as it is scored, and its prompt's tokens."""

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
    """Mine questions.

    Args:
        ends: tokens that end an answer.
        text: an answer's, by its tokens.
        report: called with the number of questions done.
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
    asked: JudgeQuestion,
    ends: frozenset[int],
    text: Callable[[Sequence[int]], str],
) -> Iterator[tuple[Tensor, bool]]:
    """Of each place where the draft would part from the answer: the row of its token, and whether
    that is harmless."""
    prompt = list(asked.ids)

    def worth(answer: Sequence[int]) -> float:
        return score(asked.question, 1, text(answer)) or 0.0

    answer = complete_answer(workspace, prompt, (), ends)
    kept, at = worth(answer), 0
    said = _likeliest(workspace.decoders["draft"], prompt, answer)
    while at < len(answer):
        token = said[at]
        if token != answer[at]:
            start = [*answer[:at], token]
            row = _row(workspace.decoders["target"], [*prompt, *start])
            other = complete_answer(workspace, prompt, start, ends)
            good = worth(other) >= kept
            yield row, good
            if good:
                answer, kept = other, worth(other)
                said = _likeliest(workspace.decoders["draft"], prompt, answer)
        at += 1


def complete_answer(
    workspace: Workspace, prompt: Sequence[int], start: Sequence[int], ends: frozenset[int]
) -> list[int]:
    """An answer that begins so, as the target greedily goes on with it."""
    if (start and start[-1] in ends) or len(start) >= MAX_ANSWER:
        return list(start)
    rule = StopRule(ends, MAX_ANSWER - len(start))
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


def export(
    folder: Path, weight: Tensor, bias: Tensor, quality: JudgeQuality, facts: dict[str, Any]
) -> None:
    """Write model.safetensors and config.json; `facts` and what it is worth go under
    "specbench"."""
    named = {"weight": weight.contiguous(), "bias": bias.contiguous()}
    labels = {"kind": "judge", **facts, "held_out": asdict(quality)}
    config = {"hidden_size": len(weight), "specbench": labels}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    with files.staging_folder(folder, overwrite=None) as staging:
        save_file(named, staging / "model.safetensors", metadata={"format": "pt"})
        (staging / "config.json").write_text(text, encoding="utf-8")
