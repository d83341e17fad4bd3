"""What minirl promises not to do: run data as code, hand tokens on, open itself to others."""

import ast
import os
import re
from pathlib import Path

import pytest

import minirl
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.launch import _make_run_dir
from minirl.workers import SECRET, _environment

ROOT = Path(minirl.__file__).parent
FORBIDDEN_CALLS = re.compile(
    r"eval|exec|compile|__import__|os\.(system|popen)|subprocess\.getoutput|"
    r"(pickle|torch|yaml|marshal|joblib|np|numpy)\.loads?|pickle\.Unpickler|shelve\.open"
)
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml"}
# What the jail is for: a program that the model wrote, in a process that has given everything up.
ALLOWED = {"tasks/jail.py": ["exec", "compile"]}


def dangers(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] if FORBIDDEN_CALLS.fullmatch(name) else []
            words = {k.arg: ast.unparse(k.value) for k in node.keywords}
            found += [w for w in ("shell", "allow_pickle") if words.get(w, "False") != "False"]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [name for name in names if name.split(".")[0] in FORBIDDEN_IMPORTS]
    return found


def test_no_data_is_run_as_code() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        found = dangers(path.read_text())
        assert found == ALLOWED.get(str(path.relative_to(ROOT)), []), path
    source = (
        "import pickle, os\nfrom yaml import load\ntorch.load(x)\neval(y)\nos.system(z)\n"
        "subprocess.run(a, shell=True)\nnp.fromfile(b, allow_pickle=True)\nmodel.eval()\n"
    )
    found = "pickle yaml torch.load eval os.system shell allow_pickle"
    assert " ".join(dangers(source)) == found


def test_a_directory_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(RecipeError, match=r"--run-dir = .* cannot be written to .*name another"):
        _make_run_dir(Config(), Path("/proc/minirl-run"), "cpu")  # not even root may


def test_workers_are_started_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ["HF_TOKEN", "WANDB_API_KEY", "MY_SECRET_THING", "DB_PASSWORD"]
    harmless = ["TOKENIZERS_PARALLELISM", "KEYBOARD", "HOME"]
    assert [name for name in (*secret, *harmless) if SECRET.search(name)] == secret
    monkeypatch.setenv("HF_TOKEN", "hf-abcdefghij")
    with _environment({"OMP_NUM_THREADS": "3"}):
        assert "HF_TOKEN" not in os.environ and os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["HF_TOKEN"] == "hf-abcdefghij"
