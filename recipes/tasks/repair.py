"""Conversations about one document: repair a code snippet, or extract lists from a manual.

`snippet` resembles SelfPiCo (arXiv:2407.16974). The prompt shows code with faults, the error
message
of one fault, and how to fix this fault. The answer is the code without this fault. The next turn
shows the next error, until the code runs. `manual` resembles ProphetFuzz (arXiv:2409.00922). The
answers are lists of a manual's options, of options that exclude each other, and of commands. The
tasks only imitate these workloads. They do not run SelfPiCo or ProphetFuzz.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from recipes.tasks.workflow import Workflow
from specbench_cli.training.generated.lexicon import ITEMS, NAMES
from specbench_cli.training.generated.template import Draw, Turns

LOOP = (
    "This snippet stops with an error:\n```python\n{snippet}\n```\n{error}\n"
    "{advice} Write the whole snippet again and change nothing else."
)


class Fault(NamedTuple):
    """A mistake in a snippet.

    Attributes:
        error: error message of the snippet.
        wrong: the wrong line; None if a line is missing.
        right: the correct line.
        advice: description of the fix that allows only one answer.
    """

    error: str
    wrong: str | None
    right: str
    advice: str

    def fix(self, lines: Sequence[str]) -> list[str]:
        """Return the lines of a snippet without this fault."""
        if self.wrong is None:
            return [self.right, *lines]
        return [self.right if line == self.wrong else line for line in lines]


def missing_line(name: str, line: str) -> Fault:
    """Return a fault: the line that defines a name is missing."""
    return Fault(name_error(name), None, line, f"Begin with `{line}`.")


def wrong_line(line: str, right: str, wrong: str, error: str) -> Fault:
    """Return a fault: a line contains the text `wrong` in place of `right`."""
    return Fault(error, line.replace(right, wrong), line, f"Write `{right}` for `{wrong}`.")


def name_error(name: str) -> str:
    """Return Python's message for a name that is not defined."""
    return f"NameError: name '{name}' is not defined"


def concatenation_error(kind: str) -> str:
    """Return Python's message for adding a value of another type to a string."""
    return f'TypeError: can only concatenate str (not "{kind}") to str'


def attribute_error(kind: str, name: str) -> str:
    """Return Python's message for a missing attribute."""
    return f"AttributeError: '{kind}' object has no attribute '{name}'"


Snippet = tuple[Sequence[str], Sequence[Fault]]
"""Lines of a program, and its possible faults in the order in which Python reports them."""


def receipt(d: Draw) -> Snippet:
    """Return a code snippet that adds prices."""
    prices = f"prices = {[d.number(2, 90) for _ in range(d.number(2, 5))]}"
    add, tell = "    total = total + price", 'print("total: " + str(total))'
    return (prices, "total = 0", "for price in prices:", add, tell), (
        missing_line("prices", prices),
        missing_line("total", "total = 0"),
        wrong_line(add, "+ price", "+ pric", name_error("pric")),
        wrong_line(tell, "+ str(total)", "+ total", concatenation_error("int")),
    )


def short_names(d: Draw) -> Snippet:
    """Return a code snippet that sorts all names below a given length."""
    found = d.words(NAMES, 4)
    names = "names = [" + ", ".join(f'"{name}"' for name in found) + "]"
    test = f"    if len(name) < {min(map(len, found)) + d.number(1, 2)}:"
    keep, tell = "        short.append(name)", 'print(", ".join(sorted(short)))'
    return (names, "short = []", "for name in names:", test, keep, tell), (
        missing_line("names", names),
        wrong_line(test, "(name)", "(nam)", name_error("nam")),
        missing_line("short", "short = []"),
        wrong_line(keep, ".append", ".push", attribute_error("list", "push")),
        wrong_line(tell, "(sorted", "(sort", name_error("sort")),
    )


def stock(d: Draw) -> Snippet:
    """Return a snippet that subtracts sold items from the stock."""
    one, other = d.words(ITEMS, 2)
    held = f'stock = {{"{one}": {d.number(20, 90)}, "{other}": {d.number(20, 90)}}}'
    sold = f'sold = {{"{one}": {d.number(2, 19)}, "{other}": {d.number(2, 19)}}}'
    less = "    stock[item] = stock[item] - sold[item]"
    tell = f'print("{one} left: " + str(stock["{one}"]))'
    return (held, sold, "for item in sold:", less, tell), (
        missing_line("sold", sold),
        missing_line("stock", held),
        wrong_line(less, "- sold[item]", "- sales[item]", name_error("sales")),
        wrong_line(tell, f'["{one}"]', f'["{one[:-1]}"]', f"KeyError: '{one[:-1]}'"),
    )


def distance(d: Draw) -> Snippet:
    """Return a snippet that computes the root of a sum of squares."""
    sides = f"sides = {[d.number(2, 30) for _ in range(d.number(2, 3))]}"
    squares = "squares = [side * side for side in sides]"
    root, tell = "length = math.sqrt(sum(squares))", 'print("length: " + str(round(length, 2)))'
    return ("import math", sides, squares, root, tell), (
        missing_line("sides", sides),
        wrong_line(squares, "[side *", "[edge *", name_error("edge")),
        missing_line("math", "import math"),
        wrong_line(root, "(squares)", "(square)", name_error("square")),
        wrong_line(
            tell, "+ str(round(length, 2))", "+ round(length, 2)", concatenation_error("float")
        ),
    )


def average(d: Draw) -> Snippet:
    """Return a snippet that prints the mean and the maximum of some numbers."""
    points = f"points = {[d.number(2, 30) for _ in range(d.number(3, 5))]}"
    share, most = "    return sum(numbers) / len(numbers)", "best = max(points)"
    tell = 'print("mean " + str(mean(points)) + ", best " + str(best))'
    return (points, "def mean(numbers):", share, most, tell), (
        wrong_line(
            most, "max(", "maximum(", name_error("maximum")
        ),  # Python reports this error before one in the argument
        missing_line("points", points),
        wrong_line(share, "len(", "length(", name_error("length")),
        wrong_line(tell, "+ str(best)", "+ best", concatenation_error("int")),
    )


def word_count(d: Draw) -> Snippet:
    """Return a snippet that counts how often a word occurs in a text."""
    words = d.words(ITEMS, 3)
    text = f'text = "{" ".join(d.rng.choice(words) for _ in range(5))} {words[0]}"'
    loop, add = "for word in text.split():", "    counts[word] = counts.get(word, 0) + 1"
    tell = f'print("{words[0]}: " + str(counts["{words[0]}"]))'
    return (text, "counts = {}", loop, add, tell), (
        missing_line("text", text),
        wrong_line(loop, ".split", ".splits", attribute_error("str", "splits")),
        missing_line("counts", "counts = {}"),
        wrong_line(add, "(word,", "(wrd,", name_error("wrd")),
        wrong_line(tell, f'["{words[0]}"]', f'["{words[0][:-1]}"]', f"KeyError: '{words[0][:-1]}'"),
    )


def _write_snippet(d: Draw, write: Callable[[Draw], Snippet]) -> Turns:
    """Return three turns. Each turn repairs one fault of a code snippet."""
    lines, possible = write(d)
    faults = [possible[at] for at in sorted(d.rng.sample(range(len(possible)), 3))]
    for fault in faults:
        if fault.wrong is None:
            lines = [line for line in lines if line != fault.right]
        else:
            lines = [fault.wrong if line == fault.right else line for line in lines]
    turns: Turns = []
    for fault in faults:
        snippet, lines = "\n".join(lines), fault.fix(lines)
        turns.append(
            (
                LOOP.format(snippet=snippet, error=fault.error, advice=fault.advice),
                "\n".join(lines),
            )
        )
    return turns


class ManualOption(NamedTuple):
    """An option of a command: its name, its argument ("", N or FILE), and its description."""

    name: str
    takes: str
    does: str

    @property
    def usage(self) -> str:
        """The option as a manual shows it, such as `--depth N`."""
        return f"--{self.name} {self.takes}".strip()

    @property
    def example(self) -> str:
        """The option as a command line has it, such as `--depth 3`."""
        return f"--{self.name} {VALUES.get(self.takes, '')}".strip()


VALUES = {"N": "3", "FILE": "a.txt"}
COMMANDS = {
    "walk": "visits the files of a folder",
    "pack": "puts files into an archive",
    "sift": "picks lines of a text",
    "blend": "joins several tables",
    "stamp": "puts a date on every page",
    "scan": "looks for files that are the same",
}
OPTIONS = [
    ManualOption(*entry.split("/"))
    for entry in (
        "depth/N/goes down at most N levels,flat//leaves out folders inside folders,"
        "output/FILE/writes to FILE in place of the screen,quiet//prints nothing but errors,"
        "verbose//prints every step,limit/N/stops after N lines,sorted//puts names in order,"
        "reverse//turns the order round,width/N/breaks lines after N letters,"
        "plain//prints no colors,header//prints the names of columns first,"
        "input/FILE/reads its names from FILE,count//prints a number and no lines,"
        "skip/N/leaves out the first N lines,check//changes nothing and tells what it would do,"
        "jobs/N/works on N files at once,wait/N/waits N seconds before it begins,"
        "log/FILE/adds a report to FILE"
    ).split(",")
]
LIST = (
    "{manual}\n\nList the options of this manual in its order, one a line with what they take, "
    "such as: --name N. Write nothing else."
)
EXCLUDE = (
    "List the pairs of options that cannot be used together, one pair a line, first the option "
    "whose text says so, in the manual's order, such as: --name --other. Write nothing else."
)
TOGETHER = (
    "For each option that needs another write a command with the two, one a line, first the "
    "option that needs the other, in the manual's order, with 3 for N and a.txt for FILE, such "
    "as: {command} --name 3 --other. Write nothing else."
)


def _write_manual(d: Draw, command: str) -> Turns:
    """Return three turns that each ask for a list from a command's manual.

    The lists are: all options, pairs of options that exclude each other, and options that need
    another option.

    Args:
        command: name of the command, from `COMMANDS`.
    """
    options = d.words(OPTIONS, 8)
    first, second, third, fourth, *others = d.rng.sample(options, len(options))
    excludes = {first: others[0], second: others[1]}
    needs = {third: others[2], fourth: others[3]}

    def entry(option: ManualOption) -> str:
        said = f"  {option.usage}: {option.does}."
        if option in excludes:
            return f"{said} Cannot be used with --{excludes[option].name}."
        return f"{said} Needs --{needs[option].name}." if option in needs else said

    manual = "\n".join([f"{command} {COMMANDS[command]}. Options:", *map(entry, options)])
    pairs = [f"--{o.name} --{excludes[o].name}" for o in options if o in excludes]
    commands = [f"{command} {o.example} {needs[o].example}" for o in options if o in needs]
    return [
        (LIST.format(manual=manual), "\n".join(option.usage for option in options)),
        (EXCLUDE, "\n".join(pairs)),
        (TOGETHER.format(command=command), "\n".join(commands)),
    ]


SNIPPETS = (receipt, short_names, stock, distance, average, word_count)
WORKFLOWS = (
    *(
        Workflow("code", "snippet", each.__name__, partial(_write_snippet, write=each))
        for each in SNIPPETS
    ),
    *(
        Workflow("multi_turn", "manual", command, partial(_write_manual, command=command))
        for command in COMMANDS
    ),
)
