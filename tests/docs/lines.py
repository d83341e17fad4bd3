"""Lines of Python and files by room of minirl/, as `wc -l` counts: `python -m tests.docs.lines`.

The last rows are all of it, and the tests without tests/bench and tests/soak.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def by_room() -> dict[str, list[Path]]:
    package = ROOT / "minirl"
    rooms = {"minirl/*.py": list(package.glob("*.py"))}
    for init in sorted(package.glob("*/__init__.py")):
        rooms[f"minirl/{init.parent.name}/"] = list(init.parent.rglob("*.py"))
    outside = {ROOT / "tests" / name for name in ("bench", "soak")}
    tests = [path for path in (ROOT / "tests").rglob("*.py") if not outside & {*path.parents}]
    return {**rooms, "minirl/": list(package.rglob("*.py")), "tests/": tests}


if __name__ == "__main__":
    for name, paths in by_room().items():
        num_lines = sum(path.read_bytes().count(b"\n") for path in paths)
        print(f"{name:<16}{num_lines:>7,} lines{len(paths):>5} files")
