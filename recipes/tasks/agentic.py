"""Conversations of an agent with a tool: a tool call, the tool's output, an answer, a revision.

They resemble the workloads of SuffixDecoding (arXiv:2411.04975): the same instructions in every
request, answers that copy from the tool's output, and answers that are repeated in full after a
check, with or without one change. The tool's output is always that of the right call, whatever the
model answered before. So every turn has one right answer.

In `documents`, `orders` and `plan`, the prompt describes the format of the answers. These are for
models that follow instructions. `research` and `revision` use the prompts that the embedded models
were trained on, with `mini`'s held-out wordings and words. Only the repetition is new: passages and
articles come again with one change.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from recipes.tasks.workflow import Workflow
from specbench_cli.training.generated import rag, summarization
from specbench_cli.training.generated.lexicon import (
    BUILDINGS,
    COMPANIES,
    EVENTS,
    EXHIBITS,
    FESTIVAL_THINGS,
    GEAR,
    ITEMS,
    MATERIALS,
    MONTHS,
    NAMES,
    PRODUCTS,
    TEAMS,
    TOWNS,
    WEEKDAYS,
    person,
)
from specbench_cli.training.generated.template import Draw, Skill, Turns, capitalise, with_article

OUTPUT = "Output of the tool:\n{lines}"
AGAIN = "Check: nothing is wrong any more. Write all lines once more."

COLLECT = (
    "You are an agent that collects facts. Your tool is search(name), which returns passages. "
    "First write the calls, one a line, such as search(Borealis). When the passages are there, "
    "write one line for each name, such as: name: Borealis; town: Halden; passage: 2. "
    "Write nothing else.\n\nTask: {task}"
)
MISREAD = "Check: the tool misread a passage. It is {passage}\nWrite all lines again, corrected."


class LookupSubject(NamedTuple):
    """A kind of thing that the agent looks up.

    kind: name of the kind.
    name: function that draws the name of a thing.
    passage: template of a passage about the thing.
    facts: for each fact that the user asks for, a function that draws its value.
    """

    kind: str
    name: Callable[[Draw], str]
    passage: str
    facts: Mapping[str, Callable[[Draw], Any]]


def _draw_year(d: Draw) -> int:
    return d.number(1800, 1990)


SUBJECTS = (
    LookupSubject(
        "museum",
        lambda d: f"{d.word(TOWNS)} Museum of {capitalise(d.word(EXHIBITS))}",
        "The {name} was opened in {year} by {founder}, and entry is free.",
        {"founder": person, "year": _draw_year},
    ),
    LookupSubject(
        "bridge",
        lambda d: f"{d.word(TOWNS)} Bridge",
        "The {name} is made of {material} and was finished in {year}, after two storms.",
        {"material": lambda d: d.word(MATERIALS), "year": _draw_year},
    ),
    LookupSubject(
        "festival",
        lambda d: f"{d.word(TOWNS)} Festival of {capitalise(d.word(FESTIVAL_THINGS))}",
        "The {name} is held in {month} and lasts {days} days, whatever the weather.",
        {"month": lambda d: d.word(MONTHS), "days": lambda d: d.number(2, 9)},
    ),
    LookupSubject(
        "company",
        lambda d: d.word(COMPANIES),
        "The company {name} is in {town}, and every {product} that it makes is tested twice.",
        {"town": lambda d: d.word(TOWNS), "product": lambda d: d.word(PRODUCTS)},
    ),
    LookupSubject(
        "team",
        lambda d: f"{d.word(TOWNS)} {d.word(TEAMS)}",
        "The {name} have won {titles} titles under {coach}, who never played for them.",
        {"coach": person, "titles": lambda d: d.number(2, 30)},
    ),
)


def _write_documents(d: Draw, subject: LookupSubject) -> Turns:
    """Return the turns of a conversation about documents.

    The agent searches twice and reports the facts found. Then the user corrects one fact, and the
    agent repeats the answer.
    """
    names: list[str] = []
    while len(names) < 3:
        name = subject.name(d)
        if name not in names:
            names.append(name)
    facts = [{key: draw(d) for key, draw in subject.facts.items()} for _ in names]
    place = d.rng.sample(range(3), 3)  # order of the passages; the third one is not needed

    def passage(at: int) -> str:
        return f"Passage {place[at] + 1}: {subject.passage.format(name=names[at], **facts[at])}"

    def lines() -> str:
        found = ({"name": names[at], **facts[at], "passage": place[at] + 1} for at in (0, 1))
        return "\n".join("; ".join(f"{k}: {v}" for k, v in each.items()) for each in found)

    one, other = subject.facts
    task = f"Find {one} and {other} of {names[0]} and of {names[1]}."
    turns = [
        (COLLECT.format(task=task), "\n".join(f"search({name})" for name in names[:2])),
        (OUTPUT.format(lines="\n".join(sorted(map(passage, range(3))))), lines()),
    ]
    wrong = d.number(0, 1)
    facts[wrong] = {
        **facts[wrong],
        other: _draw_other(d, subject.facts[other], [facts[wrong][other]]),
    }
    return [*turns, (MISREAD.format(passage=passage(wrong)), lines()), (AGAIN, lines())]


def _draw_other(d: Draw, draw: Callable[[Draw], Any], but: Sequence[Any]) -> Any:
    """Draw values until one is not in `but`, and return it."""
    while (found := draw(d)) in but:
        pass
    return found


COUNT = (
    "You are an agent that counts orders. Your tool is select(column, value), which returns the "
    "rows (number | buyer | town | item | amount) where a column has a value. First write the "
    "call, such as select(item, books). When the rows are there, copy those that count, one a "
    "line, and then the sum of their amounts, such as: total: 12. Write nothing else."
    "\n\nTask: {task}"
)
MORE = "Output of the tool, which found more rows:\n{lines}\nWrite all lines again, with these."
CANCELLED = "Check: order {number} was cancelled. Write all lines again, without it."

QUERIES = {
    ("buyer", "item"): "Select what {buyer} has ordered. How many {item} are among it?",
    ("town", "item"): "Select what goes to {town}. How many {item} are among it?",
    ("item", "town"): "Select all {item}. How many of them go to {town}?",
    ("item", "buyer"): "Select all {item}. How many of them has {buyer} ordered?",
}
"""Selected column, column that decides which rows count -> question."""


def _write_orders(d: Draw, query: tuple[str, str]) -> Turns:
    """Return the turns of a conversation about orders.

    The agent writes a query and reports the matching rows with their sum. Then more rows are added,
    and one row is removed.

    Args:
        query: the selected column, and the column that decides which rows match.
    """
    selected, counted = query
    words = {"buyer": d.words(NAMES, 4), "town": d.words(TOWNS, 4), "item": d.words(ITEMS, 4)}
    numbers = d.rng.sample(range(100, 1000), 7)

    def order(number: int, counts: bool) -> dict[str, Any]:
        row = {column: d.rng.choice(values) for column, values in words.items()}
        row[selected] = words[selected][0]
        row[counted] = words[counted][0] if counts else d.rng.choice(words[counted][1:])
        return {"number": number, **row, "amount": d.number(2, 30)}

    def table(rows: Sequence[Mapping[str, Any]]) -> str:
        return "\n".join(" | ".join(str(value) for value in row.values()) for row in rows)

    def lines(rows: Sequence[Mapping[str, Any]]) -> str:
        held = [row for row in rows if row[counted] == words[counted][0]]
        return f"{table(held)}\ntotal: {sum(row['amount'] for row in held)}"

    which = [True, True, True, False, False]
    d.rng.shuffle(which)
    rows = list(map(order, numbers, [*which, True, False]))
    first, more = rows[: len(which)], rows[len(which) :]
    gone = d.rng.choice([row for row in first if row[counted] == words[counted][0]])
    kept = [row for row in rows if row is not gone]
    task = QUERIES[query].format(**{column: values[0] for column, values in words.items()})
    return [
        (COUNT.format(task=task), f"select({selected}, {words[selected][0]})"),
        (OUTPUT.format(lines=table(first)), lines(first)),
        (MORE.format(lines=table(more)), lines(rows)),
        (CANCELLED.format(number=gone["number"]), lines(kept)),
    ]


PLAN = (
    "You are an agent that carries out plans. Write the plan as one line for each step, in the "
    "order given, such as: [open] call the doctor. After each output of the tool write the whole "
    "plan again, with [done] for [open] where a step is done. Write nothing else.\n\nTask: {task}"
)
FAILED = "{said}, {failed}: not possible. Take this step in its place: {instead}."

STEPS: Mapping[str, Callable[[Draw], str]] = {
    "place": lambda d: f"book the {d.word(BUILDINGS)}",
    "goods": lambda d: f"order {d.number(20, 90)} {d.word(ITEMS)}",
    "guest": lambda d: f"write to {person(d)}",
    "gear": lambda d: f"borrow {d.word(GEAR)}",
}


def _write_plan(d: Draw, fails: str) -> Turns:
    """Return the turns of a conversation about a plan.

    The agent writes a plan. Then one step is replaced, two steps are marked as done, and finally
    all.

    Args:
        fails: kind of the step that fails and is replaced.
    """
    kinds = d.rng.sample([*STEPS], len(STEPS))
    steps = [STEPS[kind](d) for kind in kinds]
    at = kinds.index(fails)
    instead = _draw_other(d, STEPS[fails], [steps[at]])

    def lines(done: Sequence[int]) -> str:
        return "\n".join(f"[{'done' if i in done else 'open'}] {s}" for i, s in enumerate(steps))

    task = (
        f"Prepare {with_article(d.word(EVENTS))} in {d.word(TOWNS)} on {d.word(WEEKDAYS)}. "
        f"First {steps[0]}, then {steps[1]}, then {steps[2]}, and last {steps[3]}."
    )
    other, *rest = [i for i in range(len(steps)) if i != at]
    said = f"{steps[other]}: done"
    turns = [(PLAN.format(task=task), lines([]))]
    failure = FAILED.format(said=said, failed=steps[at], instead=instead)
    steps[at] = instead
    now = f"{steps[rest[0]]}: done, {steps[at]}: done."
    return [
        *turns,
        (OUTPUT.format(lines=failure), lines([other])),
        (OUTPUT.format(lines=now), lines([other, rest[0], at])),
        (OUTPUT.format(lines=f"{steps[rest[1]]}: done."), lines(range(len(steps)))),
    ]


HELD_OUT, HALF_B = 1, 1
"""Index of the held-out wording, and of the second half of the lexicons. No model was trained on
this combination."""


def _write_research(d: Draw, about: Callable[[Draw], rag.Fact]) -> Turns:
    """Return four turns with questions about passages of text.

    The first two turns show two passages, the other turns show three. The last turn repeats the
    first
    question.
    """
    d = Draw(d.rng, HALF_B)
    others = [write for write in rag.SUBJECTS if write is not about]
    facts = [about(d), *(write(d) for write in d.rng.sample(others, 2))]

    def turn(asked: int, found: int) -> tuple[str, str]:
        lines = (f"Passage {i}: {fact.passage}" for i, fact in enumerate(facts[:found], 1))
        gaps = {"passages": "\n".join(lines), "question": facts[asked].question}
        answer = f"{facts[asked].answer} See passage {asked + 1}."
        return rag.ASKS[HELD_OUT].format(**gaps), answer

    return [turn(0, 2), turn(1, 2), turn(2, 3), turn(0, 3)]


LONGEST_ARTICLE = 450
"""Maximum number of characters of an article. Longer ones contain remarks that no summary needs."""


def _write_revision(d: Draw, write: Skill) -> Turns:
    """Return three turns: summarize an article, then summarize it again with one changed number."""
    d = Draw(d.rng, HALF_B)
    text, numbers = "", list[str]()
    while not numbers or len(text) > LONGEST_ARTICLE:
        gaps, (summary,) = write(d)
        text = gaps["text"]
        inside = re.findall(r"\d+", text)
        numbers = [n for n in re.findall(r"\d+", summary) if inside.count(n) == 1]
    turns = []
    for _ in range(3):
        turns.append((summarization.ASKS[HELD_OUT].format(text=text), summary))
        at = d.rng.randrange(len(numbers))
        old = re.compile(rf"\b{numbers[at]}\b")
        inside = re.findall(r"\d+", text)
        numbers[at] = _draw_other(d, lambda d: str(d.number(2, 99)), inside)
        text, summary = (old.sub(numbers[at], each) for each in (text, summary))
    return turns


WORKFLOWS = (
    *(
        Workflow("rag", "research", f.__name__, partial(_write_research, about=f))
        for f in rag.SUBJECTS
    ),
    *(
        Workflow("summarization", "revision", f.__name__, partial(_write_revision, write=f))
        for f in (
            summarization.council,
            summarization.storm,
            summarization.closure,
            summarization.match,
            summarization.transfer,
            summarization.launch,
            summarization.recall,
        )
    ),
    *(
        Workflow("multi_turn", "documents", each.kind, partial(_write_documents, subject=each))
        for each in SUBJECTS
    ),
    *(
        Workflow("multi_turn", "orders", "_".join(q), partial(_write_orders, query=q))
        for q in QUERIES
    ),
    *(Workflow("multi_turn", "plan", fails, partial(_write_plan, fails=fails)) for fails in STEPS),
)
