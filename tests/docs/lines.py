"""Lines of Python and files by room of minirl/, as `wc -l` counts: `python -m tests.docs.lines`.

The last rows are all of it, and the tests without tests/bench and tests/soak.
"""

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def show(name: str, paths: Iterable[Path]) -> None:
    counts = [path.read_bytes().count(b"\n") for path in paths]
    print(f"{name:<16}{sum(counts):>7,} lines{len(counts):>5} files")


if __name__ == "__main__":
    package, tests = ROOT / "minirl", ROOT / "tests"
    show("minirl/*.py", package.glob("*.py"))
    for init in sorted(package.glob("*/__init__.py")):
        show(f"minirl/{init.parent.name}/", init.parent.rglob("*.py"))
    show("minirl/", package.rglob("*.py"))
    outside = {tests / "bench", tests / "soak"}
    show("tests/", (path for path in tests.rglob("*.py") if not outside & {*path.parents}))
