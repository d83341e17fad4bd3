"""The inside of the sandbox: a script that confines itself, then runs code that a model wrote.

Run by sandbox.py as a fresh Python with an environment of its own, one process per test. Takes a
job as JSON on stdin; writes one byte to stdout once all limits are in force, and after it what the
code prints, or what its function returns as JSON. Needs the standard library alone; the rest of
minirl never imports it. All limits are unprivileged and hold inside a container. In this order:

    capabilities   none are left, and none can be gained (no_new_privs)
    rlimits        CPU time, memory, file size, open files
    Landlock       Python's libraries may be read, the scratch folder also written; nothing else
    seccomp        an allow-list of system calls: threads but no processes, no exec, no sockets that
                   reach another process, no signals to one, no change of a file by its path

seccomp alone covers what the kernel's Landlock may be too old for: truncation (ABI 3), TCP (4),
device ioctls (5), signals and abstract sockets (6); and what no Landlock covers: chmod, chown,
utime, xattrs, keyrings, io_uring.

Leaves out: wall time, output, threads and the size of the scratch folder, which sandbox.py watches;
and which output is right, which never comes in here.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import types
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
READY = b"!"
RESULT_FD = 3
NUM_OPEN_FILES = 64

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8
TRUNCATE = 1 << 14
ALL_TCP = ALL_SCOPES = 3
FILE_RIGHTS = READ_FILE | WRITE_FILE | TRUNCATE
SCRATCH_RIGHTS = FILE_RIGHTS | READ_DIR | REMOVE_FILE | MAKE_REG
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

# Name, number on x86_64, number on aarch64 ("-": that machine has no such call).
MACHINES = ("x86_64", "aarch64")
ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, lseek 8 62,
close 3 57, close_range 436 436, fstat 5 80, newfstatat 262 79, stat 4 -, lstat 6 -, statx 332 291,
access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getcwd 79 17,
chdir 80 49, fchdir 81 50, getdents64 217 61, unlink 87 -, unlinkat 263 35, rename 82 -,
renameat 264 38, renameat2 316 276, umask 95 166, ftruncate 77 46, fsync 74 82, fdatasync 75 83,
flock 73 32, sendfile 40 71, copy_file_range 326 285, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -,
pipe2 293 59, select 23 -, pselect6 270 72, poll 7 -, ppoll 271 73, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, recvfrom 45 207,
shutdown 48 210, getsockname 51 204, getsockopt 55 209, mmap 9 222, munmap 11 215, mremap 25 216,
mprotect 10 226, madvise 28 233, brk 12 214, msync 26 227, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133,
rt_sigtimedwait 128 137, sigaltstack 131 132, pause 34 -, alarm 37 -, setitimer 38 103,
getitimer 36 102, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113,
clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165,
sysinfo 99 179, uname 63 160, getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174,
geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158, sched_yield 24 124,
sched_getaffinity 204 123, getcpu 309 168, futex 202 98, set_robust_list 273 99, rseq 334 293,
set_tid_address 218 96, membarrier 324 283, getrandom 318 278, restart_syscall 219 128, exit 60 93,
exit_group 231 94
"""
# Allowed where for each (argument, mask, values): argument & mask is one of the values. An argument
# is a 32-bit word of the call's registers: word 2n is the low half of argument n.
ANY = 0xFFFFFFFF
O_ACCMODE, O_TRUNC = 3, 0o1000
CLONE_THREAD = 0x00010000
Test = tuple[int, int, tuple[int, ...]]


def conditional(pid: int) -> dict[str, tuple[Test, ...]]:
    """`pid` is this process: it may signal itself, and no other."""
    # Read-only with O_TRUNC is left out: Landlock before ABI 3 takes it for reading.
    modes = (0, 1, 2, 1 | O_TRUNC, 2 | O_TRUNC)
    # Of file descriptors and locks. F_SETOWN and F_SETSIG are left out: they send signals.
    commands = (*range(8), 36, 37, 38, 1030, 1032)
    terminal = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS … FIONBIO, FIOCLEX
    return {
        "clone 56 220": ((0, CLONE_THREAD, (CLONE_THREAD,)),),
        "open 2 -": ((2, O_ACCMODE | O_TRUNC, modes),),
        "openat 257 56": ((4, O_ACCMODE | O_TRUNC, modes),),
        "fcntl 72 25": ((2, ANY, commands),),
        "ioctl 16 29": ((2, ANY, terminal),),
        "prctl 157 167": ((0, ANY, (15, 16)),),  # a thread's name
        "kill 62 129": ((0, ANY, (pid,)),),
        "tgkill 234 131": ((0, ANY, (pid,)),),
        "prlimit64 302 261": ((0, ANY, (0,)),),
        "socketpair 53 199": ((0, ANY, (1,)),),  # asyncio has one
        "sendto 44 206": ((8, ANY, (0,)), (9, ANY, (0,))),  # to the other end, to no address
    }


class Broken(Exception):
    """A limit cannot be set here."""


def checked(name: str, result: int) -> int:
    if result < 0:
        raise Broken(f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def confine(job: dict[str, Any]) -> None:
    if os.uname().machine not in MACHINES:
        raise Broken(f"no table of system calls for {os.uname().machine}")
    head, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    checked("capset", LIBC.capset(ctypes.byref(head), ctypes.byref(none)))
    checked("dumpable", LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    checked("no_new_privs", LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    set_limits(job)
    if job["max_abi"]:
        restrict_files(job["max_abi"], job["libraries"], job["scratch"])
    install(seccomp_program())


def set_limits(job: dict[str, Any]) -> None:
    seconds, memory = job["cpu_s"], job["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NOFILE, NUM_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def landlock_abi() -> int:
    return checked("Landlock", LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def restrict_files(max_abi: int, libraries: list[str], scratch: str) -> None:
    """Every right that the kernel's Landlock knows is withdrawn, then a few are given back."""
    abi = min(landlock_abi(), max_abi)
    num_rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)
    handled = (1 << num_rights) - 1
    record = struct.pack("QQQ", handled, ALL_TCP * (abi >= 4), ALL_SCOPES * (abi >= 6))
    rules = checked("Landlock", LIBC.syscall(LANDLOCK_CREATE, record, ctypes.c_size_t(24), 0))
    readable = {path: READ_FILE | READ_DIR for path in libraries}
    for path, rights in {**readable, **dict.fromkeys(DEVICES, FILE_RIGHTS)}.items():
        if os.path.exists(path):
            allow(rules, path, rights & handled)
    allow(rules, scratch, SCRATCH_RIGHTS & handled)
    checked("Landlock", LIBC.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def allow(rules: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not os.path.isdir(path):
        rights &= FILE_RIGHTS
    record = struct.pack("=Qi", rights, fd)
    checked(f"Landlock {path}", LIBC.syscall(LANDLOCK_ADD, rules, 1, record, 0))
    os.close(fd)


LOAD, AND, EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # places in the record that a filter sees
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PASS, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
CLONE3, OPENAT2 = 435, 437
Instruction = tuple[int, int, int, int]


def seccomp_program() -> bytes:
    machine = os.uname().machine
    column = 1 + MACHINES.index(machine)
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCH),
        (EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),  # the tables of 32-bit programs, or x32 below: no number matches
        (LOAD, 0, 0, NUMBER),
    ]
    for number in (CLONE3, OPENAT2):  # a filter cannot see their flags; libc takes the older call
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ENOSYS)]
    tests = {**dict.fromkeys(ALLOWED.split(","), ()), **conditional(os.getpid())}
    for entry, wanted in tests.items():
        if (found := entry.split()[column]) != "-":
            body = [step for test in wanted for step in passing(*test)]
            body.append((RETURN, 0, 0, PASS))
            program += [(EQUAL, 0, len(body), int(found)), *body]
    program.append((RETURN, 0, 0, EPERM))
    return b"".join(struct.pack("<HBBI", *step) for step in program)


def passing(argument: int, mask: int, values: tuple[int, ...]) -> list[Instruction]:
    """Goes past its own end if the argument is one of the values."""
    steps: list[Instruction] = [(LOAD, 0, 0, ARGUMENTS + 4 * argument), (AND, 0, 0, mask)]
    for left in range(len(values), 0, -1):
        steps.append((EQUAL, left, 0, values[-left]))
    return [*steps, (RETURN, 0, 0, EPERM)]


def install(program: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    whole, mode = Program(len(program) // 8, program), ctypes.c_ulong(SECCOMP_MODE_FILTER)
    checked("seccomp", LIBC.prctl(PR_SET_SECCOMP, mode, ctypes.byref(whole), 0, 0))


def place_files(stdin: str, is_call: bool) -> None:
    """0 holds the input; 1 is the output, or of a call what is ignored, and 3 its result."""
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as file:
        file.write(stdin.encode(errors="replace"))
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
    if is_call:
        os.dup2(1, RESULT_FD)
        os.dup2(os.open("/dev/null", os.O_WRONLY), 1)


def work(job: dict[str, Any]) -> NoReturn:
    """The answer as a program, or one call of its function. Ends like any program, so that threads
    are joined and buffers written."""
    sys.argv = ["answer.py"]
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    name = "answer" if job["function"] else "__main__"
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(job["code"], "answer.py", "exec"), module.__dict__)
    if job["function"]:
        target = getattr(module, job["function"], None)
        if target is None and hasattr(module, "Solution"):
            target = getattr(module.Solution(), job["function"])
        if target is None:
            raise NameError(f"no function {job['function']}")
        with open(RESULT_FD, "w") as result:
            result.write(json.dumps(target(*job["arguments"])))
    sys.exit(0)


def main() -> None:
    job = json.load(sys.stdin.buffer)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != job["parent"]:  # it ended before this process could ask to end with it
        return
    try:
        place_files(job["stdin"], bool(job["function"]))
        confine(job)
    except (Broken, OSError, ValueError, OverflowError) as error:
        sys.exit(str(error))
    os.write(RESULT_FD if job["function"] else 1, READY)
    work(job)


if __name__ == "__main__":
    main()
