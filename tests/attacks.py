"""What code may try in the sandbox. Each attack prints ESCAPED if it got what it was after, or what
it takes for the secret that the tests expect; it counts only if neither comes out. Where a signal
would do harm if it got through, it is signal 0.

@HOME@, @PORT@, @PID@, @NAME@ and @FOLDER@ stand for the real ones of the attacked.

As a program, it runs attacks as the user who starts it, in a child that may make no namespace:
`python attacks.py FOLDER NAME…`.
"""

import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from minirl.tasks import jail
from minirl.tasks.code import Test, passes
from minirl.tasks.sandbox import Call, Limits, Outcome, run

SMALL = Limits(
    cpu_s=2,
    wall_s=60.0,  # on a busy machine too, an attack comes to its point
    memory_bytes=2**28,
    output_bytes=2**16,
    file_bytes=2**18,
    scratch_bytes=2**20,
    num_files=64,
    num_threads=8,
)
SHORT = replace(SMALL, wall_s=0.5)
CALLS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def syscall(*a):
    return libc.syscall(*[ctypes.c_long(x) if isinstance(x, int) else x for x in a])
"""
# Escaped if `got()` gives something true.
TRY = """
try:
    found = got()
except BaseException as error:
    print(type(error).__name__)
else:
    print("ESCAPED" if found else "no", str(found)[:2000])
"""


def tried(body: str) -> str:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"{CALLS}\nimport os, sys\ndef got():\n{lines}\n{TRY}"


def reads(path: str) -> str:
    return tried(f"return open({path!r}, 'rb').read(100)")


def writes(path: str) -> str:
    return tried(f"open({path!r}, 'w').write('was here')\nreturn True")


RESOURCES = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "patient fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    ),
    "thread bomb": "import threading, time\nthreading.stack_size(2**16)\nwhile True:\n"
    "    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "memory bomb": "kept = []\nwhile True:\n    kept.append(bytearray(10**7))",
    "memory by mmap": "import mmap\nkept = [mmap.mmap(-1, 10**8) for _ in range(99)]",
    "memory by memfd": tried(
        "fds = [os.memfd_create('x') for _ in range(40)]\n"
        "return all(os.write(fd, bytes(10**6)) for fd in fds)"
    ),
    "memory by System V": tried("return syscall(29, 0, 10**8, 0o1600) >= 0"),
    "endless output": "while True:\n    print('x' * 10**4)",
    "chatter": (
        "import sys, time\nwhile True:\n    sys.stderr.write('x')\n    sys.stderr.flush()\n"
        "    time.sleep(0.001)"
    ),
    "endless errors": "import sys\nwhile True:\n    sys.stderr.write('x' * 10**4)",
    "busy for ever": "while True:\n    pass",
    "asleep for ever": "import time\ntime.sleep(600)",
    "deaf to signals": (
        "import signal, time\nfor number in range(1, 65):\n    try:\n"
        "        signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError):\n"
        "        pass\nwhile True:\n    pass"
    ),
    "full disk": "with open('big', 'wb') as f:\n    while True:\n        f.write(bytes(10**5))",
    "full disk by many": (
        "for i in range(50):\n    with open(str(i), 'wb') as f:\n        f.write(bytes(10**5))"
    ),
    "many files": "for i in range(10**6):\n    open(f'f{i}', 'w').close()",
    "many open files": "kept = [open('/dev/null') for _ in range(10**6)]",
    "deep folders": "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f():\n    f()\nf()\nprint('ESCAPED')"
    ),
    "segmentation fault": "import ctypes\nctypes.string_at(0)\nprint('ESCAPED')",
    "more than the limits": tried(
        "import resource\nfor limit in (resource.RLIMIT_CPU, resource.RLIMIT_AS):\n"
        "    resource.setrlimit(limit, (-1, -1))\nreturn True"
    ),
}
ESCAPES = {
    # the network
    "internet socket": tried(
        "import socket\nsocket.create_connection(('127.0.0.1', @PORT@), 1)\nreturn True"
    ),
    "udp socket": tried(
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "return s.sendto(b'x', ('127.0.0.1', @PORT@))"
    ),
    "abstract unix socket": tried(
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0@NAME@')\nreturn True"
    ),
    "path socket": tried(
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('@FOLDER@/socket')\n"
        "return True"
    ),
    "half of a pair of sockets": tried(
        "import socket\ns, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "return s.sendto(b'x', '\\0@NAME@-datagrams')"
    ),
    "another end of a pair": tried(
        "import socket\ns, _ = socket.socketpair()\ns.bind('\\0@NAME@-bound')\nreturn True"
    ),
    "netlink socket": tried(
        "import socket\nreturn [n for n in socket.if_nameindex() if n[1] != 'lo']"
    ),
    # files
    "shadow": reads("/etc/shadow"),
    "passwd": reads("/etc/passwd"),
    "ssh key": reads("@HOME@/.ssh/id_rsa"),
    "ssh key of the user": tried("return open(os.path.expanduser('~/.ssh/id_rsa')).read()"),
    "home": tried("return os.listdir('@HOME@')"),
    "environment of process 1": reads("/proc/1/environ"),
    "environment of the parent": reads("/proc/@PID@/environ"),
    "its own environment": tried("return [v for v in os.environ.values() if 'secret-' in v]"),
    "memory through proc": reads("/proc/self/mem"),
    "kernel log": tried("return open('/dev/kmsg').read(10) or open('/dev/mem').read(1)"),
    "symlink out": tried(
        "os.symlink('@HOME@/.ssh/id_rsa', './link')\nreturn open('./link').read()"
    ),
    "symlink to write": tried(
        "os.symlink('@FOLDER@', './out')\nopen('./out/written', 'w').write('x')\nreturn True"
    ),
    "hard link": tried("os.link('@HOME@/.ssh/id_rsa', './hard')\nreturn True"),
    "hard link to a library": tried("os.link(os.__file__, './hard')\nreturn True"),
    "truncate a file": tried("return libc.truncate(b'@FOLDER@/kept', 0) == 0"),
    "truncate by reading": tried(
        "open('x', 'w').write('x')\nos.open('x', os.O_RDONLY | os.O_TRUNC)\n"
        "return not os.path.getsize('x')"
    ),
    "chmod a file": tried("os.chmod('@FOLDER@/kept', 0o777)\nreturn True"),
    "chown a file": tried("os.chown('@FOLDER@/kept', os.getuid(), os.getgid())\nreturn True"),
    "touch a file": tried("os.utime('@FOLDER@/kept', (0, 0))\nreturn True"),
    "attribute of a file": tried("os.setxattr('@FOLDER@/kept', 'user.x', b'x')\nreturn True"),
    "remove a file": tried("os.unlink('@FOLDER@/kept')\nreturn True"),
    "move a file": tried("os.rename('@FOLDER@/kept', 'mine')\nreturn True"),
    "chmod of an open library": tried(
        "fd = os.open(os.__file__, 0)\nos.fchmod(fd, os.fstat(fd).st_mode & 0o777)\nreturn True"
    ),
    "memory of the parent": reads("/proc/@PID@/mem"),
    "folder of the parent": tried("return os.listdir('/proc/@PID@/cwd/')"),
    "dots": reads("../../../../../../../@HOME@/.ssh/id_rsa"),
    "shared memory": writes("/dev/shm/was-here"),
    "shared memory of Python": tried(
        "from multiprocessing.shared_memory import SharedMemory\n"
        "return SharedMemory(name='washere', create=True, size=100)"
    ),
    "the standard library": tried("open(os.__file__, 'a').write('')\nreturn True"),
    "a new module": tried(
        "open(os.path.join(os.path.dirname(os.__file__), 'was_here.py'), 'w')\nreturn True"
    ),
    "the root": writes("/was-here"),
    "tmp": writes("/tmp/was-here"),
    "devices": writes("/dev/was-here"),
    "the folder of the tests": writes("@FOLDER@/written"),
    "chmod of a library": tried("os.chmod(os.__file__, 0o777)\nreturn True"),
    "setuid file": tried(
        "open('s', 'w').write('x')\nos.chmod('s', 0o4777)\nos.chown('s', 0, 0)\nreturn True"
    ),
    # processes
    "signal to the parent": tried("os.kill(@PID@, 0)\nreturn True"),
    "signal to init": tried("os.kill(1, 0)\nreturn True"),
    "signal to the group": tried("os.kill(0, 0)\nreturn True"),
    "signal to everybody": tried("os.kill(-1, 0)\nreturn True"),
    "signal to a thread": tried("return syscall(200, @PID@, 0) == 0"),
    "signal by a pidfd": tried(
        "import signal\nsignal.pidfd_send_signal(os.pidfd_open(@PID@), 0)\nreturn True"
    ),
    "signal with a value": tried(
        "info = (ctypes.c_int * 32)(0, 0, -1)\nreturn syscall(129, @PID@, 0, info) == 0"
    ),
    "signal by a pipe": tried(
        "import fcntl\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, @PID@)\nreturn True"
    ),
    "signal at the end of the parent": tried("return libc.prctl(1, 0) == 0"),
    "the limits of the parent": tried(
        "import resource\nreturn resource.prlimit(@PID@, resource.RLIMIT_NOFILE)"
    ),
    "daemon": tried(
        "import time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.close(0); os.close(1); os.close(2)\n        time.sleep(600)\n    os._exit(0)\n"
        "return False"
    ),
    "a shell": tried("import subprocess\nreturn subprocess.run(['/bin/sh', '-c', 'echo x'])"),
    "exec": tried("os.execv('/lib64/ld-linux-x86-64.so.2', ['x'])"),
    "ptrace the parent": tried("return libc.ptrace(16, @PID@, 0, 0) == 0"),
    "memfd and execveat": tried(
        "fd = syscall(319, b'x', 0)\nos.write(fd, open('/bin/true', 'rb').read())\n"
        "empty = (ctypes.c_char_p * 1)()\nreturn syscall(322, fd, b'', empty, empty, 0x1000) == 0"
    ),
    "execveat": tried(
        "fd = os.open('/lib64/ld-linux-x86-64.so.2', 0)\nempty = (ctypes.c_char_p * 1)()\n"
        "return syscall(322, fd, b'', empty, empty, 0x1000) != -1 or ctypes.get_errno() != 1"
    ),
    "process_vm_readv": tried(
        "b = ctypes.create_string_buffer(8)\n"
        "class V(ctypes.Structure): _fields_ = [('a', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "here, there = V(ctypes.addressof(b), 8), V(ctypes.addressof(b), 8)\n"
        "return libc.process_vm_readv(@PID@, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0"
    ),
    "files of the parent": tried("return syscall(438, os.pidfd_open(@PID@), 0, 0) >= 0"),
    # the kernel
    "mount": tried("return libc.mount(b'none', b'.', b'tmpfs', 0, b'') == 0"),
    "remount writable": tried(
        "return libc.mount(b'none', b'/', None, 0x20 | 0x1000, b'') == 0 and open('/x', 'w')"
    ),
    "umount": tried("return libc.umount2(b'.', 2) == 0"),
    "unshare": tried("return libc.unshare(0x10000000) == 0"),
    "clone3": tried("return syscall(435, 0, 0) >= 0 or ctypes.get_errno() != 38"),
    "chroot": tried("return libc.chroot(b'.') == 0"),
    "mknod": tried("os.mknod('./disk', 0o60600, os.makedev(254, 0))\nreturn True"),
    "setuid": tried("os.setuid(0)\nreturn True"),
    "setgroups": tried("os.setgroups([0])\nreturn True"),
    "host name": tried("return libc.sethostname(b'mine', 4) == 0"),
    "the clock": tried("import time\ntime.clock_settime(0, 0)\nreturn True"),
    "sysrq": writes("/proc/sysrq-trigger"),
    "core pattern": writes("/proc/sys/kernel/core_pattern"),
    "cgroups": tried("return os.listdir('/sys/fs/cgroup')"),
    "keyctl": tried("return syscall(250, 0, -3, 1) >= 0"),
    "add_key": tried("return syscall(248, b'user', b'x', b'x', 1, -3) >= 0"),
    "32-bit calls": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(bytes.fromhex('b814000000cd80c3'))  # getpid by int 0x80\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
        "print('ESCAPED', f())"
    ),
    "x32 calls": tried("return syscall(0x40000000 + 39) >= 0"),
    "bpf": tried("return syscall(321, 0, 0, 0) >= 0"),
    "io_uring": tried("p = (ctypes.c_char * 120)()\nreturn syscall(425, 4, p) >= 0"),
    "userfaultfd": tried("return syscall(323, 0) >= 0"),
    "perf": tried("p = (ctypes.c_char * 120)()\nreturn syscall(298, p, 0, -1, -1, 0) >= 0"),
    "file handles": tried("p = (ctypes.c_char * 120)()\nreturn syscall(304, 3, p, 0) >= 0"),
}
VERDICTS = {
    "exit early": "import os\nos._exit(0)",
    "exit with a smile": "import sys\nsys.exit(0)",
    "patched builtins": (
        "import builtins, sys, json\nbuiltins.str = bytes\nbuiltins.print = lambda *a: None\n"
        "builtins.all = builtins.bool = builtins.len = lambda *a: True\n"
        "sys.exit = lambda *a: None\n"
        "json.loads = json.dumps = lambda *a, **k: True"
    ),
    "forged verdict": (
        "import json, os, struct\n"
        "body = json.dumps({'status': '', 'stderr': ''}).encode() + b'\\n'\n"
        "frame = struct.pack('>I', len(body)) + body\nfor fd in range(64):\n    try:\n"
        "        os.write(fd, frame)\n    except OSError:\n        pass"
    ),
    "frames": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n    for value in [*frame.f_locals."
        "values(), *frame.f_globals.values()]:\n        if 'secret-' in repr(value):\n"
        "            print(repr(value))\n    frame = frame.f_back"
    ),
    "garbage collector": (
        "import gc\nfor thing in gc.get_objects():\n    try:\n        text = repr(thing)\n"
        "    except Exception:\n        continue\n    at = text.find('secret' + '-')\n"
        "    if at >= 0:\n        print(text[at:at + 39])"
    ),
    "open files": (
        "import os\nfor fd in range(64):\n    try:\n        print(fd, os.pread(fd, 9999, 0))\n"
        "    except OSError as error:\n        print(fd, error)"
    ),
    "arguments": (
        "import ctypes, sys\nprint(sys.argv, sys.orig_argv)\n"
        "for name in ('/proc/self/cmdline', '/proc/1/cmdline', '/proc/@PID@/cmdline'):\n"
        "    try:\n        print(open(name).read())\n    except OSError:\n        pass"
    ),
    "every file": (
        "import os\nfor folder, folders, files in os.walk('/'):\n"
        "    folders[:] = [f for f in folders if f not in ('lib', 'lib64', 'dev')]\n"
        "    for name in files:\n        print(open(os.path.join(folder, name), 'rb').read())"
    ),
    "the harness's files": (
        "import os, sys\nfor module in list(sys.modules.values()):\n"
        "    name = getattr(module, '__file__', None) or ''\n    if 'jail' in name:\n"
        "        print('ESCAPED', os.listdir(os.path.dirname(name)))"
    ),
    "closed stdout": "import os\nos.close(1)\nprint('x')",
    "garbage": "import os\nos.write(1, bytes(range(256)) * 99 + b'\\xed\\xa0\\x80\\xff\\xfe')",
    "null bytes": "print('\\0' * 1000)",
    "the input back": "import sys\nprint(sys.stdin.read())",
    "an answer too long": "print('x' * 60000)\nprint(input())",
    "syntax error": "def (:",
    "too much syntax": "print(" + "(" * 5000 + ")" * 5000 + ")",
}
SECRET_CALL = "secret_of"
FUNCTIONS = {
    "equal to all": (
        "class Same:\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n"
        "    def __repr__(self):\n        return 'anything'\n"
        "def secret_of(x):\n    return Same()"
    ),
    "a text equal to all": (
        "class Same(str):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n"
        "def secret_of(x):\n    return Same('anything')"
    ),
    "a pickle": "import pickle\ndef secret_of(x):\n    return pickle.dumps(print)",
    "patched json": (
        'import json\njson.dumps = lambda value: \'{"__class__": "eval"}\'\n'
        "def secret_of(x):\n    return x"
    ),
    "no return": "import os\ndef secret_of(x):\n    os._exit(0)",
    "not a number": "def secret_of(x):\n    return float('nan')",
    "nested": "def secret_of(x):\n    for _ in range(900):\n        x = [x]\n    return x",
    "written by hand": "import os\nos.write(3, b'[' * 60000)\nos._exit(0)",
    "the caller": (
        "import sys\ndef secret_of(x):\n    return [sorted(map(str, frame.items())) for frame in "
        "[sys._getframe(1).f_locals, sys._getframe(1).f_globals]]"
    ),
    "no function": "x = 1",
    "endless result": "def secret_of(x):\n    return 'x' * 10**7",
}
# These never end by themselves.
ENDLESS = (
    *("patient fork bomb", "endless errors", "busy for ever", "asleep for ever"),
    *("deaf to signals", "thread bomb", "deep recursion", "chatter"),
)
PROGRAMS = {**RESOURCES, **ESCAPES, **VERDICTS}


@dataclass(frozen=True)
class World:
    """What there is to get at, outside."""

    secret: str
    words: dict[str, str]

    def code(self, name: str) -> str:
        code = PROGRAMS.get(name) or FUNCTIONS[name]
        for word, value in self.words.items():
            code = code.replace(f"@{word}@", value)
        return code

    def attempt(self, name: str, max_abi: int = 99) -> tuple[Outcome, bool]:
        call = Call(SECRET_CALL, ("question",)) if name in FUNCTIONS else None
        limits = replace(SHORT if name in ENDLESS else SMALL, max_abi=max_abi)
        outcome = run(self.code(name), "question\n", call, limits)  # raises if the sandbox broke
        return outcome, passes(Test("question\n", call, self.secret), outcome)

    def got_away(self, name: str, max_abi: int = 99) -> str:
        """What is wrong, or ""."""
        outcome, is_passed = self.attempt(name, max_abi)
        whole = outcome.output + outcome.stderr.encode()
        if is_passed or b"ESCAPED" in whole or self.secret.encode() in whole:
            return f"{name}: {outcome}"
        return ""


@contextmanager
def world(folder: Path) -> Iterator[World]:
    """A home with a key, a server, listeners: all with the secret, all within reach outside."""
    secret, name = f"secret-{secrets.token_hex(16)}", f"minirl-test-{secrets.token_hex(4)}"
    home, kept = folder / "home", folder / "kept"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_rsa").write_text(secret)
    kept.write_text("as it was")
    before = kept.stat()
    os.environ["MINIRL_TEST_TOKEN"] = secret
    server = socket.create_server(("127.0.0.1", 0))
    listeners = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    for listener, address in zip(listeners, (f"\0{name}", str(folder / "socket")), strict=True):
        listener.bind(address)
        listener.listen()
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(f"\0{name}-datagrams")
    port = str(server.getsockname()[1])
    words = {"HOME": str(home), "PORT": port, "PID": str(os.getpid()), "NAME": name}
    try:
        yield World(secret, {**words, "FOLDER": str(folder)})
    finally:
        del os.environ["MINIRL_TEST_TOKEN"]
        for opened in (server, datagrams, *listeners):
            opened.close()
    after = kept.stat()
    assert not (folder / "written").exists() and kept.read_text() == "as it was"
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)


NEW_NAMESPACES = 0x7E020080  # the flags of clone
FORBIDDEN = {  # as in the default profile of a container
    "x86_64": {"clone": 56, "unshare": 272, "setns": 308, "mount": 165, "pivot_root": 155},
    "aarch64": {"clone": 220, "unshare": 97, "setns": 268, "mount": 40, "pivot_root": 41},
}


def enter_container(*more: int) -> None:
    """From here on this process and its children can make no namespace and mount nothing; `more`
    are numbers of calls that the kernel then does not know."""
    numbers = dict(FORBIDDEN[os.uname().machine])
    program = [
        (jail.LOAD, 0, 0, jail.NUMBER),
        (jail.EQUAL, 0, 5, numbers.pop("clone")),
        (jail.LOAD, 0, 0, jail.ARGUMENTS),
        (jail.AND, 0, 0, NEW_NAMESPACES),
        (jail.EQUAL, 0, 1, 0),
        (jail.RETURN, 0, 0, jail.PASS),
        (jail.RETURN, 0, 0, jail.EPERM),
    ]
    for number in numbers.values():
        program += [(jail.EQUAL, 0, 1, number), (jail.RETURN, 0, 0, jail.EPERM)]
    for number in (jail.CLONE3, *more):
        program += [(jail.EQUAL, 0, 1, number), (jail.RETURN, 0, 0, jail.ENOSYS)]
    program.append((jail.RETURN, 0, 0, jail.PASS))
    assert jail.LIBC.prctl(jail.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    jail.install(b"".join(struct.pack("<HBBI", *step) for step in program))
    assert jail.LIBC.unshare(0x10000000) == -1, "a user namespace"


def main() -> None:
    """Prints what got away, one line each."""
    enter_container()
    with world(Path(sys.argv[1])) as attacked:
        for name in sys.argv[2:] or (*PROGRAMS, *FUNCTIONS):
            if wrong := attacked.got_away(name):
                print(wrong)
    print("done", os.getuid())


if __name__ == "__main__":
    main()
