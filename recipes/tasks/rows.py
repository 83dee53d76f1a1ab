"""Questions of the generated tasks that specbench ships. A row is one question."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from recipes.tasks import agentic, repair
from recipes.tasks.workflow import Workflow
from specbench_cli.errors import UsageError
from specbench_cli.training.generated.rows import GeneratedConversation, generate_rows
from specbench_cli.training.generated.template import FAMILIES, TEMPLATES, Draw


def mini_rows(
    seed: int = 0, per_family: int = 80, exclude: Iterable[GeneratedConversation] = ()
) -> list[GeneratedConversation]:
    """Return the rows of the task `mini`, with different first turns, grouped by family.

    Args:
        per_family: number of rows of each family.
        exclude: rows whose first turns must not occur.

    Raises:
        UsageError: the lexicons do not contain enough words for that many different first turns.
    """
    kept: dict[str, list[GeneratedConversation]] = {family: [] for family in FAMILIES}
    seen = {known["turns"][0] for known in exclude}
    limit = 10 * per_family * len(FAMILIES)
    for candidate in generate_rows(seed, "mini"):
        rows = kept[candidate["family"]]
        if len(rows) < per_family and candidate["turns"][0] not in seen:
            seen.add(candidate["turns"][0])
            rows.append({**candidate, "id": f"{candidate['family']}-{len(rows):03d}"})
        if all(len(rows) == per_family for rows in kept.values()):
            return [row for family in FAMILIES for row in kept[family]]
        limit -= 1
        if limit == 0:
            break
    short = min(kept, key=lambda family: len(kept[family]))
    raise UsageError(
        f"{per_family} rows per family are too many: only {len(kept[short])} different ones of"
        f" {short} were found",
        "use fewer rows per family",
    )


def best_of_n_rows() -> list[GeneratedConversation]:
    """Return the rows of the task `best-of-n`. They are like those of `mini`, with other first
    turns.
    """
    return mini_rows(seed=1, per_family=8, exclude=mini_rows())


def workflow_rows(
    workflows: Sequence[Workflow], per_category: int, seed: int = 0
) -> list[GeneratedConversation]:
    """Return the rows of a task with conversations of several turns.

    Each category has `per_category` rows. The workflows of a category alternate.
    """
    rows: list[GeneratedConversation] = []
    seen: set[str] = set()
    for category in dict.fromkeys(workflow.category for workflow in workflows):
        forms = [workflow for workflow in workflows if workflow.category == category]
        for index in range(per_category):
            form = forms[index % len(forms)]
            draw = Draw(random.Random(f"{category}/{seed}/{index}"))
            while (turns := form.write(draw))[0][0] in seen:
                pass
            seen.add(turns[0][0])
            rows.append(
                GeneratedConversation(
                    id=f"{category}-{index:03d}",
                    family=form.family,
                    category=category,
                    template=f"{category}_{form.name}",
                    turns=[question for question, _ in turns],
                    reference=[answer for _, answer in turns],
                )
            )
    return rows


CHAINS = ("more", "sharing", "together", "poem_reversed")
"""Skills whose first answer has several lines, one per step: sums that build on each other, or one
verse for each of three things."""


def chain_rows(
    seed: int = 0, per_template: int = 20, skills: Sequence[str] = CHAINS
) -> list[GeneratedConversation]:
    """Return the rows of the task `chains`. Their words and wordings occur in the training texts.

    Args:
        per_template: number of rows for each wording.
        skills: names of skills whose answers have one step per line.
    """
    rows: list[GeneratedConversation] = []
    seen: set[str] = set()
    for skill in skills:
        for form in (t for t in TEMPLATES if t.fill.__name__ == skill):
            for index in range(per_template):
                draw = Draw(
                    random.Random(f"chains/{seed}/{form.name}/{index}"),
                    0 if form.held_out else None,
                )
                while (first := form.write(draw)[0])[0] in seen:
                    pass
                seen.add(first[0])
                rows.append(
                    GeneratedConversation(
                        id=f"{form.name}-{index:03d}",
                        family=form.family if form.family == "math_reasoning" else "other",
                        category="sums" if form.family == "math_reasoning" else "verses",
                        template=form.name,
                        turns=[first[0]],
                        reference=[first[1]],
                    )
                )
    return rows


TASKS: Mapping[str, Callable[[], list[GeneratedConversation]]] = {
    "mini": mini_rows,
    "best-of-n": best_of_n_rows,
    "chains": chain_rows,
    "agentic": partial(workflow_rows, agentic.WORKFLOWS, per_category=24),
    "repair": partial(workflow_rows, repair.WORKFLOWS, per_category=36),
}
"""Name -> generator, for each generated task that specbench ships."""


def lines(task: str) -> Iterator[str]:
    """Yield the lines of the JSON Lines file of a task. `task` is one of `TASKS`."""
    return (json.dumps(generated, ensure_ascii=False) for generated in TASKS[task]())
