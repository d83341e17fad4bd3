"""How much there is to read, to install and to set, counted: `python -m tests.docs.weight`.

    lines          physical lines of all .py files of the package, tests left out, as `wc -l` counts
    code           of those, lines that hold code: no blank ones, comments or docstrings
    loop lines     of the modules that training itself needs: the loop, the trainer rank, the
                   rollout worker and the verifier, with all that they import at their top
    dependencies   distributions in pyproject's `dependencies`; "with vLLM" adds the extra that a
                   run needs. What these need in turn is not counted
    recipe keys    values that a whole recipe sets, with what it extends; and all keys there are

`python -m tests.docs.weight FOLDER [PACKAGE]` counts another project's checkout by the same
rules, as far as it has a pyproject.toml or a requirements.txt. Loads no torch.
"""

import argparse
import ast
import io
import json
import re
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minirl.config import KEYS
from minirl.recipe import load

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/gsm8k.toml"
LOOP = ("minirl.loop", "minirl.train.trainer", "minirl.rollout.worker", "minirl.tasks.verifier")
ENGINE = "cuda"  # the extra with vLLM
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


@dataclass(frozen=True)
class Weight:
    files: int
    lines: int
    code: int
    dependencies: int | None  # None: nobody says


def weigh(root: Path, package: str) -> Weight:
    """Tests are not part of a package, also where they lie in it."""
    paths = [p for p in sorted((root / package).rglob("*.py")) if not is_test(p, root)]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    dependencies = _dependencies(root)
    return Weight(
        len(texts),
        sum(text.count("\n") for text in texts),
        sum(count_code(text) for text in texts),
        None if dependencies is None else len(dependencies),
    )


def is_test(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return bool({"test", "tests"} & set(parts[:-1])) or parts[-1].startswith("test_")


def count_code(text: str) -> int:
    """Lines with at least one token that is neither a comment nor a docstring."""
    try:
        docstrings = _docstring_lines(ast.parse(text))
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, tokenize.TokenError):  # of another Python: count what is not blank
        return sum(bool(line.strip()) for line in text.splitlines())
    found: set[int] = set()
    for token in tokens:
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def _docstring_lines(tree: ast.AST) -> set[int]:
    """Any string that stands alone is one: explanations under fields too."""
    found: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def names(requirements: Sequence[str]) -> set[str]:
    """Distributions, once each, however often they are named."""
    found = (NAME.match(text.strip()) for text in requirements)
    return {re.sub(r"[-_.]+", "-", match.group()).lower() for match in found if match}


def _dependencies(root: Path) -> set[str] | None:
    if (file := root / "pyproject.toml").is_file():
        listed = tomllib.loads(file.read_text()).get("project", {}).get("dependencies")
        if listed is not None:
            return names(listed)
    if (file := root / "requirements.txt").is_file():
        return names([line for line in file.read_text().splitlines() if line[:1].isalnum()])
    return None


def with_engine(root: Path = ROOT) -> int:
    """Dependencies with the extra that has vLLM; extras of extras are followed."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras, own = project["optional-dependencies"], project["name"]

    def follow(extra: str) -> Iterator[str]:
        for text in extras[extra]:
            inner = re.fullmatch(rf"{own}\[(.+)\]", text.strip())
            if inner is None:
                yield text
            else:
                for name in inner.group(1).split(","):
                    yield from follow(name.strip())

    return len(names([*project["dependencies"], *follow(ENGINE)]))


def keys_set(recipe: Path) -> int:
    """By the recipe itself or what it extends."""
    origins = load(recipe).origins.values()
    return sum(not origin.startswith(("default", "algorithm")) for origin in origins)


def ours() -> dict[str, Any]:
    return {
        **asdict(weigh(ROOT, "minirl")),
        "loop_lines": sum(path.read_text().count("\n") for path in needed_by(LOOP)),
        "dependencies_with_vllm": with_engine(),
        "recipe": RECIPE,
        "recipe_keys": keys_set(ROOT / RECIPE),
        "all_keys": len(KEYS),
        "test_lines": weigh_tests(),
    }


def needed_by(modules: Sequence[str]) -> set[Path]:
    """The files of these and of every module of ours that they import when they are loaded."""
    found: set[Path] = set()
    left = list(modules)
    while left:
        path = _file_of(left.pop())
        if path is None or path in found:
            continue
        found.add(path)
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.ImportFrom(module=str(module)):
                    left += [module, *(f"{module}.{alias.name}" for alias in node.names)]
                case ast.Import():
                    left += [alias.name for alias in node.names]
    return found


def _file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if module.startswith("minirl.") and file.is_file():
            return file
    return None


def weigh_tests() -> int:
    return sum(p.read_text().count("\n") for p in sorted((ROOT / "tests").rglob("*.py")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="another project's checkout")
    parser.add_argument("package", nargs="?", default="", help="its folder with the package")
    chosen = parser.parse_args()
    found = ours() if chosen.folder is None else asdict(weigh(chosen.folder, chosen.package))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
