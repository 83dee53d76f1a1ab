"""Answers that mean harm: what does each reach when it is run to be scored?

    python benchmarks/soundness/hostile_code.py [NAME ...] [--uncontained NAME ...]

A program of `REACHING` passes if what it tries succeeds; one of `FORGING` tries to pass tests that
it cannot satisfy. So all must fail. Traps tell what was reached apart from the verdict: files that
must not be touched, listeners that must hear nothing, processes that must not be left. Rows of a
Markdown table are printed; exit code 1 if anything was reached or passed.

`--uncontained` runs programs as `specbench run --run-code --uncontained` does, where many of them
reach what they want: of `HARMLESS` alone, for a program that succeeds does what it says.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import psutil

from specbench_cli.scoring import code, contained

HEAD = """
import ctypes, os, signal, socket, subprocess, sys, threading, time
C = ctypes.CDLL(None, use_errno=True)
TRAP, PORT = {trap!r}, {port}
"""

CALLS = {
    # system calls that programs below make by number: x86-64, ARM64
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clone": (56, 220),
    "io_setup": (206, 0),
    "keyctl": (250, 219),
    "membarrier": (324, 283),
    "perf_event_open": (298, 241),
    "process_vm_readv": (310, 270),
    "request_key": (249, 218),
    "socket": (41, 198),
    "timer_create": (222, 107),
    "userfaultfd": (323, 282),
}
_CALLS = {name: each[os.uname().machine == "aarch64"] for name, each in CALLS.items()}


REACHING: dict[str, tuple[str, str]] = {
    # name: what it tries, the body of a function that returns whether it succeeded
    "passwd": ("read /etc/passwd", "return open('/etc/passwd').read()"),
    "home": ("list the home folder", "return os.listdir(TRAP)"),
    "run-folder": ("read the run's records", "return open(TRAP + '/records.jsonl').read()"),
    "variables": (
        "read the environment",
        "return os.environ.get('SPECBENCH_SECRET') or os.environ.get('HOME')",
    ),
    "parents-variables": (
        "read the parent's environment",
        "return open(f'/proc/{os.getppid()}/environ').read()",
    ),
    "specbench": (
        "import specbench",
        "sys.path += ['.', *{path!r}]\nimport specbench_cli\nreturn True",
    ),
    "packages": (
        "read what is installed beside the standard library",
        "found = []\n"
        "for lib in {sys.base_prefix + '/lib', '/lib', '/lib64', '/usr/lib', '/usr/lib64'}:\n"
        "    if not os.path.isdir(lib): continue\n"
        "    for each in os.listdir(lib):\n"
        "        for kind in ('site-packages', 'dist-packages'):\n"
        "            try: found += os.listdir(f'{lib}/{each}/{kind}')\n"
        "            except (FileNotFoundError, NotADirectoryError): pass\n"
        "return found",
    ),
    "packages-written": (
        "install a package for itself",
        "import sysconfig\nreturn open(sysconfig.get_path('purelib') + '/mine.py', 'w').write('x')",
    ),
    "write-outside": (
        "write to the run's folder",
        "return open(TRAP + '/written', 'w').write('x')",
    ),
    "write-root": ("write beside its folder", "return open('/written', 'w').write('x')"),
    "write-libraries": ("write into Python's library", "return open(os.__file__, 'a')"),
    "remount": (
        "make the libraries writable",
        "return C.mount(None, b'/usr/lib', None, 32 | 4096, None) == 0",
    ),
    "symlink": (
        "follow a link outside",
        "os.symlink('/etc/passwd', 'link')\nreturn open('link').read()",
    ),
    "chroot": (
        "leave by chroot",
        "os.mkdir('cell')\nos.chroot('cell')\nos.chdir('../' * 60)\nos.chroot('.')\n"
        "return os.listdir('/etc')",
    ),
    "mount": ("mount a file system", "return C.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0"),
    "mount-proc": (
        "mount /proc",
        "os.mkdir('p')\nreturn C.mount(b'p', b'p', b'proc', 0, None) == 0",
    ),
    "namespaces": (
        "have capabilities in namespaces of its own",
        "return C.unshare(0x10000000 | 0x20000) == 0",
    ),
    "root": (
        "become another user",
        "ids = {0, 1, 1000, 65534} - {os.getuid()}\nreturn any(not C.setuid(i) for i in ids)",
    ),
    "devices": (
        "make a device",
        "import stat\nos.mknod('d', stat.S_IFBLK | 0o600, 1)\nreturn True",
    ),
    "others": (
        "see other processes",
        "return [n for n in os.listdir('/proc') if n.isdigit() and int(n) != os.getpid()]",
    ),
    "keys": (
        "read the session's keys",
        "id = C.syscall(ctypes.c_long({keyctl}), 0, -3, 0)\n"
        "room = ctypes.create_string_buffer(4096)\n"
        "n = C.syscall(ctypes.c_long({keyctl}), 11, ctypes.c_long(id), room, 4096)\n"
        "return n > 0",
    ),
    "tcp": (
        "connect to this machine",
        "return socket.create_connection(('127.0.0.1', PORT), 1)",
    ),
    "tcp-outside": (
        "connect to the internet",
        "socket.create_connection(('1.1.1.1', 53), 1)\nreturn True",
    ),
    "udp": (
        "send a datagram",
        "return socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    ),
    "dns": ("resolve a name", "return socket.getaddrinfo('example.com', 80)"),
    "unix-socket": (
        "connect to a socket in the file system",
        "s = socket.socket(socket.AF_UNIX)\ns.connect(TRAP + '/socket')\nreturn True",
    ),
    "abstract-socket": (
        "connect to a socket without a file",
        "s = socket.socket(socket.AF_UNIX)\ns.connect('\\0' + TRAP)\nreturn True",
    ),
    "packets": ("listen to the wire", "return socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    "vsock": ("open a socket to the hypervisor", "return socket.socket(40, socket.SOCK_STREAM)"),
    "vsock-pair": (
        "open such a socket with bits that the kernel ignores",
        "return C.syscall(ctypes.c_long({socket}), ctypes.c_long(1 << 32 | 40), 1, 0) >= 0",
    ),
    "crypto-socket": (
        "use the kernel's cryptography",
        "return socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    ),
    "netlink": ("ask the kernel by netlink", "return socket.socket(socket.AF_NETLINK, 3)"),
    "tipc-pair": ("open a pair of TIPC sockets", "return socket.socketpair(30, 1)"),
    "module": (
        "make the kernel load a module for a protocol",
        "s = socket.socket(socket.AF_INET, socket.SOCK_SEQPACKET, 132)\nreturn True",
    ),
    "io-uring": (
        "have an io_uring",
        "space = ctypes.create_string_buffer(256)\n"
        "return C.syscall(ctypes.c_long(425), ctypes.c_long(4), space) >= 0",
    ),
    "add-key": (
        "leave a key with the kernel",
        "ring = ctypes.c_long(-2)  # the process's\n"
        "number, size = ctypes.c_long({add_key}), ctypes.c_long(1)\n"
        "return C.syscall(number, b'user', b'k', b'x', size, ring) > 0",
    ),
    "request-key": (
        "ask for a key, which starts a program of the machine's",
        "C.syscall(ctypes.c_long({request_key}), b'user', b'k', b'x', ctypes.c_long(-2))\n"
        "return ctypes.get_errno() in (2, 126)  # ENOENT, ENOKEY: it looked",
    ),
    "compat-calls": (
        "make a call as a 32-bit program does",
        "import mmap\n"
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('b814000000cd80c3'))  # getpid\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(code))\n"
        "return ctypes.CFUNCTYPE(ctypes.c_int)(at)() > 0",
    ),
    "x32-calls": (
        "make a call by its x32 number",
        "return C.syscall(ctypes.c_long(0x40000000 + {keyctl}), 0, -3, 1) >= 0",
    ),
    "bpf": (
        "load a program into the kernel",
        "C.syscall(ctypes.c_long({bpf}), ctypes.c_long(0), bytes(128), ctypes.c_long(0))\n"
        "return ctypes.get_errno() == 22  # EINVAL: it read what it was given",
    ),
    "performance": (
        "count the processor's events",
        "size = bytes(4) + (112).to_bytes(4, 'little')\n"
        "return C.syscall(ctypes.c_long({perf_event_open}), size + bytes(104), 0, -1, -1, 0) >= 0",
    ),
    "page-faults": (
        "serve page faults itself",
        "return C.syscall(ctypes.c_long({userfaultfd}), ctypes.c_long(1)) >= 0",
    ),
    "read-memory": (
        "read memory by process id",
        "import struct\n"
        "there = ctypes.create_string_buffer(b'there')\n"
        "vector = struct.pack('PN', ctypes.addressof(there), 5)\n"
        "one, none = ctypes.c_long(1), ctypes.c_long(0)\n"
        "number, own = ctypes.c_long({process_vm_readv}), ctypes.c_long(os.getpid())\n"
        "return C.syscall(number, own, vector, one, vector, one, none) == 5",
    ),
    "kernel-log": (
        "read the kernel's log",
        "return C.klogctl(3, ctypes.create_string_buffer(4096), 4096) > 0",
    ),
    "watch": (
        "watch which libraries others open",
        "return C.inotify_add_watch(C.inotify_init1(0), os.__file__.encode(), 0x20) >= 0",
    ),
    "watch-folder": (
        "watch a folder of libraries as older programs do",
        "import fcntl\n"
        "folder = os.open(os.path.dirname(os.__file__), os.O_RDONLY)\n"
        "signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        "return fcntl.fcntl(folder, fcntl.F_NOTIFY, fcntl.DN_ACCESS) == 0",
    ),
    "lease": (
        "take a lease on a file of its own, as on a library's",
        "import fcntl\n"
        "own = open('f', 'w')\nown.close()\nown = open('f')\n"
        "return fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_RDLCK) == 0",
    ),
    "lock-library": (
        "lock a library",
        "import fcntl\nfcntl.flock(open(os.__file__), fcntl.LOCK_EX)\nreturn True",
    ),
    "lock-library-ofd": (
        "lock a library by the open file",
        "import fcntl, struct\n"
        "wanted = struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 0, 0, 0)\n"
        "return fcntl.fcntl(open(os.__file__), 37, wanted)",
    ),
    "pipe-size": (
        "take more of the user's pages for pipes",
        "import fcntl\nreturn fcntl.fcntl(os.pipe()[1], 1031, 1 << 20) > 0",
    ),
    "asynchronous": (
        "use up the machine's asynchronous requests",
        "number, wanted = ctypes.c_long({io_setup}), ctypes.c_long(1000)\n"
        "return C.syscall(number, wanted, ctypes.byref(ctypes.c_ulong(0))) == 0",
    ),
    "process-handle": (
        "take files from a process by its handle",
        "own = C.syscall(ctypes.c_long(434), ctypes.c_long(os.getpid()), ctypes.c_long(0))\n"
        "return C.syscall(ctypes.c_long(438), ctypes.c_long(own), 0, 0) >= 0",
    ),
    "timers": (
        "use up the user's timers",
        "number, made = ctypes.c_long({timer_create}), ctypes.byref(ctypes.c_int())\n"
        "return C.syscall(number, ctypes.c_long(1), 0, made) == 0",
    ),
    "signals-queued": (
        "use up the user's queue of signals",
        "first = signal.SIGRTMIN\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(first, first + 2))\n"
        "for _ in range(999): os.kill(os.getpid(), first + 1)\n"
        "waited = (signal.sigtimedwait([first + 1], 0) for _ in range(999))\n"
        "return sum(each is not None for each in waited) > 65",
    ),
    "pages-given": (
        "share pages of its own with the kernel",
        "import struct\n"
        "page = ctypes.create_string_buffer(4096)\n"
        "vector = struct.pack('PN', ctypes.addressof(page), 4096)\n"
        "return C.vmsplice(os.pipe()[1], vector, ctypes.c_size_t(1), 0) >= 0",
    ),
    "pages-of-libraries": (
        "take a library's pages into a pipe",
        "size, at = ctypes.c_size_t(4096), ctypes.c_longlong(0)\n"
        "with open(os.__file__, 'rb') as f:\n"
        "    return C.splice(f.fileno(), ctypes.byref(at), os.pipe()[1], None, size, 0) >= 0",
    ),
    "pages-sent": (
        "send a library's pages to a pipe",
        "with open(os.__file__, 'rb') as f:\n"
        "    return os.sendfile(os.pipe()[1], f.fileno(), 0, 4096)",
    ),
    "pages-asked": (
        "see which pages of a library are in memory",
        "import mmap\n"
        "with open(os.__file__, 'rb') as f: m = mmap.mmap(f.fileno(), 4096, mmap.MAP_PRIVATE)\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "length, seen = ctypes.c_size_t(4096), ctypes.create_string_buffer(1)\n"
        "return C.mincore(ctypes.c_void_p(at), length, seen) == 0",
    ),
    "pages-merged": (
        "have its pages merged with those of others",
        "import mmap\nmmap.mmap(-1, 8192).madvise(mmap.MADV_MERGEABLE)\nreturn True",
    ),
    "pages-huge": (
        "take huge pages of the machine",
        "import mmap\n"
        "at = C.mmap(None, ctypes.c_size_t(1 << 21), 3, 0x40022, -1, ctypes.c_long(0))\n"
        "return ctypes.get_errno() == 12  # ENOMEM: there are none, but it looked",
    ),
    "read-ahead": (
        "make the machine read a library from the disk ahead of use",
        "with open(os.__file__, 'rb') as f:\n"
        "    return C.readahead(f.fileno(), ctypes.c_longlong(0), ctypes.c_size_t(4096)) == 0",
    ),
    "file-map": (
        "ask a file system where a library lies on the disk",
        "import fcntl\n"
        "with open(os.__file__, 'rb') as f:\n"
        "    try: fcntl.ioctl(f, 0xC020660B, bytearray(32))\n"
        "    except OSError as fault: return fault.errno != 1\n"
        "return True",
    ),
    "packet-filter": (
        "load a packet filter into the kernel",
        "import struct\n"
        "rule = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0))\n"
        "wanted = struct.pack('HP', 1, ctypes.addressof(rule))\n"
        "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, 26, wanted)\n"
        "return True",
    ),
    "barrier": (
        "interrupt all processors of the machine",
        "number, command = ctypes.c_long({membarrier}), ctypes.c_long(1)\n"
        "return C.syscall(number, command, ctypes.c_long(0)) == 0",
    ),
    "memory-locked": (
        "lock memory",
        "return C.mlock(ctypes.create_string_buffer(4096), ctypes.c_size_t(4096)) == 0",
    ),
    "slow-down": (
        "change the processors that it may use",
        "os.sched_setaffinity(0, {0})\nreturn True",
    ),
    "clone": (
        "clone itself into a new user namespace",
        "flags = ctypes.c_long(0x10000000 | 17)\n"
        "pid = C.syscall(ctypes.c_long({clone}), flags, 0, 0, 0, 0)\n"
        "return pid >= 0",
    ),
    "execute": (
        "become another program",
        "try: os.execv('/none', ['none'])\nexcept FileNotFoundError: return True  # it looked",
    ),
    "fork-bomb": ("fork without end", "while True: os.fork()"),
    "fork": ("fork once", "pid = os.fork()\npid or time.sleep(60)\nreturn pid"),
    "child": (
        "start a program that outlives it",
        "return subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
    ),
    "daemon": (
        "become a daemon",
        "if os.fork(): return True\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(60)",
    ),
    "thread": (
        "start a thread",
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nreturn True",
    ),
    "kill": (
        "kill whatever it may",
        "for pid in (os.getppid() or -1, -1, *range(2, 64)):  # 0 would be itself\n"
        "    try: os.kill(pid, 9); return True\n"
        "    except OSError: pass",
    ),
    "ptrace": (
        "trace other processes",
        "return any(C.ptrace(16, pid, 0, 0) == 0 for pid in (os.getppid(), *range(2, 64)))",
    ),
    "peek": (
        "read other processes' memory",
        "return any(open(f'/proc/{pid}/mem', 'rb') for pid in (os.getppid(), 1))",
    ),
    "memory": ("take 3 GiB", "return bytearray(3 << 30)"),
    "memory-of-children": (
        "take memory in children",
        "for _ in range(8):\n"
        "    if not os.fork(): bytearray(b'x') * (1 << 29); time.sleep(60)\n"
        "return True",
    ),
    "memory-shared": (
        "leave shared memory behind, System V's",
        "return C.shmget(0, ctypes.c_size_t(1 << 26), 0o1666) >= 0",
    ),
    "semaphores": (
        "leave semaphores behind, System V's",
        "return C.semget(0, 1, 0o1666) >= 0",
    ),
    "messages": ("leave a queue of messages behind", "return C.msgget(0, 0o1666) >= 0"),
    "memory-secret": (
        "take memory that is hidden from the kernel",
        "return C.syscall(ctypes.c_long(447), ctypes.c_long(0)) >= 0",
    ),
    "sync": (
        "make the machine write all its disks' caches",
        "return C.syncfs(os.open('/usr/lib', os.O_RDONLY)) == 0",
    ),
    "memory-files": (
        "take 1 GiB in files without a name",
        "kept = [os.memfd_create('m') for _ in range(1024)]\n"
        "return all(os.write(f, bytes(1 << 20)) for f in kept)",
    ),
    "disk": (
        "fill the disk with 64 MiB in files",
        "for i in range(64):\n"
        "    with open(str(i), 'wb') as f: f.write(bytes(1 << 20))\n"
        "return True",
    ),
    "inodes": (
        "fill the disk with 5000 empty files",
        "for i in range(5000): os.close(os.open(str(i), os.O_CREAT))\nreturn True",
    ),
    "big-file": ("write a file of 2 MiB", "return open('f', 'wb').write(bytes(2 << 20))"),
    "open-files": ("open 200 files", "return [open(f'f{i}', 'w') for i in range(200)]"),
    "limits": (
        "lift its limits",
        "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))\nreturn True",
    ),
    "endless": ("run without end", "while True: pass"),
    "sleep": ("sleep for an hour", "time.sleep(3600)\nreturn True"),
    "deaf": (
        "run on, deaf to signals",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nC.prctl(1, 0)\n"
        "while True: time.sleep(1)",
    ),
    "tests": (
        "find what the tests expect in memory",
        "import gc\n"
        "found = [str(o) for o in gc.get_objects() if isinstance(o, (dict, str, list, tuple))]\n"
        "frame = sys._getframe()\n"
        "while frame: found.append(str(frame.f_locals)); frame = frame.f_back\n"
        "for n in range(64):\n"
        "    try: found.append(os.pread(n, 9999, 0).decode())\n"
        "    except OSError: pass\n"
        "return any('NEEDLE' + '-OF-THE-TESTS' in each for each in found)",
    ),
}

FORGING: dict[str, tuple[str, str]] = {
    # name: what it tries, the whole program; the tests want add(2, 3) == 5 and more
    "exit-0": ("end with code 0", "sys.exit(0)"),
    "end-0": ("end its process with code 0", "def add(a, b): os._exit(0)"),
    "end-86": ("end its process with the code of a pass", "def add(a, b): os._exit(86)"),
    "at-exit": (
        "change its exit code at the end",
        "import atexit\natexit.register(os._exit, 86)\ndef add(a, b): return 0",
    ),
    "printed": (
        "print success",
        "def add(a, b):\n    for w in ('passed', 'ok', '86', '1.0', 'True'): print(w)",
    ),
    "replies": (
        "write success to every file that is open",
        "def add(a, b):\n"
        "    for n in range(64):\n"
        "        for w in (b'{\"value\": true}\\n', b'{\"passed\": true}\\n', b'86\\n'):\n"
        "            try: os.write(n, w)\n"
        "            except OSError: pass",
    ),
    "equal-to-all": (
        "return what equals everything",
        "class All(int):\n"
        "    __eq__ = lambda a, b: True\n"
        "    __ne__ = lambda a, b: False\n"
        "    __hash__ = lambda a: 0\n"
        "def add(a, b): return All()",
    ),
    "any": (
        "return a mock that equals everything",
        "import types\nclass All:\n    def __eq__(a, b): return True\ndef add(a, b): return All()",
    ),
    "assertions": (
        "take the assertions away",
        "import builtins\nbuiltins.AssertionError = type('Never', (BaseException,), {})\n"
        "builtins.__build_class__ = builtins.compile = builtins.exec = lambda *a: None\n"
        "def add(a, b): return 0",
    ),
    "harness": (
        "change the code that asks it",
        "import builtins, json\nm = sys.modules['__main__']\n"
        "for n in list(vars(m)):\n"
        "    if callable(vars(m)[n]): setattr(m, n, lambda *a, **k: 0)\n"
        "m.PASSED = m.FAILED = 0\njson.dumps = lambda *a: '{\"value\": true}'\n"
        "def add(a, b): return 0",
    ),
    "frames": (
        "end the loop that asks it from its frames",
        "def add(a, b):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        frame.f_locals.update(reply='{\"value\": true}', code=86)\n"
        "        frame = frame.f_back\n"
        "    return 0",
    ),
    "tests-redefined": (
        "define the tests anew",
        "def check(candidate): pass\ndef add(a, b): return 0\nNEEDLE = None",
    ),
    "truth": ("return true, which tests may mistake", "def add(a, b): return True"),
    "nan": ("return no number", "def add(a, b): return float('nan')"),
    "raises": ("raise what tests may catch", "def add(a, b): raise AssertionError"),
    "code-in-data": (
        "have its reply run as code",
        "class P:\n    def __reduce__(s): return os._exit, (86,)\ndef add(a, b): return P()",
    ),
    "deep": (
        "return a list of depth 5000",
        "def add(a, b):\n    x = []\n    for _ in range(5000): x = [x]\n    return x",
    ),
    "huge": ("return 1 GiB", "def add(a, b): return 'x' * (1 << 30)"),
    "big-number": ("return a number of a million digits", "def add(a, b): return 10 ** (10 ** 6)"),
    "endless-iterator": (
        "return an iterator without end",
        "import itertools\ndef add(a, b): return itertools.count()",
    ),
    "closed": (
        "close every file",
        "def add(a, b):\n    os.closerange(0, 256)\n    sys.stdout = sys.stderr = None",
    ),
    "output": (
        "write without end",
        "def add(a, b):\n    while True:\n        os.write(1, b'x' * 65536)",
    ),
    "garbage": (
        "reply with what is no reply",
        "def add(a, b):\n"
        "    for n in range(3, 64):\n"
        "        try: os.write(n, b'\\xff{[\\0' * 99 + b'\\n')\n"
        "        except OSError: pass",
    ),
    "recursion": (
        "exhaust the stack",
        "sys.setrecursionlimit(10 ** 9)\ndef add(a, b): return add(b, a)",
    ),
    "segfault": ("crash the interpreter", "def add(a, b): return ctypes.string_at(0)"),
    "abort": ("abort", "def add(a, b): os.abort()"),
    "signals": (
        "stop or kill itself",
        "def add(a, b):\n    os.kill(os.getpid(), signal.SIGKILL)\n    os.abort()",
    ),
}

NEEDLE = '\nNEEDLE = "NEEDLE-OF-THE-TESTS"\n'

TESTS = f"""
{NEEDLE}
def check(add):
    for a, b in ((2, 3), (40, 2), (-1, 1)):
        assert add(a, b) == a + b
"""

HARMLESS = (
    "passwd home run-folder write-outside symlink tcp udp unix-socket abstract-socket others"
    " specbench exit-0 end-0 equal-to-all any assertions printed"
).split()


class Traps:
    """Things outside that an answer may reach.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "records.jsonl").write_text("secret")
        self._listeners = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._listeners[0].getsockname()[1]
        datagrams = socket.socket(type=socket.SOCK_DGRAM)
        datagrams.bind(("127.0.0.1", self.port))
        self._datagrams = datagrams
        for name in (str(folder / "socket"), f"\0{folder}"):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(name)
            listener.listen()
            self._listeners.append(listener)
        for each in (*self._listeners, datagrams):
            each.setblocking(False)

    def sprung(self) -> list[str]:
        """What was reached since the last time."""
        found = []
        if sorted(path.name for path in self._folder.iterdir()) != ["records.jsonl", "socket"]:
            found.append("a file outside")
            (self._folder / "written").unlink(missing_ok=True)
        for listener in self._listeners:
            with suppress(BlockingIOError):
                listener.accept()[0].close()
                found.append("a listener")
        with suppress(BlockingIOError):
            self._datagrams.recv(9)
            found.append("a listener")
        if any(map(_is_left, psutil.process_iter())):
            found.append("a process is left")
        return found

    def close(self) -> None:
        """Listen no more."""
        for each in (*self._listeners, self._datagrams):
            each.close()


def _is_left(process: psutil.Process) -> bool:
    """Return True if a process contains an answer of ours, or one whose run has ended."""
    if contained.__file__ not in _words(process):
        return False
    try:
        above = {each.pid for each in process.parents()}
    except psutil.NoSuchProcess:
        return False
    return os.getpid() in above or above <= {1}  # else another test process waits for it


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def program(name: str, traps: Path, port: int) -> tuple[str, str]:
    """A hostile answer, and the tests that it must not pass."""
    head = HEAD.format(trap=str(traps), port=port)
    if name in FORGING:
        return f"{head}\n{FORGING[name][1]}\n", f"{TESTS}\ncheck(add)\n"
    body = REACHING[name][1]
    body = body.replace("{path!r}", repr(sys.path))
    for call, number in _CALLS.items():
        body = body.replace(f"{{{call}}}", str(number))
    attempt = f"{head}\ndef attempt():\n{textwrap.indent(body, '    ')}\n"
    return attempt, f"{NEEDLE}\nassert attempt()\n"


def tried(names: list[str], *, uncontained: bool = False) -> Iterator[tuple[str, list[str], bool]]:
    """Every program's name, what it reached, and whether it passed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {"SPECBENCH_SECRET": "secret"}),
    ):
        traps = Traps(Path(folder))
        try:
            for name in names:
                answer, tests = program(name, Path(folder), traps.port)
                passed = code.tested(answer, "", tests, uncontained=uncontained)
                reached = [REACHING[name][0]] if name in REACHING and passed else []
                yield name, [*reached, *traps.sprung()], passed
        finally:
            traps.close()


def main() -> int:
    """See above."""
    words = sys.argv[1:]
    uncontained = "--uncontained" in words
    wanted = [word for word in words if word != "--uncontained"]
    wanted = wanted or (HARMLESS if uncontained else [*REACHING, *FORGING])
    if uncontained and (harmful := {*wanted} - {*HARMLESS}):
        print(f"not without containment: {', '.join(sorted(harmful))}")  # noqa: T201
        return 2
    held = 0
    print("| program | tries to | reached | verdict |\n| --- | --- | --- | --- |")  # noqa: T201
    began = time.monotonic()
    for name, reached, passed in tried(wanted, uncontained=uncontained):
        what = {**REACHING, **FORGING}[name][0]
        verdict = "PASSED" if passed else "failed"
        row = f"| `{name}` | {what} | {', '.join(reached) or 'nothing'} | {verdict} |"
        print(row, flush=True)  # noqa: T201
        held += not reached and not passed
    print(f"\n{held} of {len(wanted)} reached nothing and failed")  # noqa: T201
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)  # noqa: T201
    return held < len(wanted)


if __name__ == "__main__":
    raise SystemExit(main())
