"""Runs a program where the kernel gives no namespaces, as in many containers: unshare is forbidden
by a filter. `python no_namespaces.py ARGUMENTS…` is `python ARGUMENTS…` there.
"""

import os
import struct
import sys

from minirl.tasks.sandbox.jail import LIBC, PR_SET_NO_NEW_PRIVS, install
from minirl.tasks.sandbox.syscalls import ALLOW, DENIED, EPERM, FAIL, JUMP_EQUAL, LOAD, RETURN


def main() -> None:
    number = DENIED["unshare"][os.uname().machine == "aarch64"]
    program = [
        (LOAD, 0, 0, 0),
        (JUMP_EQUAL, 0, 1, number),
        (RETURN, 0, 0, FAIL | EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    assert LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    install(b"".join(struct.pack("<HBBI", *instruction) for instruction in program))
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
