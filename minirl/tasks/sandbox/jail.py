"""The inside of the sandbox: a script of its own that builds the walls, then runs code behind them.

Run as `python -P -s -S -B jail.py` with an empty environment and two pipes: frames come in on stdin
and go out on stdout (a frame is four bytes of length and so many bytes). It needs the standard
library alone and is never imported by the rest of minirl. Three processes, one after the other:

    supervisor   enters new namespaces, builds the file system, waits for init and kills it when the
                 time is over. It dies with the process that started it
    init         process 1 of its own PID namespace, without any privilege. One job after the other:
                 forks a worker, collects what it prints, kills whatever is left of it. When init
                 ends, the kernel ends everything in the namespace
    worker       a fork of init for one job: takes its limits and runs the code

The order of the walls matters, and is that of `enter`, `build_root`, `drop_privileges`, `confine`.
Nothing that says which output is right ever comes in here: whatever code does to these processes,
all that it can change is what it is taken to have printed.

With settings["is_isolated"] = false there are no namespaces, only limits and the system call
filter: that is the fallback that a recipe must ask for.
"""

import base64
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
import types
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEW = {  # what unshare leaves behind
    "mount": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x2, 0x4, 0x8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
SYS_MOUNT_SETATTR = 442  # the same number everywhere: it came after tables were made one
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL, SECCOMP_MODE_FILTER = 4, 2
CAPABILITY_VERSION_3 = 0x20080522
INSIDE, NOBODY = 1000, 65534  # the ids of a worker: inside, and outside where root starts it
SCRATCH, OLD = "/scratch", "/.old"
RESULT_FD = 3
STDERR_BYTES = 2000


class Broken(Exception):
    """A wall cannot be built here."""


# -- frames


def read_exactly(fd: int, count: int) -> bytes | None:
    """None: the other side is gone."""
    parts = bytearray()
    while len(parts) < count:
        part = os.read(fd, min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def receive() -> Any:
    head = read_exactly(0, 4)
    body = read_exactly(0, struct.unpack(">I", head)[0]) if head else None
    return json.loads(body) if body is not None else None


def send(message: dict[str, Any], output: bytes = b"") -> None:
    body = json.dumps(message).encode() + b"\n" + output
    left = memoryview(struct.pack(">I", len(body)) + body)
    while left:
        left = left[os.write(1, left) :]


# -- the walls


def call(name: str, result: int) -> None:
    if result != 0:
        raise Broken(f"{name}: {os.strerror(ctypes.get_errno())}")


def enter() -> None:
    """New namespaces. A helper that stays outside says who is who: as root, root and nobody; else
    one's own user alone."""
    is_root = os.geteuid() == 0
    user, group, me = os.geteuid(), os.getegid(), os.getpid()
    asked, answer = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(answer)
        os.read(asked, 1)
        try:
            if not is_root:  # who may not drop groups must not be allowed to
                write(f"/proc/{me}/setgroups", "deny")
            as_root = f"\n{INSIDE} {NOBODY} 1"
            write(f"/proc/{me}/uid_map", f"0 0 1{as_root}" if is_root else f"{INSIDE} {user} 1")
            write(f"/proc/{me}/gid_map", f"0 0 1{as_root}" if is_root else f"{INSIDE} {group} 1")
        except OSError:
            os._exit(1)
        os._exit(0)
    os.close(asked)
    result = LIBC.unshare(sum(CLONE_NEW.values()))
    error = ctypes.get_errno()
    os.close(answer)  # the helper goes on, also where there is nothing to do
    _, status = os.waitpid(helper, 0)
    if result != 0:
        raise Broken(f"unshare: {os.strerror(error)}")
    if status != 0:
        raise Broken("uid_map: not allowed")


def write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = [os.fsencode(x) if x else None for x in (source, target, kind)]
    call(f"mount {target}", LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode()))


def set_attributes(path: str, attributes: int, flags: int = 0) -> None:
    """Only ever adds: what the machine's owner locked stays locked."""
    record = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    result = LIBC.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), flags, ctypes.byref(record), 32
    )
    call(f"mount_setattr {path}", result)


def build_root(settings: dict[str, Any]) -> None:
    """A root of nothing but read-only libraries, three devices and a scratch folder. No /proc: a
    program needs none, and there is nothing to learn from one that is not there."""
    sources = {path: os.path.realpath(path) for path in settings["libraries"]}
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("none", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    os.mkdir(f"/tmp{OLD}")
    number = SYS_PIVOT_ROOT[os.uname().machine]
    call("pivot_root", LIBC.syscall(number, b"/tmp", f"/tmp{OLD}".encode()))
    os.chdir("/")
    bound: list[str] = []
    for path in sorted(sources):
        source = OLD + sources[path]
        if any(path.startswith(f"{other}/") for other in bound) or not os.path.exists(source):
            continue
        bind(source, path, AT_RECURSIVE, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
        bound.append(path)
    for name in ("null", "zero", "urandom"):
        bind(f"{OLD}/dev/{name}", f"/dev/{name}", 0, ATTR_RDONLY | ATTR_NOSUID | ATTR_NOEXEC)
    os.mkdir(SCRATCH)
    size = f"size={settings['scratch_bytes']},nr_inodes={settings['num_files']}"
    owner = f"mode=700,uid={INSIDE},gid={INSIDE}"
    mount("none", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, f"{size},{owner}")
    call("umount", LIBC.umount2(OLD.encode(), MNT_DETACH))
    os.rmdir(OLD)
    set_attributes("/", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    os.chdir(SCRATCH)


def bind(source: str, target: str, recursive: int, attributes: int) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(source, target, None, MS_BIND | MS_REC)
    set_attributes(target, attributes, recursive)


def drop_privileges() -> None:
    """Of init, before any code is run, and of the supervisor: as another user it could not kill
    init any more, nor would the kernel when the supervisor dies."""
    with contextlib.suppress(PermissionError):  # where groups cannot be dropped
        os.setgroups([])
    os.setresgid(INSIDE, INSIDE, INSIDE)
    os.setresuid(INSIDE, INSIDE, INSIDE)
    drop_capabilities()


def drop_capabilities() -> None:
    """Bounding set first: that still takes one."""
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    head, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    call("capset", LIBC.capset(ctypes.byref(head), ctypes.byref(none)))
    call("no_new_privs", LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    call("dumpable", LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))


def confine(settings: dict[str, Any]) -> None:
    """The last thing before the code: limits that only go down, and the filter."""
    seconds, memory = settings["cpu_s"], settings["memory_bytes"]
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, settings["scratch_bytes"], settings["scratch_bytes"]),
        (resource.RLIMIT_NPROC, settings["num_threads"], settings["num_threads"]),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        resource.setrlimit(limit, (soft, hard))
    call("no_new_privs", LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if settings["filter"]:
        install(base64.b64decode(settings["filter"]))


def install(program: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    whole = Program(len(program) // 8, program)
    mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)
    call("seccomp", LIBC.prctl(PR_SET_SECCOMP, mode, ctypes.byref(whole), 0, 0))


# -- the three processes


def supervise(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Gives a job in a worker, and None (after its end) in init. Does not come back itself."""
    if settings["is_isolated"]:
        enter()
        build_root(settings)
    else:
        os.chdir(settings["scratch"])
    # Init gets from inside only what it has a handler for, and Python has one for this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    init = os.fork()
    if settings["is_isolated"]:
        drop_privileges()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # last: a change of user clears it
    if init == 0:
        return serve(settings)
    if os.getppid() != settings["parent"]:  # it died before we could ask to die with it
        os.kill(init, signal.SIGKILL)
    os.close(0)  # only init reads and writes from here on
    os.close(1)
    watched = os.pidfd_open(init)
    if not select.select([watched], [], [], settings["total_s"])[0]:
        os.kill(init, signal.SIGKILL)  # of a PID namespace: with all that is in it
    os.waitpid(init, 0)
    os._exit(0)


def serve(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Init's loop: a job, a worker, an answer."""
    send({"ready": True})
    while (job := receive()) is not None:
        stdin = os.memfd_create("stdin")
        write_all(stdin, job.pop("stdin", "").encode(errors="replace"))
        os.lseek(stdin, 0, os.SEEK_SET)
        out, err, begun = os.pipe(), os.pipe(), os.pipe()
        worker = os.fork()
        if worker == 0:
            os.close(begun[0])
            os.setsid()
            os.dup2(stdin, 0)
            os.dup2(out[1], RESULT_FD)
            os.dup2(err[1], 2)
            os.dup2(RESULT_FD, 1)
            if "function" in job:
                os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
            else:
                os.close(RESULT_FD)
            first = RESULT_FD + ("function" in job)
            os.closerange(first, begun[1])
            os.closerange(begun[1] + 1, 1024)
            try:
                confine(settings)
            except Exception as error:
                write_all(2, f"{type(error).__name__}: {error}".encode())
                os._exit(1)
            write_all(begun[1], b"!")
            os.close(begun[1])
            return job
        for fd in (stdin, out[1], err[1], begun[1]):
            os.close(fd)
        is_confined = os.read(begun[0], 1) == b"!"  # else no code was run, and that is our failure
        status, output, errors = collect(worker, out[0], err[0], settings)
        for fd in (out[0], err[0], begun[0]):
            os.close(fd)
        said = errors.decode(errors="replace")
        send({"status": status, "stderr": said} if is_confined else {"error": said}, output)
    return None


def write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def collect(worker: int, out: int, err: int, settings: dict[str, Any]) -> tuple[str, bytes, bytes]:
    """Until the worker ends, says too much or takes too long. Then all that is left is killed."""
    deadline, ended = time.monotonic() + settings["wall_s"], os.pidfd_open(worker)
    room = {out: settings["output_bytes"], err: STDERR_BYTES}
    heard = {out: bytearray(), err: bytearray()}
    open_fds, reason = [out, err], ""
    while not reason:
        left = deadline - time.monotonic()
        ready = select.select([*open_fds, ended], [], [], max(0.0, left))[0]
        if left <= 0 or not ready:
            reason = "wall time"
        for fd in [fd for fd in open_fds if fd in ready]:
            if not hear(fd, heard[fd], room[fd]):
                open_fds.remove(fd)
        if len(heard[out]) > room[out]:
            reason = "output"
        elif ended in ready:
            break
    os.close(ended)
    status = finish(worker)
    for fd in open_fds:  # what it had said before it ended; nobody is left to say more
        while len(heard[fd]) <= room[fd] and hear(fd, heard[fd], room[fd]):
            pass
    if len(heard[out]) > room[out]:
        reason = "output"
    return reason or status, bytes(heard[out][: room[out]]), bytes(heard[err][:STDERR_BYTES])


def hear(fd: int, heard: bytearray, room: int) -> bool:
    """False: nobody writes any more. What there is no room for is not kept."""
    data = os.read(fd, 65536)
    heard += data[: max(0, room + 1 - len(heard))]
    return bool(data)


def finish(worker: int) -> str:
    """Ends everything in the namespace but init, and says how the worker ended."""
    if os.getpid() == 1:  # -1 is all of the namespace; outside of one it would be the user's all
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    code = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, 0)
            code = os.waitstatus_to_exitcode(status) if pid == worker else code
    if code == -signal.SIGXCPU or code == -signal.SIGKILL:
        return "CPU time"  # nothing else kills it before this function does
    return f"signal {-code}" if code < 0 else f"exit code {code}" if code else ""


def work(job: dict[str, Any]) -> NoReturn:
    """The worker: the answer as a program, or one call of its function. Ends like any program, so
    that threads are joined and buffers written."""
    sys.argv = ["answer.py"]
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    name = "answer" if "function" in job else "__main__"
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(job["code"], "answer.py", "exec"), module.__dict__)
    if "function" in job:
        target = getattr(module, job["function"], None)
        if target is None and hasattr(module, "Solution"):
            target = getattr(module.Solution(), job["function"])
        if target is None:
            raise NameError(f"no function {job['function']}")
        write_all(RESULT_FD, json.dumps(target(*job["arguments"])).encode())
    sys.exit(0)


def main() -> None:
    settings = receive()
    if settings is None:
        return
    try:
        job = supervise(settings)
    except (Broken, OSError, KeyError) as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return
    if job is None:
        os._exit(0)
    work(job)


if __name__ == "__main__":
    main()
