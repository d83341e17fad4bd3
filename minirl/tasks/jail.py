"""The inside of the sandbox: a script that confines itself, then runs code that a model wrote.

Takes a job as JSON from the socket that its argument names, and answers with one byte once all
limits are in force: no capabilities and none to gain, rlimits, Landlock (Python's libraries may be
read, the scratch folder also written), and a seccomp allow-list, which covers what Landlock lacks:
truncation (ABI 3), TCP (4), ioctls (5), signals and abstract sockets (6); chmod, xattrs, keyrings.
Output is stdout, or a function's result as JSON. Standard library only; minirl never imports it.
Leaves out: wall time, threads and scratch space (sandbox.py watches them), and the right output.
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
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8
TRUNCATE = 1 << 14
ALL_TCP = ALL_SCOPES = 3
FILE_RIGHTS = READ_FILE | WRITE_FILE | TRUNCATE
SCRATCH_RIGHTS = FILE_RIGHTS | READ_DIR | REMOVE_FILE | MAKE_REG
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

# Of x86_64; the names are for the reader.
ALLOWED = """
read 0, write 1, readv 19, writev 20, pread64 17, pwrite64 18, lseek 8, close 3, close_range 436,
fstat 5, newfstatat 262, stat 4, lstat 6, statx 332, access 21, faccessat 269, faccessat2 439,
readlink 89, readlinkat 267, getcwd 79, chdir 80, fchdir 81, getdents64 217, unlink 87,
unlinkat 263, rename 82, renameat 264, renameat2 316, umask 95, ftruncate 77, fsync 74,
fdatasync 75, flock 73, sendfile 40, copy_file_range 326, dup 32, dup2 33, dup3 292, pipe 22,
pipe2 293, select 23, pselect6 270, poll 7, ppoll 271, epoll_create1 291, epoll_ctl 233,
epoll_wait 232, epoll_pwait 281, eventfd2 290, recvfrom 45, shutdown 48, getsockname 51,
getsockopt 55, mmap 9, munmap 11, mremap 25, mprotect 10, madvise 28, brk 12, msync 26,
rt_sigaction 13, rt_sigprocmask 14, rt_sigreturn 15, rt_sigpending 127, rt_sigsuspend 130,
rt_sigtimedwait 128, sigaltstack 131, pause 34, alarm 37, setitimer 38, getitimer 36,
nanosleep 35, clock_nanosleep 230, clock_gettime 228, clock_getres 229, gettimeofday 96, time 201,
times 100, getrusage 98, sysinfo 99, uname 63, getpid 39, getppid 110, gettid 186, getuid 102,
geteuid 107, getgid 104, getegid 108, getgroups 115, sched_yield 24, sched_getaffinity 204,
getcpu 309, futex 202, set_robust_list 273, rseq 334, set_tid_address 218, membarrier 324,
getrandom 318, restart_syscall 219, exit 60, exit_group 231
"""
# Allowed where for each (argument, mask, values): argument & mask is one of the values. An argument
# is a 32-bit word of the call's registers: word 2n is the low half of argument n.
ANY = 0xFFFFFFFF
O_ACCMODE, O_TRUNC = 3, 0o1000
CLONE_THREAD = 0x00010000
Test = tuple[int, int, tuple[int, ...]]


def conditional(pid: int) -> dict[str, tuple[Test, ...]]:
    """`pid` is this process: it may signal no other. A SIGKILL always comes from outside."""
    # Read-only with O_TRUNC is left out: Landlock before ABI 3 takes it for reading.
    modes = (0, 1, 2, 1 | O_TRUNC, 2 | O_TRUNC)
    # Of file descriptors and locks. F_SETOWN and F_SETSIG are left out: they send signals.
    commands = (*range(8), 36, 37, 38, 1030, 1032)
    not_kill = tuple(number for number in range(65) if number != signal.SIGKILL)
    terminal = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS … FIONBIO, FIOCLEX
    return {
        "clone 56": ((0, CLONE_THREAD, (CLONE_THREAD,)),),
        "open 2": ((2, O_ACCMODE | O_TRUNC, modes),),
        "openat 257": ((4, O_ACCMODE | O_TRUNC, modes),),
        "fcntl 72": ((2, ANY, commands),),
        "ioctl 16": ((2, ANY, terminal),),
        "prctl 157": ((0, ANY, (15, 16)),),  # a thread's name
        "kill 62": ((0, ANY, (pid,)), (2, ANY, not_kill)),
        "tgkill 234": ((0, ANY, (pid,)), (4, ANY, not_kill)),
        "prlimit64 302": ((0, ANY, (0,)),),
        "socketpair 53": ((0, ANY, (1,)),),  # asyncio has one
        "sendto 44": ((8, ANY, (0,)), (9, ANY, (0,))),  # to the other end, to no address
    }


def checked(name: str, result: int) -> int:
    if result < 0:
        raise OSError(f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def confine(job: dict[str, Any]) -> None:
    if os.uname().machine != "x86_64":
        raise OSError(f"no table of system calls for {os.uname().machine}")
    head, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3
    checked("capset", LIBC.capset(ctypes.byref(head), ctypes.byref(none)))
    checked("dumpable", LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    checked("no_new_privs", LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"] + 1))
    limits = {"AS": job["memory_bytes"], "FSIZE": job["file_bytes"], "NOFILE": 64, "CORE": 0}
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    restrict_files(job["libraries"], job["scratch"])
    install(seccomp_program())


def restrict_files(libraries: list[str], scratch: str) -> None:
    """Withdraws every right that the kernel's Landlock knows, then gives a few back."""
    abi = checked("Landlock", LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    record = struct.pack("QQQ", handled, ALL_TCP * (abi >= 4), ALL_SCOPES * (abi >= 6))
    rules = checked("Landlock", LIBC.syscall(LANDLOCK_CREATE, record, ctypes.c_size_t(24), 0))
    readable = dict.fromkeys(filter(os.path.exists, libraries), READ_FILE | READ_DIR)
    given = {**readable, **dict.fromkeys(DEVICES, FILE_RIGHTS), scratch: SCRATCH_RIGHTS}
    for path, rights in given.items():
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        known = handled if os.path.isdir(path) else handled & FILE_RIGHTS
        record = struct.pack("=Qi", rights & known, fd)
        checked(f"Landlock {path}", LIBC.syscall(LANDLOCK_ADD, rules, 1, record, 0))
        os.close(fd)
    checked("Landlock", LIBC.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


LOAD, AND, EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # places in the record that a filter sees
AUDIT_ARCH_X86_64 = 0xC000003E
PASS, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
CLONE3, OPENAT2 = 435, 437
Instruction = tuple[int, int, int, int]


def seccomp_program() -> list[Instruction]:
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCH),
        (EQUAL, 1, 0, AUDIT_ARCH_X86_64),
        (RETURN, 0, 0, KILL),  # the tables of 32-bit programs, or x32 below: no number matches
        (LOAD, 0, 0, NUMBER),
    ]
    for number in (CLONE3, OPENAT2):  # a filter cannot see their flags; libc takes the older call
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ENOSYS)]
    tests = {**dict.fromkeys(ALLOWED.split(","), ()), **conditional(os.getpid())}
    for entry, wanted in tests.items():
        body = [step for test in wanted for step in passing(*test)]
        body.append((RETURN, 0, 0, PASS))
        program += [(EQUAL, 0, len(body), int(entry.split()[1])), *body]
    return [*program, (RETURN, 0, 0, EPERM)]


def passing(argument: int, mask: int, values: tuple[int, ...]) -> list[Instruction]:
    """Jumps past its own end if the argument is one of the values, else refuses the call."""
    load = [(LOAD, 0, 0, ARGUMENTS + 4 * argument), (AND, 0, 0, mask)]
    equal = [(EQUAL, left, 0, values[-left]) for left in range(len(values), 0, -1)]
    return [*load, *equal, (RETURN, 0, 0, EPERM)]


def install(program: list[Instruction]) -> None:
    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    steps = b"".join(struct.pack("<HBBI", *step) for step in program)
    whole, filter_mode = Program(len(program), steps), ctypes.c_ulong(2)
    checked("seccomp", LIBC.prctl(PR_SET_SECCOMP, filter_mode, ctypes.byref(whole), 0, 0))


def work(job: dict[str, Any], result: int) -> NoReturn:
    """Runs the code as a program, or calls its function. Exits as any program does, so that threads
    are joined and buffers are flushed."""
    sys.argv = ["answer.py"]
    name = "answer" if job["function"] else "__main__"
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(job["code"], "answer.py", "exec"), module.__dict__)
    if job["function"]:
        owner = module.Solution() if hasattr(module, "Solution") else module
        target = getattr(module, job["function"], None) or getattr(owner, job["function"])
        with open(result, "w") as file:
            file.write(json.dumps(target(*job["arguments"])))
    sys.exit(0)


def main() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    control = open(int(sys.argv[1]), "r+b", buffering=0)  # noqa: SIM115
    job, result = json.loads(control.readall()), os.dup(1)
    if job["function"]:  # what it prints is ignored
        os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    try:
        confine(job)
    except (OSError, ValueError, OverflowError) as error:
        sys.exit(str(error))  # while control is open: the parent kills this process once it is not
    control.write(b"!")  # raises where the parent died before PDEATHSIG was set
    control.close()
    work(job, result)


if __name__ == "__main__":
    main()
