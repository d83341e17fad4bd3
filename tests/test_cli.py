"""The command line, as a person meets it: real processes, exit codes, what is printed."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from minirl.recipe import load, to_toml
from minirl.tools.doctor import Finding, diagnose

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def python(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # Wide and offline, whatever the terminal and the machine are.
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )


def minirl(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return python("-m", "minirl.cli", *args, cwd=cwd)


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["config", "-h"]])
def test_help_loads_no_torch(args: list[str]) -> None:
    code = f"""
import sys
import minirl.cli, minirl.config
sys.argv = ["minirl", *{args!r}]
try:
    minirl.cli.main()
except SystemExit as end:
    assert not end.code
print([name for name in ("torch", "vllm", "transformers", "numpy") if name in sys.modules])
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "Usage: minirl" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_help_teaches() -> None:
    top, train = minirl("--help").stdout, minirl("train", "--help").stdout
    for words in ("minirl doctor", "--dry-run", "Exit codes:", "train", "config"):
        assert words in top
    for words in ("--set", "--run-dir", "--resume", "metrics.jsonl", "Exit codes:", "  3  "):
        assert words in train


def test_usage_errors_exit_with_2() -> None:
    for args in (["train"], ["trian", "x.toml"], ["train", "x.toml", "--no-such-flag"]):
        done = minirl(*args)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_dry_run_anywhere(recipe: Path, tmp_path: Path) -> None:
    done = minirl("train", str(recipe), "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("recipe ok\n")
    assert "trajectory ring" in done.stdout
    assert not list(tmp_path.iterdir())


def test_dry_run_checks_a_local_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"0" * 3 * 2**20)
    sizes = {"max_position_embeddings": 384, "num_attention_heads": 2}
    (tmp_path / "model/config.json").write_text(json.dumps(sizes))
    (tmp_path / "r.toml").write_text('[model]\npath = "model"\n[devices]\nkind = "cpu"\n')
    done = minirl("train", "r.toml", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3.0 MiB" in done.stdout
    longer = ["--set", "rollout.max_new_tokens=129"]
    done = minirl("train", "r.toml", "--dry-run", *longer, cwd=tmp_path)
    assert done.returncode == 2
    assert "past the model's 384 positions" in done.stderr


def test_dry_run_refuses_more_processes_than_the_cores_allow(tmp_path: Path) -> None:
    many = ["--set", "devices.rollout=1024"]
    done = minirl("train", str(ROOT / "recipes/smoke.toml"), "--dry-run", *many, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("minirl: devices.rollout = 1024: ")
    assert done.stdout == ""


def test_config_is_toml_and_says_where_from() -> None:
    recipe = ROOT / "recipes/gsm8k-2gpu.toml"
    done = minirl("config", str(recipe), "--set", "train.lr=1e-4")
    assert done.returncode == 0
    wanted = to_toml(load(recipe, ["train.lr=1e-4"]).config)
    assert tomllib.loads(done.stdout) == tomllib.loads(wanted)
    assert "lr = 0.0001                           # --set\n" in done.stdout
    assert "# gsm8k-2gpu.toml" in done.stdout
    assert "# gsm8k.toml" in done.stdout
    assert "# default" in done.stdout


@pytest.mark.parametrize(
    "args, line",
    [
        (
            ["--run-dir", "full"],
            'minirl: --run-dir = "full": is not empty and holds no run '
            "(there is no recipe.toml in it); name another directory\n",
        ),
        (
            ["--resume", "--run-dir", "full"],
            'minirl: --run-dir = "full": is not empty and holds no run '
            "(there is no recipe.toml in it); name another directory\n",
        ),
        (
            ["--run-dir", "r.toml"],
            'minirl: --run-dir = "r.toml": is a file; name a new directory\n',
        ),
        (
            ["--resume", "--run-dir", "gone"],
            'minirl: --run-dir = "gone": no such directory to resume; '
            "name a run directory, or leave --resume out to start one\n",
        ),
        (
            ["--resume"],  # runs/r-big-... is not a run of r.toml
            'minirl: --resume = "runs/r-*": no run of this recipe; '
            "leave --resume out to start one, or name it with --run-dir\n",
        ),
    ],
)
def test_wrong_run_dir(tmp_path: Path, args: list[str], line: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/metrics.jsonl").touch()
    (tmp_path / "runs/r-big-20250101-000000").mkdir(parents=True)
    (tmp_path / "r.toml").write_text('[devices]\nkind = "cpu"\n')
    done = minirl("train", "r.toml", *args, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, line)


def test_resume_takes_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minirl.cli.train import choose_run_dir

    monkeypatch.chdir(tmp_path)
    for name in ("r-20250101-000000", "r-20250102-000000", "r-2gpu-20260101-000000"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    chosen = choose_run_dir(Path("some/r.toml"), None, resume=True)
    assert chosen == Path("runs/r-20250102-000000")
    fresh = choose_run_dir(Path("some/r.toml"), None, resume=False)
    assert fresh.match("runs/r-????????-??????")
    assert not fresh.exists()


def test_errors_have_exit_codes_and_no_traceback() -> None:
    code = """
import minirl.cli, minirl.errors as e
def fail(): raise {}
minirl.cli.app = lambda **_: fail()
minirl.cli.main()
"""
    for error, exit_code, stderr in (
        ("e.WorkerDied('rank 1\\ndied')", 1, "minirl: rank 1\\ndied\n"),
        ("e.Stalled('nothing moved')", 3, "minirl: nothing moved\n"),
        ("KeyboardInterrupt", 130, ""),
    ):
        done = python("-c", code.format(error))
        assert (done.returncode, done.stderr) == (exit_code, stderr)


def test_output_to_a_full_disk_fails_no_run_and_changes_no_exit_code() -> None:
    code = """
import sys, minirl.cli
from minirl.view.console import ConsoleView
def train(**_):
    view = ConsoleView(10)
    for step in range(1, 11):
        view.note("x" * 9000)
        view.step({"step": step, "seconds": 1.0, "reward/mean": 0.5})
    view.close()
    sys.exit(7)
minirl.cli.app = train
minirl.cli.main()
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, cwd=ROOT
        )
    assert (done.returncode, done.stderr) == (7, b"")


def test_doctor() -> None:
    done = minirl("doctor")
    assert done.returncode in (0, 1)
    assert done.stderr == ""
    for name in ("python", "torch", "vllm", "transformers", "/dev/shm", "disk here"):
        assert name in done.stdout
    assert ("NOT OK" in done.stdout) == (done.returncode == 1)
    assert done.stdout.count("remedy: ") == done.stdout.count("NOT OK")


def test_doctor_names_a_remedy_for_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from minirl.tools import doctor

    monkeypatch.setattr(doctor, "TORCH_PROBE", "import no_such_torch")
    monkeypatch.setattr(doctor, "TRANSFORMERS_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 1)
    findings = {finding.name: finding for finding in diagnose()}
    assert findings["torch"] == Finding(
        "torch",
        False,
        "does not import: ModuleNotFoundError: No module named 'no_such_torch'",
        doctor.INSTALL,
    )
    assert findings["transformers"].detail.endswith("no answer in 1 s")
    assert all(finding.remedy for finding in findings.values() if not finding.ok)


def test_plan_needs_no_gpu_and_names_the_split_to_take() -> None:
    done = minirl("plan", "recipes/gsm8k-2gpu.toml", "--gpu", "4090", "--num", "3", "--mean", "200")
    assert done.returncode == 0, done.stderr
    assert "TOO BIG: lower train.max_tokens to" in done.stdout
    assert "1 + 2" in done.stdout and done.stdout.count("take this") == 1


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["recipes/gsm8k.toml", "--gpu", "T4"], '--gpu = "T4": is not in the table; one of H100, '),
        (["recipes/gsm8k.toml", "--num", "1"], "--num = 1: 1 cannot be split into engines of 1 "),
        (["recipes/gsm8k.toml", "--run", "no"], '--run = "no": has no step in its batches.jsonl; '),
    ],
)
def test_plan_refuses_in_one_line(args: list[str], line: str) -> None:
    done = minirl("plan", *args)
    assert done.returncode == 2
    assert done.stderr.startswith(f"minirl: {line}") and len(done.stderr.splitlines()) == 1
