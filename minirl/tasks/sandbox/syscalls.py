"""The system calls that sandboxed code may not make, as a seccomp filter.

Gives the bytes of a BPF program. It is a second wall: namespaces already keep most of these from
doing anything. What only it forbids: new processes (threads are allowed), programs, sockets, and
memory that no limit counts (memfd, System V). What is forbidden fails with EPERM, as it would where
one is not allowed to, so that a program sees an ordinary error.

Numbers are those of the kernel's tables (unistd_64.h for x86_64, asm-generic for aarch64).
"""

import struct

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # the other table that an x86_64 kernel may serve
CLONE = {"x86_64": 56, "aarch64": 220}
PRLIMIT = {"x86_64": 302, "aarch64": 261}
CLONE3 = 435
CLONE_THREAD = 0x00010000
EPERM, ENOSYS = 1, 38
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000

# Name: (x86_64, aarch64). None: that machine has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "syslog": (103, 116),
    "acct": (163, 89),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "quotactl": (179, 60),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
}
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16  # in the record that a filter looks at (little endian)


def filter_for(machine: str) -> bytes:
    """Empty where the machine's calls are not known: there is no sandbox then."""
    if machine not in AUDIT_ARCH:
        return b""
    column = list(AUDIT_ARCH).index(machine)
    numbers = [n for row in DENIED.values() if (n := row[column]) is not None]
    program = [
        (LOAD, 0, 0, ARCH),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, KILL),
        (JUMP_EQUAL, 0, 1, CLONE3),  # its flags are out of a filter's sight: libc takes clone then
        (RETURN, 0, 0, FAIL | ENOSYS),
        (JUMP_EQUAL, 0, 4, CLONE[machine]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_ANY_BIT, 0, 1, CLONE_THREAD),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, FAIL | EPERM),
        (JUMP_EQUAL, 0, 4, PRLIMIT[machine]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_EQUAL, 0, 1, 0),  # one's own limits, which only go down; not those of init
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, FAIL | EPERM),
    ]
    for number in numbers:
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, FAIL | EPERM)]
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
