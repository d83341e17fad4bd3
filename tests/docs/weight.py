"""How much there is to read, to install and to set: `python -m tests.docs.weight`.

    lines          physical lines of all .py files of the package, without tests, as `wc -l` counts
    core lines     of the modules that training itself needs: the loop, the trainer rank, the
                   rollout worker and the verifier, with all that they import at their top
    dependencies   distributions in pyproject's `dependencies`; "with vLLM" adds the extra that a
                   run needs. What these need in turn is not counted
    recipe keys    values that a whole recipe sets, with what it extends; and all keys there are
    test lines     without tests/bench and tests/soak

`python -m tests.docs.weight FOLDER PACKAGE` counts another project's checkout by the same rules, as
far as it has a pyproject.toml or a requirements.txt. Loads no torch.
"""

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from minirl.config import KEYS
from minirl.recipe import load

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/gsm8k.toml"
CORE = ("minirl.loop", "minirl.train.trainer", "minirl.rollout.worker", "minirl.tasks.verifier")


def weigh(root: Path, package: str) -> dict[str, Any]:
    """Tests are not part of a package, even where they are in its folder."""
    paths = [path for path in (root / package).rglob("*.py") if not is_test(path, root)]
    dependencies = len(dependencies_of(root))
    return {"files": len(paths), "lines": count(paths), "dependencies": dependencies}


def is_test(path: Path, root: Path) -> bool:
    *folders, name = path.relative_to(root).parts
    return bool({"test", "tests"} & set(folders)) or name.startswith("test_")


def count(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def dependencies_of(root: Path, extras: Sequence[str] = ()) -> set[str]:
    """Distributions, once each; extras that name extras of the same project are followed."""
    if not (root / "pyproject.toml").is_file():
        lines = (root / "requirements.txt").read_text().splitlines()
        return {normal(line) for line in lines if line[:1].isalnum()}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    found = {normal(text) for text in project.get("dependencies", [])}
    for extra in extras:
        for text in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[(.+)\]", text.strip())
            found |= dependencies_of(root, own[1].split(",")) if own else {normal(text)}
    return found


def normal(requirement: str) -> str:
    name = re.split(r"[^\w.-]", requirement.strip())[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def keys_set(recipe: Path) -> int:
    """By the recipe itself or what it extends."""
    origins = load(recipe).origins.values()
    return sum(not origin.startswith(("default", "algorithm")) for origin in origins)


def needed_by(modules: Sequence[str]) -> set[Path]:
    """The files of these and of every module of ours that they import when they are loaded."""
    found: set[Path] = set()
    left = list(modules)
    while left:
        base = ROOT.joinpath(*left.pop().split("."))
        files = {base.with_suffix(".py"), base / "__init__.py"}
        for path in {path for path in files if path.is_file()} - found:
            found.add(path)
            for node in ast.parse(path.read_text()).body:
                match node:
                    case ast.ImportFrom(module=str(name)) if name.startswith("minirl"):
                        left += [name, *(f"{name}.{alias.name}" for alias in node.names)]
    return found


def ours() -> dict[str, Any]:
    outside = {ROOT / "tests" / name for name in ("bench", "soak")}
    tests = [p for p in (ROOT / "tests").rglob("*.py") if not outside & set(p.parents)]
    return {
        **weigh(ROOT, "minirl"),
        "core_lines": count(needed_by(CORE)),
        "dependencies_with_vllm": len(dependencies_of(ROOT, ["cuda"])),
        "recipe": RECIPE,
        "recipe_keys": keys_set(ROOT / RECIPE),
        "all_keys": len(KEYS),
        "test_lines": count(tests),
    }


if __name__ == "__main__":
    words = sys.argv[1:]
    print(json.dumps(weigh(Path(words[0]), words[1]) if words else ours(), indent=1))
