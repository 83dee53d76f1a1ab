"""Retrieval-augmented questions: several passages, and a question about one of them."""

from collections.abc import Callable
from typing import NamedTuple

from specbench_cli.training.generated.lexicon import (
    COLOR_NAMES,
    COMPANIES,
    EXHIBITS,
    FESTIVAL_THINGS,
    JOBS,
    MATERIALS,
    MONTHS,
    PRODUCTS,
    TEAMS,
    TOWNS,
    person,
)
from specbench_cli.training.generated.template import (
    Draw,
    FilledTemplate,
    capitalise,
    skill,
    with_article,
)
from specbench_cli.training.generated.world import RIVERS

ASKS = (
    "Answer the question from the passages.\n{passages}\nQuestion: {question}",
    "{passages}\nUse these passages to answer. {question}",
    "I have found some passages.\n{passages}\nWith their help, tell me: {question}",
)


class Fact(NamedTuple):
    """A retrieved passage with one question about it and the answer."""

    passage: str
    question: str
    answer: str


def museum(d: Draw) -> Fact:
    """Return a passage about a museum, its founder and its year."""
    town, founder, year = d.word(TOWNS), person(d), d.number(1800, 1990)
    name = f"{town} Museum of {capitalise(d.word(EXHIBITS))}"
    return Fact(
        f"The {name} was opened in {year} by {founder}. "
        f"It has {d.number(10, 90, 5)} thousand visitors a year.",
        f"When was the {name} opened, and by whom?",
        f"The {name} was opened by {founder} in {year}.",
    )


def crossing(d: Draw) -> Fact:
    """Return a passage about a bridge, its length and its material."""
    town, river, material = d.word(TOWNS), d.word(RIVERS), d.word(MATERIALS)
    length, year = d.number(40, 900, 10), d.number(1800, 1990)
    return Fact(
        f"The {town} Bridge crosses the river {river}. "
        f"It is {length} meters long, made of {material}, and was finished in {year}.",
        f"How long is the {town} Bridge, and what is it made of?",
        f"The {town} Bridge over the {river} is {length} meters long and made of {material}.",
    )


def festival(d: Draw) -> Fact:
    """Return a passage about a festival, its month and its length."""
    town, thing, month = d.word(TOWNS), d.word(FESTIVAL_THINGS), d.word(MONTHS)
    days = d.number(2, 9)
    return Fact(
        f"Each {month} the town of {town} holds its Festival of {capitalise(thing)}. "
        f"It lasts {days} days and was first held by {with_article(d.word(JOBS))}.",
        f"When is the Festival of {capitalise(thing)} in {town}, and how long does it last?",
        f"The Festival of {capitalise(thing)} in {town} is held in {month} and lasts {days} days.",
    )


def inventor(d: Draw) -> Fact:
    """Return a passage about an inventor, the invention and the company that sold it."""
    who, job = person(d), d.word(JOBS)
    product, company, year = d.word(PRODUCTS), d.word(COMPANIES), d.number(1900, 1999)
    return Fact(
        f"{who}, who had worked as {with_article(job)}, invented a new {product} in {year}. "
        f"It was later sold by the company {company}.",
        f"What did {who} invent, and which company sold it?",
        f"{who} invented a new {product} in {year}, and the company {company} sold it.",
    )


def team(d: Draw) -> Fact:
    """Return a passage about a sports team, its coach and its titles."""
    name, (one, two) = f"{d.word(TOWNS)} {d.word(TEAMS)}", d.words(COLOR_NAMES, 2)
    coach, titles = person(d), d.number(2, 9)
    return Fact(
        f"The {name} play in {one} and {two}. "
        f"Under their coach {coach} they have won {titles} titles.",
        f"Who coaches the {name}, and how many titles have they won?",
        f"The coach of the {name} is {coach}, and they have won {titles} titles.",
    )


def firm(d: Draw) -> Fact:
    """Return a passage about a company, its town and its product."""
    name, town, product = d.word(COMPANIES), d.word(TOWNS), d.word(PRODUCTS)
    founder, workers = person(d), d.number(20, 900, 10)
    return Fact(
        f"The company {name} was started by {founder} in {town}. "
        f"Its {workers} workers make a {product} that is sold all over the world.",
        f"Where is the company {name}, and what does it make?",
        f"The company {name} is in {town}, and its {workers} workers make a {product}.",
    )


SUBJECTS = (museum, crossing, festival, inventor, team, firm)


def make_passages(d: Draw, about: Callable[[Draw], Fact]) -> FilledTemplate:
    """Return passages on different subjects, and a question about one of them.

    There are usually 2 or 3 passages, sometimes up to 14.

    Args:
        about: function that returns the passage with the question.
    """
    relevant = about(d)
    rest = [write for write in SUBJECTS if write is not about]
    n_others = d.number(3, 13) if d.number(1, 12) == 1 else d.number(1, 2)
    facts = [relevant, *(write(d) for write in d.rng.sample(rest * 3, n_others))]
    d.rng.shuffle(facts)
    passages = "\n".join(f"Passage {i}: {fact.passage}" for i, fact in enumerate(facts, 1))
    return FilledTemplate(
        {"passages": passages, "question": relevant.question},
        [f"{relevant.answer} See passage {facts.index(relevant) + 1}."],
    )


@skill("rag", "culture", *ASKS)
def about_museum(d: Draw) -> FilledTemplate:
    """Ask about a museum."""
    return make_passages(d, museum)


@skill("rag", "places", *ASKS)
def about_crossing(d: Draw) -> FilledTemplate:
    """Ask about a bridge."""
    return make_passages(d, crossing)


@skill("rag", "culture", *ASKS)
def about_festival(d: Draw) -> FilledTemplate:
    """Ask about a festival."""
    return make_passages(d, festival)


@skill("rag", "business", *ASKS)
def about_inventor(d: Draw) -> FilledTemplate:
    """Ask about an inventor."""
    return make_passages(d, inventor)


@skill("rag", "sports", *ASKS)
def about_team(d: Draw) -> FilledTemplate:
    """Ask about a team."""
    return make_passages(d, team)


@skill("rag", "business", *ASKS)
def about_firm(d: Draw) -> FilledTemplate:
    """Ask about a company."""
    return make_passages(d, firm)
