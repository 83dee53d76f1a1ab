"""Translation between English and German, two or three sentences at a time."""

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
    """The English side as the question, the German side as the answer."""
    pairs = [clause(d, tense, fronted) for _ in range(d.number(2, 3))]
    return FilledTemplate({"text": " ".join(p.en for p in pairs)}, [" ".join(p.de for p in pairs)])


def to_english(d: Draw, tense: Tense, fronted: bool) -> FilledTemplate:
    """The German side as the question, the English side as the answer."""
    pairs = [clause(d, tense, fronted) for _ in range(d.number(2, 3))]
    return FilledTemplate({"text": " ".join(p.de for p in pairs)}, [" ".join(p.en for p in pairs)])


@skill("translation", "en-de", *TO_GERMAN)
def german_present(d: Draw) -> FilledTemplate:
    """English to German, present."""
    return to_german(d, "present", fronted=False)


@skill("translation", "en-de", *TO_GERMAN)
def german_past(d: Draw) -> FilledTemplate:
    """English to German, past."""
    return to_german(d, "past", fronted=False)


@skill("translation", "en-de", *TO_GERMAN)
def german_fronted(d: Draw) -> FilledTemplate:
    """English to German, past, the time first."""
    return to_german(d, "past", fronted=True)


@skill("translation", "en-de", *TO_GERMAN)
def german_negated(d: Draw) -> FilledTemplate:
    """English to German, negated."""
    return to_german(d, "negated", fronted=False)


@skill("translation", "de-en", *TO_ENGLISH)
def english_present(d: Draw) -> FilledTemplate:
    """German to English, present."""
    return to_english(d, "present", fronted=False)


@skill("translation", "de-en", *TO_ENGLISH)
def english_past(d: Draw) -> FilledTemplate:
    """German to English, past."""
    return to_english(d, "past", fronted=False)


@skill("translation", "de-en", *TO_ENGLISH)
def english_fronted(d: Draw) -> FilledTemplate:
    """German to English, present, the time first."""
    return to_english(d, "present", fronted=True)


@skill("translation", "de-en", *TO_ENGLISH)
def english_negated(d: Draw) -> FilledTemplate:
    """German to English, negated."""
    return to_english(d, "negated", fronted=False)
