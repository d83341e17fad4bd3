"""Imports go one way, foreign libraries stay in their rooms, and `import minirl` does no work."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import minirl

ROOT = Path(minirl.__file__).parent

# From the ground up. A room imports from lower levels, or from its own level where no circle comes
# of it. `rollout` and `train` meet only in lower rooms.
LEVELS = (
    {"records", "config", "recipe", "errors", "devices"},
    {"guard", "secrets", "lines", "shortage"},
    {
        "metrics",
        "record",
        "trace",
        "shm",
        "pace",
        "buffer",
        "tasks",
        "fleet",
        "estimates",
    }
    | {"evaluate", "model", "loggers"},
    {"rollout", "train", "blackbox"},
    {"simulate"},
    {"plan"},
    {"journal", "conversations", "faults", "recovery", "loop", "resplit"},
    {"launch", "replay", "console", "dashboard", "doctor", "machine", "report", "sweep"}
    | {"resume", "verify_resume", "outcome", "results", "weight"},
    {"bench", "exam"},
    {"sft", "chaos"},
    {"cli"},
    {"variants"},
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
FOREIGN = {
    "vllm": {"rollout", "devices", "bench"},
    "pydantic": {"config", "recipe", "train"},
    "typer": {"cli"},
    "rich": {"console", "dashboard", "cli"},
    "transformers": {"train", "model", "rollout", "bench"},
    "datasets": {"tasks"},
    "peft": {"train"},
    "math_verify": {"tasks"},
    "pyarrow": {"tasks"},
    "matplotlib": {"report"},
    "tensorboard": {"loggers"},
    "wandb": {"loggers"},
    "trackio": {"loggers"},
}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def room_of(module: str) -> str:
    return module.split(".")[1]


def imported(path: Path) -> set[str]:
    """All modules that a file imports, also inside functions and for types only."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: imports are absolute"
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = within & MODULES.keys()
            names |= modules or {node.module}
    return names


def ours(path: Path) -> set[str]:
    return {name for name in imported(path) if name.split(".")[0] == "minirl"} - {"minirl"}


def test_minirl_does_not_import_its_tests() -> None:
    assert not any("tests" in name.split(".") for path in FILES for name in imported(path))


def test_every_room_has_its_level() -> None:
    assert {room_of(module) for module in MODULES} == LEVEL.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    room = room_of(module)
    for target in ours(MODULES[module]):
        other = room_of(target)
        assert LEVEL[other] <= LEVEL[room], f"{module} imports {target}, which is above it"
        assert {room, other} != {"rollout", "train"}, f"{module} imports {target}"


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Takes away what imports nothing that is left, until only circles and their users are left."""
    left = dict(edges)
    while ground := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in ground:
            del left[name]
    return sorted(left)


def test_no_circle_between_modules() -> None:
    # A package's own file stands for the package; its modules may import it, not the other way.
    assert circle({module: ours(path) - {module} for module, path in MODULES.items()}) == []


def test_no_circle_between_rooms() -> None:
    rooms: dict[str, set[str]] = {room: set() for room in LEVEL}
    for module, path in MODULES.items():
        rooms[room_of(module)] |= {room_of(target) for target in ours(path)}
    assert circle({room: targets - {room} for room, targets in rooms.items()}) == []


def test_a_circle_would_be_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set(), "e": {"d"}}
    assert circle(edges) == ["a", "b", "c"]


@pytest.mark.parametrize("library", FOREIGN)
def test_foreign_libraries_are_quarantined(library: str) -> None:
    users = {
        room_of(module)
        for module, path in MODULES.items()
        if library in {name.split(".")[0] for name in imported(path)}
    }
    assert users and users <= FOREIGN[library]


def loaded_by(statement: str) -> set[str]:
    program = f"{statement}; import sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT.parent,
    )
    return set(done.stdout.split())


def test_import_minirl_does_no_work() -> None:
    assert not loaded_by("import minirl") & {"torch", "numpy", "vllm", "transformers", "rich"}


@pytest.mark.parametrize(
    "module",
    [
        "minirl.config",
        "minirl.buffer",
        "minirl.cli",
        "minirl.tasks.verifier",
        "minirl.tools.data",
        "minirl.tasks.math",
        "minirl.model",
        "minirl.workers",
        "minirl.tools.plan",
        "minirl.view.dashboard",
    ],
)
def test_light_modules_load_no_torch(module: str) -> None:
    """The recipe is checked before torch is loaded, and a verifier stays a small process."""
    assert not loaded_by(f"import {module}") & {"torch", "vllm", "transformers"}
