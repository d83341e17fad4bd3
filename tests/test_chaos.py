"""`minirl chaos`: its parts, and a short soak of a real run."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import RECIPES, SMALL

from minirl.config import Config
from minirl.errors import RecipeError
from minirl.records import Answer, StopReason
from minirl.run_dir import read_lines
from minirl.tasks import Task
from minirl.tasks.registry import make_task, self_check
from minirl.tasks.turns import has_turns
from minirl.tools.statistics import wilson
from tests.soak import task
from tests.soak.accuracy import RUN_SD, Evaluated, compare, last_evaluation
from tests.soak.deck import BY_NAME, FAULTS, Deck
from tests.soak.events import Event, Outcome
from tests.soak.files import tear
from tests.soak.ledger import Finding
from tests.soak.report import as_markdown, figures
from tests.soak.task import BROKEN, Fate, Fated, fate_at
from tests.soak.witness import Follower, Witness

HERE = Path(__file__).parent
ROOT = HERE.parent


# -- which fault when


def test_one_seed_deals_one_order_and_every_fault_comes() -> None:
    one, two, other = Deck(3), Deck(3), Deck(4)
    size = sum(fault.count for fault in FAULTS)
    draws = [one.draw() for _ in range(3 * size)]
    assert draws == [two.draw() for _ in range(3 * size)]
    assert [d.fault for d in draws] != [other.draw().fault for _ in range(3 * size)]
    for turn in range(3):
        dealt = Counter(draw.fault for draw in draws[turn * size : (turn + 1) * size])
        assert dealt == {fault.name: fault.count for fault in FAULTS}
    assert len({draw.seed for draw in draws}) == len(draws)


def test_only_some_faults() -> None:
    deck = Deck(0, ("kill-rank", "fill-disk"))
    assert {deck.draw().fault for _ in range(20)} == {"kill-rank", "fill-disk"}
    with pytest.raises(RecipeError, match=r'--faults = "kill-cat": no such fault; there are kill-'):
        Deck(0, ("kill-cat",))


# -- torn files


def test_torn_as_a_crash_would(tmp_path: Path) -> None:
    """No line that a checkpoint vouches for; here there is none, so any line but the last stays."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n')
    for seed in range(20):
        dice = random.Random(seed)
        torn = tear(tmp_path, dice)
        assert torn and set(torn) <= {"metrics.jsonl", "samples.jsonl"}
        for name in torn:
            text = (tmp_path / name).read_text()
            assert text.startswith('{"step": 1, "a": 1}\n{') and not text.endswith("\n")
            assert [line["step"] for line in read_lines(tmp_path / name)] == [1]
            (tmp_path / name).write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n')


def test_what_a_checkpoint_vouches_for_is_not_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.soak.files.newest_whole", lambda run_dir: (None, {"step": 2}, []))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert tear(tmp_path, random.Random(0)) == ["metrics.jsonl"]
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.startswith('{"step": 1}\n{"step": 2}\n{') and not text.endswith("}\n")


# -- the witness


def line_of(step: int, seconds: float, **values: Any) -> str:
    counts = {"submitted": 5, "trained": 3, "dropped": 1, "in_flight": 1}
    ledger = {f"buffer/groups_{name}": count for name, count in counts.items()}
    line = {"step": step, "version": step, "seconds": seconds, "buffer/staleness_max": 1}
    return json.dumps({**line, **ledger, **values}) + "\n"


def test_a_file_is_followed_through_cuts_and_replacements(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert list(follower.look()) == []
    path.write_text(line_of(1, 1.0) + line_of(2, 2.0) + line_of(3, 3.0)[:20])
    assert [line["step"] for line in follower.look()] == [1, 2]
    with path.open("a") as file:
        file.write(line_of(3, 3.0)[20:])
    assert [line["step"] for line in follower.look()] == [3]
    aside = tmp_path / "aside"  # as a controller does that goes back to step 1
    aside.write_text(line_of(1, 1.0))
    aside.rename(path)
    assert list(follower.look()) == []
    with path.open("a") as file:
        file.write(line_of(2, 4.0))
    assert [(line["step"], line["seconds"]) for line in follower.look()] == [(2, 4.0)]
    aside.write_text(line_of(1, 1.0) + "no line\n" + line_of(2, 5.0) + line_of(3, 6.0))
    aside.rename(path)
    assert [line["seconds"] for line in follower.look()] == [5.0, 6.0]
    os.truncate(path, len(line_of(1, 1.0)))  # cut, and longer than before when it is seen again
    with path.open("a") as file:
        file.write("".join(line_of(step, 7.0) for step in range(2, 9)))
    assert [line["step"] for line in follower.look()] == [*range(2, 9)]


def test_the_witness_sees_what_is_taken_back_later(tmp_path: Path) -> None:
    witness = Witness(tmp_path, max_staleness=2)
    path = tmp_path / "metrics.jsonl"
    path.write_text(line_of(1, 1.0) + line_of(2, 2.0, **{"buffer/staleness_max": 3}))
    assert witness.look() == 2 and witness.furthest == 2
    path.write_text("")
    assert witness.look() == 2
    path.write_text(line_of(1, 3.0, **{"buffer/groups_dropped": 2}))
    assert witness.look() == 3 and witness.last_step == 1 and witness.furthest == 2
    batch = {"step": 6, "version": 5, "groups": [{"id": 7}, {"id": 8}]}
    (tmp_path / "batches.jsonl").write_text(f"{json.dumps(batch)}\n")
    sample = {"step": 6, "group": 7, "token_versions": [0, 1, 5], "token_gaps": [None, None, 0.1]}
    old = {**sample, "group": 8, "token_gaps": [None, 0.1, 0.1]}
    (tmp_path / "samples.jsonl").write_text(f"{json.dumps(sample)}\n{json.dumps(old)}\n")
    witness.look()
    assert witness.num_tokens == 3
    assert witness.violations == [
        "step 2: buffer/staleness_max is 3",
        "step 1: the groups do not add up (submitted 5, trained 3, dropped 2, in_flight 1)",
        "step 6: group 8 has a token 4 old",
    ]


# -- rewards that fail


def chaos_task(share: float = 0.3, kind: str = "arithmetic") -> Task:
    base = Config()
    tasks = replace(base.tasks, kind=kind)
    return make_task(replace(base, tasks=task.options(tasks, 5, share)))


def test_fates_are_as_many_as_asked_for_and_held_out_prompts_have_none() -> None:
    tried = [fate_at(5, 0.06, place) for place in range(20_000)]
    counts = Counter(tried)
    assert 0.05 < 1 - counts[Fate.FINE] / len(tried) < 0.07
    assert all(counts[fate] > 50 for fate in (*BROKEN, Fate.SLOW))
    made = chaos_task()
    fated = [example for i in range(100) if isinstance(example := made.train(i), Fated)]
    assert 15 < len(fated) < 45
    assert not any(isinstance(example, Fated) for example in made.heldout(100))
    assert fated[0].prompt and made.train(3) == made.train(3)
    assert self_check(made, "chaos").num_right == 32, "in the controller all is as ever"


def test_a_task_stays_what_it_is() -> None:
    assert not has_turns(chaos_task()) and has_turns(chaos_task(kind="calculator"))
    base = Config()
    given = replace(base.tasks, options={"max_start": 9})
    made = make_task(replace(base, tasks=task.options(given, 5, 0.3)))
    assert made.options["max_start"] == 9 and "chaos_kind" not in made.options


def _grade(place: int, pipe: Any) -> None:
    made = chaos_task()
    example = made.train(place)
    try:
        pipe.send(made.reward(example, Answer(made.solution(example), StopReason.STOP, 9)))
    except ValueError as error:
        pipe.send(str(error))


def test_fates_strike_in_a_verifier() -> None:
    context = multiprocessing.get_context("fork")
    found: dict[Fate, object] = {}
    for fate in (Fate.FINE, Fate.SLOW, Fate.RAISES, Fate.EXITS, Fate.HANGS):
        place = next(i for i in range(1000) if fate_at(5, 0.3, i) is fate)
        ours, theirs = context.Pipe()
        process = context.Process(target=_grade, args=(place, theirs))
        process.start()
        theirs.close()
        process.join(1.0 if fate is Fate.HANGS else 30.0)
        found[fate] = ours.recv() if ours.poll() and not process.exitcode else process.exitcode
        process.kill()
        process.join()
    raised = "chaos: this reward always raises"
    expected = {Fate.FINE: 1.0, Fate.SLOW: 1.0, Fate.RAISES: raised, Fate.EXITS: 7}
    assert found == {**expected, Fate.HANGS: None}


# -- the disk

WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for _ in sys.stdin:
    data = bytes(9000)
    try:
        while data:
            data = data[os.write(fd, data) :]
        print("ok", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""
DISK = f"""
import subprocess, sys
from pathlib import Path
from tests.soak.disk import Limit, small_disk
folder = Path(sys.argv[1])
disk = Limit() if "limit" in sys.argv else small_disk(folder, 4 << 20)
folder.mkdir(exist_ok=True)
command = [sys.executable, "-c", {WRITER!r}, str(folder / "x")]
child = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
def ask():
    child.stdin.write("go\\n")
    child.stdin.flush()
    return child.stdout.readline().strip()
said = [ask()]
disk.fill([child.pid])
said.append(ask())
disk.free([child.pid])
said.append(ask())
child.stdin.close()
child.wait()
print(type(disk).__name__, *said, sep=" | ")
"""


def on_a_disk(folder: Path, *extra: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", DISK, str(folder), *extra],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_small_disk_is_full_and_then_not(tmp_path: Path) -> None:
    said = on_a_disk(tmp_path / "disk")
    assert list((tmp_path / "disk").iterdir()) in ([], [tmp_path / "disk" / "x"])
    assert said in (
        "Tmpfs | ok | No space left on device | ok",
        "Limit | ok | File too large | ok",
    )
    limited = on_a_disk(tmp_path / "plain", "limit")
    assert limited == "Limit | ok | File too large | ok"


# -- accuracy


def evaluated(share: float, count: int = 1024, steps: int = 40) -> Evaluated:
    found = wilson(share, count)
    return Evaluated(found.mean, found.low, found.high, count, steps)


def test_accuracy_is_within_noise_or_not() -> None:
    assert compare(evaluated(0.90), evaluated(0.91)).is_held
    noise = 1.96 * (2 * 0.9 * 0.1 / 1024 + 2 * RUN_SD**2) ** 0.5
    assert compare(evaluated(0.90 - 0.95 * noise), evaluated(0.90)).is_held
    assert not compare(evaluated(0.90 - 1.1 * noise), evaluated(0.90)).is_held
    assert not compare(evaluated(0.90 + 1.5 * noise), evaluated(0.90)).is_held
    other = compare(evaluated(0.9, steps=41), evaluated(0.9))
    assert other == Finding("accuracy", False, "41 steps against 40: not to be compared")
    none = compare(None, evaluated(0.9))
    assert not none.is_held and none.detail == "the soak has no evaluation of its last step"


def test_the_last_evaluation_is_of_the_last_step(tmp_path: Path) -> None:
    judged = {"eval/accuracy": 0.5, "eval/low": 0.4, "eval/high": 0.6, "eval/count": 64}
    path = tmp_path / "metrics.jsonl"
    path.write_text(line_of(1, 1.0, **judged) + line_of(2, 2.0))
    assert last_evaluation(tmp_path) is None
    path.write_text(line_of(1, 1.0) + line_of(2, 2.0, **judged))
    assert last_evaluation(tmp_path) == Evaluated(0.5, 0.4, 0.6, 64, 2)


# -- what a person is told


def test_figures_and_table() -> None:
    events = [
        Event("kill-rank", "train-0", 1.0, 3, survived=True, recovered_s=4.0),
        Event("kill-rank", "train-0", 9.0, 5, survived=True, recovered_s=6.0),
        Event("kill-at-save", "controller", 20.0, 6, "save", True, 12.0, 0.4),
        Event("fill-disk", "disk", 30.0, 7, survived=False, detail="it ended"),
    ]
    findings = [Finding("survived", False, "fill-disk: a | b"), Finding("once", True, "all")]
    outcome = Outcome("a tmpfs", 60.0, 2, 10, 14, events, findings)
    facts = {"cores": 2, "cpu": "a CPU", "packages": {"minirl": "0.1.0"}}
    setting = {"recipe": "recipes/smoke.toml", "minutes": 1.0, "seed": 3}
    found = json.loads(json.dumps(figures(outcome, setting, facts)))
    assert not found["held"] and found["injected"] == 4 and found["survived"] == 3
    text = as_markdown(found)
    assert "`minirl chaos recipes/smoke.toml --minutes 1 --seed 3` on 2 cores (a CPU)" in text
    assert "| 2 | 2 | 5.0 s, at most 6.0 s |" in text and "| 1 | 0 | – |" in text
    assert "was killed 1 times: 0 at start, 1 at save, 0 at evaluation, 0 at full disk" in text
    assert "| survived | **NO** | fill-disk: a \\| b |" in text and "| once | yes | all |" in text
    assert "4 more that were taken back" in text


def test_the_docs_show_what_the_command_wrote() -> None:
    """docs/chaos.json is what `minirl chaos … --json` wrote, and the page prints it."""
    found = json.loads((ROOT / "docs" / "chaos.json").read_text())
    assert as_markdown(found) in (ROOT / "docs" / "faults.md").read_text()
    assert found["held"] and found["minutes"] >= 20
    assert {row["fault"] for row in found["faults"]} >= BY_NAME.keys()


def run_chaos(folder: Path, *extra: str, **changes: object) -> subprocess.CompletedProcess[str]:
    settings = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    overrides = [f"--set={key}={value}" for key, value in settings.items()]
    return subprocess.run(
        [
            *(sys.executable, "-m", "minirl.cli", "chaos", str(RECIPES / "smoke.toml")),
            *("--run-dir", str(folder), *overrides, *extra),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT)))},
    )


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        (("--minutes", "0"), "--minutes = 0.0: must be 0.01 to 10,000; 20 is a good soak"),
        (("--minutes=1", "--faults", "x"), '--faults = "x": no such fault; there are kill-engine'),
        (("--minutes=1", "--bad-rewards=2"), "--bad-rewards = 2.0: must be 0 to 0.5"),
    ],
)
def test_wrong_input_is_one_line(extra: tuple[str, ...], line: str, tmp_path: Path) -> None:
    done = run_chaos(tmp_path / "chaos", *extra)
    assert done.returncode == 2 and done.stderr.startswith(f"minirl: {line}")
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "chaos").exists()


@pytest.mark.vllm
def test_a_short_soak_loses_nothing(tmp_path: Path, tied_folder: Path) -> None:
    """A real run: its engine and its trainer rank are killed, then the controller while it saves;
    lines are torn, and rewards raise, hang, exit and take their time all along. Then it finishes
    by itself."""
    done = run_chaos(
        tmp_path / "chaos",
        *("--minutes=9", "--most=2", "--seed=835", "--bad-rewards=0.12", "--problems=32"),
        *("--faults=kill-two,kill-at-save", f"--json={tmp_path / 'figures.json'}"),
        "--no-reference",
        model__path=tied_folder,
        tasks__kind=f"{HERE / 'noisy_task.py'}:Endless",
        checkpoint__every=2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["held"] and found["injected"] == found["survived"] == 3
    told = (tmp_path / "chaos" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in told]
    assert [event["fault"] for event in events] == ["kill-two", "kill-at-save", "tear-files"]
    assert events[0]["target"] == "rollout-0, train-0"
    assert found["controllers"] == 2 and found["controller_killed_at"]["save"] == 1
    names = {row["name"] for row in found["properties"]}
    assert names >= {"survived", "watched", "ended", "steps", "ledger", "once", "accounted"}
    assert names >= {"rewards", "staleness", "versions", "finite", "clean"}
    assert as_markdown(found) in done.stdout and "nothing was lost: " in done.stdout
