"""metrics.jsonl holds only what the table defines, and docs/metrics.md is that table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minirl import metrics
from minirl.metrics import MetricsLog
from tests.docs.metrics import document

DOCUMENT = Path(__file__).parent.parent / "docs" / "metrics.md"


def test_the_document_is_printed_from_the_table() -> None:
    assert DOCUMENT.read_text() == document()


def test_every_metric_has_one_row() -> None:
    names = [metric.name for metric in metrics.TABLE]
    assert len(set(names)) == len(names)
    rows = document().partition("|---|---|\n")[2].splitlines()
    assert [row.split("`")[1] for row in rows] == names
    assert all(row.replace(r"\|", "").count("|") == 3 for row in rows)  # two columns


def test_an_unknown_name_fails_and_writes_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(AssertionError, match="reward/maen"):
        log.write({"step": 1, "reward/maen": 0.5})
    log.close()
    assert metrics.read(tmp_path / "metrics.jsonl") == []


def test_what_a_step_does_not_have_is_left_out(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    line = log.write(
        {
            "train/loss": float("nan"),
            "train/grad_norm": float("inf"),
            "eval/accuracy": None,
            "reward/mean": 0.0,
            "step": 1,
        }
    )
    log.close()
    assert line == {"step": 1, "reward/mean": 0.0}
    assert list(line) == ["step", "reward/mean"]  # in the order of the table
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward/mean": 0.0}\n'


def test_a_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1})
    assert metrics.read(log.path) == [{"step": 1}] == log.lines
    log.close()


def test_resume_takes_back_the_lines_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 8)))
    log = MetricsLog(path, last_step=4)
    log.write({"step": 5, "version": 5})
    log.close()
    expected = [{"step": s} for s in range(1, 5)] + [{"step": 5, "version": 5}]
    assert metrics.read(path) == log.lines == expected


def test_a_new_run_begins_with_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsLog(path).close()
    assert path.read_text() == ""


def test_a_last_line_that_was_cut_is_left_out_and_resume_mends_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "reward/me')
    assert metrics.read(path) == [{"step": 1}, {"step": 2}]
    log = MetricsLog(path, last_step=2)
    log.write({"step": 3})
    log.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_on_a_full_disk_lines_are_taken_back_all_the_same(tmp_path: Path) -> None:
    """Nothing can be written aside then; what is less needs no room."""
    program = """
import sys
from pathlib import Path
from tests.soak.disk import Tmpfs, small_disk
disk = small_disk(Path(sys.argv[1]), 1 << 20)
if isinstance(disk, Tmpfs):
    from minirl import metrics
    from minirl.lines import Lines
    path = Path(sys.argv[1]) / "samples.jsonl"
    path.write_text("".join('{"step":%d}\\n' % step for step in range(1, 2000)) + '{"st')
    disk.fill([])
    assert len(metrics.cut(path, 1500)) == 1500, "as given"
    assert len(metrics.read(path)) == 1500, "as read"
    Lines(path).write('{"step":1501}')
    assert path.read_text().endswith('{"step":1500}\\n{"step":1501}\\n')
    assert sorted(p.name for p in path.parent.iterdir()) == ["filler", "samples.jsonl"]
else:
    print("no disk")
"""
    env = {**os.environ, "PYTHONPATH": str(Path(metrics.__file__).parent.parent)}
    command = [sys.executable, "-c", program, str(tmp_path / "disk")]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.stdout == "no disk\n":
        pytest.skip("nothing can be mounted here")
    assert done.returncode == 0, done.stderr


def test_no_file_is_no_lines(tmp_path: Path) -> None:
    assert metrics.read(tmp_path / "metrics.jsonl") == []
