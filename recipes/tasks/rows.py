"""Rows of the generated tasks that specbench ships."""

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
    """The task `mini`: `per_family` different rows of each family, families in order.

    Args:
        apart_from: rows whose first turns do not occur.

    Raises UsageError where the lexicons cannot give that many different first turns.
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
        f"{per_family} rows a family are too many: {short} has {len(kept[short])} different ones",
        "ask for fewer rows a family",
    )


def best_of_n_rows() -> list[GeneratedConversation]:
    """The task `best-of-n`: rows like `mini`'s, and none of them; its card has each asked often."""
    return mini_rows(seed=1, per_family=8, exclude=mini_rows())


def workflow_rows(
    workflows: Sequence[Workflow], per_category: int, seed: int = 0
) -> list[GeneratedConversation]:
    """A task of workflows: so many rows of each category, whose workflows take turns."""
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
"""Skills whose answers are chains of lines, of which the first turn's is asked for: two sums, each
on the last one's result, and that; or a verse for each of three things."""


def chain_rows(
    seed: int = 0, per_template: int = 20, skills: Sequence[str] = CHAINS
) -> list[GeneratedConversation]:
    """The task `chains`: so many rows of each wording, with the words it was trained on.

    Args:
        skills: by name; those of other skills may not have a step a line.
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
"""The generated tasks that are shipped."""


def lines(task: str) -> Iterator[str]:
    """The file of a generated task, line by line; `task` is one of `TASKS`."""
    return (json.dumps(generated, ensure_ascii=False) for generated in TASKS[task]())
