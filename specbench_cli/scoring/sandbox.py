"""Sandbox that runs an answer and its tests in two processes, which exchange only JSON lines.

`scoring.code` runs this module as a program with the standard library only (`python -I -S`). The
program is called the supervisor. It starts two sandboxed processes:

- The answer's process executes the answer, then serves commands over a pipe: look up a name, call,
  read or set an attribute. It replies in JSON. Objects that JSON cannot represent stay there, and
  the reply contains a number for each. During a command it can draw values from an iterator of the
  tests.
- The tests' process reads the job and executes the assertions. It executes no code of the answer,
  it compares values of builtin types, and the answer never sees the expected values. Its exit code
  decides whether the answer passes, so an answer can pass only by correct replies. It also counts
  how often each assertion holds, and writes the counts to standard output.

On Linux each process has its own namespaces (user, mount, PID, network, IPC, host name): no
network, no other processes, read-only libraries and an empty writable folder, no `/proc`, no
`/dev`, no keys, no capabilities, no further namespaces. It cannot start processes, so limits on
memory, CPU time, open files and file sizes apply to all of its work. A seccomp filter with a list
of allowed system calls blocks what namespaces do not isolate (sockets of the hypervisor, io_uring,
the kernel's log).

The supervisor reads nothing from either process. It kills both when the tests have ended, or when a
pipe from its parent process is closed.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NoReturn, TextIO

PASSED, FAILED, NO_SANDBOX = 86, 87, 88
"""Exit codes of the supervisor. With `NO_SANDBOX`, its standard error names what is not
available."""

CPU_S = 10
MEMORY_BYTES = 2 * 1024**3
FILE_BYTES = 1024**2
FOLDER_BYTES = 16 * 1024**2
OPEN_FILES = 64
MAX_DRAWN = 100_000
"""Maximum number of values taken from an iterator that an answer returns."""

_LIMITS = {
    resource.RLIMIT_CPU: CPU_S,
    resource.RLIMIT_AS: MEMORY_BYTES,
    resource.RLIMIT_FSIZE: FILE_BYTES,
    resource.RLIMIT_NOFILE: OPEN_FILES,
    resource.RLIMIT_NPROC: 0,  # no children or threads: limits do not count their usage
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
}
if sys.platform == "linux":
    _LIMITS[resource.RLIMIT_SIGPENDING] = 64  # the queue is shared by all processes of the user

# These constants are defined in the header files of Linux.
_MOUNT_SETATTR = 442
_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""CLONE_NEW: USER, NS, PID, NET, IPC, UTS."""
_READ_ONLY, _NO_SUID, _NO_DEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_AT_RECURSIVE = 0x8000
_JOIN_SESSION_KEYRING = 1
_NO_NEW_PRIVILEGES, _SECURE_BITS, _SECCOMP = 38, 28, 22
_NO_ROOT = 3  # executing a file as user 0 gives no capabilities
_CAPABILITIES_3 = 0x20080522

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_PACKAGES = ("site-packages", "dist-packages")
"""Folders of installed packages, in the folders `python*` of libraries."""

# Allow list of the system call filter (seccomp). The numbers are those of Linux for x86-64 and
# ARM64.
_MACHINES = {"x86_64": 0, "aarch64": 1}
_ARCHITECTURE = (0xC000003E, 0xC00000B7)
_LAST_CALL = (334, 293)
"""Number of `rseq`, the last allowed call. C libraries work without later calls, which Linux before
5.1 lacks: io_uring, clone3, pidfd, the newer mount calls, memfd_secret, and x32 calls on x86-64."""
_SET_UP_CALLS = {"clone": (56, 220), "keyctl": (250, 219)}
"""System calls that create a sandboxed process, before the filter is installed."""
CALLS: dict[str, tuple[int | None, int | None]] = {
    # Calls on files: these are read-only libraries, or lie in the answer's own folder.
    "read": (0, 63),
    "write": (1, 64),
    "open": (2, None),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "lseek": (8, 62),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "access": (21, None),
    "faccessat": (269, 48),
    "creat": (85, None),
    "openat": (257, 56),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "link": (86, None),
    "linkat": (265, 37),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "umask": (95, 166),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "getxattr": (191, 8),
    "lgetxattr": (192, 9),
    "fgetxattr": (193, 10),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    "flistxattr": (196, 13),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    # System calls that do nothing and report success. This is safe, because the folder in which the
    # model's answer runs exists only in memory.
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "msync": (26, 227),
    "fadvise64": (221, 223),
    # Calls that allocate memory of the process, which RLIMIT_AS limits.
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "madvise": (28, 233),
    # Calls that wait for files and locks of the process.
    "select": (23, None),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pselect6": (270, 72),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "futex": (202, 98),
    # Calls for signals to the process itself, and for its timer. RLIMIT_SIGPENDING limits the
    # number of queued signals.
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "pause": (34, None),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getitimer": (36, 102),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    # time
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "times": (100, 153),
    # Calls that read facts about the process and the machine, or lower the limits of the process.
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getcpu": (309, 168),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "getrandom": (318, 278),
    # Calls that the C library makes itself, and calls that end the process.
    "restart_syscall": (219, 128),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # Calls that create sockets of two families, or socket pairs. The network namespace contains no
    # other process.
    "socket": (41, 198),
    "socketpair": (53, 199),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "connect": (42, 203),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "shutdown": (48, 210),
    "setsockopt": (54, 208),
    "getsockopt": (55, 209),
}
"""Allowed system calls by name, with their numbers on x86-64 and ARM64. All others fail.

The kernel has no namespace for what the others affect: library pages that other processes use
(`vmsplice`, `splice`, `sendfile`, `mincore`), disks (`sync`, `fallocate`), memory and requests that
no process limit counts (`memfd_create`, `shmget`, `timer_create`, `io_setup`), keys, tracing,
monitoring and processes. Python's standard library works without them: `shutil` copies in another
way.
"""
_PAIR_FLAGS = (0, 0x800, 0x80000, 0x80800)  # SOCK_NONBLOCK, SOCK_CLOEXEC
_FAMILIES = (2, 10)
"""AF_INET and AF_INET6, which the network namespace isolates. It does not isolate AF_UNIX: such a
socket connects to any visible socket file, even in a read-only folder."""
_PAIR_FAMILIES, _PAIR_TYPES = (1,), tuple(kind | flags for kind in (1, 5) for flags in _PAIR_FLAGS)
"""AF_UNIX, and SOCK_STREAM and SOCK_SEQPACKET, whose pairs send to each other alone. A datagram
socket could name another receiver for each message."""
_PROTOCOLS = (0, 6, 17)
"""Default protocol, TCP and UDP. For other protocols the kernel would load a module."""
_FILE_COMMANDS = (0, 1, 2, 3, 4, 5, 1030)
"""The `fcntl` commands that are allowed: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK,
F_DUPFD_CLOEXEC. Leases, notices, locks of open files, write hints and the sizes of pipes have an
effect outside."""
_LOCK_COMMANDS = (6, 7)
"""F_SETLK and F_SETLKW: they succeed without being executed. A sandbox is one process, and a
process never waits for its own locks; a lock on a library would make programs outside wait."""
_WITHOUT_EFFECT = frozenset({"fsync", "fdatasync", "msync", "fadvise64"})
_DEVICE_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""The `ioctl` commands TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX. File systems
have commands that write the cache of an entire disk."""
_MEMORY_ADVICE = (4, 8)
"""MADV_DONTNEED and MADV_FREE, which `malloc` uses. Other advice merges pages with those of other
processes, or takes pages of libraries out of memory."""
_HUGE_PAGES = 0x40000
"""MAP_HUGETLB of `mmap`: the machine has one pool of huge pages for all."""
_FUTEX_COMMANDS = tuple(
    command | private | clock
    for command in (0, 1, 9, 10)  # WAIT, WAKE, WAIT_BITSET, WAKE_BITSET
    for private in (0, 128)
    for clock in (0, 256)
)
_TCP = 6
_SOCKET_LEVELS = (1, _TCP)
"""SOL_SOCKET and TCP."""
_SOCKET_OPTIONS = (*range(1, 10), 13, 15, 20, 21)
"""SO_DEBUG to SO_KEEPALIVE, SO_LINGER, SO_REUSEPORT, SO_RCVTIMEO and SO_SNDTIMEO. Others load
programs into the kernel."""
_TCP_OPTIONS = tuple(range(1, 10))
"""TCP_NODELAY to TCP_DEFER_ACCEPT. TCP_CONGESTION and TCP_ULP choose modules of the kernel."""


# Encoding of Python values as lines of text, for the pipes of the sandbox -----------------------


def _identity(value: Any) -> Any:
    return value


_DATA: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    # Each entry: name of the type, its class, a function that splits a value into items, and a
    # function that builds the value from items.
    "list": (list, _identity, _identity),
    "tuple": (tuple, _identity, tuple),
    "dict": (dict, dict.items, dict),
    "set": (set, _identity, set),
    "frozenset": (frozenset, _identity, frozenset),
    "complex": (complex, lambda z: (z.real, z.imag), lambda parts: complex(*parts)),
    "bytes": (bytes, _identity, bytes),
    "bytearray": (bytearray, _identity, bytearray),
    "range": (range, lambda r: (r.start, r.stop, r.step), lambda parts: range(*parts)),
    "iterator": (Iterator, lambda drawn: islice(drawn, MAX_DRAWN), iter),
}


def encode_value(value: Any, number: Callable[[Any], int], *, draw: bool = True) -> Any:
    """Return a value in a form that JSON can represent.

    Args:
        number: Returns the number under which an object is registered that JSON cannot represent.
        draw: True copies the values of an iterator, which exhausts it. False registers the iterator
            as an object. Iterators of the answer are copied. Iterators of the tests are not,
            because
            the answer draws each of their values when it needs the value.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for name, (kind, parts, _) in _DATA.items():
        if isinstance(value, kind) and (draw or kind is not Iterator):
            return {name: [encode_value(part, number, draw=draw) for part in parts(value)]}
    return {"object": number(value)}


def decode_value(encoded: Any, find: Callable[[int], Any]) -> Any:
    """Return the value that `encode_value` encoded. `find` returns the object with a given
    number.
    """
    if not isinstance(encoded, dict):
        return encoded
    ((name, inside),) = encoded.items()
    if name == "object":
        return find(inside)
    return _DATA[name][2]([decode_value(part, find) for part in inside])


# The answer's process -------------------------------------------------------------------------


def _serve_answer(calls: int, replies: int) -> None:  # noqa: C901  no globals that an answer could set
    """Execute the answer's program, and serve the commands of the tests' process."""
    names: dict[str, Any] = {"__name__": "__main__"}
    objects: list[Any] = []
    iterators: dict[int, _RemoteIterator] = {}
    calls_file, replies_file = os.fdopen(calls), os.fdopen(replies, "w")

    def number(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def load(program: str) -> None:
        exec(compile(program, "answer", "exec"), names)  # noqa: S102 (in the sandbox)

    def name(wanted: str) -> Any:
        if wanted not in names:
            raise NameError(wanted)
        return names[wanted]

    def bind(name: str, value: Any) -> None:
        names[name] = value

    def call(function: Any, arguments: Any, named: Any) -> Any:
        return function(*arguments, **named)

    commands: dict[str, Callable[..., Any]] = {
        "load": load,
        "name": name,
        "bind": bind,
        "call": call,
        "get": getattr,
        "set": setattr,
        "truth": bool,
    }

    def find(number: int) -> Any:
        if number >= 0:
            return objects[number]
        return iterators.setdefault(number, _RemoteIterator(partial(draw, number)))

    def draw(number: int) -> Any:
        print(json.dumps({"draw": number}), file=replies_file, flush=True)
        reply = serve()
        if "raised" in reply:
            kind = getattr(builtins, reply["raised"])
            raise kind.__new__(kind)
        return decode_value(reply["value"], find)

    def serve() -> Any:
        """Serve commands of the tests. Return the reply to a `draw` as soon as it arrives."""
        for line in iter(calls_file.readline, ""):
            command, *inputs = json.loads(line)
            if command == _DRAWN:
                return inputs[0]
            try:
                value = commands[command](*(decode_value(encoded, find) for encoded in inputs))
                reply = json.dumps({"value": encode_value(value, number)})
            except BaseException as fault:  # the answer may raise SystemExit too
                reply = json.dumps({"raised": _builtin_name(type(fault))})
            print(reply, file=replies_file, flush=True)
        os._exit(FAILED)

    serve()


class _RemoteIterator:
    """An iterator of the tests, as an object in the answer's process.

    Args:
        draw: Returns the iterator's next value, or raises StopIteration.
    """

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __iter__(self) -> _RemoteIterator:
        return self

    def __next__(self) -> Any:
        return self._draw()


def _builtin_name(kind: type[BaseException]) -> str:
    """Return the name of the builtin exception from which an exception class is derived most
    directly.
    """
    names = (each.__name__ for each in kind.__mro__ if vars(builtins).get(each.__name__) is each)
    return next(names, "BaseException")


# The tests' process ---------------------------------------------------------------------------

_EXCEPTIONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, BaseException)
    and not issubclass(
        kind, StopIteration | StopAsyncIteration | GeneratorExit | BaseExceptionGroup
    )
}
"""Exceptions of an answer that the tests see unchanged, by name.

`StopIteration` and similar exceptions would end a loop over `map` without an error and skip the
remaining assertions. They become a RuntimeError, as in a generator (PEP 479).
"""

_DRAWN = "drawn"
"""First word of a line with a value from one of the tests' iterators."""

_HOLDS = "assertion holds"
"""Name of the counting function in the tests' namespace. No program can contain this name."""


def assertions(tests: ast.Module) -> list[ast.Assert]:
    """Return the assert statements of a program in the order of the source text."""
    found = [node for node in ast.walk(tests) if isinstance(node, ast.Assert)]
    return sorted(found, key=lambda each: (each.lineno, each.col_offset))


def _count_assertions(tests: str, counts: list[int]) -> ast.Module:
    """Return the tests with code added that counts how often each assertion holds.

    Args:
        counts: Empty list, which receives a 0 for each assertion, in the order of the source text.
    """
    tree = ast.parse(tests)
    places = {each: place for place, each in enumerate(assertions(tree), len(counts))}
    counts += [0] * len(places)
    for node in list(ast.walk(tree)):
        for field in ("body", "orelse", "finalbody"):
            lines = getattr(node, field, None)
            if isinstance(lines, list):
                counted: list[ast.stmt] = []
                for line in lines:
                    counted.append(line)
                    if line in places:
                        name = ast.Name(_HOLDS, ast.Load())
                        call = ast.Expr(ast.Call(name, [ast.Constant(places[line])], []))
                        for new in ast.walk(call):
                            ast.copy_location(new, line)
                        counted.append(call)
                setattr(node, field, counted)
    return tree


class _AnswerClient:
    """Client through which the tests use the answer's process.

    Args:
        calls, replies: pipes to and from the answer's process.
    """

    def __init__(self, calls: TextIO, replies: TextIO) -> None:
        self._calls = calls
        self._replies = replies
        self._iterators: list[Iterator[Any]] = []

    def __call__(self, command: str, *inputs: Any) -> Any:
        """Send a command to the answer's process and return the result.

        If the reply is not valid, the tests' process ends, and the tests count as failed.

        Raises:
            BaseException: the answer raised an exception. A builtin exception of the same name is
                raised here.
        """
        try:
            encoded = [encode_value(each, self._number_of, draw=False) for each in inputs]
        except BaseException:  # tests that expect an exception must not take it for the answer's
            os._exit(FAILED)
        return self._ask(command, *encoded)

    def bind(self, name: str, value: Any) -> None:
        """Let the answer read a value under a name, if the value can be sent as data.

        An iterator is not sent, because the answer could exhaust an iterator that the tests also
        use.
        """
        try:
            encoded = encode_value(value, _number_of, draw=False)
        except (TypeError, RecursionError):
            return
        self._ask("bind", name, encoded)

    def _ask(self, *encoded: Any) -> Any:
        try:
            print(json.dumps(encoded), file=self._calls, flush=True)
            while "draw" in (reply := json.loads(self._replies.readline())):
                drawn = [_DRAWN, self._draw(reply["draw"])]
                print(json.dumps(drawn), file=self._calls, flush=True)
            raised = str(reply["raised"]) if "raised" in reply else None
            value = (
                None
                if raised
                else decode_value(reply["value"], lambda number: _RemoteObject(self, number))
            )
        except BaseException:  # the answer's process has ended, or its reply is not valid
            os._exit(FAILED)
        if raised is None:
            return value
        kind = _EXCEPTIONS.get(raised, RuntimeError)
        raise kind.__new__(kind)

    def _number_of(self, value: Any) -> int:
        """Return the number of an object of the answer. For an iterator of the tests, it is
        negative.
        """
        if not isinstance(value, Iterator):
            return _number_of(value)
        place = next((n for n, each in enumerate(self._iterators) if each is value), None)
        if place is None:
            place = len(self._iterators)
            self._iterators.append(value)
        return -1 - place

    def _draw(self, number: int) -> dict[str, Any]:
        """Return a reply with the next value of an iterator that the tests passed to the answer.

        Raises:
            AssertionError: an assertion inside the tests' iterator failed.
        """
        iterator = self._iterators[-1 - number]
        try:
            value = next(iterator)
        except AssertionError:  # the answer could catch it
            raise
        except BaseException as fault:
            return {"raised": _builtin_name(type(fault))}
        return {"value": encode_value(value, self._number_of, draw=False)}


class _RemoteObject:
    """An object in the answer's process: a function, a class or an instance."""

    def __init__(self, ask: _AnswerClient, number: int) -> None:
        vars(self).update(_ask=ask, _number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", self, arguments, named)

    def __bool__(self) -> bool:
        return bool(self._ask("truth", self))

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self, name, value)


def _number_of(value: Any) -> int:
    if not isinstance(value, _RemoteObject):
        raise TypeError(f"the tests hand over a {type(value).__name__}, which is no data")
    return int(vars(value)["_number"])


def _run_tests(calls: int, replies: int, report: int) -> None:
    """Run the tests on the answer. If this function raises an exception, the answer fails."""
    job = json.load(sys.stdin)
    ask = _AnswerClient(os.fdopen(calls, "w"), os.fdopen(replies))
    ask("load", job["program"])
    stars: dict[str, Any] = {}
    for line in job["star_imports"]:
        exec(line, stars)  # noqa: S102 (the task's)
    names = {name: stars[name] for name in job["star_names"] if name in stars}
    counts: list[int] = []

    def count(place: int) -> None:
        counts[place] += 1

    names.update({"__name__": "__main__", _HOLDS: count})
    if any("random" in text for text in (job["prelude"], *job["tests"])):
        import random  # only here: it takes as long to import as all other modules

        random.seed(job["seed"])
    exec(compile(job["prelude"], "prompt", "exec"), names)  # noqa: S102 (the task's, not the answer's)
    for name in job["answer_names"]:
        with suppress(NameError):
            names[name] = ask("name", name)
    shared: dict[str, Any] = {}
    for piece in job["tests"]:
        exec(compile(_count_assertions(piece, counts), "tests", "exec"), names)  # noqa: S102 (the task's)
        for name in job["shared_names"]:
            if name in names and names[name] is not shared.get(name, shared):
                shared[name] = names[name]
                ask.bind(name, names[name])
    with os.fdopen(report, "w") as file:
        json.dump(counts, file)


# Processes ------------------------------------------------------------------------------------


def _start_process(
    isolated: bool, work: Callable[[], None], own: set[int], *, without_stdin: bool
) -> int:
    """Start a sandboxed process and return its process id.

    Args:
        isolated: True if the process gets namespaces of its own.
        work: function to run in the process. The exit code is `PASSED` if the function returns.
        own: file descriptors of the pipes that stay open in the process.
        without_stdin: True if its standard input is empty. False passes on the supervisor's.

    Raises:
        OSError: the process cannot be started or isolated.
    """
    ready, error_pipe = os.pipe()
    process = _clone_into_namespaces() if isolated else os.fork()
    if process == 0:
        _run_process(isolated, work, {*own, error_pipe}, error_pipe, without_stdin=without_stdin)
    os.close(error_pipe)
    with os.fdopen(ready) as encoded:
        if fault := encoded.read():
            raise OSError(fault)
    return process


def _run_process(
    isolated: bool, work: Callable[[], None], own: set[int], error_pipe: int, *, without_stdin: bool
) -> NoReturn:
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2) if without_stdin else (1, 2):
            os.dup2(nothing, number)
        for number in {*range(3, OPEN_FILES)} - own:
            with suppress(OSError):  # numbers that are not open
                os.close(number)
        if isolated:
            _isolate()
        for what, most in _LIMITS.items():
            hard = resource.getrlimit(what)[1]
            limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(what, (limit, limit))
    except BaseException as fault:
        os.write(error_pipe, str(fault).encode())
        os._exit(FAILED)
    os.close(error_pipe)
    try:
        sys.set_int_max_str_digits(0)
        work()
    except BaseException:  # a failing answer is not an error of the sandbox
        os._exit(FAILED)
    os._exit(PASSED)


_C = ctypes.PyDLL(None, use_errno=True)
"""The C library. Calls keep the GIL, so a process that clones itself has one thread."""


def _check_result(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _call_system(number: int, *arguments: Any) -> int:
    """Make a system call for which the C library has no function, and return its result."""
    wide = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    return _check_result(_C.syscall(ctypes.c_long(number), *wide))


def _clone_into_namespaces() -> int:
    """Clone this process into new namespaces; return the child's id, or 0 in the child.

    The child executes no file, so it needs only libraries. If this process runs as root, user 1 in
    the namespace is `nobody` outside. Otherwise user 0 in the namespace is the current user.
    """
    if sys.platform != "linux" or os.uname().machine not in _MACHINES:
        raise OSError(f"this is only supported on Linux, on {' and '.join(_MACHINES)}")
    mapped, tell = os.pipe()
    child = _call_system(_number("clone"), _NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os.close(tell)
        if not os.read(mapped, 1):
            os._exit(FAILED)  # the supervisor reports the reason
        return 0
    os.close(mapped)
    try:
        root = os.geteuid() == 0
        if not root:
            _write(f"/proc/{child}/setgroups", "deny")
        for kind, ours in (("uid", os.geteuid()), ("gid", os.getegid())):
            _write(f"/proc/{child}/{kind}_map", "0 0 1\n1 65534 1\n" if root else f"0 {ours} 1\n")
        os.write(tell, b"\0")
    finally:
        os.close(tell)
    return child


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123 (importing pathlib takes too long)
        file.write(text)


def _isolate() -> None:
    """Isolate this process from the whole system, except for its libraries and pipes."""
    _write("/proc/sys/user/max_user_namespaces", "0")
    _check_result(_C.sethostname(b"room", 4))
    _check_result(_C.setdomainname(b"room", 4))
    _call_system(_number("keyctl"), _JOIN_SESSION_KEYRING, None)
    _check_result(_C.mount(None, b"/", None, _REC | _PRIVATE, None))
    new = "/proc"  # every system has this folder, and no Python is installed in it
    _mount_empty(new, "size=64k,mode=755")
    own = {f"{sys.base_prefix}/lib", f"{sys.base_prefix}/{sys.platlibdir}"}
    for path in sorted({*_LIBRARIES, *own}):
        _expose(path, new + path)
    for path in _package_folders(own):
        if os.path.isdir(new + path):  # noqa: PTH112
            _mount_empty(new + path, "size=4k,mode=555", _READ_ONLY)
    os.mkdir(f"{new}/tmp")  # noqa: PTH102
    _mount_empty(f"{new}/tmp", f"size={FOLDER_BYTES},nr_inodes=1024,mode=777")
    read_only = _REMOUNT | _READ_ONLY | _NO_SUID | _NO_DEV
    _check_result(_C.mount(None, new.encode(), None, read_only, None))
    os.chdir(new)
    _check_result(_C.pivot_root(b".", b"."))
    _check_result(_C.umount2(b".", _DETACH))
    os.chdir("/tmp")
    _check_result(_C.prctl(_SECURE_BITS, _NO_ROOT, 0, 0, 0))
    _check_result(_C.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    with suppress(OSError):  # the mapping has no user 1 if this process is not root
        os.setgroups([])
        os.setresgid(1, 1, 1)
        os.setresuid(1, 1, 1)
    none = (ctypes.c_uint32 * 6)()
    _check_result(_C.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), none))
    program = ctypes.create_string_buffer(call_filter(os.uname().machine))
    described = struct.pack("HP", len(program) // _INSTRUCTION.size, ctypes.addressof(program))
    _check_result(_C.prctl(_SECCOMP, 2, described, 0, 0))


_INSTRUCTION = struct.Struct("HBBI")  # operation, jump if true, jump if false, constant
_LOAD, _EQUAL, _GREATER, _HAS_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_CALL_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in `struct seccomp_data`
_ALLOW, _KILL, _SUCCEED, _NOT_PERMITTED, _NO_SUCH_CALL = (
    (_RETURN, 0, 0, verdict)
    for verdict in (0x7FFF0000, 0x80000000, 0x00050000, 0x00050001, 0x00050026)
)
"""Verdicts. `_SUCCEED` lets a call return 0 without being executed."""


def _load_argument(place: int) -> tuple[int, int, int, int]:
    """Return the BPF instruction that loads the low 32 bits of a system call's argument.

    The kernel uses only these bits of an `int` argument.
    """
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * place)


def _refuse_unless(place: int, values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Return BPF instructions that reject a system call unless its argument has one of these
    values.
    """
    left = range(len(values), 0, -1)
    equal = [(_EQUAL, jump, 0, value) for jump, value in zip(left, values, strict=True)]
    return [_load_argument(place), *equal, _NOT_PERMITTED]


def call_filter(machine: str) -> bytes:
    """Return the BPF program that filters system calls, as an array of `struct sock_filter`.

    A call of another architecture, such as 32-bit x86, ends the process. A call with a number above
    `_LAST_CALL` fails with ENOSYS, so the C library uses an older call. A call that is not in
    `CALLS`, or that has a forbidden argument, fails with EPERM.

    Args:
        machine: Machine name from `os.uname`.
    """
    column = _MACHINES[machine]
    plain = [*_refuse_unless(5, (0,)), _ALLOW]
    tcp = [*_refuse_unless(2, _TCP_OPTIONS), _ALLOW]
    locks = [each for command in _LOCK_COMMANDS for each in ((_EQUAL, 0, 1, command), _SUCCEED)]
    checks = {
        "socket": [*_refuse_unless(0, _FAMILIES), *_refuse_unless(2, _PROTOCOLS), _ALLOW],
        "socketpair": [
            *_refuse_unless(0, _PAIR_FAMILIES),
            *_refuse_unless(1, _PAIR_TYPES),
            *_refuse_unless(2, _PROTOCOLS),
            _ALLOW,
        ],
        "preadv2": plain,  # flags would show which pages are in memory, or write at once
        "pwritev2": plain,
        "fcntl": [_load_argument(1), *locks, *_refuse_unless(1, _FILE_COMMANDS), _ALLOW],
        "ioctl": [*_refuse_unless(1, _DEVICE_COMMANDS), _ALLOW],
        "mmap": [_load_argument(3), (_HAS_BIT, 0, 1, _HUGE_PAGES), _NOT_PERMITTED, _ALLOW],
        "madvise": [*_refuse_unless(2, _MEMORY_ADVICE), _ALLOW],
        "futex": [*_refuse_unless(1, _FUTEX_COMMANDS), _ALLOW],
        "getsockopt": [*_refuse_unless(1, _SOCKET_LEVELS), _ALLOW],
        "setsockopt": [
            *_refuse_unless(1, _SOCKET_LEVELS),
            _load_argument(1),
            (_EQUAL, 0, len(tcp), _TCP),
            *tcp,
            *_refuse_unless(2, _SOCKET_OPTIONS),
            _ALLOW,
        ],
        **{name: [_SUCCEED] for name in _WITHOUT_EFFECT},
    }
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURE[column]),
        _KILL,
        (_LOAD, 0, 0, _CALL_AT),
        (_GREATER, 0, 1, _LAST_CALL[column]),
        _NO_SUCH_CALL,
    ]
    for name, numbers in CALLS.items():
        if (number := numbers[column]) is not None:
            check = checks.get(name, [_ALLOW])
            program += [(_EQUAL, 0, len(check), number), *check]
    return b"".join(_INSTRUCTION.pack(*each) for each in [*program, _NOT_PERMITTED])


def _number(call: str) -> int:
    """Return the number of a system call on this machine."""
    return _SET_UP_CALLS[call][_MACHINES[os.uname().machine]]


def _mount_empty(where: str, options: str, flags: int = 0) -> None:
    flags |= _NO_SUID | _NO_DEV
    _check_result(_C.mount(b"tmpfs", where.encode(), b"tmpfs", flags, options.encode()))


def _package_folders(own: set[str]) -> set[str]:
    """Return the real paths of the folders that contain installed packages.

    Args:
        own: The library folders of the running Python.
    """
    found: set[str] = set()
    for folder in {*_LIBRARIES, *own}:
        with suppress(FileNotFoundError):
            pythons = [name for name in os.listdir(folder) if name.startswith(("python", "pypy"))]  # noqa: PTH208
            paths = [f"{folder}/{name}/{kind}" for name in pythons for kind in _PACKAGES]
            found.update(os.path.realpath(path) for path in paths if os.path.isdir(path))  # noqa: PTH112
    return found


def _expose(path: str, inside: str) -> None:
    """Make a folder readable in the sandbox's root folder, or copy a link. Skip a path that is
    missing.
    """
    if os.path.islink(path):  # noqa: PTH114
        os.symlink(os.readlink(path), inside)  # noqa: PTH115, PTH211
    elif os.path.isdir(path) and not os.path.exists(inside):  # noqa: PTH110, PTH112
        os.makedirs(inside)  # noqa: PTH103
        _check_result(_C.mount(path.encode(), inside.encode(), None, _BIND | _REC, None))
        sealed = (ctypes.c_uint64 * 4)(_READ_ONLY | _NO_SUID | _NO_DEV)
        size = ctypes.sizeof(sealed)
        _call_system(_MOUNT_SETATTR, -100, inside.encode(), _AT_RECURSIVE, sealed, size)


def main(isolated: bool, parent_pipe: int) -> int:
    """Run both processes until the tests end or the parent pipe is closed.

    Returns:
        The exit code.
    """
    low = os.dup(parent_pipe)  # below `OPEN_FILES`, so that the processes close it
    os.close(parent_pipe)
    calls, replies, ended = os.pipe(), os.pipe(), os.pipe()
    report = os.dup(1)
    serving, testing = {calls[0], replies[1]}, {calls[1], replies[0], ended[1], report}
    processes: list[int] = []
    try:
        processes.append(
            _start_process(
                isolated, lambda: _serve_answer(calls[0], replies[1]), serving, without_stdin=True
            )
        )
        test = partial(_run_tests, calls[1], replies[0], report)
        processes.append(_start_process(isolated, test, testing, without_stdin=False))
        for number in (*calls, *replies, ended[1], report):
            os.close(number)
        select.select([low, ended[0]], [], [])
    except OSError as fault:
        print(fault, file=sys.stderr)  # noqa: T201
        return NO_SANDBOX
    finally:
        for process in processes:
            os.killpg(process, signal.SIGKILL)
    ends = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    return PASSED if ends[1] == PASSED else FAILED


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1] == "contained", int(sys.argv[2])))
