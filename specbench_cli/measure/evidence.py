"""What is measured of a run's outputs beside their verdicts, once they are all there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.errors import PromptError
from specbench_cli.judge.verdict import Judge
from specbench_cli.measure.bench import Bench
from specbench_cli.plan.plan import Plan
from specbench_cli.stats.neartie import at_least_one
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import Record
from specbench_cli.tasks import Question

Outputs = Mapping[tuple[str, int, int], Sequence[int]]
"""Outputs by prompt, turn and pass."""


def texts(plan: Plan, bench: Bench) -> Iterator[list[int]]:
    """What the tolerance is measured on: the run's questions, then the others of its tasks.

    The same whenever and by whichever pass it is asked for.
    """
    rest = (question for task in plan.tasks for question in task.questions)
    for question in (*plan.questions, *rest):
        with suppress(PromptError):  # the model may be unable to decode questions outside the run
            yield bench.prompt(question)


def pictured(questions: Sequence[Question]) -> frozenset[str]:
    """Questions on which every row keeps its drafts, in pass 1: the first of each family, in the
    plan's order. A constant, so that whoever reads records knows where to look; a sample, because
    drafts are larger than all the rest of a record."""
    first: dict[str, str] = {}
    for question in questions:
        first.setdefault(question.family, question.prompt_id)
    return frozenset(first.values())


def has_near_tie(records: Iterable[Record]) -> bool:
    """Return True if an output is a near-tie, so that vanilla's ties are needed to explain it."""
    return any(r.verdict is not None and r.verdict.kind == "near-tie" for r in records)


def near_ties(
    judge: Judge,
    prompts: Mapping[tuple[str, int], Prompt],
    vanilla: Outputs,
    request: Callable[[str, int, Sequence[int], StopRule], Request],
) -> dict[str, Any]:
    """Where vanilla's outputs have ties within the tolerance, and so near-ties may be expected.

    This costs one forward of transformers' module per output. The verdict of a near-tie, which
    needs the result, has measured the tolerance before.

    Args:
        judge: of the run.
        prompts: as they were.
        vanilla: its outputs; of several passes the first counts, as all are the same.
        request: makes one of a prompt; see `Bench.request`.
    Returns:
        For the manifest: how many `outputs` and `positions` were looked at, how many positions are
        `ties`, how many outputs are `expected` at most to differ by rounding, and by output
        (prompt, turn) the `chances` above 0.
    """
    first: dict[tuple[str, int], Sequence[int]] = {}
    for (prompt_id, turn, _), ids in sorted(vanilla.items()):
        first.setdefault((prompt_id, turn), ids)
    ties, chances = 0, []
    for key, ids in first.items():
        # Chances depend on neither stop strings nor budget.
        asked = request(*key, prompts[key].ids, StopRule(frozenset(), len(ids)))
        at = judge.chances(asked, ids)
        ties += sum(chance > 0 for chance in at)
        if any(at):
            chances.append([*key, at_least_one(at)])
    return {
        "outputs": len(first),
        "positions": sum(map(len, first.values())),
        "ties": ties,
        "expected": sum(chance for *_, chance in chances),
        "chances": chances,
    }
