"""`python as_nobody.py NAME…` runs attacks.py as nobody: a Python and a minirl that only root may
read are bound to where nobody can reach them, in a mount namespace that ends with the process.
"""

import ctypes
import os
import shutil
import sys
from pathlib import Path

NOBODY = 65534
NEW_MOUNTS, PRIVATE, BIND = 0x00020000, 0x44000, 0x5000


def main() -> None:
    libc, place = ctypes.CDLL(None, use_errno=True), Path("/mnt")
    assert libc.unshare(NEW_MOUNTS) == 0 and libc.mount(b"none", b"/", None, PRIVATE, None) == 0
    assert libc.mount(b"none", b"/mnt", b"tmpfs", 0, b"mode=755") == 0
    sources = {"python": sys.base_prefix, "minirl": f"{os.environ['MINIRL_ROOT']}/minirl"}
    for name, source in {**sources, "tests": str(Path(__file__).parent)}.items():
        (place / name).mkdir()
        assert libc.mount(os.fsencode(source), bytes(place / name), None, BIND, None) == 0
    world = place / "world"
    world.mkdir()
    shutil.chown(world, NOBODY, NOBODY)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.chdir("/")
    python = f"{place}/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    environment = {"PYTHONPATH": f"{place}", "LD_LIBRARY_PATH": f"{place}/python/lib"}
    program = [python, f"{place}/tests/attacks.py", str(world), *sys.argv[1:]]
    os.execve(python, program, environment)


if __name__ == "__main__":
    main()
