"""Scoring of generated code: comparison with a reference program, and unit tests (HumanEval, MBPP).

`same_code` compares programs and runs nothing. `passes_tests` runs an answer and its tests in two
sandboxed processes (module `sandbox`). The process of the tests executes no code of the answer, so
an answer passes only if its replies are correct. This needs a POSIX system. On Linux both processes
have their own namespaces. Without namespaces nothing is run, unless the user accepts limits on
time,
memory, open files, file sizes and processes instead. Such limits stop mistakes, but not malicious
code.

Tests and answer exchange data: numbers, texts, lists, tuples, sets, dictionaries, iterators, and
builtin exceptions by name. Any other object of the answer is passed as a number. The tests can call
it, read its attributes, and test its truth value. The answer draws the values of the tests'
iterators one by one. If the answer changes an argument in place, the tests do not see the change.
The `==` of the answer's classes is not called. A program that relies on either fails.

An answer passes only if the tests end without an error, and if each assertion held at least as
often
as for the task's reference solution. If no reference solution passes, each assertion must have held
at least once. An assertion that can never hold (`assert False`) is an exception.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import subprocess
import symtable
import sys
import tempfile
import textwrap
import warnings
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, cached_property, lru_cache
from hashlib import sha256
from heapq import heappop, heappush

from specbench_cli.errors import EnvironmentFault
from specbench_cli.scoring import sandbox

TIMEOUT_S = 20.0
"""Time limit of one answer and its tests in seconds; `sandbox` has the other limits."""

_UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)
"""Exceptions of Python for a text that is not a program."""

_FENCED = re.compile(
    r"(?<![`\w])(?P<fence>```|~~~)[^\n`]*\n(?P<code>.*?)(?:^[ \t]*(?P=fence)|\Z)",
    re.DOTALL | re.MULTILINE,
)
_OUTSIDE = re.compile(r"\n(?=\S)")
_DEFINITION = re.compile(r"^(?:def|class|import|from|@)\b", re.MULTILINE)


def passes_tests(
    answer: str,
    before: str,
    after: str,
    *,
    uncontained: bool,
    reference: str | None = None,
) -> bool:
    """Return True if an answer passes the unit tests of its question.

    Args:
        answer: text of a model: code, code in a fenced block, or lines that continue the prompt.
        before: code before the answer, e.g. the prompt of HumanEval.
        after: test code. It compiles without the answer.
        uncontained: True to run without namespaces, with limits on resources only.
        reference: the task's own solution, written like an answer. The tests use builtins and
            standard modules, except for names that this solution defines itself.

    Raises:
        EnvironmentFault: namespaces are not available.
    """
    function = _find_last_function(_close_prompt(before))
    solution = _find_bindings(_find_solution(before, reference))
    used = _find_read_names(after) - _find_bindings(after).keys() - vars(builtins).keys()
    used |= _find_wanted_builtins(before, after, solution)
    for code in _find_programs(answer, {function} if function else used):
        program = before + code
        if compiles(program) and compiles(program + after):
            held = _count_held_assertions(
                program, before, after, reference, uncontained=uncontained
            )
            if not held:  # it failed, or there are no assertions
                return held is not None
            expected = _count_expected_assertions(before, after, reference, uncontained=uncontained)
            return all(count >= wanted for count, wanted in zip(held, expected, strict=True))
    return False


@lru_cache(maxsize=1024)
def _count_expected_assertions(
    before: str, after: str, reference: str | None, *, uncontained: bool
) -> Sequence[int]:
    """Return how often each assertion of the tests must hold.

    The assertions are in the order of the source text.
    """
    if reference is not None:
        solution = _find_solution(before, reference)
        held = _count_held_assertions(solution, before, after, reference, uncontained=uncontained)
        if held is not None:
            return held
    tree = _parse(after)
    tests = sandbox.assertions(tree) if tree else []
    return [int(not _never_holds(each.test)) for each in tests]


def _never_holds(test: ast.expr) -> bool:
    """Return True if an assertion tests a constant that is false, as `assert False` does."""
    return isinstance(test, ast.Constant) and not test.value


@cache
def check_containment() -> None:
    """Raise EnvironmentFault if this machine cannot run answers in namespaces of their own."""
    _count_held_assertions("", "", "", None, uncontained=False)


def compiles(program: str) -> bool:
    """Return True if a text compiles as a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in a model's code
        try:
            compile(program, "answer", "exec")
        except _UNPARSED:
            return False
    return True


def same_code(reference: str, answer: str) -> bool:
    """Return True if an answer equals the reference program except for layout and comments.

    Args:
        reference: a program that compiles.
        answer: text of a model: code, or code in a fenced block.
    """
    wanted = _dump_tree(reference)
    readings = _find_programs(answer, _find_bindings(reference).keys())
    return wanted is not None and any(_dump_tree(code) == wanted for code in readings)


def _dump_tree(code: str) -> str | None:
    """Return the syntax tree of a program as text, or None if the program does not parse."""
    with suppress(*_UNPARSED):
        tree = _parse(code)
        return None if tree is None else ast.dump(tree)
    return None


def _parse(code: str) -> ast.Module | None:
    """Return the syntax tree, or None if the code does not parse."""
    with warnings.catch_warnings(), suppress(*_UNPARSED):
        warnings.simplefilter("ignore")  # invalid escapes in a model's code
        return ast.parse(code)
    return None


def _find_programs(answer: str, wanted: Collection[str]) -> Iterator[str]:
    """Yield the possible programs in an answer, the most likely one first.

    Args:
        wanted: names that the program should define.
    """
    for block in _find_blocks(answer, wanted):
        yield from _find_programs_in_block(block)


def _find_blocks(answer: str, wanted: Collection[str]) -> Iterator[str]:
    """Yield the code blocks of an answer, the most likely one first.

    First come the blocks that define a wanted name, together with earlier blocks that they need.
    Next come the blocks that continue a function body, and then all others.
    """
    found = list(_FENCED.finditer(answer))
    if not found:
        yield answer
        return
    before = answer[: found[0].start()]
    blocks = [each["code"].removesuffix("\n") for each in found]
    goes_on = _starts_indented(before)  # the prompt opened a fence, and the answer closes it
    if before.strip() and (goes_on or _defines(before, wanted)):
        blocks.insert(0, before)
    ranks = [
        0 if _defines(block, wanted) else 1 if _starts_indented(block) else 2 for block in blocks
    ]
    joined = _JoinedBlocks(blocks, most=_MOST_JOINED * len(answer))
    for at in sorted(range(len(blocks)), key=ranks.__getitem__):
        if ranks[at] == 0 and (code := joined.with_helpers(at)) is not None:
            yield code
        yield blocks[at]


def _defines(code: str, names: Collection[str]) -> bool:
    """Return True if the code defines one of the names. The code may be truncated."""
    either = "|".join(map(re.escape, names))
    pattern = rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(?:{either})\b|^(?:{either})[ \t]*="
    return bool(names) and re.search(pattern, code, re.MULTILINE) is not None


_MOST_JOINED = 10
"""Total length of the joined blocks that are tried, as a multiple of the answer's length."""


class _JoinedBlocks:
    """The code blocks of an answer. A block can be joined with the earlier blocks that it needs.

    Args:
        blocks: The blocks in the order of the answer.
        most: Maximum total length of the joined blocks. It limits the time for a long answer.
    """

    def __init__(self, blocks: Sequence[str], most: int) -> None:
        self._blocks = blocks
        self._left = most

    @cached_property
    def _names(self) -> list[tuple[set[str], set[str]]]:
        """For each block, the names that it defines and the names that it reads."""
        return [(set(_find_bindings(block)), _find_read_names(block)) for block in self._blocks]

    @cached_property
    def _binders(self) -> dict[str, list[int]]:
        """For each name, the indices of the blocks that define it, in ascending order."""
        found: dict[str, list[int]] = {}
        for at, (bound, _) in enumerate(self._names):
            for name in bound:
                found.setdefault(name, []).append(at)
        return found

    def with_helpers(self, at: int) -> str | None:
        """Return a block, preceded by the earlier blocks that define the names it uses.

        Returns:
            None if no earlier block defines such a name, or if the joined blocks are too long.
        """
        have: set[str] = set()
        chosen: list[int] = []
        wanted: list[tuple[int, str]] = [(-at, "")]  # a heap: the last block comes first
        while wanted:
            place, name = heappop(wanted)
            if name in have:
                continue
            chosen.append(-place)
            self._left -= len(self._blocks[-place])
            if self._left < 0:
                return None
            bound, used = self._names[-place]
            have |= bound
            for name in used - have:
                binders = self._binders.get(name, [])
                if before := bisect_left(binders, -place):
                    heappush(wanted, (-binders[before - 1], name))
        if len(chosen) == 1:
            return None
        return "\n\n".join(self._blocks[place] for place in reversed(chosen))


def _find_programs_in_block(code: str) -> Iterator[str]:
    """Yield the programs that a code block may stand for, the most likely one first."""
    if _starts_indented(code):  # it continues the function; everything outside comes after it
        yield _OUTSIDE.split(code, maxsplit=1)[0]
    yield code
    yield textwrap.dedent(code)
    if definition := _DEFINITION.search(code):  # if it follows some words
        yield code[definition.start() :]
    yield textwrap.indent(textwrap.dedent(code), "    ")


def _starts_indented(code: str) -> bool:
    return code.lstrip("\r\n")[:1] in (" ", "\t")


def _make_job(
    program: str, before: str, after: str, reference: str | None
) -> dict[str, str | list[str]]:
    """Return the job of the process that runs the tests. Its fields are:

    - program: Program of the answer.
    - prelude: Code that runs before the tests. It contains the code before the answer (HumanEval's
      helpers) and imports from the standard library. So the answer cannot replace `math.isclose`.
    - star_imports: Lines such as `from math import *` in the reference solution.
    - star_names: Names that the tests may read from the modules in `star_imports`.
    - answer_names: Names in the tests that refer to objects of the answer. A builtin or a standard
      module is one of them only if the task's function has its name.
    - shared_names: Names that the top level of the tests defines and that the answer may read, such
      as set-up code of MBPP.
    - tests: Test code, split into statements if there are `shared_names`.
    - seed: Random seed of the tests, the same for the reference and for every answer.
    """
    prelude = _close_prompt(before)
    in_program, in_prelude = _find_bindings(program), _find_bindings(prelude)
    solved = _find_solution(before, reference)
    solution = _find_bindings(solved)
    used = _find_read_names(after)
    imports = _standard_imports(after, solution)
    imported = used if "*" in in_program else in_program.keys()  # as in `from math import *`
    lines = [imports[name] for name in sorted(imports.keys() & imported - in_prelude.keys())]
    answer_names = _find_answer_names(before, after, solution)
    last = _find_last_function(prelude)
    if last in used & in_program.keys() and in_program[last] != in_prelude[last]:
        answer_names.add(last)
    shared_names = _find_bindings(after).keys() & _find_read_names(program)
    if reference is not None and solved:
        shared_names &= _find_read_globals(solved)
    tests = _parse(after)
    return {
        "program": program,
        "prelude": "\n".join([prelude, *lines]),
        "star_imports": _star_imports(solved),
        "star_names": sorted(used & imported - solution.keys()),
        "answer_names": sorted(answer_names),
        "shared_names": sorted(shared_names),
        "tests": [ast.unparse(line) for line in tests.body] if tests and shared_names else [after],
        "seed": sha256(after.encode(errors="replace")).hexdigest(),
    }


def _find_answer_names(before: str, after: str, solution: Mapping[str, str]) -> set[str]:
    """Return the names in the tests that refer to objects of the answer.

    They are the names that the reference solution defines. If the tests read none of these, they
    are the names that neither the tests nor Python define.
    """
    used = {
        name
        for name in _find_read_names(after) - _find_bindings(_close_prompt(before)).keys()
        if not _is_special(name)
    }
    if used & solution.keys():
        return {name for name in used & solution.keys() if not _is_import(solution[name])}
    taken = vars(builtins).keys() - _find_wanted_builtins(before, after, solution)
    return used - _standard_imports(after, solution).keys() - taken


def _is_special(name: str) -> bool:
    """Return True if Python itself defines the name in every module, such as `__name__`."""
    return name.startswith("__") and name.endswith("__")


def _find_read_globals(program: str) -> set[str]:
    """Return the global names that a program reads, also inside its functions and classes."""
    found: set[str] = set()
    with suppress(*_UNPARSED):
        tables = [symtable.symtable(program, "answer", "exec")]
        for table in tables:
            tables += table.get_children()
            found.update(
                each.get_name()
                for each in table.get_symbols()
                if each.is_referenced() and (each.is_global() or table.get_type() == "module")
            )
    return found


def _find_solution(before: str, reference: str | None) -> str:
    """Return the reference solution as a program, or "" if there is none."""
    return next(filter(compiles, (before + (reference or ""), reference or "")), "")


def _find_wanted_builtins(before: str, after: str, solution: Mapping[str, str]) -> set[str]:
    """Return the names of builtins that the answer must define itself, because the task requires
    it.

    They are the builtin names that the reference solution defines. If the tests read none of the
    names that the solution defines, a builtin can be the name of the task's function. This is so
    only if the tests read exactly one builtin, and no other name that they do not define.
    """
    own = _close_prompt(before)
    used = _find_read_names(after) - _find_bindings(own).keys()
    found = used & vars(builtins).keys()
    if used & solution.keys():
        return {name for name in found & solution.keys() if not _is_import(solution[name])}
    others = used & _find_read_globals(after) - found - (
        _find_bindings(after).keys() - _rebound(after)
    )
    return found if len(found) == 1 and not _find_last_function(own) and not others else set()


def _standard_imports(after: str, solution: Mapping[str, str]) -> dict[str, str]:
    """Return the import statements for the standard modules and names that the tests use.

    The tests use a module `math` if they read an attribute of it, as in `math.isclose`, and never
    call `math` itself. The reference solution has priority: a name that it defines belongs to the
    answer, and a name that it imports belongs to the tests.
    """
    used = _find_read_names(after)
    found = {
        name: f"import {name}"
        for name in (used & sys.stdlib_module_names) - solution.keys() - _find_called_names(after)
    }
    for name in used & solution.keys():
        if _is_import(solution[name]):
            found[name] = solution[name]
    return found


def _is_import(line: str) -> bool:
    """Return True if a statement is an import.

    Args:
        line: source text of one statement.
    """
    tree = _parse(line)
    return tree is not None and isinstance(tree.body[0], ast.Import | ast.ImportFrom)


def _star_imports(program: str) -> list[str]:
    """Return those lines of a program that import everything from a standard module.

    An example is `from math import *`.
    """
    tree = _parse(program)
    return [
        ast.unparse(line)
        for line in (tree.body if tree else ())
        if isinstance(line, ast.ImportFrom)
        and line.names[0].name == "*"
        and (line.module or "").partition(".")[0] in sys.stdlib_module_names
    ]


def _find_called_names(program: str) -> set[str]:
    """Return the names that a program uses as functions or values, not as modules.

    It calls them, or reads them without ever reading an attribute.
    """
    tree = _parse(program)
    nodes = list(ast.walk(tree)) if tree else []
    owners = {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    called = {
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    read = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return called | read - owners


def _rebound(program: str) -> set[str]:
    """Return the names that a statement both reads and assigns again: `for f in [f]`, `f =
    g(f)`.
    """
    found: set[str] = set()
    tree = _parse(program)
    for node in ast.walk(tree) if tree else ():
        match node:
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                found |= _find_names(target) & _find_names(value)
            case ast.Assign(targets=targets, value=value):
                found |= set().union(*map(_find_names, targets)) & _find_names(value)
    return found


def _find_names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _close_prompt(before: str) -> str:
    """Return the code before the answer as a complete program.

    If it ends in the head of a function, `pass` is added as the body.
    """
    return next(filter(compiles, (before, f"{before}\n    pass")), "")


def _find_last_function(program: str) -> str | None:
    """Return the name of the function that the model's answer completes.

    This is the last function in `program`, the code before the answer. None if there is none.
    """
    tree = _parse(program)
    last = tree.body[-1] if tree and tree.body else None
    return last.name if isinstance(last, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _find_read_names(program: str) -> set[str]:
    """Return the names that a program reads."""
    tree = _parse(program)
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name)) if tree else ()
    return {name.id for name in names if isinstance(name.ctx, ast.Load)}


def _find_bindings(program: str) -> dict[str, str]:
    """Return the names that the top level of a program defines.

    Each name is mapped to the statement that defines it last. If that is an import, the statement
    imports only this name.
    """
    bound: dict[str, str] = {}
    tree = _parse(program)
    for line in tree.body if tree else ():
        text = _unparse(line)
        defines = isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for node in [line] if defines else ast.walk(line):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    bound[node.name] = text
                case ast.Name(ctx=ast.Store()):
                    bound[node.id] = text
                case ast.Import() | ast.ImportFrom():
                    for each in node.names:
                        alone = copy(node)
                        alone.names = [each]
                        bound[each.asname or each.name.partition(".")[0]] = ast.unparse(alone)
    return bound


def _unparse(line: ast.stmt) -> str:
    """Return the source text of a statement.

    Return "" if the statement is nested too deeply, or contains a number that is too large.
    """
    try:
        return ast.unparse(line)
    except (ValueError, RecursionError):
        return ""


def _count_held_assertions(
    program: str, before: str, after: str, reference: str | None, *, uncontained: bool
) -> list[int] | None:
    """Run the tests, and return how often each of their assertions held.

    Return None if the program fails the tests.

    Raises:
        EnvironmentFault: namespaces are not available.
    """
    job = _make_job(program, before, after, reference)
    parent_pipe, write_end = os.pipe()
    command = [sys.executable, "-I", "-S", sandbox.__file__]
    with (
        tempfile.TemporaryDirectory(prefix="answer-", ignore_cleanup_errors=True) as empty,
        subprocess.Popen(
            [*command, "uncontained" if uncontained else "contained", str(parent_pipe)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=empty,
            env={},
            pass_fds=[parent_pipe],
            start_new_session=True,
        ) as supervisor,
    ):
        os.close(parent_pipe)
        counts = errors = b""
        try:
            with suppress(subprocess.TimeoutExpired):
                counts, errors = supervisor.communicate(json.dumps(job).encode(), timeout=TIMEOUT_S)
        finally:
            os.close(write_end)  # this kills the processes that still run
    if supervisor.returncode in (sandbox.PASSED, sandbox.FAILED):
        passed = supervisor.returncode == sandbox.PASSED and counts
        return list(json.loads(counts)) if passed else None
    raise EnvironmentFault(
        "answers cannot be run in a sandbox on this machine:"
        f" {errors.decode(errors='replace').strip()}",
        "allow namespaces for this user (Linux 5.12 or later; in a container: --privileged; Ubuntu:"
        " sysctl kernel.apparmor_restrict_unprivileged_userns=0), or run answers without a sandbox,"
        " with all rights of this user: specbench run --run-code --uncontained",
    )
