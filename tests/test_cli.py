"""The command line, as a person meets it: real processes, exit codes, what is printed."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cases import each_case
from typer.testing import CliRunner

from minirl import __version__
from minirl.cli import app, main
from minirl.recipe import load, to_toml
from minirl.run_dir import choose_run_dir
from minirl.tools import doctor

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
COMMANDS = "train eval sample sft data plan sweep config doctor watch runs inspect report replay"
HEAVY = ("torch", "vllm", "transformers", "numpy", "scipy", "rich", "minirl.config")


def python(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # 80 columns and offline, whatever the terminal and the machine are.
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )


def minirl(*args: str, cwd: Path = ROOT, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    done = python("-m", "minirl.cli", *args, cwd=cwd)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def ran(*words: object, code: int = 0) -> list[str]:
    """Without a process; errors are raised."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output.splitlines()


def test_help_teaches_and_loads_nothing_heavy() -> None:
    shown = minirl("--help").stdout
    rows = re.findall(r"^  (\w+) +(\S.*)$", shown.partition("Commands:")[2], re.MULTILINE)
    assert [name for name, _ in rows] == COMMANDS.split()
    assert all(summary.endswith(".") and "..." not in summary for _, summary in rows)
    assert "Exit codes:" in shown and minirl().stdout == shown
    assert minirl("--version").stdout == f"{__version__}\n"
    code = f"""import sys, minirl.cli
for command in sys.argv[1:]:
    sys.argv = ["minirl", *command.split(), "-h"]
    try:
        minirl.cli.main()
    except SystemExit as end:
        assert not end.code
    print([name for name in {HEAVY!r} if name in sys.modules], end="|")
"""
    commands = ["", *COMMANDS.split()]
    done = python("-c", code, *commands)
    assert done.returncode == 0, done.stderr
    for command, shown in zip(commands, done.stdout.split("|")[:-1], strict=True):
        assert shown.startswith("Usage: minirl") and shown.endswith("[]"), command
        num_examples = len(re.findall(rf"^  minirl {command}\b", shown, re.MULTILINE))
        assert num_examples >= 1, command


TOO_SHORT = '{"max_position_embeddings": 383}'


@each_case("wrong_input")
def test_wrong_input_is_one_line_and_exit_code_2(
    case: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args, line = case.values()
    for name, text in (("full/metrics.jsonl", ""), ("model/config.json", TOO_SHORT)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "runs/r-big-20250101-000000").mkdir(parents=True)  # not a run of r.toml
    (tmp_path / "r.toml").write_text('[devices]\nkind = "cpu"\n')
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["minirl", *args.split()])
    with pytest.raises(SystemExit) as end:
        main()
    out, error = capsys.readouterr()
    assert end.value.code == 2 and (not out or out.startswith("loading "))
    assert error.startswith(f"minirl: {line}") and len(error.splitlines()) == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_recipes_are_short_and_a_dry_run_checks_them_anywhere(recipe: Path, tmp_path: Path) -> None:
    assert len(recipe.read_text().splitlines()) <= 30 and recipe.read_text().startswith("# ")
    done = minirl("train", str(recipe), "--dry-run", cwd=tmp_path)
    assert done.stdout.endswith("recipe ok\n") and "\ncheckpoints " in done.stdout
    assert not list(tmp_path.iterdir())


def test_config_is_toml_and_says_where_from() -> None:
    recipe = ROOT / "recipes/gsm8k-2gpu.toml"
    shown = "\n".join(ran("config", recipe, "--set", "train.lr=1e-4"))
    wanted = to_toml(load(recipe, ["train.lr=1e-4"]).config)
    assert tomllib.loads(shown) == tomllib.loads(wanted)
    for origin in ("0.0001           ", "# --set\n", "# gsm8k-2gpu.toml", "# gsm8k.toml"):
        assert origin in shown


def test_resume_takes_the_newest_run(here: Path) -> None:
    for name in ("r-20250101-000000", "r-20250102-000000", "r-2gpu-20260101-000000"):
        (here / "runs" / name).mkdir(parents=True)
        (here / "runs" / name / "recipe.toml").touch()
    assert choose_run_dir(Path("a/r.toml"), None, resume=True) == Path("runs/r-20250102-000000")
    fresh = choose_run_dir(Path("a/r.toml"), None, resume=False)
    assert fresh.match("runs/r-????????-??????") and not fresh.exists()


@each_case("exit_codes")
def test_errors_have_exit_codes_on_a_full_disk(case: dict[str, Any]) -> None:
    code = f"""import minirl.cli, minirl.errors as e
from minirl.view.console import ConsoleView
def app(**_):
    view = ConsoleView(10)
    view.note("x" * 9000)
    view.step({{"step": 1, "seconds": 1.0, "reward/mean": 0.5}})
    raise {case["error"]}
minirl.cli.app = app
minirl.cli.main()
"""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code]
        pipes: dict[str, Any] = {"stdout": full, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command, **pipes, cwd=ROOT)
    assert (done.returncode, done.stderr) == (case["code"], case["stderr"])


def test_doctor_names_a_remedy_for_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    done = minirl("doctor", code=None)
    assert done.returncode in (0, 1) and done.stderr == ""
    assert all(name in done.stdout for name in ("torch", "vllm", "/dev/shm", "sandbox"))
    assert ("NOT OK" in done.stdout) == (done.returncode == 1)
    assert done.stdout.count("remedy: ") == done.stdout.count("NOT OK")
    monkeypatch.setattr(doctor, "TORCH_PROBE", "import no_such_torch")
    monkeypatch.setattr(doctor, "TRANSFORMERS_PROBE", "")
    findings = {finding.name: finding for finding in doctor.diagnose()}
    missing = "does not import: ModuleNotFoundError: No module named 'no_such_torch'"
    assert findings["torch"] == doctor.Finding("torch", False, missing, doctor.INSTALL)
    assert all(finding.remedy for finding in findings.values() if not finding.ok)
    monkeypatch.setattr(doctor, "TRANSFORMERS_PROBE", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 1)
    assert any(finding.detail.endswith("no answer in 1 s") for finding in doctor.diagnose())


def test_plan_needs_no_gpu_and_names_the_split_to_take() -> None:
    options = ("--gpu", "4090", "--gpus", "3", "--set", "train.max_tokens=16384")
    shown = ran("plan", ROOT / "recipes/gsm8k-2gpu.toml", *options, code=2)
    assert sum("take this" in line for line in shown) == 1, shown
    for words in ("TOO BIG", "--set train.max_tokens=", "1 + 2"):
        assert any(words in line for line in shown), words
