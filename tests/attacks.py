"""What code may try in the sandbox: tests/data/attacks.txt, by name. An attack prints ESCAPED if it
got what it was after (one whose code returns, which attack.txt runs: if it returns something true),
or what it takes for the secret that the tests expect; it is held if neither comes out. @HOME@,
@PORT@, @PID@, @NAME@ and @FOLDER@ stand for the real ones of the attacked.

`python attacks.py FOLDER NAME…` runs attacks in a process that may make no namespace, and
`python attacks.py --nobody NAME…` as an unprivileged user.
"""

import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sysconfig import get_path
from typing import NamedTuple

from minirl.tasks import jail
from minirl.tasks.code import Test, passes
from minirl.tasks.sandbox import Call, Limits, Outcome, run

DATA = Path(__file__).parent / "data"
# On a busy machine too, an attack comes to its point.
SMALL = Limits(2, 60.0, 2**28, file_bytes=2**18, scratch_bytes=2**20, num_files=64, num_threads=8)
SHORT = SMALL._replace(wall_s=0.5)  # for those that never end by themselves
ENDLESS = (
    *("patient fork bomb", "endless errors", "busy for ever", "asleep for ever"),
    *("deaf to signals", "deep recursion", "chatter"),
)


def read_attacks() -> Iterator[dict[str, str]]:
    """The sections of the file, each by name."""
    text = (DATA / "attacks.txt").read_text()
    for section in re.split(r"^==== .*\n", text, flags=re.M)[1:]:
        parts = re.split(r"^== (.*)\n", section, flags=re.M)[1:]
        yield {name: _code(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _code(body: str) -> str:
    if not re.search(r"^return", body, re.M):
        return body
    tried = (DATA / "attack.txt").read_text()
    return tried.replace("{body}", re.sub(r"^", "    ", body.rstrip(), flags=re.M))


RESOURCES, ESCAPES, VERDICTS, FUNCTIONS = read_attacks()
VERDICTS["too much syntax"] = "print(" + "(" * 5000 + ")" * 5000 + ")"
PROGRAMS = {**RESOURCES, **ESCAPES, **VERDICTS}


class World(NamedTuple):
    """What there is to get at, outside."""

    secret: str
    words: dict[str, str]

    def code(self, name: str) -> str:
        code = PROGRAMS.get(name) or FUNCTIONS[name]
        for word, value in self.words.items():
            code = code.replace(f"@{word}@", value)
        return code

    def attempt(self, name: str) -> tuple[Outcome, bool]:
        call = Call("secret_of", ("question",)) if name in FUNCTIONS else None
        limits = SHORT if name in ENDLESS else SMALL
        outcome = run(self.code(name), "question\n", call, limits)  # raises if the sandbox broke
        return outcome, passes(Test("question\n", call, self.secret), outcome)

    def got_away(self, name: str) -> str:
        """What is wrong, or ""."""
        outcome, is_passed = self.attempt(name)
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
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        for listener, address in ((abstract, f"\0{name}"), (by_path, str(folder / "socket"))):
            listener.bind(address)
            listener.listen()
        datagrams.bind(f"\0{name}-datagrams")
        port = str(server.getsockname()[1])
        words = {"HOME": str(home), "PORT": port, "PID": str(os.getpid()), "NAME": name}
        yield World(secret, {**words, "FOLDER": str(folder)})
    del os.environ["MINIRL_TEST_TOKEN"]
    after = kept.stat()
    assert not (folder / "written").exists() and kept.read_text() == "as it was"
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)


CLONE, NEW_NAMESPACES = 56, 0x7E020080  # its flags
FORBIDDEN = {"unshare": 272, "setns": 308, "mount": 165, "pivot_root": 155}
NOBODY = 65534
NEW_MOUNTS, PRIVATE, BIND = 0x00020000, 0x44000, 0x5000


def enter_container(*more: int) -> None:
    """From here on this process and its children can make no namespace and mount nothing, as in the
    default profile of a container; `more` are calls that the kernel then does not know."""
    plain_clone = [*jail.passing(0, NEW_NAMESPACES, (0,)), (jail.RETURN, 0, 0, jail.PASS)]
    program = [(jail.LOAD, 0, 0, jail.NUMBER), (jail.EQUAL, 0, len(plain_clone), CLONE)]
    program += plain_clone
    refused = dict.fromkeys(FORBIDDEN.values(), jail.EPERM)
    for number, verdict in {**refused, **dict.fromkeys((jail.CLONE3, *more), jail.ENOSYS)}.items():
        program += [(jail.EQUAL, 0, 1, number), (jail.RETURN, 0, 0, verdict)]
    assert jail.LIBC.prctl(jail.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    jail.install([*program, (jail.RETURN, 0, 0, jail.PASS)])
    assert jail.LIBC.unshare(0x10000000) == -1, "a user namespace"


def as_nobody(names: list[str]) -> None:
    """Starts this file anew as nobody: a Python and a minirl that only root may read are bound to
    where nobody can reach them, in a mount namespace that ends with the process."""
    libc, place = jail.LIBC, Path("/mnt")
    assert libc.unshare(NEW_MOUNTS) == 0 and libc.mount(b"none", b"/", None, PRIVATE, None) == 0
    assert libc.mount(b"none", b"/mnt", b"tmpfs", 0, b"mode=755") == 0
    folders = {"minirl": Path(jail.__file__).parent.parent, "tests": Path(__file__).parent}
    folders |= {"python": Path(sys.base_prefix), "packages": Path(get_path("purelib"))}
    for name, source in folders.items():
        (place / name).mkdir()
        assert libc.mount(os.fsencode(source), bytes(place / name), None, BIND, None) == 0
    (place / "world").mkdir()
    shutil.chown(place / "world", NOBODY, NOBODY)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.chdir("/")
    python = f"{place}/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    environment = {"PYTHONPATH": f"{place}:{place}/packages"}
    environment["LD_LIBRARY_PATH"] = f"{place}/python/lib"
    os.execve(python, [python, "/mnt/tests/attacks.py", "/mnt/world", *names], environment)


def main() -> None:
    """Prints what got away, one line each."""
    folder, *names = sys.argv[1:]
    if folder == "--nobody":
        as_nobody(names)
    enter_container()
    with world(Path(folder)) as attacked:
        for name in names or (*PROGRAMS, *FUNCTIONS):
            if wrong := attacked.got_away(name):
                print(wrong)
    print("done", os.getuid())


if __name__ == "__main__":
    main()
