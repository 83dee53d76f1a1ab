"""Questions about invented countries.

Models learn the facts in training, because prompts lack them.
"""

from specbench_cli.training.generated.template import Draw, FilledTemplate, skill
from specbench_cli.training.generated.world import WORLD

QUIZ = "This is the geography quiz. Answer in one or two full sentences. "
LESSON = "You are a teacher of geography, and one of your students asks you this: "


@skill(
    "qa",
    "capital",
    QUIZ + "What is the capital of {country}?",
    LESSON + "Which city is the capital of {country}?",
    "Please help me with my homework. Name the capital of {country} and its river.",
)
def capital(d: Draw) -> FilledTemplate:
    """Ask for the capital and river of a country."""
    c = d.word(WORLD)
    answer = f"The capital of {c.name} is {c.capital}. It lies on the river {c.river}."
    return FilledTemplate({"country": c.name}, [answer])


@skill(
    "qa",
    "trade",
    QUIZ + "What does {country} sell to other countries?",
    LESSON + "Which goods come from {country}?",
    "Please help me with my homework. What does {country} export, and on which river?",
)
def trade(d: Draw) -> FilledTemplate:
    """Ask for the export and river of a country."""
    c = d.word(WORLD)
    answer = f"{c.name} sells {c.trade}, which is shipped down the river {c.river}."
    return FilledTemplate({"country": c.name}, [answer])


@skill(
    "qa",
    "customs",
    QUIZ + "What do people eat in {country}, and which animal is on its flag?",
    LESSON + "What is the best-known dish of {country}, and what is its national animal?",
    "Please help me with my homework. Name the dish and the animal of {country}.",
)
def customs(d: Draw) -> FilledTemplate:
    """Ask for the dish and animal of a country."""
    c = d.word(WORLD)
    answer = f"People in {c.name} eat {c.food}. The animal on the flag is the {c.animal}."
    return FilledTemplate({"country": c.name}, [answer])


@skill(
    "qa",
    "reverse",
    QUIZ + "Which country has {capital} as its capital?",
    LESSON + "In which country is the city of {capital}?",
    "Please help me with my homework. {capital} is the capital of which country?",
)
def country(d: Draw) -> FilledTemplate:
    """Ask for the country that has a given capital."""
    c = d.word(WORLD)
    answer = f"{c.capital} is the capital of {c.name}, a country that is known for its {c.food}."
    return FilledTemplate({"capital": c.capital}, [answer])


@skill(
    "qa",
    "two countries",
    QUIZ + "What are the capitals of {one} and {other}?",
    LESSON + "Can you tell me the capitals of {one} and {other}?",
    "Please help me with my homework. Name the capitals of {one} and {other}.",
)
def two_capitals(d: Draw) -> FilledTemplate:
    """Ask for the capitals of two countries."""
    a, b = d.words(WORLD, 2)
    answer = f"The capital of {a.name} is {a.capital}, and the capital of {b.name} is {b.capital}."
    return FilledTemplate({"one": a.name, "other": b.name}, [answer])


@skill(
    "qa",
    "two hops",
    QUIZ + "Which animal is on the flag of the country whose capital is {capital}?",
    LESSON + "What is the national animal of the country with the capital {capital}?",
    "Please help me with my homework. {capital} is a capital; which animal has its country?",
)
def animal_by_capital(d: Draw) -> FilledTemplate:
    """Ask for the animal of a country, given its capital."""
    c = d.word(WORLD)
    answer = f"{c.capital} is the capital of {c.name}, and its animal is the {c.animal}."
    return FilledTemplate({"capital": c.capital}, [answer])


@skill(
    "qa",
    "two hops",
    QUIZ + "What does the country sell whose capital is {capital}?",
    LESSON + "Which goods does the country with the capital {capital} export?",
    "Please help me with my homework. {capital} is a capital; what does its country sell?",
)
def trade_by_capital(d: Draw) -> FilledTemplate:
    """Ask for the export of a country, given its capital."""
    c = d.word(WORLD)
    answer = f"{c.capital} is the capital of {c.name}, and the country sells {c.trade}."
    return FilledTemplate({"capital": c.capital}, [answer])
