"""A test that names of classes and functions follow the rules in CONTRIBUTING.md.

A name fails if it is a single word without meaning of its own, such as a participle, an adverb or
a pronoun. It also fails if it contains a word that the field does not use. A class name may exist
only once.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("specbench_cli", "methods", "recipes", "benchmarks")

MEANINGLESS = set(
    """
    able above again ahead alike all almost alone along also always among another anew any apart
    around as aside at away bare before beginning behind belonging below beside besides better
    between beyond both by down due each elsewhere enough even every far few for from further gone
    here how in inside instead itself just least less like likes likely lone many meant more most
    much near now of off on once one only other others ours out outside over own part plain same
    several since so some still such sure than that theirs there this those three through to
    together twice two under unlike up what when where which who whole whose why with within
    without

    absorbed added adopted arranged arrived asked begun biased bounded branched built called
    changed checked chosen cited claimed composed contrasted copied counted cut dealt decided
    defined divided done dotted drawn driven enclosed ended explained fed filled fitted foreseen
    found given gathered granted grown handed held hired informed kept known labelled learnt left
    lent lettered lightened listed looked lost made meant meets misjudged mismatched mixed moved
    named needed noted numbered offered ordered owed parted partnered passed pictured placed
    posed priced put quoted ranked reached refused resettled said sealed seated seen sent settled
    shown signed slowed spelt spoiled spoken spread sprung staffed stated stood struck swept taken
    tamed taught tested told tossed tried turned unasked unfit unheard unjudged unmarked unread
    untrue unwrapped used visited walked wanted warned watched wrapped

    asking closing facing falling fitting following giving going lacking leaving looking missing
    moving naming passing reaching saying standing taking telling turning waiting

    falls gives goes holds knows lacks lies says stands takes tells
    """.split()
)
"""Words that must not be a whole name."""

UNUSUAL = set(
    """
    arm arms hire hires hiring law laws ledger lend lends loan loans seat seats stand tap taps told
    void
    """.split()
)
"""Words that must not be any part of a name, because the field does not use them like this."""

KEPT = {
    "more": "a skill of the generated tasks; its name is part of ids in datasets",
    "together": "a skill of the generated tasks; its name is part of ids in datasets",
    "passed": "the result of an audit check: a key of certificates",
    "used": "a forward whose result was used: the engine's field `Forward.used`",
    "fit_scaling_laws": "scaling law is a term of the field",
    "Stand": "the method STAND",
    "StandParams": "the method STAND",
    "exact_law": "a guarantee that plug-ins and certificates state by this name",
}
"""Names that are allowed in spite of these rules, with the reason."""


def find_definitions() -> Iterator[tuple[str, str, bool]]:
    """Yield the path, name and whether it is a class of each definition in the packages."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    relative_path = path.relative_to(ROOT).as_posix()
                    yield relative_path, node.name, isinstance(node, ast.ClassDef)


def find_failing_names() -> set[str]:
    """Return the names that fail: definitions by path, and class names that exist twice."""
    found, classes = set(), defaultdict(set)
    for path, name, is_class in find_definitions():
        words = name.strip("_").lower().split("_")
        empty = len(words) == 1 and words[0] in MEANINGLESS
        if name not in KEPT and (empty or UNUSUAL.intersection(words)):
            found.add(f"{path}::{name}")
        if is_class:
            classes[name].add(path)
    for name, paths in classes.items():
        # A method and its head may share a name.
        if len(paths) > 1 and len({path.rpartition("/")[0] for path in paths}) > 1:
            found.add(f"class {name} in {' and '.join(sorted(paths))}")
    return found


def test_names_follow_the_rules():
    assert sorted(find_failing_names()) == [], "rename these: CONTRIBUTING.md, Code of style"
