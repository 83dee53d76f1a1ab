"""Generator of sentence pairs in English and German, with a small grammar."""

from typing import Literal, NamedTuple

from specbench_cli.training.generated.template import Draw, capitalise, with_article


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


class PhrasePair(NamedTuple):
    """A phrase in both languages. German adjectives are without their ending."""

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
    PhrasePair(*entry.split("/"))
    for entry in (
        "old/alt small/klein big/groß young/jung beautiful/schön poor/arm rich/reich "
        "strange/seltsam new/neu famous/berühmt quiet/still strong/stark"
    ).split()
]
COLORS = [
    PhrasePair(*entry.split("/"))
    for entry in (
        "red/rot green/grün blue/blau white/weiß black/schwarz yellow/gelb heavy/schwer "
        "cheap/billig round/rund brown/braun simple/einfach gray/grau"
    ).split()
]
WHERE = [
    PhrasePair(*entry.split("/"))
    for entry in (
        "at the market/auf dem Markt,in the garden/im Garten,at school/in der Schule,"
        "in the city/in der Stadt,at the station/am Bahnhof,in the kitchen/in der Küche,"
        "by the river/am Fluss,in the village/im Dorf,on the street/auf der Straße,"
        "at the harbor/am Hafen"
    ).split(",")
]
WHEN = [
    PhrasePair(*entry.split("/"))
    for entry in (
        "today/heute,in the evening/am Abend,on Monday/am Montag,in the morning/am Morgen,"
        "in summer/im Sommer,on Sunday/am Sonntag,at night/in der Nacht,in winter/im Winter,"
        "at noon/am Mittag,on Friday/am Freitag"
    ).split(",")
]
THE = {"m": "der", "f": "die", "n": "das"}
ENDING = {"m": "en", "f": "e", "n": "es"}
"""Endings of an adjective after ein or kein in the accusative, by gender."""
ARTICLE = {"m": "en", "f": "e", "n": ""}
"""Endings of ein and kein in the accusative, by gender."""

Tense = Literal["present", "past", "negated"]


def clause(d: Draw, tense: Tense, fronted: bool) -> PhrasePair:
    """Return one sentence in English and German.

    Args:
        fronted: whether the sentence starts with the time, such as "Yesterday". In German the verb
            then comes second.
    """
    who, what, verb = d.word(PEOPLE), d.word(THINGS), d.word(VERBS)
    kind, color, where, when = d.word(ADJECTIVES), d.word(COLORS), d.word(WHERE), d.word(WHEN)
    act = {"present": verb.third, "past": verb.past, "negated": f"does not {verb.base}"}[tense]
    en = f"the {kind.en} {who.en} {act} {with_article(f'{color.en} {what.en}')} {where.en}"
    act_de = verb.de_past if tense == "past" else verb.de_third
    ein = ("kein" if tense == "negated" else "ein") + ARTICLE[what.gender]
    subject = f"{THE[who.gender]} {kind.de}e {who.de}"
    rest = f"{where.de} {ein} {color.de}{ENDING[what.gender]} {what.de}"
    if fronted:
        return PhrasePair(
            capitalise(f"{when.en} {en}."), capitalise(f"{when.de} {act_de} {subject} {rest}.")
        )
    return PhrasePair(capitalise(f"{en}."), capitalise(f"{subject} {act_de} {rest}."))
