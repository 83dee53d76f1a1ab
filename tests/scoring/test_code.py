"""Scoring of generated code: the sandbox, its limits, and the verdict of the tests."""

import json
import math
import os
import struct
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.soundness import hostile_code
from specbench_cli.errors import EnvironmentFault
from specbench_cli.scoring import code, sandbox


def lacks_containment(uncontained: bool = False) -> bool:
    """Return True if this system has no namespaces, so contained code cannot run."""
    if uncontained:
        return False
    try:
        code.check_containment()
    except EnvironmentFault:
        with pytest.raises(EnvironmentFault):
            code.passes_tests("", "", "", uncontained=False)
        return True
    return False


BOTH = pytest.mark.parametrize("uncontained", [False, True], ids=["contained", "limits"])


def passes_tests(program: str, uncontained: bool, tests: str = "", before: str = "") -> bool:
    return code.passes_tests(program, before, tests, uncontained=uncontained)


@BOTH
def test_a_correct_program_passes_and_a_wrong_one_fails(uncontained):
    if lacks_containment(uncontained):
        return
    tests = "\nassert add(2, 3) == 5\nassert sorted({add(1, 1), 4}) == [2, 4]\n"
    assert passes_tests("def add(a, b):\n    print('adding')\n    return a + b", uncontained, tests)
    assert not passes_tests("def add(a, b):\n    return a * b", uncontained, tests)


PROMPT_CODE = (
    'from typing import List\n\n\ndef add(a: int, b: int) -> int:\n    """ Add two numbers. """\n'
)
CHECK = "\n\ndef check(candidate):\n    assert candidate(2, 3) == 5\n\n\ncheck(add)\n"
CHECK_CLOSE = "\n\ndef check(c):\n    assert abs(c(1.33, 1) - 2.33) < 1e-6\n\n\ncheck(add)\n"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (
            "```python\nprint('example')\n```\n\n```python\ndef add(a, b):\n    return a + b\n```",
            True,
        ),
        ("```bash\npip install x\n```\n```python\ndef add(a, b):\n    return a + b\n```", True),
        ("```python\nprint('example')\n```\nNow the body:\n```\n    return a + b\n```", True),
        ("    return a + b\n```\nThis function adds.\n```\nadd(1, 2)\n```", True),
        ("def add(a, b):\n    return a + b\n```\nUse it: `add(1, 2)`.", True),
        (
            "```python\nprint(add(1, 2))\n```\n```python\nasync def subadd(a, b):\n    pass\n```",
            False,
        ),
        (
            "```\ndef one():\n    return 1\n```\n```\ndef add(a, b):\n    return a + b*one()\n```",
            True,
        ),
        ("~~~python\ndef add(a, b):\n    return a + b\n~~~\nIt adds.", True),
        ("- a list\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n- its end", True),
        ("Say ```add``` first.\n```python\nadd = lambda a, b: a + b\n```", True),
        ("```\ndef add(a, b):\n    return a - b\n```\n```\nassert add(2, 3) == 5\n```", False),
        ("```\ndef subtract(a, b):\n    return a - b\n```\n```\ndef add(a, b):\n    return", False),
    ],
)
def test_the_code_block_with_the_tested_function_is_used(answer, right):
    assert passes_tests(answer, True, CHECK, PROMPT_CODE) == right


def test_without_a_prompt_program_the_tests_determine_the_needed_names():
    example = "```python\nprint(second([1, 2]))\n```\n"
    answer = f"{example}```python\ndef second(xs):\n    return xs[1]\n```\n{example}"
    assert passes_tests(
        answer, True, "\nxs = [1, 2]\nassert second(xs) == 2\nassert len(xs) == 2\n"
    )


def test_exact_code_uses_the_block_that_defines_the_reference_names():
    reference = "def add(a, b):\n    return a + b\n"
    assert code.same_code(reference, f"```\nadd(1, 2)\n```\n```\n{reference}```")
    assert not code.same_code(
        reference, "```\nadd(1, 2)\n```\n```\ndef add(a, b):\n    return a\n```"
    )


FAST = (
    "passwd home run-folder variables packages packages-written write-outside write-libraries"
    " chroot mount namespaces others tcp udp unix-socket abstract-socket fork-bomb thread kill"
    " memory disk deaf tests end-86 equal-to-all assertions harness replies closed segfault"
    " vsock vsock-pair crypto-socket netlink tipc-pair module io-uring add-key request-key"
    " compat-calls x32-calls bpf performance page-faults read-memory kernel-log watch watch-folder"
    " lease lock-library lock-library-ofd pipe-size asynchronous process-handle"
    " timers signals-queued pages-given pages-of-libraries pages-sent pages-asked pages-merged"
    " pages-huge read-ahead file-map packet-filter barrier memory-locked slow-down memory-files"
    " descriptors files-in-flight hard-link signals-by-files raw-socket domain-name paths-above"
    " stop-iteration iterator-named module-name ended-for-error replies-ahead object-numbers"
    " own-mro socket-file datagram-pair congestion pages-read-if-there"
    " clone execute memory-shared semaphores messages memory-secret sync"
).split()


def test_hostile_programs_are_contained_and_fail(monkeypatch):
    if lacks_containment():
        return
    monkeypatch.setattr(code, "TIMEOUT_S", 1.0)
    for name, reached, passed in hostile_code.run_programs(FAST):
        assert (reached, passed) == ([], False), name


def test_the_tests_of_hostile_programs_accept_a_correct_one():
    assert passes_tests("def add(a, b): return a + b", True, hostile_code.TESTS)


def test_the_system_call_filter_permits_ordinary_programs():
    if lacks_containment():
        return
    program = (
        "import asyncio, fcntl, mmap, os, resource, select, shutil, signal, socket, sqlite3\n"
        "import tempfile, threading, time\n"
        "async def later(): await asyncio.sleep(0.001); return 7\n"
        "def all_of_it():\n"
        "    one, other = socket.socketpair()\n"
        "    one.send(b'x')\n"
        "    assert select.select([other], [], [], 1)[0] and other.recv(1) == b'x'\n"
        "    socket.socket().close(), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close()\n"
        "    with tempfile.TemporaryFile() as file:\n"
        "        fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "        file.write(b'x'), file.flush(), os.fsync(file.fileno())\n"
        "        memory = mmap.mmap(file.fileno(), 1)\n"
        "        memory.flush(), memory.close()\n"
        "    with sqlite3.connect('base') as base:\n"
        "        base.execute('create table t (x)'), base.execute('insert into t values (1)')\n"
        "    assert shutil.copy2('base', 'copy') == 'copy' and os.stat('copy').st_size\n"
        "    shutil.copy(os.__file__, 'library'), os.listdir(), shutil.disk_usage('/')\n"
        "    signal.setitimer(signal.ITIMER_REAL, 9), signal.alarm(0), os.times()\n"
        "    resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))\n"
        "    assert not open('copy').isatty() and threading.Lock().acquire(timeout=0.1)\n"
        "    os.closerange(20, 30), time.sleep(0.001), os.urandom(4), os.cpu_count()\n"
        "    return asyncio.run(later())\n"
    )
    assert passes_tests(program, False, "\nassert all_of_it() == 7\n")


def run_filter(machine: str, call: int, *arguments: int, architecture: int | None = None) -> int:
    """Return the decision of the filter, by interpreting its classic BPF program."""
    column = sandbox._MACHINES[machine]
    wide = [*arguments, *[0] * (6 - len(arguments))]
    known = sandbox._ARCHITECTURE[column] if architecture is None else architecture
    data = struct.pack("=iIQ6Q", call, known, 0, *wide)
    program = list(struct.iter_unpack("HBBI", sandbox.call_filter(machine)))
    at = loaded = 0
    while True:
        operation, if_true, if_false, constant = program[at]
        at += 1
        match operation:
            case 0x20:  # load a word
                (loaded,) = struct.unpack_from("=I", data, constant)
            case 0x15:
                at += if_true if loaded == constant else if_false
            case 0x25:
                at += if_true if loaded > constant else if_false
            case 0x45:
                at += if_true if loaded & constant else if_false
            case 0x06:
                return constant


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_system_call_filter_decides_by_call_argument_and_architecture(machine):
    column = sandbox._MACHINES[machine]
    calls = {name: numbers[column] for name, numbers in sandbox.CALLS.items()}
    allowed, killed, done = 0x7FFF0000, 0x80000000, 0x50000
    not_permitted, no_such_call = 0x50001, 0x50026

    for number in set(range(sandbox._LAST_CALL[column])) - set(calls.values()):
        assert run_filter(machine, number) == not_permitted, number
    for name in hostile_code.CALLS.keys() - {"socket"}:
        assert run_filter(machine, hostile_code.CALLS[name][column]) == not_permitted, name
    assert hostile_code.CALLS["socket"][column] == calls["socket"]
    for name in ("fsync", "fdatasync", "msync", "fadvise64"):
        assert run_filter(machine, calls[name]) == done
    for call, families, kinds in (("socket", (2, 10), range(8)), ("socketpair", (1,), (1, 5))):
        for family in range(64):
            for protocol in (0, 6, 17, 132, 262):
                for kind in range(8):
                    for high in (0, 1 << 32):  # the kernel ignores the upper half
                        fine = family in families and protocol in (0, 6, 17) and kind in kinds
                        wide = family | high, kind | 0x80800 | high, protocol | high
                        verdict = run_filter(machine, calls[call], *wide)
                        assert verdict == (allowed if fine else not_permitted)
    for command in (*range(64), *range(1024, 1048)):  # 1024: F_SETLEASE, 1026: F_NOTIFY
        fine = command in {0, 1, 2, 3, 4, 5, 1030}
        verdict = run_filter(machine, calls["fcntl"], 3, command)
        assert verdict == (allowed if fine else done if command in {6, 7} else not_permitted)
    for call, place, fine, wrong in (
        ("ioctl", 1, 0x5421, 0xC020660B),  # FIONBIO, FS_IOC_FIEMAP
        ("mmap", 3, 0x22, 0x40022),  # MAP_PRIVATE | MAP_ANONYMOUS, and MAP_HUGETLB
        ("madvise", 2, 4, 12),  # MADV_DONTNEED, MADV_MERGEABLE
        ("futex", 1, 0x80, 0x86),  # FUTEX_WAIT, FUTEX_LOCK_PI
    ):
        for argument, verdict in ((fine, allowed), (wrong, not_permitted)):
            assert run_filter(machine, calls[call], *[0] * place, argument) == verdict, call
    for call in ("preadv2", "pwritev2"):
        for flags, verdict in ((0, allowed), (8, not_permitted), (8 | 1 << 32, not_permitted)):
            assert run_filter(machine, calls[call], 3, 0, 1, 0, 0, flags) == verdict  # RWF_NOWAIT
    for level, option, fine in (
        *((1, 2, True), (1, 13, True), (6, 1, True)),
        *((1, 26, False), (0, 1, False), (6, 13, False), (6, 31, False)),
    ):
        verdict = run_filter(machine, calls["setsockopt"], 3, level, option)
        assert verdict == (allowed if fine else not_permitted)  # SO_ATTACH_FILTER is 26
    for call in {"x86_64": (206, 209, 73), "aarch64": (0, 2, 32)}[machine]:
        assert run_filter(machine, call) == not_permitted  # io_setup, io_submit, flock
    read, last = {"x86_64": (0, 334), "aarch64": (63, 293)}[machine]
    assert run_filter(machine, read) == run_filter(machine, last) == allowed
    for later in (425, 426, 427, 435, 438, 442, 447, 0x40000000 + 41, -1):
        assert run_filter(machine, later) == no_such_call
    for other in (0x40000003, 0x40000028, 0):  # 32-bit x86, 32-bit ARM, none
        assert run_filter(machine, read, architecture=other) == killed


def test_without_containment_hostile_programs_reach_their_aim():
    programs = ["run-folder", "write-outside", "abstract-socket"]
    assert all(reached for _, reached, _ in hostile_code.run_programs(programs, uncontained=True))


@BOTH
def test_the_sandbox_folder_is_empty_and_writable(uncontained):
    if lacks_containment(uncontained):
        return
    look = "import os\nassert os.listdir() == []\nopen('left', 'w').write('x')"
    assert passes_tests(look, uncontained)
    assert passes_tests(look, uncontained)


@pytest.mark.parametrize(
    "program",
    [
        "open('big', 'wb').write(bytes(2 * 1024**2))",
        "files = [open('f' + str(i), 'w') for i in range(200)]",
        "input()",
        "raise SystemExit",
        "assert False",
        "x = (",
        "x = '\\0'\0",
    ],
)
def test_a_program_that_exceeds_a_limit_or_exits_fails(program):
    assert not passes_tests(program, uncontained=True)


def test_sandboxes_inherit_no_high_file_descriptor():
    if lacks_containment():
        return
    count = (
        "import os\ndef found():\n    n = 0\n    for fd in range(64, 1024):\n"
        "        try: os.fstat(fd)\n        except OSError: continue\n        n += 1\n"
        "    return n\n"
    )
    descriptors = [
        os.open(os.devnull, os.O_RDONLY) for _ in range(80)
    ]  # the sandbox's own descriptor has a higher number
    try:
        assert passes_tests(count, False, "\nassert found() == 0\n")
    finally:
        for fd in descriptors:
            os.close(fd)


def test_an_endless_loop_ends_at_the_time_limit(monkeypatch):
    monkeypatch.setattr(code, "TIMEOUT_S", 0.5)
    began = time.monotonic()
    assert not passes_tests("while True: pass", uncontained=True)
    assert time.monotonic() - began < 10


@BOTH
def test_sandboxes_end_with_their_parent_process(uncontained):
    """The system closes the parent's end of the pipe when the parent ends for any reason."""
    if lacks_containment(uncontained):
        return
    parent_end, our_end = os.pipe()
    words = [sys.executable, "-I", "-S", sandbox.__file__]
    mode = "uncontained" if uncontained else "contained"
    with subprocess.Popen(
        [*words, mode, str(parent_end)], stdin=subprocess.PIPE, env={}, pass_fds=[parent_end]
    ) as keeper:
        os.close(parent_end)
        job = {
            "program": "while True: pass",
            "prelude": "",
            "answer_names": [],
            "shared_names": [],
            "tests": [],
        }
        keeper.stdin.write(json.dumps(job).encode())
        keeper.stdin.close()
        os.close(our_end)
        assert keeper.wait(10) == sandbox.FAILED  # its exit code after both ends are closed


def test_without_containment_code_is_not_run_and_the_error_has_a_hint(monkeypatch, tmp_path):
    lacking = tmp_path / "keeper.py"
    lacking.write_text(
        f"import sys\nprint('not permitted', file=sys.stderr)\nsys.exit({sandbox.NO_SANDBOX})\n"
    )
    monkeypatch.setattr(sandbox, "__file__", str(lacking))
    with pytest.raises(
        EnvironmentFault, match="cannot be run in a sandbox on this machine: not permitted"
    ) as fault:
        passes_tests("pass", uncontained=False)
    assert "--run-code --uncontained" in fault.value.hint


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    st.sets(st.integers()),
    st.frozensets(st.text()),
)
DATA = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=40)
@given(DATA)
def test_data_is_passed_between_processes_unchanged(value):
    def none(number):
        raise AssertionError(number)

    back = sandbox.decode_value(json.loads(json.dumps(sandbox.encode_value(value, none))), none)
    assert back == value and type(back) is type(value)


@BOTH
def test_objects_of_the_answer_stay_in_its_process_and_can_be_used(uncontained):
    if lacks_containment(uncontained):
        return
    program = (
        "import re\nclass Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        "def total(pairs): return sum(p.a * p.b for p in pairs)\n"
        "def first(pair): return pair.a\n"
        "def count(n): yield from range(n)\n"
        "def root(x):\n    if x < 0: raise ValueError(x)\n    return x ** .5\n"
    )
    tests = (
        "\npair = Pair(2, 3)\nassert total([pair, Pair(1, 1)]) == 7\npair.a = 5\n"
        "assert first(pair) == pair.a == 5 and list(count(3)) == [0, 1, 2]\n"
        "try:\n    root(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError\n"
    )
    assert passes_tests(program, uncontained, tests)


def test_the_answer_sees_the_setup_of_the_tests():
    program = "def vowels(word): return sum(c in VOWELS for c in word)"
    assert passes_tests(program, True, "\nVOWELS = 'aeiou'\nassert vowels('banana') == 3\n")


HELPER_CODE = 'import math\ndef poly(x):\n    return x - 2\n\ndef root():\n    """Of poly."""\n'
CLOSE = "\nassert math.fabs(poly(root())) < 1e-9 and math.isclose(root(), 2)\n"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return 2", True),
        (f"{HELPER_CODE}    return 2", True),
        ("    return 0\n", False),
        (f"{HELPER_CODE}    return 0\n\ndef poly(x): return 0", False),
        (f"{HELPER_CODE}    return 0\n\nclass math:\n    fabs = isclose = lambda *a: 0", False),
    ],
)
def test_the_answer_cannot_replace_helpers_and_modules_of_the_tests(answer, right):
    assert passes_tests(answer, True, CLOSE, HELPER_CODE) == right


def test_a_module_imported_only_by_the_answer_is_the_tests_own():
    program = "import math\nmath.isclose = lambda *a: True\ndef third(): return {}"
    tests = "\nassert math.isclose(third(), 1 / 3)\n"
    assert passes_tests(program.format(1 / 3), True, tests) and not passes_tests(
        program.format(0), True, tests
    )


def test_a_builtin_redefined_by_the_answer_is_the_answer_s():
    assert passes_tests("def sum(a, b): return a * b", True, "\nassert sum(2, 5) == 10\n")


@pytest.mark.parametrize(
    ("answer", "before", "tests"),
    [
        (
            "def similar(a, b): return 0\ndef set(x): return 1\n",
            "",
            "\nassert set(similar((3, 4), (4, 5))) == set((4,))\n",
        ),
        ("```\ndef add(a, b): return 0\ndef abs(x): return 0\n```", PROMPT_CODE, CHECK_CLOSE),
        (
            "    return 0\n\nfrom operator import is_not as abs\nabs = bool",
            PROMPT_CODE,
            CHECK_CLOSE,
        ),
        ("    return 0\n\nglobals()['abs'] = lambda x: 0", PROMPT_CODE, CHECK_CLOSE),
        (
            "class math: isclose = staticmethod(lambda *a, **k: True)\ndef area(r): return 0\n",
            "",
            "\nassert math.isclose(area(10), 314.15)\n",
        ),
        (
            "import math\ndef area(r): return 0\nexec('class math: isclose = lambda *a: True')\n",
            "",
            "\nassert math.isclose(area(10), 314.15)\n",
        ),
        (
            "def area(r): return 0\nexec('class math: isclose = lambda *a: True')\n",
            "",
            "\nassert math.isclose(area(10), 314.15)\n",
        ),
        (
            "import cmath as math\ndef area(r): return 0\nmath.isclose = lambda *a: True\n",
            "",
            "\nassert math.isclose(area(10), 314.15)\n",
        ),
        (
            "class math:\n    isclose = lambda *a: True\ndef area(r): return 0\n",
            "",
            "\ndef check(math):\n    assert math.isclose(area(1), 3.14)\ncheck(math)\n",
        ),
        *(
            ("def double(x): return 0\nabs = lambda x: 0\n", "", tests)
            for tests in (
                "\ndef check(double):\n    assert abs(double(2) - 4) < 1\ncheck(double)\n",
                "\nfor double in [double]:\n    assert abs(double(2) - 4) < 1\n",
                "\nassert [abs(double(2) - 4) for double in [double]] == [0]\n",
            )
        ),
    ],
)
def test_answer_cannot_replace_a_builtin_or_module_that_the_tests_use(answer, before, tests):
    assert not passes_tests(answer, True, tests, before)


REFERENCE = "from math import isclose\nimport math as m\ndef sum(a, b): return a * b\n"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("from math import isclose\nimport math as m\ndef sum(a, b): return a * b", True),
        ("from math import *\nimport math as m\ndef sum(a, b): return a * b", True),
        ("def sum(a, b): return 0\ndef isclose(a, b): return True\ndef m(): pass", False),
        ("isclose = m = all = print\ndef sum(a, b): return a + b", False),
    ],
)
def test_the_reference_determines_which_builtins_and_imports_the_answer_may_define(answer, right):
    tests = "\nassert all(isclose(sum(a, 2), m.floor(2 * a)) for a in range(9))\n"
    passed = code.passes_tests(answer, "", tests, uncontained=True, reference=REFERENCE)
    assert passed == right


def test_a_module_or_builtin_name_defined_by_the_reference_belongs_to_the_answer():
    answer = "Words first.\n```\nclass calendar:\n    days = 7\n```"
    tests, reference = "\nassert calendar.days == 7\n", "class calendar:\n    days = 7\n"
    assert code.passes_tests(answer, "", tests, uncontained=True, reference=reference)


LOOP = "\nfor got, wanted in zip(map(up, [1, 2]), [2, 3]):\n    assert got == wanted\n"
UP = "def up(x): return x + 1\n"
RAISES = (
    "\nassert up(1) == 2\ntry:\n    up(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False\n"
)


@pytest.mark.parametrize(
    ("answer", "tests", "reference"),
    [
        (
            "def up(x): return 0 if x else cases",
            "\ncases = iter([(1, 2)])\nfor x, y in cases:\n    assert up(x) == y\n",
            None,
        ),
        (
            "def up(x): return 0 if x else cases",
            "\ncases = [iter([(1, 2)])]\nfor x, y in cases[0]:\n    assert up(x) == y\n",
            UP,
        ),
        ("def up(x): raise StopIteration", LOOP, None),
        ("def up(x):\n    if x > 1: raise StopIteration\n    return x + 1", LOOP, None),
        ("class End(StopIteration): pass\ndef up(x): raise End", LOOP, UP),
        ("import os\ndef up(x): return os._exit(0) if x < 0 else x + 1", RAISES, None),
        (
            "import os\ndef up(x):\n    if x > 0: return x + 1\n"
            "    for n in range(3, 64):\n"
            "        try: os.write(n, b'no reply\\n')\n"
            "        except OSError: pass\n",
            RAISES,
            None,
        ),
        ("import sys\ndef up(x): return sys.exit() if x < 0 else x + 1", RAISES, None),
        (
            "__name__ = 'other'\ndef up(x): return 0",
            "\nif __name__ == '__main__':\n    assert up(1) == 2\n",
            UP,
        ),
        (
            "__name__ = 'other'\ndef up(x): return 0",
            "\nif __name__ == '__main__':\n    assert up(1) == 2\n",
            None,
        ),
        (
            "def up(x): return 0\ndef isclose(*a): return True",
            "\nassert isclose(up(1), 2)\n",
            f"from math import *\nfrom typing import *\n{UP}",
        ),
        (
            "def up(x): return 0\nclass lists: same = staticmethod(lambda *a: True)",
            "\nassert lists.same(up(1), 2)\n",
            f"import nosuchmodule as lists\n{UP}",
        ),
        ("def up(x): return wanted", "\nwanted = 2\nassert up(1) == wanted\n", UP),
        ("def ups(xs): return []", LOOP.replace("map(up, [1, 2])", "ups([1, 2])"), None),
        (
            "def ups(xs): return [2]",
            LOOP.replace("map(up, [1, 2])", "ups([1, 2])"),
            "def ups(xs): return [x + 1 for x in xs]\n",
        ),
        (
            "def up(x): return {}",
            "\ngot = up(1)\nif got:\n    assert got == 2\n",
            UP,
        ),
    ],
)
def test_an_answer_passes_only_if_every_assertion_holds(answer, tests, reference):
    assert not code.passes_tests(answer, "", tests, uncontained=True, reference=reference)
    right = reference or (UP if "ups" not in tests else "def ups(xs): return [x + 1 for x in xs]")
    if reference is None and tests == RAISES:
        right = (
            "def up(x):\n    if x < 0: raise UnicodeDecodeError('a', b'', 0, 1, '')\n    return 2"
        )
    if "nosuchmodule" not in right:
        assert code.passes_tests(right, "", tests, uncontained=True, reference=reference)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("import json\njson.loads('{')", "ValueError"),
        ("b'\\xff'.decode()", "UnicodeDecodeError"),
        ("raise type('Mine', (KeyError,), {})", "LookupError"),
        ("raise SystemExit", "SystemExit"),
        ("next(iter(()))", "RuntimeError"),
        ("raise ExceptionGroup('two', [ValueError()])", "RuntimeError"),
    ],
)
def test_an_exception_of_the_answer_becomes_its_nearest_builtin_type(fault, expected):
    answer = "def up(x):\n    " + fault.replace("\n", "\n    ")
    tests = f"\ntry:\n    up(1)\nexcept {expected}:\n    pass\nelse:\n    assert False\n"
    assert passes_tests(answer, True, tests)


FIRST = "def first(it, n): return [next(it) for _ in range(n)]\n"
ITERATOR_TESTS = "\nit = iter([1, 2, 9, 9])\nassert first(it, 2) == [1, 2]\n"


@BOTH
@pytest.mark.parametrize("reference", [None, FIRST])
def test_the_answer_consumes_an_iterator_of_the_tests_only_as_far_as_it_reads(
    uncontained, reference
):
    if lacks_containment(uncontained):
        return
    for rest in ("assert list(it) == [9, 9]\n", "for left in it:\n    assert left == 9\n"):
        for answer, right in (
            (FIRST, True),
            ("def first(it, n): return list(it)[:n]", False),
            ("def first(it, n): return [next(it), next(it), next(it)][:n]", rest[0] == "f"),
        ):
            passed = code.passes_tests(
                answer, "", ITERATOR_TESTS + rest, uncontained=uncontained, reference=reference
            )
            assert passed == (right and not (reference and answer != FIRST))


ENDLESS = "\nimport itertools\nassert above(itertools.count(), 200_000) == 200_001\n"
ABOVE = "def above(it, n): return next(x for x in it if x > n)\n"
OWN_ITERATOR_TESTS = "\nassert total(map(up, iter([1, 2])), (up(x) for x in [3])) == 9\n"
TOTAL = "def up(x): return x + 1\ndef total(*its): return sum(x for it in its for x in it)\n"
FAULTY = (
    "\ndef faulty():\n    yield 1\n    raise KeyError\n"
    "assert first(faulty(), 1) == [1]\n"
    "try:\n    first(faulty(), 2)\n    assert False\nexcept KeyError:\n    pass\n"
)


@pytest.mark.parametrize(
    ("answer", "tests"),
    [(ABOVE, ENDLESS), (TOTAL, OWN_ITERATOR_TESTS), (FIRST, FAULTY), (FIRST, ITERATOR_TESTS)],
)
def test_an_iterator_of_the_tests_may_be_infinite_call_the_answer_or_fail(answer, tests):
    assert passes_tests(answer, True, tests)
    wrong = answer.replace("it, n)", "it, n): return []\ndef other(it, n)")
    assert not passes_tests(wrong.replace("sum(", "len("), True, tests)


def test_answer_cannot_swallow_an_assertion_in_an_iterator_of_the_tests():
    tests = "\ndef own():\n    yield 1\n    assert False\nassert first(own(), 1) == [1]\n"
    answer = (
        "def first(it, n):\n    got = [next(it)]\n    try: next(it)\n"
        "    except BaseException: pass\n    return got\n"
    )
    assert code.passes_tests(FIRST, "", tests, uncontained=True, reference=FIRST)
    assert not code.passes_tests(answer, "", tests, uncontained=True, reference=FIRST)


@pytest.mark.parametrize("number", ["7", "-9", "null", "true", '"0"', "1e9", "{}"])
def test_the_answer_cannot_use_an_iterator_that_it_did_not_get(number):
    answer = (
        "import os\ndef first(it, n):\n    for fd in range(3, 64):\n"
        f"        try: os.write(fd, b'{{\"draw\": {number}}}\\n')\n"
        "        except OSError: pass\n    return [1, 2]\n"
    )
    assert not passes_tests(
        answer, True, "\ncases = iter([1, 2, 3])\nassert first(iter([1]), 2) == [1, 2]\n"
    )


def test_the_truth_value_of_an_answer_s_object_is_computed_by_the_answer():
    answer = "class No:\n    def __len__(self): return 0\ndef up(x): return No()\n"
    assert not passes_tests(answer, True, "\nassert up(1)\n")
    assert passes_tests(answer, True, "\nassert not up(1)\n")


def test_random_numbers_of_the_tests_are_the_same_for_every_answer():
    tests = (
        "\nimport random\nfor x in range(random.randint(1, 10**4)):\n    assert up(x) == x + 1\n"
    )
    for answer in (UP, "x = 7\ndef up(y): return x - 6 + y\n"):
        assert code.passes_tests(answer, "", tests, uncontained=True, reference=UP)


def test_loop_over_values_of_the_answer_may_be_shorter_if_it_is_inside_the_assertion():
    reference = "def divisors(n): return [d for d in range(1, n + 1) if n % d == 0]\n"
    incomplete = "def divisors(n): return [1, n]\n"
    outside = "\nfor d in divisors(6):\n    assert 6 % d == 0\n"
    inside = "\nassert all(6 % d == 0 for d in divisors(6))\n"
    for tests, passes in ((outside, False), (inside, True)):
        passed = code.passes_tests(incomplete, "", tests, uncontained=True, reference=reference)
        assert passed == passes


def test_assertion_that_the_reference_does_not_reach_need_not_run():
    tests = "\nassert up(1) == 2\nif up(0) == 5:\n    assert up(0) == 5\n"
    assert code.passes_tests(UP, "", tests, uncontained=True, reference=UP)
    assert not code.passes_tests(UP, "", tests, uncontained=True)


def test_time_to_find_the_code_grows_with_the_length_of_the_answer():
    """Half of 2,000 blocks need the one before, and no concatenation compiles."""
    blocks = (
        f"```\nfrom __future__ import annotations\ndef up(x): return up{at}(x)\n"
        f"def up{at + 1}(x): return x\n```\n"
        for at in range(2000)
    )
    began = time.monotonic()
    answer = "".join(blocks)
    readings = code._find_programs(answer, {"up"})
    assert sum(len(reading) for reading in readings) < 100 * len(answer)
    assert time.monotonic() - began < 10


def test_nan_is_passed_between_processes():
    assert passes_tests(
        "def f(): return float('nan')", True, "\nimport math\nassert math.isnan(f())\n"
    )
    assert math.isnan(sandbox.decode_value(json.loads(json.dumps(math.nan)), int))


def test_invalid_escapes_print_no_warning():
    assert passes_tests("x = '\\d'", True)


@pytest.mark.parametrize("line", ["x = 0x" + "f" * 5000, "x = " + "+".join(["1"] * 400)])
def test_an_unprintable_line_does_not_break_the_scoring(line):
    answer = f"{line}\ndef f(x):\n    return 2\n"
    assert not code.passes_tests(answer, "", "assert f(1) == 3\n", uncontained=False)
    assert code.passes_tests(answer, "", "assert f(1) == 2\n", uncontained=False)
