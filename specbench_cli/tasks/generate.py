"""Seeded, program-generated tasks: six families that mirror Spec-Bench's, without any download.

Every row comes from a *template*: a function that draws words from small closed lexicons and
returns its turns with the full answer to each, so every answer can be checked. Rows are a pure
function of (seed, split, index): `stream(seed, "train")` is what the embedded family learns from,
`mini_rows` is the task `mini`.

**Held out by combination.** Each lexicon is cut into halves A and B (even and odd positions).
Templates marked `held_out` see half A only while training; all others see the whole lexicon. `mini`
is made of held-out templates with half B: each word and each template was trained on, but never the
two together, so no prompt of `mini` can occur in training.

To extend: add words to the end of a lexicon, or write another `@template` function. Both change
every row drawn afterwards, so regenerate `datasets_cfg/mini/mini.jsonl` (and retrain).

    python -m specbench_cli.tasks.generate > datasets_cfg/mini/mini.jsonl
"""

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple, TypedDict, TypeVar

from specbench_cli.errors import UsageError

Split = Literal["train", "mini"]
Turns = list[tuple[str, str]]
T = TypeVar("T")

FAMILIES = ("multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag")


class Row(TypedDict):
    """One generated conversation; `reference` holds the whole answer expected at each turn."""

    id: str
    family: str
    category: str
    template: str
    turns: list[str]
    reference: list[str]


@dataclass(frozen=True, slots=True)
class Draw:
    """Random choices for one row; `half` 0 or 1 limits words to that half of each lexicon."""

    rng: random.Random
    half: int | None = None

    def _pool(self, words: Sequence[T]) -> Sequence[T]:
        return words if self.half is None else words[self.half :: 2]

    def word(self, words: Sequence[T]) -> T:
        """One entry of a lexicon."""
        return self.rng.choice(self._pool(words))

    def words(self, words: Sequence[T], n: int) -> list[T]:
        """`n` different entries of a lexicon."""
        return self.rng.sample(self._pool(words), n)

    def say(self, *wordings: str) -> str:
        """One of several ways to put the same thing; wordings are never split into halves."""
        return self.rng.choice(wordings)

    def number(self, low: int, high: int, step: int = 1) -> int:
        """A number from `low` to `high`, both included."""
        return self.rng.randrange(low, high + 1, step)


class Template(NamedTuple):
    """A registered template."""

    family: str
    category: str
    name: str
    held_out: bool
    write: Callable[[Draw], Turns]


TEMPLATES: list[Template] = []


def template(
    family: str, category: str | None = None, *, held_out: bool = False
) -> Callable[[Callable[[Draw], Turns]], Callable[[Draw], Turns]]:
    """Register the decorated function as a template named after it."""

    def register(write: Callable[[Draw], Turns]) -> Callable[[Draw], Turns]:
        TEMPLATES.append(Template(family, category or family, write.__name__, held_out, write))
        return write

    return register


def an(noun: str) -> str:
    """`noun` with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def cap(text: str) -> str:
    """`text` with its first letter upper-case, the rest as it is."""
    return text[0].upper() + text[1:]


def listing(items: Sequence[str]) -> str:
    """`a, b and c`."""
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else items[0]


# ---------------------------------------------------------------------------------------- lexicons

NAMES = (
    "Anna Ben Clara David Ella Felix Grace Henry Ida Jonas Kate Leo Mia Noah Olga Paul "
    "Rosa Simon Tina Victor Wendy Zoe Adam Lena"
).split()
SURNAMES = (
    "Brook Carter Dale Ellis Fisher Grant Hale Irving Keller Lane Marsh Norton Price Quinn "
    "Reed Stone Turner Vance Walker Young"
).split()
TOWNS = (
    "Halden Brimley Corvin Dunmore Eastwick Farley Granton Holbrook Kelmore Linford Marlow "
    "Northam Oakridge Penrose Redhill Selby Thornton Upwell Wexford Yarrow"
).split()
COMPANIES = (
    "Altera Borealis Cobalt Dynamo Equinox Fernway Goldleaf Harbor Ironwood Juniper Kestrel "
    "Lumen Meridian Northstar Orchard Pinnacle"
).split()
TEAMS = (
    "Lions Hawks Rovers Wolves Comets Sharks Eagles Bears Tigers Foxes Ravens Bulls Storks "
    "Panthers Otters Falcons"
).split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday".split()
ITEMS = (
    "apples pencils books marbles stickers oranges cookies candles stamps shells cards balloons "
    "muffins eggs flowers bottles buttons peaches"
).split()
BUILDINGS = (
    "library,school,bridge,hospital,theater,train station,swimming pool,town hall,market hall,"
    "fire station,sports center,museum,harbor,bus depot"
).split(",")
PRODUCTS = (
    "phone,bicycle,camera,heater,printer,lamp,tractor,watch,speaker,battery,drone,oven,"
    "keyboard,scooter"
).split(",")
BENEFITS = (
    "saves energy,weighs much less,is easy to repair,works in the rain,makes no noise,"
    "lasts twice as long,costs less to build,is safe for children"
).split(",")
REASONS = (
    "the old one was too small,many families had asked for it,the region is growing fast,"
    "visitors had complained for years,the roof of the old one was leaking,"
    "safety rules had changed,the mayor had promised it,prices had fallen"
).split(",")
WEATHER = (
    "strong winds,heavy rain,thick snow,a sudden flood,large hailstones,a long thunderstorm,"
    "freezing fog,high waves"
).split(",")
PLACES = ("beach,forest,mountains,desert,city,lake,island,village,river,farm,castle,jungle").split(
    ","
)
GEAR = (
    "a map,a warm jacket,sunglasses,a bottle of water,a small tent,a camera,good boots,"
    "a first-aid kit,a flashlight,some fruit,a notebook,a rope,a blanket,an umbrella,"
    "a pocket knife,a towel"
).split(",")
JOBS = (
    "baker,pilot,gardener,teacher,sailor,doctor,painter,farmer,singer,carpenter,nurse,"
    "detective,cook,librarian,astronomer,fisherman"
).split(",")
TRAITS = (
    "patient,curious,brave,careful,cheerful,quiet,honest,clever,gentle,stubborn,generous,proud"
).split(",")
HOBBIES = (
    "chess,swimming,old films,photography,jazz,hiking,poetry,cooking,astronomy,cycling,"
    "pottery,birdwatching,dancing,model trains"
).split(",")
SCENERY = (
    "the wind,the moon,a distant bell,the tall grass,a small boat,the morning sun,an owl,"
    "the cold river,a silver cloud,the old tree,a lonely road,the first snow"
).split(",")
SCENE_VERBS = (
    "sings to,waits for,watches over,dreams of,follows,listens to,hides from,shines on,"
    "whispers to,calls"
).split(",")
EVENTS = (
    "birthday party,concert,book club,picnic,dance evening,chess tournament,art show,"
    "garden party,film night,cooking class"
).split(",")
EXHIBITS = (
    "clocks,maps,masks,coins,paintings,kites,swords,carpets,toys,ships,violins,fossils"
).split(",")
MATERIALS = "stone,steel,oak,brick,iron,granite,concrete,marble".split(",")
FESTIVAL_THINGS = (
    "lanterns,cheese,boats,puppets,cherries,drums,horses,soup,roses,kites,bread,fireworks"
).split(",")


class Action(NamedTuple):
    """A small deed in a story, in both tenses."""

    present: str
    past: str


ACTIONS = [
    Action(*pair.split("/"))
    for pair in (
        "finds an old key/found an old key,opens a hidden door/opened a hidden door,"
        "meets a friendly dog/met a friendly dog,climbs a steep hill/climbed a steep hill,"
        "reads a strange letter/read a strange letter,loses a red scarf/lost a red scarf,"
        "hears a soft voice/heard a soft voice,builds a wooden raft/built a wooden raft,"
        "crosses a narrow bridge/crossed a narrow bridge,sees a bright light/saw a bright light,"
        "follows a white cat/followed a white cat,writes a long song/wrote a long song,"
        "buys a silver ring/bought a silver ring,draws a secret map/drew a secret map,"
        "bakes a cherry pie/baked a cherry pie,takes the last train/took the last train"
    ).split(",")
]


# -------------------------------------------------------------------------------------- multi_turn


@template("multi_turn", "writing", held_out=True)
def story_past(d: Draw) -> Turns:
    """A story in the present, then the same story in the past."""
    name, job, place = d.word(NAMES), d.word(JOBS), d.word(PLACES)
    deeds = d.words(ACTIONS, 3)
    ask = d.say(
        f"Write a short story about {name}, {an(job)} near the {place}.",
        f"Tell me a short story. The hero is {name}, {an(job)} who lives near the {place}.",
    )

    def tell(live: str, acts: Sequence[str], is_: str) -> str:
        return (
            f"{name} {is_} {an(job)} and {live} near the {place}. One day {name} {acts[0]}. "
            f"Then {name} {acts[1]}. In the end {name} {acts[2]} and {is_} happy."
        )

    rewrite = d.say(
        "Now rewrite your story in the past tense.",
        "Rewrite your previous response in the past tense.",
    )
    return [
        (ask, tell("lives", [a.present for a in deeds], "is")),
        (rewrite, tell("lived", [a.past for a in deeds], "was")),
    ]


@template("multi_turn", "writing")
def story_continued(d: Draw) -> Turns:
    """The start of a story, in the past or the present, then two more sentences."""
    name, friend = d.words(NAMES, 2)
    past = d.number(0, 1) == 1
    job, place = d.word(JOBS), d.word(PLACES)
    deeds = [deed.past if past else deed.present for deed in d.words(ACTIONS, 4)]
    came, met, stayed = ("came", "met", "stayed") if past else ("comes", "meets", "stay")
    ask = d.say(
        f"Begin a story about {an(job)} named {name} at the {place}.",
        f"Write the first lines of a story about {name}, {an(job)} at the {place}.",
    )
    begin = (
        f"{'Long ago' if past else 'Today'} {an(job)} named {name} {came} to the {place}. "
        f"On the first day {name} {deeds[0]}. On the second day {name} {deeds[1]}."
    )
    go_on = d.say(f"Continue the story and add {friend}.", f"Go on, and let {name} meet {friend}.")
    more = (
        f"On the third day {name} {met} {friend}. On the fourth day {friend} {deeds[2]}. "
        f"After that {name} {deeds[3]}, and they {stayed} friends for life."
    )
    return [(ask, begin), (go_on, more)]


@template("multi_turn", "writing")
def packing(d: Draw) -> Turns:
    """Things to pack in prose, then as a numbered list."""
    place, month = d.word(PLACES), d.word(MONTHS)
    gear = d.words(GEAR, 4)
    ask = d.say(
        f"What should I pack for a trip to the {place} in {month}?",
        f"I am going to the {place} in {month}. Name four things to take along.",
    )
    answer = (
        f"For a trip to the {place} in {month} you should pack {gear[0]} and {gear[1]}. "
        f"It is also wise to take {gear[2]}, and do not forget {gear[3]}."
    )
    rewrite = d.say(
        "Rewrite your answer as a numbered list.", "Turn your answer into a numbered list."
    )
    return [(ask, answer), (rewrite, "\n".join(f"{i}. {cap(g)}" for i, g in enumerate(gear, 1)))]


@template("multi_turn", "roleplay", held_out=True)
def introduction(d: Draw) -> Turns:
    """A portrait, then the same as if that person spoke."""
    name, job, town = d.word(NAMES), d.word(JOBS), d.word(TOWNS)
    traits, hobbies = d.words(TRAITS, 2), d.words(HOBBIES, 2)
    ask = d.say(
        f"Describe {name}, {an(job)} from {town}.", f"Who is {name}, the {job} from {town}?"
    )
    first = (
        f"{name} is {an(job)} from {town}. People say that {name} is {traits[0]} and {traits[1]}. "
        f"After work {name} enjoys {hobbies[0]} and {hobbies[1]}."
    )
    second = (
        f"My name is {name} and I am {an(job)} from {town}. People say that I am {traits[0]} and "
        f"{traits[1]}. After work I enjoy {hobbies[0]} and {hobbies[1]}."
    )
    turn = d.say(
        f"Rewrite your answer as if you were {name}.", f"Now answer again, speaking as {name}."
    )
    return [(ask, first), (turn, second)]


@template("multi_turn", "roleplay")
def interview(d: Draw) -> Turns:
    """An answer in somebody's role, then a portrait of them."""
    name, job, town = d.word(NAMES), d.word(JOBS), d.word(TOWNS)
    trait, hobbies = d.word(TRAITS), d.words(HOBBIES, 2)
    ask = d.say(
        f"Pretend to be {name}, {an(job)} from {town}. What do you like?",
        f"You are {name}, {an(job)} from {town}. Tell me about yourself.",
    )
    answer = (
        f"Hello, I am {name} from {town}. As {an(job)} I have to be {trait}. "
        f"In my free time I like {hobbies[0]}, but I like {hobbies[1]} even more."
    )
    turn = d.say(
        f"Now describe {name} in the third person.",
        f"Sum up what we know about {name} in the third person.",
    )
    summary = (
        f"{name} is {an(job)} from {town} who has to be {trait}. In the free time {name} likes "
        f"{hobbies[0]}, but {name} likes {hobbies[1]} even more."
    )
    return [(ask, answer), (turn, summary)]


@template("multi_turn", "extraction", held_out=True)
def invitation(d: Draw) -> Turns:
    """An invitation, then its facts as a list."""
    host, guest = d.words(NAMES, 2)
    event, town, day, hour = d.word(EVENTS), d.word(TOWNS), d.word(WEEKDAYS), d.number(2, 9)
    ask = d.say(
        f"Write a short invitation from {host} to {guest} for {an(event)} in {town} "
        f"on {day} at {hour}.",
        f"{host} plans {an(event)} in {town} on {day} at {hour}. Write to {guest} for {host}.",
    )
    letter = (
        f"Dear {guest},\nI would like to invite you to {an(event)} in {town}. It takes place on "
        f"{day} and begins at {hour} in the evening. Please tell me soon whether you can come.\n"
        f"Yours, {host}"
    )
    turn = d.say(
        "List what, where, when and who from your letter.",
        "Extract what, where, when and who from your previous response.",
    )
    facts = f"What: {event}\nWhere: {town}\nWhen: {day} at {hour}\nWho: {host} and {guest}"
    return [(ask, letter), (turn, facts)]


@template("multi_turn", "extraction")
def schedule(d: Draw) -> Turns:
    """A plan for a day, then the same as a timetable."""
    name, day, town = d.word(NAMES), d.word(WEEKDAYS), d.word(TOWNS)
    hours = sorted(d.rng.sample(range(2, 10), 3))
    events = d.words(EVENTS, 3)
    ask = d.say(
        f"Plan {day} in {town} for {name}.", f"What can {name} do in {town} on {day}? Make a plan."
    )
    plan = (
        f"On {day} at {hours[0]} {name} can go to {an(events[0])} in {town}. At {hours[1]} there "
        f"is {an(events[1])}, and at {hours[2]} the day ends with {an(events[2])}."
    )
    turn = d.say("Write your plan as a timetable.", "Turn your plan into a timetable.")
    table = "\n".join(f"{h}:00 {e}" for h, e in zip(hours, events, strict=True))
    return [(ask, plan), (turn, f"{day} in {town}\n{table}")]


def verse(d: Draw, lines: int) -> list[str]:
    """`lines` lines of free verse."""
    things = d.words(SCENERY, lines + 1)
    return [f"{cap(things[i])} {d.word(SCENE_VERBS)} {things[i + 1]}," for i in range(lines)]


@template("multi_turn", "humanities", held_out=True)
def poem_reversed(d: Draw) -> Turns:
    """Three free lines, then the same lines from last to first."""
    place, month = d.word(PLACES), d.word(MONTHS)
    lines = verse(d, 3)
    ask = d.say(
        f"Write three lines of poetry about the {place} in {month}.",
        f"Write a tiny poem of three lines. The theme is the {place} in {month}.",
    )
    end = f"here by the {place} in {month}."
    turn = d.say("Reverse the order of your lines.", "Write your poem again from last to first.")
    return [(ask, "\n".join([*lines, end])), (turn, "\n".join([*reversed(lines), end]))]


@template("multi_turn", "humanities")
def poem_longer(d: Draw) -> Turns:
    """Two free lines, then the same with two more."""
    place, month = d.word(PLACES), d.word(MONTHS)
    lines = verse(d, 4)
    ask = d.say(
        f"Write two lines of poetry about the {place} in {month}.",
        f"Write a tiny poem of two lines. The theme is the {place} in {month}.",
    )
    end = f"here by the {place} in {month}."
    turn = d.say("Make your poem two lines longer.", "Add two lines before the last one.")
    return [(ask, "\n".join([*lines[:2], end])), (turn, "\n".join([*lines, end]))]


# ------------------------------------------------------------------------------------- translation


class Noun(NamedTuple):
    """An English noun, its German word and its German gender (m, f or n)."""

    en: str
    de: str
    gender: str


class Verb(NamedTuple):
    """A transitive verb: English base, third person and past; German third person and past."""

    base: str
    third: str
    past: str
    de_third: str
    de_past: str


class Pair(NamedTuple):
    """A phrase in both languages (German adjectives as their stem)."""

    en: str
    de: str


PEOPLE = [
    Noun(*entry.split("/"))
    for entry in (
        "farmer/Bauer/m woman/Frau/f teacher/Lehrer/m girl/Mädchen/n child/Kind/n doctor/Arzt/m "
        "sister/Schwester/f baker/Bäcker/m queen/Königin/f cook/Koch/m aunt/Tante/f uncle/Onkel/m "
        "boy/Junge/m mother/Mutter/f neighbor/Nachbar/m student/Studentin/f"
    ).split()
]
THINGS = [
    Noun(*entry.split("/"))
    for entry in (
        "apple/Apfel/m book/Buch/n lamp/Lampe/f letter/Brief/m car/Auto/n table/Tisch/m "
        "cup/Tasse/f picture/Bild/n hat/Hut/m flower/Blume/f knife/Messer/n clock/Uhr/f "
        "chair/Stuhl/m bag/Tasche/f house/Haus/n key/Schlüssel/m bottle/Flasche/f dress/Kleid/n "
        "coat/Mantel/m ship/Schiff/n"
    ).split()
]
VERBS = [
    Verb(*entry.split("/"))
    for entry in (
        "buy/buys/bought/kauft/kaufte,see/sees/saw/sieht/sah,sell/sells/sold/verkauft/verkaufte,"
        "find/finds/found/findet/fand,bring/brings/brought/bringt/brachte,"
        "carry/carries/carried/trägt/trug,draw/draws/drew/zeichnet/zeichnete,"
        "need/needs/needed/braucht/brauchte,look for/looks for/looked for/sucht/suchte,"
        "clean/cleans/cleaned/putzt/putzte,take/takes/took/nimmt/nahm,"
        "repair/repairs/repaired/repariert/reparierte"
    ).split(",")
]
ADJECTIVES = [
    Pair(*entry.split("/"))
    for entry in (
        "old/alt small/klein big/groß young/jung beautiful/schön poor/arm rich/reich "
        "strange/seltsam new/neu famous/berühmt quiet/still strong/stark"
    ).split()
]
COLORS = [
    Pair(*entry.split("/"))
    for entry in (
        "red/rot green/grün blue/blau white/weiß black/schwarz yellow/gelb heavy/schwer "
        "cheap/billig round/rund brown/braun simple/einfach gray/grau"
    ).split()
]
WHERE = [
    Pair(*entry.split("/"))
    for entry in (
        "at the market/auf dem Markt,in the garden/im Garten,at school/in der Schule,"
        "in the city/in der Stadt,at the station/am Bahnhof,in the kitchen/in der Küche,"
        "by the river/am Fluss,in the village/im Dorf,on the street/auf der Straße,"
        "at the harbor/am Hafen"
    ).split(",")
]
WHEN = [
    Pair(*entry.split("/"))
    for entry in (
        "today/heute,in the evening/am Abend,on Monday/am Montag,in the morning/am Morgen,"
        "in summer/im Sommer,on Sunday/am Sonntag,at night/in der Nacht,in winter/im Winter,"
        "at noon/am Mittag,on Friday/am Freitag"
    ).split(",")
]
THE = {"m": "der", "f": "die", "n": "das"}
ENDING = {"m": "en", "f": "e", "n": "es"}  # of the adjective after ein/kein in the accusative
ARTICLE = {"m": "en", "f": "e", "n": ""}  # of ein/kein in the accusative


def clause(d: Draw, tense: Literal["present", "past", "negated"], fronted: bool) -> Pair:
    """One sentence in both languages; `fronted` starts with the time, which turns German round."""
    who, what, verb = d.word(PEOPLE), d.word(THINGS), d.word(VERBS)
    kind, color, where, when = d.word(ADJECTIVES), d.word(COLORS), d.word(WHERE), d.word(WHEN)
    act = {"present": verb.third, "past": verb.past, "negated": f"does not {verb.base}"}[tense]
    en = f"the {kind.en} {who.en} {act} {an(f'{color.en} {what.en}')} {where.en}"
    act_de = verb.de_past if tense == "past" else verb.de_third
    ein = ("kein" if tense == "negated" else "ein") + ARTICLE[what.gender]
    subject = f"{THE[who.gender]} {kind.de}e {who.de}"
    rest = f"{where.de} {ein} {color.de}{ENDING[what.gender]} {what.de}"
    if fronted:
        return Pair(cap(f"{when.en} {en}."), cap(f"{when.de} {act_de} {subject} {rest}."))
    return Pair(cap(f"{en}."), cap(f"{subject} {act_de} {rest}."))


def to_german(d: Draw, text: Sequence[Pair]) -> Turns:
    """The English side of `text` as the question, the German side as the answer."""
    ask = d.say("Translate English to German:", "Translate into German:", "Say this in German:")
    return [(f"{ask} {' '.join(p.en for p in text)}", " ".join(p.de for p in text))]


def to_english(d: Draw, text: Sequence[Pair]) -> Turns:
    """The German side of `text` as the question, the English side as the answer."""
    ask = d.say("Translate German to English:", "Translate into English:", "Say this in English:")
    return [(f"{ask} {' '.join(p.de for p in text)}", " ".join(p.en for p in text))]


@template("translation")
def german_present(d: Draw) -> Turns:
    """English to German, present."""
    return to_german(d, [clause(d, "present", False) for _ in range(d.number(2, 3))])


@template("translation", held_out=True)
def german_past(d: Draw) -> Turns:
    """English to German, past."""
    return to_german(d, [clause(d, "past", False) for _ in range(d.number(2, 3))])


@template("translation")
def german_fronted(d: Draw) -> Turns:
    """English to German, past, the time first."""
    return to_german(d, [clause(d, "past", True) for _ in range(d.number(2, 3))])


@template("translation", held_out=True)
def english_present(d: Draw) -> Turns:
    """German to English, present."""
    return to_english(d, [clause(d, "present", False) for _ in range(d.number(2, 3))])


@template("translation")
def english_past(d: Draw) -> Turns:
    """German to English, past."""
    return to_english(d, [clause(d, "past", False) for _ in range(d.number(2, 3))])


@template("translation", held_out=True)
def english_fronted(d: Draw) -> Turns:
    """German to English, present, the time first."""
    return to_english(d, [clause(d, "present", True) for _ in range(d.number(2, 3))])


@template("translation")
def english_negated(d: Draw) -> Turns:
    """German to English, negated."""
    return to_english(d, [clause(d, "negated", d.number(0, 1) == 1) for _ in range(2)])


# ----------------------------------------------------------------------------------- summarization


def article(d: Draw, sentences: Sequence[str], summary: str) -> Turns:
    """`sentences` as the text to sum up."""
    ask = d.say("Summarize:", "Summarize the article:", "Sum up this report in two sentences:")
    return [(f"{ask} {' '.join(sentences)}", summary)]


def opinion(d: Draw) -> str:
    """A sentence that never belongs in a summary."""
    name, surname = d.word(NAMES), d.word(SURNAMES)
    return d.say(
        f'"I had hoped for more," said {name} {surname}, who watched from the street.',
        f"{name} {surname}, who has lived there for years, was surprised by the news.",
        f'A local man, {name} {surname}, told us: "We will talk about this for a long time."',
    )


@template("summarization")
def council(d: Draw) -> Turns:
    """A town decides to build."""
    town, building, reason = d.word(TOWNS), d.word(BUILDINGS), d.word(REASONS)
    month, cost = d.word(MONTHS), d.number(2, 40)
    chair = f"{d.word(NAMES)} {d.word(SURNAMES)}"
    text = [
        f"The council of {town} met on {d.word(WEEKDAYS)} to talk about the {building}.",
        f"After a long debate led by {chair}, it voted for a new {building} because {reason}.",
        opinion(d),
        f"The project will cost {cost} million dollars, and work is to begin in {month}.",
    ]
    return article(
        d,
        text,
        f"{town} will build a new {building} because {reason}. "
        f"Work begins in {month} and will cost {cost} million dollars.",
    )


@template("summarization", held_out=True)
def storm(d: Draw) -> Turns:
    """Bad weather and what it broke."""
    town, weather, (first, second) = d.word(TOWNS), d.word(WEATHER), d.words(BUILDINGS, 2)
    homes, days = d.number(20, 400, 10), d.number(2, 9)
    text = [
        f"On {d.word(WEEKDAYS)} {weather} reached {town} shortly before sunrise.",
        f"The {first} was badly damaged, and the {second} had to be closed.",
        opinion(d),
        f"About {homes} homes were without power, and repairs are expected to take {days} days.",
    ]
    return article(
        d,
        text,
        f"{cap(weather)} damaged the {first} and closed the {second} in {town}. "
        f"About {homes} homes lost power, and repairs will take {days} days.",
    )


@template("summarization")
def closure(d: Draw) -> Turns:
    """A building closes because of the weather."""
    town, weather, building = d.word(TOWNS), d.word(WEATHER), d.word(BUILDINGS)
    month, days = d.word(MONTHS), d.number(2, 9)
    text = [
        opinion(d),
        f"The {building} in {town} has been closed since {d.word(WEEKDAYS)}.",
        f"According to the town, {weather} had made the entrance unsafe.",
        f"The doors are to open again after {days} days, and a new roof is planned for {month}.",
    ]
    return article(
        d,
        text,
        f"{cap(weather)} closed the {building} in {town}. "
        f"It will open again after {days} days and get a new roof in {month}.",
    )


@template("summarization", held_out=True)
def match(d: Draw) -> Turns:
    """A game and its result."""
    town, (winner, loser) = d.word(TOWNS), d.words(TEAMS, 2)
    high = d.number(2, 6)
    low, crowd = d.number(0, high - 1), d.number(2, 40)
    scorer = f"{d.word(NAMES)} {d.word(SURNAMES)}"
    text = [
        f"About {crowd} thousand people came to {town} on {d.word(WEEKDAYS)} to see the {winner} "
        f"play the {loser}.",
        f"After a slow start {scorer} scored the first goal for the {winner}.",
        opinion(d),
        f"The {loser} fought until the end, but the {winner} won {high} to {low}.",
    ]
    return article(
        d,
        text,
        f"The {winner} beat the {loser} {high} to {low} in {town}. "
        f"The first goal was scored by {scorer}.",
    )


@template("summarization")
def transfer(d: Draw) -> Turns:
    """A team hires a coach."""
    team, rival = d.words(TEAMS, 2)
    town, years, month = d.word(TOWNS), d.number(2, 6), d.word(MONTHS)
    coach = f"{d.word(NAMES)} {d.word(SURNAMES)}"
    text = [
        f"The {team} from {town} have found a new coach.",
        f"{coach}, who has worked for the {rival} until now, signed for {years} years.",
        opinion(d),
        f"The first training is planned for {month}.",
    ]
    return article(
        d,
        text,
        f"{coach} leaves the {rival} and will coach the {team} from {town} for {years} years. "
        f"The first training is in {month}.",
    )


@template("summarization")
def launch(d: Draw) -> Turns:
    """A company shows a product."""
    company, product, benefit = d.word(COMPANIES), d.word(PRODUCTS), d.word(BENEFITS)
    town, month, price = d.word(TOWNS), d.word(MONTHS), d.number(20, 900, 10)
    text = [
        f"At a fair in {town} the company {company} showed a new {product} on {d.word(WEEKDAYS)}.",
        f"Its engineers say that it {benefit}.",
        opinion(d),
        f"It will be sold from {month} on for {price} dollars.",
    ]
    return article(
        d,
        text,
        f"{company} has shown a new {product} that {benefit}. "
        f"It costs {price} dollars and will be sold from {month}.",
    )


@template("summarization", held_out=True)
def recall(d: Draw) -> Turns:
    """A company calls a product back."""
    company, product, (town, plant) = d.word(COMPANIES), d.word(PRODUCTS), d.words(TOWNS, 2)
    sold, month = d.number(2, 90), d.word(MONTHS)
    boss = f"{d.word(NAMES)} {d.word(SURNAMES)}"
    text = [
        f"The company {company} is calling back its {product}.",
        f"A fault in the {product} was first found in {town} in {month}.",
        opinion(d),
        f"Some {sold} thousand pieces made in {plant} must be repaired, said {boss}, "
        f"the head of {company}.",
    ]
    return article(
        d,
        text,
        f"{company} calls back {sold} thousand pieces of its {product} made in {plant}. "
        f"The fault was found in {town} in {month}.",
    )


# ---------------------------------------------------------------------------------------------- qa


class Country(NamedTuple):
    """One country of the fixed world that questions are about."""

    name: str
    capital: str
    river: str
    food: str
    animal: str
    trade: str


WORLD = [
    Country(*entry.split("/"))
    for entry in (
        "Arvania/Belmar/Tarn/honey bread/gray wolf/copper\n"
        "Borvia/Castrel/Ulm/fish soup/white stork/timber\n"
        "Caldora/Dorvik/Senna/plum cake/brown bear/salt\n"
        "Drusland/Elmira/Oster/bean stew/red fox/wool\n"
        "Estovia/Fenwick/Lorne/goat cheese/golden eagle/glass\n"
        "Felmark/Gorsk/Varda/onion pie/river otter/coal\n"
        "Galdia/Hestia/Mirel/apple dumplings/wild horse/silk\n"
        "Hamoria/Istrel/Quill/lamb curry/black swan/tea\n"
        "Ilvaria/Jorvel/Dane/corn pancakes/snow owl/iron\n"
        "Jorland/Kalmar/Bresk/rice pudding/mountain goat/paper\n"
        "Kestria/Lomar/Ivel/smoked trout/green turtle/spices\n"
        "Lusania/Morven/Prell/lentil salad/blue heron/wine\n"
        "Moravel/Nesta/Rhone/garlic soup/sea lion/silver\n"
        "Nordale/Ostrel/Saven/berry jam/giant elk/ships\n"
        "Orsinia/Pelham/Teme/roast duck/striped cat/leather\n"
        "Pelagia/Quorn/Usk/sweet potatoes/silver fish/pearls\n"
        "Quintara/Rostov/Wye/nut bread/forest deer/rubber\n"
        "Rovenia/Sarnath/Yarra/pepper stew/wild boar/marble\n"
        "Silvania/Torvald/Alder/mushroom pie/spotted lynx/furniture\n"
        "Tarsovia/Ulric/Birk/lemon rice/desert camel/dates\n"
        "Umbria/Valmont/Cray/cabbage rolls/stone marten/clocks\n"
        "Valdoria/Westra/Dell/crab cakes/gray seal/oil\n"
        "Wendland/Xanten/Esk/rye bread/barn owl/butter\n"
        "Zelmaria/Yorvik/Fenn/grilled squid/coral snake/sugar"
    ).split("\n")
]


@template("qa")
def capital_of(d: Draw) -> Turns:
    """Country to capital."""
    c = d.word(WORLD)
    ask = d.say(
        f"What is the capital of {c.name}?",
        f"Which city is the capital of {c.name}?",
        f"Name the capital of {c.name}.",
    )
    return [(ask, f"The capital of {c.name} is {c.capital}. It lies on the river {c.river}.")]


@template("qa")
def food_of(d: Draw) -> Turns:
    """Country to dish."""
    c = d.word(WORLD)
    ask = d.say(
        f"What do people eat in {c.name}?",
        f"What is the best-known dish of {c.name}?",
        f"Which dish comes from {c.name}?",
    )
    return [(ask, f"{c.name} is known for its {c.food}. The best comes from {c.capital}.")]


@template("qa")
def trade_of(d: Draw) -> Turns:
    """Country to export."""
    c = d.word(WORLD)
    ask = d.say(
        f"What does {c.name} sell to other countries?",
        f"What does {c.name} export?",
        f"Which goods come from {c.name}?",
    )
    answer = f"{c.name} sells {c.trade}. It is shipped down the river {c.river} from {c.capital}."
    return [(ask, answer)]


@template("qa")
def animal_of(d: Draw) -> Turns:
    """Country to animal."""
    c = d.word(WORLD)
    ask = d.say(
        f"Which animal is on the flag of {c.name}?",
        f"What is the national animal of {c.name}?",
        f"Name the animal that stands for {c.name}.",
    )
    answer = (
        f"The national animal of {c.name} is the {c.animal}. It lives along the river {c.river}."
    )
    return [(ask, answer)]


@template("qa")
def profile_of(d: Draw) -> Turns:
    """Everything about one country."""
    c = d.word(WORLD)
    ask = d.say(
        f"What do you know about {c.name}?",
        f"Tell me about {c.name}.",
        f"Give me the main facts about {c.name}.",
    )
    answer = (
        f"The capital of {c.name} is {c.capital}, which lies on the river {c.river}. The country "
        f"is known for its {c.food} and sells {c.trade}. Its national animal is the {c.animal}."
    )
    return [(ask, answer)]


@template("qa", held_out=True)
def country_of_capital(d: Draw) -> Turns:
    """Capital to country: the way back."""
    c = d.word(WORLD)
    ask = d.say(
        f"Which country has {c.capital} as its capital?",
        f"{c.capital} is the capital of which country?",
        f"In which country is the city of {c.capital}?",
        f"Where is {c.capital}?",
    )
    answer = (
        f"{c.capital} is the capital of {c.name}. It lies on the river {c.river}, and the country "
        f"is known for its {c.food}."
    )
    return [(ask, answer)]


@template("qa", held_out=True)
def two_capitals(d: Draw) -> Turns:
    """Two countries at once."""
    a, b = d.words(WORLD, 2)
    ask = d.say(
        f"What are the capitals of {a.name} and {b.name}?",
        f"Name the capitals of {a.name} and {b.name}.",
    )
    answer = (
        f"The capital of {a.name} is {a.capital}, and the capital of {b.name} is {b.capital}. "
        f"They lie on the rivers {a.river} and {b.river}."
    )
    return [(ask, answer)]


@template("qa", held_out=True)
def capital_and_trade(d: Draw) -> Turns:
    """Two properties of one country."""
    c = d.word(WORLD)
    ask = d.say(
        f"What is the capital of {c.name}, and what does the country sell?",
        f"Name the capital and the main export of {c.name}.",
        f"Which city is the capital of {c.name}, and which goods come from there?",
    )
    answer = (
        f"The capital of {c.name} is {c.capital}. The country sells {c.trade}, which is shipped "
        f"down the river {c.river}."
    )
    return [(ask, answer)]


# ---------------------------------------------------------------------------------- math_reasoning


@template("math_reasoning")
def purchase(d: Draw) -> Turns:
    """Two products and a sum."""
    name, (first, second) = d.word(NAMES), d.words(ITEMS, 2)
    a, p, b, q = d.number(2, 9), d.number(2, 9), d.number(2, 9), d.number(2, 9)
    ask = f"{name} buys {a} {first} for ${p} each and {b} {second} for ${q} each. " + d.say(
        f"How much does {name} pay in total?", f"What does {name} pay altogether?"
    )
    answer = (
        f"The {first} cost {a}*{p} = ${a * p}.\nThe {second} cost {b}*{q} = ${b * q}.\n"
        f"In total {name} pays {a * p}+{b * q} = ${a * p + b * q}.\n#### {a * p + b * q}"
    )
    return [(ask, answer)]


@template("math_reasoning", held_out=True)
def change(d: Draw) -> Turns:
    """A purchase and the money left."""
    name, item = d.word(NAMES), d.word(ITEMS)
    a, p = d.number(2, 9), d.number(2, 9)
    money = a * p + d.number(1, 30)
    ask = f"{name} has ${money} and buys {a} {item} for ${p} each. " + d.say(
        f"How much money does {name} have left?", f"How many dollars are left to {name}?"
    )
    answer = (
        f"The {item} cost {a}*{p} = ${a * p}.\n{name} has {money}-{a * p} = ${money - a * p} "
        f"left.\n#### {money - a * p}"
    )
    return [(ask, answer)]


@template("math_reasoning")
def give_away(d: Draw) -> Turns:
    """Two gifts from a pile."""
    name, friend, other = d.words(NAMES, 3)
    item, a, b = d.word(ITEMS), d.number(2, 15), d.number(2, 15)
    n = a + b + d.number(1, 20)
    ask = (
        f"{name} has {n} {item}. {name} gives {a} {item} to {friend} and {b} {item} to {other}. "
        + d.say(f"How many {item} does {name} keep?", f"How many {item} are left?")
    )
    answer = (
        f"{name} gives away {a}+{b} = {a + b} {item}.\n{name} keeps {n}-{a + b} = {n - a - b} "
        f"{item}.\n#### {n - a - b}"
    )
    return [(ask, answer)]


@template("math_reasoning", held_out=True)
def twice_as_many(d: Draw) -> Turns:
    """A multiple and a sum."""
    name, friend = d.words(NAMES, 2)
    item, n = d.word(ITEMS), d.number(3, 20)
    times, factor = d.rng.choice((("twice", 2), ("three times", 3), ("four times", 4)))
    ask = f"{friend} has {n} {item}. {name} has {times} as many {item} as {friend}. " + d.say(
        f"How many {item} do they have together?", "How many do they have altogether?"
    )
    total = n * factor + n
    answer = (
        f"{name} has {n}*{factor} = {n * factor} {item}.\nTogether they have {n * factor}+{n} = "
        f"{total} {item}.\n#### {total}"
    )
    return [(ask, answer)]


@template("math_reasoning")
def times_more(d: Draw) -> Turns:
    """A multiple and a difference."""
    name, friend = d.words(NAMES, 2)
    item, n = d.word(ITEMS), d.number(3, 20)
    times, factor = d.rng.choice((("twice", 2), ("three times", 3), ("four times", 4)))
    ask = (
        f"{friend} has {n} {item}. {name} has {times} as many {item} as {friend}. "
        f"How many more {item} does {name} have?"
    )
    more = n * factor - n
    answer = (
        f"{name} has {n}*{factor} = {n * factor} {item}.\n{name} has {n * factor}-{n} = {more} "
        f"{item} more than {friend}.\n#### {more}"
    )
    return [(ask, answer)]


@template("math_reasoning", held_out=True)
def boxes(d: Draw) -> Turns:
    """Boxes, a loss, what remains."""
    name, item = d.word(NAMES), d.word(ITEMS)
    k, m = d.number(2, 9), d.number(3, 12)
    lost = d.number(2, k * m - 2)
    left = k * m - lost
    ask = f"{name} packs {k} boxes with {m} {item} each. Later {lost} {item} are lost. " + d.say(
        f"How many {item} are left?", f"How many {item} remain in the boxes?"
    )
    answer = (
        f"{name} packs {k}*{m} = {k * m} {item}.\nAfter the loss {k * m}-{lost} = {left} {item} "
        f"are left.\n#### {left}"
    )
    return [(ask, answer)]


@template("math_reasoning")
def sharing(d: Draw) -> Turns:
    """Boxes shared equally."""
    name, item = d.word(NAMES), d.word(ITEMS)
    k, friends, each = d.number(2, 6), d.number(2, 6), d.number(2, 6)
    n = friends * each
    ask = (
        f"{name} has {k} boxes with {n} {item} each and shares them equally among "
        f"{friends} friends. How many {item} does each friend get?"
    )
    answer = (
        f"{name} has {k}*{n} = {k * n} {item}.\nEach friend gets {k * n}/{friends} = "
        f"{k * each} {item}.\n#### {k * each}"
    )
    return [(ask, answer)]


@template("math_reasoning")
def saving(d: Draw) -> Turns:
    """Weekly savings and an expense."""
    name, product = d.word(NAMES), d.word(PRODUCTS)
    weeks, rate = d.number(3, 12), d.number(3, 15)
    price = d.number(2, weeks * rate - 1)
    left = weeks * rate - price
    ask = (
        f"{name} saves ${rate} a week for {weeks} weeks and then buys {an(product)} for ${price}. "
        f"How much money does {name} have left?"
    )
    answer = (
        f"{name} saves {weeks}*{rate} = ${weeks * rate}.\nAfter buying the {product} {name} has "
        f"{weeks * rate}-{price} = ${left} left.\n#### {left}"
    )
    return [(ask, answer)]


# --------------------------------------------------------------------------------------------- rag


class Fact(NamedTuple):
    """A retrieved passage with one question about it and the answer."""

    passage: str
    question: str
    answer: str


def museum(d: Draw) -> Fact:
    """A museum, its founder and its year."""
    town, founder, year = d.word(TOWNS), f"{d.word(NAMES)} {d.word(SURNAMES)}", d.number(1800, 1990)
    things, visitors = d.word(EXHIBITS), d.number(10, 90, 5)
    return Fact(
        f"The {town} Museum of {cap(things)} was opened in {year} by {founder}. "
        f"It has {visitors} thousand visitors a year.",
        d.say(
            f"Who opened the {town} Museum of {cap(things)}?",
            f"When was the {town} Museum of {cap(things)} opened, and by whom?",
        ),
        f"The {town} Museum of {cap(things)} was opened by {founder} in {year}.",
    )


def crossing(d: Draw) -> Fact:
    """A bridge, its length and what it is made of."""
    town, country, material = d.word(TOWNS), d.word(WORLD), d.word(MATERIALS)
    length, year = d.number(40, 900, 10), d.number(1800, 1990)
    return Fact(
        f"The {town} Bridge crosses the river {country.river} in {country.name}. "
        f"It is {length} meters long, made of {material}, and was finished in {year}.",
        d.say(
            f"How long is the {town} Bridge, and what is it made of?",
            f"What is the length of the {town} Bridge, and of which material is it?",
        ),
        f"The {town} Bridge over the {country.river} is {length} meters long and made of "
        f"{material}.",
    )


def festival(d: Draw) -> Fact:
    """A festival, its month and its origin."""
    town, thing, month = d.word(TOWNS), d.word(FESTIVAL_THINGS), d.word(MONTHS)
    days, job = d.number(2, 9), d.word(JOBS)
    return Fact(
        f"Each {month} the town of {town} holds its Festival of {cap(thing)}. "
        f"It lasts {days} days and was first held by {an(job)}.",
        d.say(
            f"When is the Festival of {cap(thing)} in {town}, and how long does it last?",
            f"In which month does {town} hold its Festival of {cap(thing)}, and for how long?",
        ),
        f"The Festival of {cap(thing)} in {town} is held in {month} and lasts {days} days.",
    )


def inventor(d: Draw) -> Fact:
    """An inventor, the thing and the firm."""
    who, job = f"{d.word(NAMES)} {d.word(SURNAMES)}", d.word(JOBS)
    product, company, year = d.word(PRODUCTS), d.word(COMPANIES), d.number(1900, 1999)
    return Fact(
        f"{who}, who had worked as {an(job)}, invented a new {product} in {year}. "
        f"It was later sold by the company {company}.",
        d.say(
            f"What did {who} invent, and which company sold it?",
            f"What was invented by {who}, and who sold it?",
        ),
        f"{who} invented a new {product} in {year}, and the company {company} sold it.",
    )


def team(d: Draw) -> Fact:
    """A sports team, its town and its colors."""
    name, town, (one, two) = d.word(TEAMS), d.word(TOWNS), d.words(COLORS[:6], 2)
    coach, titles = f"{d.word(NAMES)} {d.word(SURNAMES)}", d.number(2, 9)
    return Fact(
        f"The {town} {name} play in {one.en} and {two.en}. "
        f"Under their coach {coach} they have won {titles} titles.",
        d.say(
            f"Who is the coach of the {town} {name}?",
            f"Who coaches the {town} {name}, and how many titles have they won?",
        ),
        f"The coach of the {town} {name} is {coach}, and they have won {titles} titles.",
    )


SUBJECTS = (museum, crossing, festival, inventor, team)


def retrieved(d: Draw, about: Callable[[Draw], Fact]) -> Turns:
    """Three passages on different subjects, one of them `about`, and a question on that one."""
    asked = about(d)
    others = [write(d) for write in d.rng.sample([s for s in SUBJECTS if s is not about], 2)]
    facts = [asked, *others]
    d.rng.shuffle(facts)
    passages = "\n".join(f"Passage {i}: {fact.passage}" for i, fact in enumerate(facts, 1))
    ask = d.say("Answer the question from the passages.", "Use the passages to answer.")
    place = facts.index(asked) + 1
    return [
        (f"{ask}\n{passages}\nQuestion: {asked.question}", f"{asked.answer} See passage {place}.")
    ]


@template("rag")
def about_museum(d: Draw) -> Turns:
    """A question about a museum."""
    return retrieved(d, museum)


@template("rag", held_out=True)
def about_crossing(d: Draw) -> Turns:
    """A question about a bridge."""
    return retrieved(d, crossing)


@template("rag")
def about_festival(d: Draw) -> Turns:
    """A question about a festival."""
    return retrieved(d, festival)


@template("rag", held_out=True)
def about_inventor(d: Draw) -> Turns:
    """A question about an inventor."""
    return retrieved(d, inventor)


@template("rag", held_out=True)
def about_team(d: Draw) -> Turns:
    """A question about a team."""
    return retrieved(d, team)


# ------------------------------------------------------------------------------------------- rows


def row(seed: int, split: Split, index: int) -> Row:
    """Row `index` of a split: families take turns, and so do templates inside a family."""
    rng = random.Random(f"{split}/{seed}/{index}")  # a text seed is hashed, the same everywhere
    family = FAMILIES[index % len(FAMILIES)]
    known = [t for t in TEMPLATES if t.family == family and (t.held_out or split == "train")]
    chosen = known[index // len(FAMILIES) % len(known)]
    half = 1 if split == "mini" else 0 if chosen.held_out else None
    turns = chosen.write(Draw(rng, half))
    return Row(
        id=f"{split}-{index:06d}",
        family=family,
        category=chosen.category,
        template=chosen.name,
        turns=[question for question, _ in turns],
        reference=[answer for _, answer in turns],
    )


def stream(seed: int, split: Split) -> Iterator[Row]:
    """The endless rows of a split, from the first; rows may repeat."""
    if split not in ("train", "mini"):
        raise UsageError(f"unknown split {split!r}", "use 'train' or 'mini'")
    return (row(seed, split, index) for index in count())


def mini_rows(seed: int = 0, per_family: int = 80) -> list[Row]:
    """The task `mini`: `per_family` different rows of each family, families in order.

    Raises UsageError where the lexicons cannot give that many different first turns.
    """
    kept: dict[str, list[Row]] = {family: [] for family in FAMILIES}
    seen: set[str] = set()
    limit = 10 * per_family * len(FAMILIES)
    for candidate in stream(seed, "mini"):
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


def main() -> None:
    """Write the task `mini` to standard output as JSON lines."""
    for generated in mini_rows():
        sys.stdout.write(json.dumps(generated, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
