"""What becomes of a prompt's cells once they were measured: verdicts, scores, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite
from typing import Any

from specbench_cli.audit.verdict import Judge, is_judged
from specbench_cli.config.run import RunConfig
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.execute.cell import Cell
from specbench_cli.execute.plan import REFERENCE
from specbench_cli.scoring import score
from specbench_cli.store.schema import Record, Verdict
from specbench_cli.tasks import written_text
from specbench_cli.tasks.schema import Question

REPLAY = "replay"
DECIMALS = 3  # of the log-probabilities that are kept: they are looked at


@dataclass
class Group:
    """The cells of one prompt, which are judged, scored and written together."""

    question: Question
    cells: list[Cell]
    reference: list[int] | None
    scores: dict[tuple[int, ...], float | None] = field(default_factory=dict)
    log_probs: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """Whether every cell's window has been settled."""
        return all(cell.settled for cell in self.cells)


class Judging:
    """Makes records of measured cells.

    Args:
        judge: gives the verdicts.
        config, sampling: of the run.
        tokenizer: of the target.
    """

    def __init__(self, judge: Judge, config: RunConfig, sampling: Sampling, tokenizer: Any) -> None:
        self._judge = judge
        self._config = config
        self._sampling = sampling
        self._tokenizer = tokenizer

    def record(self, cell: Cell, group: Group) -> Record:
        """The record of a cell, which was measured; a failed one has neither verdict nor score."""
        assert cell.measured is not None
        if cell.measured.error is not None:
            return cell.record(None)
        chances = self._log_probs(cell, group)
        # Of outputs that no token verdict is possible of: evidence in place of proof.
        drawn = self._sampling.draws and self._config.verify != REPLAY
        return cell.record(
            self._verdict(cell, group.reference),
            self._score(cell, group),
            log_likelihood=fsum(chances) if chances is not None and drawn else None,
            log_probs=chances and [round(each, DECIMALS) + 0.0 for each in chances],
        )

    def _verdict(self, cell: Cell, reference: Sequence[int] | None) -> Verdict:
        assert cell.measured is not None
        if cell.arm.label == REFERENCE:
            return Verdict("reference")
        rule = self._sampling.rule
        if (
            cell.replays
            or reference is None
            or not is_judged(cell.arm.method.guarantee(rule), rule)
        ):
            return Verdict("unchecked")
        steps = None if cell.arm.method.peer else cell.measured.steps
        return self._judge.verdict(cell.request, reference, cell.measured.output, steps)

    def _score(self, cell: Cell, group: Group) -> float | None:
        """How right the answer is. Equal answers are scored once: running code takes its time."""
        assert cell.measured is not None
        if group.question.scorer is None:
            return None
        ids = tuple(cell.measured.output)
        if ids not in group.scores:
            text = written_text(self._tokenizer, ids)
            group.scores[ids] = score(
                group.question, cell.prompt.turn, text, run_code=self._config.run_code
            )
        return group.scores[ids]

    def _log_probs(self, cell: Cell, group: Group) -> list[float] | None:
        """Of each output token under the target's law: one forward for equal outputs. None of a
        target whose logits are not finite."""
        assert cell.measured is not None
        ids = tuple(cell.measured.output)
        if ids not in group.log_probs:
            group.log_probs[ids] = self._judge.log_probs(cell.request, ids)
        chances = group.log_probs[ids]
        return chances if all(map(isfinite, chances)) else None
