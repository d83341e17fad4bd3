"""What a run leaves behind and what a person is told. Takes events, gives the run directory:

    recipe.toml      the resolved recipe                 (written by launch.py)
    machine.json     hardware and versions of everything (written by launch.py)
    metrics.jsonl    one line a step, names and formulas in metrics.py
    samples.jsonl    a few readable trajectories a step
    trajectories.jsonl   reward, advantage and versions of all it trained (by a trainer rank)
    evals.jsonl      at each evaluation, the answers to the same few held-out prompts
    lengths.jsonl    how many tokens each trained trajectory has, for `minirl plan --run`
    checkpoints/     Hugging Face folders, step-000040
    lock             held while the run lives             (by launch.py)
    logs/            what each worker printed
    record/          every trained batch, with log.record (record.py)
    nonfinite/       batches whose loss or gradient was not finite (written by a trainer rank)
    blackbox/        what was going on when a number went bad (blackbox.py)
    summary.json     the result, when the run has ended
    status.json      what the dashboard shows, once a second      (written by dashboard/)

A disk that is full costs no step: lines wait in memory and go out later, and what is missing at the
end is named in `problems`.

Leaves out: how it looks on a terminal (console.py, behind `View`).
"""

import contextlib
import json
import time
from collections import deque
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Protocol

from minirl.blackbox import NUM_LINES, BlackBox, Why
from minirl.buffer import Buffer
from minirl.config import Config
from minirl.evaluation import Evaluation
from minirl.guard import Action, Breach, GuardStop
from minirl.lines import Lines, keep_lines, replace_text
from minirl.metrics import DROPPED, MetricsLog, cut
from minirl.record import Recorder
from minirl.records import Batch, Prompt, StopReason, Trajectory
from minirl.secrets import scrub
from minirl.shm.board import Total
from minirl.tasks.rewards import overlong_penalty
from minirl.workers import Fleet, Role

LOCK = "lock"
NUM_SHOWN_SAMPLES = 6  # kept for the dashboard, as the files keep all
NUM_SHOWN_STEPS = 20


class View(Protocol):
    """What a person sees while it runs."""

    def note(self, text: str) -> None: ...

    def evaluated(self, version: int, accuracy: float) -> None: ...

    def step(self, line: dict[str, Any]) -> None: ...


class Meter:
    """Running totals of the workers, as differences between two looks."""

    def __init__(self, fleet: Fleet):
        self._board = fleet.board
        self._engines = [worker.row for worker in fleet.of(Role.ROLLOUT)]
        self._rank0 = fleet.of(Role.TRAIN)[0].row
        self._then, self._before = time.monotonic(), self._read()

    def _read(self) -> dict[str, float]:
        def total(column: Total) -> float:
            return sum(self._board.total(row, column) for row in self._engines)

        return {
            "tokens": total(Total.TOKENS),
            "idle_s": total(Total.IDLE_S) / len(self._engines),
            "reload_s": total(Total.RELOAD_S),
            "reloads": total(Total.RELOADS),
            "steps": total(Total.STEPS),
            "train_idle_s": self._board.total(self._rank0, Total.IDLE_S),
        }

    def lap(self) -> dict[str, float | None]:
        now, totals = time.monotonic(), self._read()
        seconds = max(now - self._then, 1e-9)
        d = {name: totals[name] - self._before[name] for name in totals}
        self._then, self._before = now, totals
        return {
            "rollout/tokens_per_s": d["tokens"] / seconds,
            "rollout/batch_mean": d["tokens"] / d["steps"] if d["steps"] else None,
            "rollout/idle_frac": min(1.0, d["idle_s"] / seconds),
            "weights/reload_pause_s": d["reload_s"] / d["reloads"] if d["reloads"] else None,
            "train/idle_frac": min(1.0, d["train_idle_s"] / seconds),
        }


class Journal:
    def __init__(
        self,
        config: Config,
        run_dir: Path,
        fleet: Fleet,
        view: View,
        step: int = 0,
        state: dict[str, Any] | None = None,
        box: BlackBox | None = None,
        recorder: Recorder | None = None,
    ):
        self.config, self.run_dir, self.view, self.step = config, run_dir, view, step
        self._fleet, self._box, self._recorder = fleet, box, recorder
        self.log = MetricsLog(run_dir / "metrics.jsonl", last_step=step)
        self._open_logs(step, state or {})
        self._failing: set[str] = set()  # files that could not be written, as a person was told
        self.problems: list[str] = []  # what is missing at the end
        self._texts: dict[int, tuple[Prompt, tuple[str, ...]]] = {}
        self._last_line: dict[str, Any] | None = None  # waits for the last evaluation
        self._news: dict[str, float | None] = {}  # of an evaluation that ended in this step
        self.recent_samples: deque[dict[str, Any]] = deque(maxlen=NUM_SHOWN_SAMPLES)
        self.recent_ages: deque[tuple[int, ...]] = deque(maxlen=NUM_SHOWN_STEPS)
        self._num_per_step = config.train.batch_size * config.rollout.group_size
        self.began = time.monotonic()
        self.accuracies: list[tuple[int, float]] = []
        self._given_up: list[tuple[int, int]] = []  # versions between these: see `rolled_back`
        self.num_replaced = self.num_redone = 0  # workers, steps: see metrics.py
        self._seconds_before = (state or {}).get("seconds", 0.0)
        self._restore(state or {})

    def _restore(self, state: dict[str, Any]) -> None:
        self.accuracies = [(version, accuracy) for version, accuracy in state.get("accuracies", [])]
        self.trained_tokens = state.get("trained_tokens", 0)
        self.num_multi_version = state.get("num_multi_version", 0)
        self.num_replaced = max(self.num_replaced, state.get("num_replaced", 0))
        self.num_redone = max(self.num_redone, state.get("num_redone", 0))
        self._is_evaluation_due = state.get("is_evaluation_due", False)
        self._last_line = state.get("last_line")
        if self._last_line is not None:  # it is written again, when the last evaluation has ended
            self.log.roll_back(self._last_line["step"] - 1)

    def _open_logs(self, step: int, state: dict[str, Any]) -> None:
        """What is told of steps and evaluations that will be done again is taken back."""
        for name in ("samples.jsonl", "lengths.jsonl", "trajectories.jsonl"):
            if (self.run_dir / name).is_file():
                cut(self.run_dir / name, step)
        evals = self.run_dir / "evals.jsonl"
        if evals.is_file():
            told = [version for version, _ in state.get("accuracies", [])]
            keep_lines(evals, lambda line: line.get("version") in told)
        self._samples = Lines(self.run_dir / "samples.jsonl")
        self._lengths = Lines(self.run_dir / "lengths.jsonl")
        self._evals = Lines(evals)

    def state(self, is_evaluating: bool) -> dict[str, Any]:
        """For the checkpoint, so that a resumed run's summary tells of the whole run. By then all
        that was written so far is on the disk."""
        self.log.file.sync()
        return {
            "accuracies": self.accuracies,
            "seconds": self.seconds,
            "trained_tokens": self.trained_tokens,
            "num_multi_version": self.num_multi_version,
            "num_replaced": self.num_replaced,
            "num_redone": self.num_redone,
            "is_evaluation_due": is_evaluating,
            "last_line": self._last_line,
        }

    def rolled_back(
        self, step: int, versions: tuple[int, int], state: dict[str, Any] | None
    ) -> None:
        """The trainer goes on from the checkpoint of `step`: metrics and samples of later steps are
        taken back. `versions` is what its weights were and what they are now; those in between
        were given up, and an evaluation of one of them is no longer told."""
        self._given_up.append(versions)
        judged = [pair for pair in self.accuracies if not self._is_given_up(pair[0])]
        self.log.roll_back(step)
        for file in (self._samples, self._lengths, self._evals):
            file.close()
        self._open_logs(step, {"accuracies": judged})
        self._last_line, self._news = None, {}
        self._restore(state or {})
        self._is_evaluation_due = False  # if it has not ended, it still runs
        self.accuracies = judged
        told = {line.get("eval/version") for line in self.log.lines}
        if judged and judged[-1][0] not in told:
            self._news = {"eval/version": judged[-1][0], "eval/accuracy": judged[-1][1]}
            if (line := self._last_line) and line["version"] == judged[-1][0]:
                self._last_line = None  # the last evaluation has ended: nobody will come for it
                self._write(line)

    def _is_given_up(self, version: int) -> bool:
        return any(before < version < after for before, after in self._given_up)

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self.began

    @property
    def wants_first_evaluation(self) -> bool:
        """On resume also one that was under way when the checkpoint was written."""
        return not self.accuracies or self._is_evaluation_due

    def begin(self) -> None:
        self.began = time.monotonic()
        self._meter = Meter(self._fleet)

    def note(self, text: str) -> None:
        self.view.note(text)

    def saw_ages(self, counts: tuple[int, ...]) -> None:
        """Trained tokens of a step by staleness 0, 1, …: for the dashboard's histogram."""
        self.recent_ages.append(counts)

    def checkpoint_folder(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / f"step-{step:06d}"

    def keep_texts(self, group_id: int, prompt: Prompt, texts: tuple[str, ...]) -> None:
        self._texts[group_id] = (prompt, texts)

    def forget_texts(self, group_id: int) -> None:
        self._texts.pop(group_id, None)

    def trained(
        self,
        step: int,
        batch: Batch,
        values: dict[str, float | None],
        buffer: Buffer,
        is_last: bool,
    ) -> None:
        if self._last_line is not None:  # the last step of a run that now goes on
            before, self._last_line = self._last_line, None
            self._write(before)
        ledger = buffer.ledger
        trajectories = [t for group in batch.groups for t in group.trajectories]
        rewards = [reward for group in batch.groups for reward in group.own_rewards]
        cut = [t.stop is StopReason.LENGTH for t in trajectories]
        self.trained_tokens += int(values["train/tokens"] or 0)
        self.num_multi_version += sum(t.head_version != t.tail_version for t in trajectories)
        line: dict[str, float | None] = {
            "step": step,
            "version": batch.version + 1,
            "seconds": round(self.seconds, 3),
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "reward/shaped_mean": fmean(
                reward for group in batch.groups for reward in group.rewards
            ),
            "reward/penalty_mean": fmean(overlong_penalty(self.config, t) for t in trajectories),
            "reward/failures": self._num_per_step - len(trajectories),
            "rollout/length_mean": fmean(t.num_written for t in trajectories),
            "rollout/turns_mean": self._turns(trajectories),
            "rollout/truncated_frac": fmean(cut),
            "rollout/devices": self.config.devices.rollout,
            "train/devices": self.config.devices.train,
            "buffer/groups_submitted": ledger.submitted,
            "buffer/groups_trained": ledger.trained,
            "buffer/groups_dropped": ledger.dropped,
            "buffer/groups_in_flight": ledger.in_flight,
            "buffer/truncated_masked": sum(len(group.masked) for group in batch.groups),
            **{DROPPED[reason]: count for reason, count in buffer.drops.items() if count},
            "faults/workers_replaced": self.num_replaced or None,
            "faults/steps_redone": self.num_redone or None,
            **self._meter.lap(),
            **values,
        }
        self._write_samples(step, batch)
        written = [t.num_written for t in trajectories]
        prompts = [g.trajectories[0].length - g.trajectories[0].num_new for g in batch.groups]
        lengths = {"step": step, "written": written, "prompts": prompts}
        self._lengths.write(json.dumps(lengths))
        if self._recorder is not None:
            self._recorder.keep(batch, line)
        self._tell_of_disk()
        if is_last:
            self._last_line = line
        else:
            self._write(line)

    def _turns(self, trajectories: list[Trajectory]) -> float | None:
        """Left out where no answer has more than one."""
        turns = [trajectory.num_turns for trajectory in trajectories]
        return fmean(turns) if max(turns) > 1 else None

    def _write(self, line: dict[str, float | None]) -> None:
        self.view.step(self.log.write({**line, **self._news}))
        self._news = {}

    def _write_samples(self, step: int, batch: Batch) -> None:
        for group in batch.groups[: self.config.log.samples]:
            prompt, texts = self._texts[group.id]
            sample = {
                "step": step,
                "group": group.id,
                "prompt": prompt.example.prompt,
                "answer": texts[0],
                "reference": prompt.example.reference,
                "reward": group.own_rewards[0],
                "shaped": group.rewards[0],
                "versions": [
                    group.trajectories[0].head_version,
                    group.trajectories[0].tail_version,
                ],
                "stop": group.trajectories[0].stop.name.lower(),
            }
            self._samples.write(json.dumps(sample))
            self.recent_samples.append(sample)

    def _tell_of_disk(self) -> None:
        """Once when a file cannot be written, and once when it can again."""
        for file in (self.log.file, self._samples, self._lengths, self._evals):
            name = file.path.name
            if file.error and name not in self._failing:
                self.note(f"{name} cannot be written ({file.error}): its lines wait in memory")
                self._failing.add(name)
            elif not file.error and name in self._failing:
                self.note(f"{name} is written again, with all that had waited")
                self._failing.discard(name)
        problems = self._recorder.problems() if self._recorder is not None else []
        if problems and "record" not in self._failing:
            self.note(problems[0])
            self._failing.add("record")

    # -- numbers that go bad

    def breached(
        self, step: int, batch: Batch, values: dict[str, Any], found: list[Breach]
    ) -> None:
        """After the step's line is written, while its cells are still its own. Raises to stop."""
        self._metrics_of_skipped(step, values)
        for breach in found:
            message = breach.line(step)
            boxed = ""
            if breach.count == 1 or breach.action is Action.STOP:
                limits = (breach.value, breach.limit, breach.rule.remedy)
                why = Why(breach.rule.name, step, message, *limits)
                boxed = "; " + self.black_box(why, batch, batch.version, values)
            if breach.action is Action.STOP:
                raise GuardStop(f"{message}{boxed}; {self.last_checkpoint}")
            if breach.is_told:
                self.note(f"warning: {message}{boxed}")

    def black_box(
        self, why: Why, batch: Batch | None, version: int, values: dict[str, Any] | None = None
    ) -> str:
        if self._box is None:
            return "no black box is kept"
        return self._box.write(why, self.log.lines, batch, version, values)

    def _metrics_of_skipped(self, step: int, values: dict[str, Any]) -> None:
        """Beside a batch that a trainer rank saved: what went before."""
        if values.get("train/skipped_updates"):
            for folder in (self.run_dir / "nonfinite").glob(f"step-{step:06d}-*"):
                lines = "".join(json.dumps(line) + "\n" for line in self.log.lines[-NUM_LINES:])
                with contextlib.suppress(OSError):
                    (folder / "metrics.jsonl").write_text(lines)

    @property
    def last_checkpoint(self) -> str:
        found = sorted((self.run_dir / "checkpoints").glob("step-*"))
        return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"

    def evaluated(self, evaluation: Evaluation) -> None:
        if evaluation.version is not None and self._is_given_up(evaluation.version):
            self.note(f"an evaluation was of version {evaluation.version}, which was given up")
            return
        self._keep_answers(evaluation)
        if evaluation.num_failed:
            self.note(f"evaluation: {evaluation.num_failed} answers could not be graded")
        found = evaluation.interval
        if found is not None:
            version = -1 if evaluation.version is None else evaluation.version
            self.accuracies.append((version, found.mean))
            self._news = {
                "eval/accuracy": found.mean,
                "eval/low": found.low,
                "eval/high": found.high,
                "eval/version": version,
                "eval/count": len(evaluation.rewards),
                "eval/failures": evaluation.num_failed,
                "eval/truncated_frac": evaluation.truncated_frac,
            }
            self.view.evaluated(version, found.mean)
        if self._last_line is not None and self._is_last(evaluation):
            line, self._last_line = self._last_line, None
            self._write(line)

    def _is_last(self, evaluation: Evaluation) -> bool:
        """Of the last step's version, not one that was under way when that step ended."""
        assert self._last_line is not None
        return evaluation.version is None or evaluation.version >= self._last_line["version"]

    def _keep_answers(self, evaluation: Evaluation) -> None:
        """To the same first prompts every time: what each version of the model made of them."""
        answers = [
            {
                "prompt": evaluation.prompt(group_id).example.prompt,
                "reference": evaluation.prompt(group_id).example.reference,
                "answer": evaluation.texts.get(group_id),
                "reward": evaluation.rewards.get(group_id),
            }
            for group_id in evaluation.group_ids[: self.config.log.samples]
        ]
        line = {"version": evaluation.version, "answers": answers}
        self._evals.write(json.dumps(line))

    def stalled(self, report: str) -> Path:
        """Rule 8: everything that helps to find out why, on the screen and in a file."""
        path = self.run_dir / "stall.txt"
        with contextlib.suppress(OSError), path.open("a") as file:
            file.write(scrub(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{report}\n"))
        self.note(report)
        return path

    def summarise(self, is_whole: bool, extra: dict[str, Any]) -> dict[str, Any]:
        """The result. Written aside and renamed, like everything that is read later."""
        lines = self.log.lines
        gaps = [line["train/logprob_gap"] for line in lines if "train/logprob_gap" in line]
        summary = {
            "finished": is_whole,
            "steps": len(lines),
            "seconds": lines[-1]["seconds"] if lines else 0.0,
            "accuracy_before": self.accuracies[0][1] if self.accuracies else None,
            "accuracy_after": self.accuracies[-1][1] if self.accuracies else None,
            "accuracies": self.accuracies,
            "trained_tokens": self.trained_tokens,
            "staleness_max": max((line["buffer/staleness_max"] for line in lines), default=0),
            "max_staleness_allowed": self.config.buffer.max_staleness,
            "multi_version_trajectories": self.num_multi_version,
            "logprob_gap_max": max(gaps, default=None),
            **extra,
        }
        try:
            replace_text(self.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            self.problems.append(f"summary.json could not be written ({error.strerror})")
        return summary

    def close(self) -> None:
        """`problems` then names all that is not on the disk."""
        for file in (self.log.file, self._samples, self._lengths, self._evals):
            file.close()
            if file.error:
                self.problems.append(f"{file.path.name} is not whole ({file.error})")
        if self._recorder is not None:
            self._recorder.close()
            self._recorder.problems()
            if self._recorder.num_missing:
                self.problems.append(f"{self._recorder.num_missing} steps were not recorded")
