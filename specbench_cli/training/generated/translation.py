"""Translations of two or three sentences between English and German."""

from specbench_cli.training.generated.german import Tense, clause
from specbench_cli.training.generated.template import Draw, FilledTemplate, skill

TO_GERMAN = (
    "Translate English to German: {text}",
    "Here is a text in English. Write the same text in German: {text}",
    "{text} How do you say this in German?",
)
TO_ENGLISH = (
    "Translate German to English: {text}",
    "Here is a text in German. Write the same text in English: {text}",
    "{text} How do you say this in English?",
)


def to_german(d: Draw, tense: Tense, fronted: bool) -> FilledTemplate:
    """Return English sentences as the question and their German translation as the answer."""
    pairs = [clause(d, tense, fronted) for _ in range(d.number(2, 3))]
    return FilledTemplate({"text": " ".join(p.en for p in pairs)}, [" ".join(p.de for p in pairs)])


def to_english(d: Draw, tense: Tense, fronted: bool) -> FilledTemplate:
    """Return German sentences as the question and their English translation as the answer."""
    pairs = [clause(d, tense, fronted) for _ in range(d.number(2, 3))]
    return FilledTemplate({"text": " ".join(p.de for p in pairs)}, [" ".join(p.en for p in pairs)])


@skill("translation", "en-de", *TO_GERMAN)
def german_present(d: Draw) -> FilledTemplate:
    """Ask for a translation to German, in the present tense."""
    return to_german(d, "present", fronted=False)


@skill("translation", "en-de", *TO_GERMAN)
def german_past(d: Draw) -> FilledTemplate:
    """Ask for a translation to German, in the past tense."""
    return to_german(d, "past", fronted=False)


@skill("translation", "en-de", *TO_GERMAN)
def german_fronted(d: Draw) -> FilledTemplate:
    """Ask for a translation to German, in the past tense. Sentences start with a time, as
    "yesterday"."""
    return to_german(d, "past", fronted=True)


@skill("translation", "en-de", *TO_GERMAN)
def german_negated(d: Draw) -> FilledTemplate:
    """Ask for a translation to German of negated sentences."""
    return to_german(d, "negated", fronted=False)


@skill("translation", "de-en", *TO_ENGLISH)
def english_present(d: Draw) -> FilledTemplate:
    """Ask for a translation to English, in the present tense."""
    return to_english(d, "present", fronted=False)


@skill("translation", "de-en", *TO_ENGLISH)
def english_past(d: Draw) -> FilledTemplate:
    """Ask for a translation to English, in the past tense."""
    return to_english(d, "past", fronted=False)


@skill("translation", "de-en", *TO_ENGLISH)
def english_fronted(d: Draw) -> FilledTemplate:
    """Ask for a translation to English, in the present tense. Sentences start with the time."""
    return to_english(d, "present", fronted=True)


@skill("translation", "de-en", *TO_ENGLISH)
def english_negated(d: Draw) -> FilledTemplate:
    """Ask for a translation to English of negated sentences."""
    return to_english(d, "negated", fronted=False)
