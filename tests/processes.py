"""What the tests of whole runs share: start one, look into it, and see that it leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from minirl.run_dir import read_lines
from tests.crew import LIMIT_S, wait_until
from tests.soak.controller_process import living, orphaned_memory

RECIPES = Path(__file__).parent.parent / "recipes"
SMALL = {"train.steps": 4, "train.batch_size": 4, "rollout.group_size": 4, "eval.every": 0}
SMALL |= {"rollout.max_new_tokens": 48, "rollout.kv_cache_gib": 0.1, "eval.num_prompts": 8}


class Run:
    """`minirl train` on the smoke recipe, made small, in a process of its own; `boxes`: on the head
    of these (boxes.py)."""

    def __init__(self, run_dir: Path, small: bool = True, boxes: Any = None, **changes: object):
        self.dir, here = run_dir, Path(__file__).parent
        settings = dict(SMALL) if small else {}
        settings |= {key.replace("__", "."): value for key, value in changes.items()}
        train = [sys.executable, "-m", "minirl.cli", "train", str(RECIPES / "smoke.toml")]
        train += [f"--run-dir={run_dir}", *(f"--set={key}={v}" for key, v in settings.items())]
        paths = (str(here), str(here.parent), os.environ.get("PYTHONPATH", ""))
        env = dict(boxes.env if boxes else os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}
        self.before = set(os.listdir("/dev/shm"))
        command = boxes.inside(0, ["nice", *train]) if boxes else train
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **pipes)

    def workers(self) -> dict[str, int]:
        """Process ids by worker name."""
        found = {p.name(): p.pid for p in psutil.Process(self.process.pid).children()}
        return {name[3:]: pid for name, pid in found.items() if name.startswith("rl-")}

    def kill(self, name: str) -> None:
        os.kill(self.workers()[name], signal.SIGKILL)

    def wait_until(self, is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()  # a test that fails leaves no run behind
                out, err = self.process.communicate()
                raise AssertionError(f"it never came to that:\n{out}\n{err}")
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: len(self.metrics()) >= step)

    def end(self, limit_s: float = LIMIT_S, code: int | None = None) -> "Ended":
        """Waits for the end, perhaps with this exit code, and sees that nothing is left of it: no
        process, and no shared memory that no process holds."""
        try:
            out, err = self.process.communicate(timeout=limit_s)
        finally:
            self.process.kill()
        # Others' memory is orphaned for an instant too, as it comes and goes.
        wait_until(lambda: not living(self.process.pid) and not orphaned_memory() - self.before)
        assert list(self.dir.rglob("*.tmp")) == [], "a half-written file is left"
        ended = Ended(self.process.returncode, out, err)
        assert code in (None, ended.code), ended
        return ended

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.dir / "metrics.jsonl")

    def summary(self) -> dict[str, Any]:
        return json.loads((self.dir / "summary.json").read_text())


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    def __repr__(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


def assert_accounted(lines: list[dict[str, Any]], max_staleness: int) -> None:
    """Rules 1 and 2, at every step."""
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    for line in lines:
        done = line["buffer/groups_trained"] + line["buffer/groups_dropped"]
        assert line["buffer/groups_submitted"] == done + line["buffer/groups_in_flight"]
        assert line["buffer/staleness_max"] <= max_staleness


def listening_addresses(session: int) -> set[str]:
    """At which processes of a run take connections."""
    pids, found = living(session), psutil.net_connections("tcp")
    return {c.laddr.ip for c in found if c.pid in pids and c.status == psutil.CONN_LISTEN}
