"""Short news articles with a summary of two sentences.

Some sentences of an article are irrelevant.
"""

from collections.abc import Sequence

from specbench_cli.training.generated.lexicon import (
    BENEFITS,
    BUILDINGS,
    COMPANIES,
    MONTHS,
    PRODUCTS,
    REASONS,
    TEAMS,
    TOWNS,
    WEATHER,
    WEEKDAYS,
    person,
)
from specbench_cli.training.generated.template import Draw, FilledTemplate, capitalise, skill

ASKS = (
    "Summarize: {text}",
    "Here is an article from the newspaper. {text} Give me a summary in two sentences.",
    "Sum up this report in two sentences: {text}",
)


def make_remark(d: Draw) -> str:
    """Return a sentence that is irrelevant for the summary of an article."""
    who = person(d)
    return d.rng.choice(
        (
            f'"I had hoped for more," said {who}, who watched from the street.',
            f"{who}, who has lived there for years, was surprised by the news.",
            f'A local man, {who}, told us: "We will talk about this for a long time."',
            f"{who} had written about it in a letter on {d.word(WEEKDAYS)}.",
            f"Pictures by {who} were shown in {d.word(TOWNS)} in {d.word(MONTHS)}.",
        )
    )


def make_article(d: Draw, sentences: Sequence[str], summary: str) -> FilledTemplate:
    """Return an article with its summary.

    An irrelevant remark is inserted between the sentences. Some articles have up to ten remarks.
    """
    text = list(sentences)
    n_remarks = d.number(2, 10) if d.number(1, 8) == 1 else 1
    for _ in range(n_remarks):
        text.insert(d.number(1, len(text)), make_remark(d))
    return FilledTemplate({"text": " ".join(text)}, [summary])


@skill("summarization", "politics", *ASKS)
def council(d: Draw) -> FilledTemplate:
    """Ask for the summary of an article about a town that will build something."""
    town, building, reason = d.word(TOWNS), d.word(BUILDINGS), d.word(REASONS)
    month, cost = d.word(MONTHS), d.number(2, 40)
    return make_article(
        d,
        [
            f"The council of {town} met on {d.word(WEEKDAYS)} to talk about the {building}.",
            f"After a debate led by {person(d)}, it voted for a new {building} because {reason}.",
            f"The project will cost {cost} million dollars, and work is to begin in {month}.",
        ],
        f"{town} will build a new {building} because {reason}. "
        f"Work begins in {month} and will cost {cost} million dollars.",
    )


@skill("summarization", "weather", *ASKS)
def storm(d: Draw) -> FilledTemplate:
    """Ask for the summary of an article about a storm and its damage."""
    town, weather, (first, second) = d.word(TOWNS), d.word(WEATHER), d.words(BUILDINGS, 2)
    homes, days = d.number(20, 400, 10), d.number(2, 9)
    return make_article(
        d,
        [
            f"On {d.word(WEEKDAYS)} {weather} reached {town} shortly before sunrise.",
            f"The {first} was badly damaged, and the {second} had to be closed.",
            f"About {homes} homes were without power, and repairs should take {days} days.",
        ],
        f"{capitalise(weather)} damaged the {first} and closed the {second} in {town}. "
        f"About {homes} homes lost power, and repairs will take {days} days.",
    )


@skill("summarization", "weather", *ASKS)
def closure(d: Draw) -> FilledTemplate:
    """Ask for the summary of an article about a building that is closed after bad weather."""
    town, weather, building = d.word(TOWNS), d.word(WEATHER), d.word(BUILDINGS)
    month, days = d.word(MONTHS), d.number(2, 9)
    return make_article(
        d,
        [
            f"The {building} in {town} has been closed since {d.word(WEEKDAYS)}.",
            f"According to the town, {weather} had made the entrance unsafe.",
            f"The doors open again after {days} days, and a new roof is planned for {month}.",
        ],
        f"{capitalise(weather)} closed the {building} in {town}. "
        f"It will open again after {days} days and get a new roof in {month}.",
    )


@skill("summarization", "sports", *ASKS)
def match(d: Draw) -> FilledTemplate:
    """Ask for the summary of an article about a game and its result."""
    town, (winner, loser), scorer = d.word(TOWNS), d.words(TEAMS, 2), person(d)
    high = d.number(2, 6)
    low = d.number(0, high - 1)
    return make_article(
        d,
        [
            f"About {d.number(2, 40)} thousand people came to {town} on {d.word(WEEKDAYS)} to see "
            f"the {winner} play the {loser}.",
            f"After a slow start {scorer} scored the first goal for the {winner}.",
            f"The {loser} fought until the end, but the {winner} won {high} to {low}.",
        ],
        f"The {winner} beat the {loser} {high} to {low} in {town}. "
        f"The first goal was scored by {scorer}.",
    )


@skill("summarization", "sports", *ASKS)
def transfer(d: Draw) -> FilledTemplate:
    """Ask for the summary of an article about a team with a new coach."""
    (team, rival), town, coach = d.words(TEAMS, 2), d.word(TOWNS), person(d)
    years, month = d.number(2, 6), d.word(MONTHS)
    return make_article(
        d,
        [
            f"The {team} from {town} have found a new coach.",
            f"{coach}, who has worked for the {rival} until now, signed for {years} years.",
            f"The first training is planned for {month}.",
        ],
        f"{coach} leaves the {rival} and will coach the {team} from {town} for {years} years. "
        f"The first training is in {month}.",
    )


@skill("summarization", "business", *ASKS)
def launch(d: Draw) -> FilledTemplate:
    """Ask for the summary of an article about a new product."""
    company, product, benefit = d.word(COMPANIES), d.word(PRODUCTS), d.word(BENEFITS)
    month, price = d.word(MONTHS), d.number(20, 900, 10)
    return make_article(
        d,
        [
            f"At a fair in {d.word(TOWNS)} the company {company} showed a new {product}.",
            f"Its engineers say that it {benefit}.",
            f"It will be sold from {month} on for {price} dollars.",
        ],
        f"{company} has shown a new {product} that {benefit}. "
        f"It costs {price} dollars and will be sold from {month}.",
    )


@skill("summarization", "business", *ASKS)
def recall(d: Draw) -> FilledTemplate:
    """Ask for the summary of an article about a product recall."""
    company, product, (town, plant) = d.word(COMPANIES), d.word(PRODUCTS), d.words(TOWNS, 2)
    sold, month = d.number(2, 90), d.word(MONTHS)
    return make_article(
        d,
        [
            f"The company {company} is calling back its {product}.",
            f"A fault in the {product} was first found in {town} in {month}.",
            f"Some {sold} thousand pieces made in {plant} must be repaired, said {person(d)}, "
            f"the head of {company}.",
        ],
        f"{company} calls back {sold} thousand pieces of its {product} made in {plant}. "
        f"The fault was found in {town} in {month}.",
    )
