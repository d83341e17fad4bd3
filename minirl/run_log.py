"""What the controller writes about a run while it trains.

Takes what the loop reports (a step, an evaluation, a rollback, a stall), gives the lines and files
of the run directory (run_dir.py) and what a person is shown (`View`). What could not be written by
the end of the run is named in `problems`.
"""

import json
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, pstdev
from typing import Protocol

from minirl.buffer import Buffer
from minirl.config import Config
from minirl.errors import MinirlError
from minirl.evaluation import Evaluation
from minirl.metrics import DROPPED, Breach, metrics_line
from minirl.records import Batch, Group, Prompt, StopReason, Trajectory
from minirl.run_dir import JsonLines, Line, read_lines, write_text
from minirl.shm.board import Total
from minirl.tasks.rewards import overlong_penalty
from minirl.train.bad_batch import BatchSaver
from minirl.train.messages import CheckpointState, RunTotals, Trained
from minirl.workers import Fleet, Role

LOGS = ("metrics", "evals", "samples", "batches")
NUM_SHOWN_SAMPLES = 6  # in memory, for the dashboard
NUM_SHOWN_STEPS = 20


class View(Protocol):
    """What a person sees while the run trains."""

    def note(self, text: str) -> None: ...
    def evaluated(self, version: int, accuracy: float) -> None: ...
    def step(self, line: Line) -> None: ...


class Meter:
    """What the workers did since the last lap: differences of their running totals."""

    def __init__(self, fleet: Fleet):
        self._board = fleet.board
        self._engines = [worker.row for worker in fleet.of(Role.ROLLOUT)]
        self._rank = fleet.of(Role.TRAIN)[0].row
        self._before = self._read()

    def _read(self) -> dict[Total | str, float]:
        total = self._board.total
        found: dict[Total | str, float] = {"seconds": time.monotonic()}
        found["rank idle"] = total(self._rank, Total.IDLE_S)
        for column in Total:
            found[column] = sum(total(row, column) for row in self._engines)
        return found

    def lap(self) -> dict[str, float | None]:
        now = self._read()
        done = {name: value - self._before[name] for name, value in now.items()}
        self._before = now
        seconds, tokens = max(done["seconds"], 1e-9), done[Total.TOKENS]
        steps, reloads = done[Total.STEPS], done[Total.RELOADS]
        return {
            "rollout/tokens_per_s": tokens / seconds,
            "rollout/batch_mean": tokens / steps if steps else None,
            "rollout/idle_frac": min(1.0, done[Total.IDLE_S] / len(self._engines) / seconds),
            "weights/reload_pause_s": done[Total.RELOAD_S] / reloads if reloads else None,
            "train/idle_frac": min(1.0, done["rank idle"] / seconds),
        }


class RunLog:
    """Writes the run directory. `step` is that of the checkpoint a resumed run starts from, and
    `evaluating` the version whose evaluation was under way when it was saved."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        fleet: Fleet,
        view: View,
        step: int = 0,
        totals: RunTotals | None = None,
        saver: BatchSaver | None = None,
        evaluating: int | None = None,
    ):
        self.config, self.run_dir, self.view, self.step = config, run_dir, view, step
        self._fleet, self._saver = fleet, saver
        self._files = {name: JsonLines(run_dir / f"{name}.jsonl") for name in LOGS}
        self.metrics = read_lines(run_dir / "metrics.jsonl")
        self.evals = read_lines(run_dir / "evals.jsonl")
        self.totals = totals or RunTotals()
        self._seconds_before, self.began = self.totals.seconds, time.monotonic()
        self.problems: list[str] = []  # what is missing when the run ends
        self._texts: dict[int, tuple[Prompt, tuple[str, ...]]] = {}
        self.recent_samples: deque[Line] = deque(maxlen=NUM_SHOWN_SAMPLES)
        self.recent_ages: deque[tuple[int, ...]] = deque(maxlen=NUM_SHOWN_STEPS)
        self._cancel_after(step)
        every = config.eval.every
        if evaluating is not None:
            self._cancel_evaluation(evaluating)
        is_due = not self.is_evaluated(step - step % every if every else 0)
        self.wants_evaluation = is_due or evaluating is not None  # before the first step

    def begin(self) -> None:
        self.began = time.monotonic()
        self._meter = Meter(self._fleet)

    def note(self, text: str) -> None:
        self.view.note(text)

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self.began

    def checkpoint_folder(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / f"step-{step:06d}"

    @property
    def last_checkpoint(self) -> str:
        found = sorted((self.run_dir / "checkpoints").glob("step-*"))
        return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"

    def state(self) -> RunTotals:
        """For a checkpoint. By then the lines of its steps are on the disk."""
        for file in self._files.values():
            file.sync()
        return replace(self.totals, seconds=self.seconds)

    def roll_back(self, step: int, state: CheckpointState | None) -> None:
        """The trainer starts again from the checkpoint of `step`, whose state this is."""
        before, self.totals = self.totals, state.totals if state else RunTotals()
        self.totals.workers_replaced = before.workers_replaced
        self.totals.steps_redone = before.steps_redone
        self._cancel_after(step)

    def _cancel_after(self, step: int) -> None:
        for file in self._files.values():
            if not file.is_empty:
                file.write({"rolled_back_to": step})
        self.metrics = [line for line in self.metrics if line["step"] <= step]
        self.evals = [line for line in self.evals if line["step"] <= step]
        if self._saver is not None:
            self._saver.forget_after(step)

    def _write(self, name: str, line: Line) -> None:
        """A file that cannot be written is reported once; its lines are retried with the next."""
        file = self._files[name]
        had_failed = bool(file.error)
        file.write(line)
        if file.error and not had_failed:
            self.note(f"{name}.jsonl cannot be written ({file.error}): its lines wait in memory")

    def keep_texts(self, group_id: int, prompt: Prompt, texts: tuple[str, ...]) -> None:
        self._texts[group_id] = (prompt, texts)

    def forget_texts(self, group_id: int) -> None:
        self._texts.pop(group_id, None)

    def trained(
        self, step: int, batch: Batch, trained: Trained, buffer: Buffer, breaches: list[Breach]
    ) -> None:
        """While the batch's ring cells are still its own."""
        trajectories = [t for group in batch.groups for t in group.trajectories]
        self.totals.trained_tokens += int(trained.values["train/tokens"] or 0)
        self.totals.multi_version += sum(t.head_version != t.tail_version for t in trajectories)
        self.recent_ages.append(trained.ages)
        line = metrics_line(
            {
                "step": step,
                "version": batch.version + 1,
                "seconds": round(self.seconds, 3),
                **self._answers(batch, trajectories),
                **_buffer_counts(batch, buffer),
                "rollout/devices": self.config.devices.rollout,
                "train/devices": self.config.devices.train,
                "faults/workers_replaced": self.totals.workers_replaced or None,
                "faults/steps_redone": self.totals.steps_redone or None,
                **self._meter.lap(),
                **trained.values,
                "guard/warnings": len(breaches),
            }
        )
        self.metrics.append(line)
        self._write("metrics", line)
        groups = [_group_line(group) for group in batch.groups]
        self._write("batches", {"step": step, "version": batch.version, "groups": groups})
        self._write_samples(step, batch, trained)
        if self._saver is not None and (problem := self._saver.record(batch, line)):
            self.note(problem)
        self.view.step(line)

    def _answers(self, batch: Batch, trajectories: list[Trajectory]) -> dict[str, float | None]:
        rewards = [reward for group in batch.groups for reward in group.own_rewards]
        turns = [t.num_turns for t in trajectories]
        num_asked = self.config.train.batch_size * self.config.rollout.group_size
        return {
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "reward/shaped_mean": fmean(r for group in batch.groups for r in group.rewards),
            "reward/penalty_mean": fmean(overlong_penalty(self.config, t) for t in trajectories),
            "reward/failures": num_asked - len(trajectories),
            "rollout/length_mean": fmean(t.num_written for t in trajectories),
            "rollout/turns_mean": fmean(turns) if max(turns) > 1 else None,
            "rollout/truncated_frac": fmean(t.stop is StopReason.LENGTH for t in trajectories),
        }

    def _write_samples(self, step: int, batch: Batch, trained: Trained) -> None:
        groups = batch.groups[: self.config.log.samples]
        for group, shown in zip_longest(groups, trained.samples[: len(groups)]):
            prompt, texts = self._texts[group.id]
            first = group.trajectories[0]
            sample = {
                "step": step,
                "group": group.id,
                "prompt": prompt.example.prompt,
                "answer": texts[0],
                "reference": prompt.example.reference,
                "reward": group.own_rewards[0],
                "shaped": group.rewards[0],
                "versions": [first.head_version, first.tail_version],
                "stop": first.stop.name.lower(),
            }
            self.recent_samples.append(sample)
            self._write("samples", {**sample, **(asdict(shown) if shown else {})})

    def check(self, step: int, batch: Batch, trained: Trained, breaches: list[Breach]) -> None:
        """Saves a batch that went bad and warns; raises where a limit stops the run."""
        fatal = [breach for breach in breaches if breach.is_fatal]
        saved = ""
        if trained.problem:
            saved = self.save_bad(batch, batch.version, trained.problem, must_save=bool(fatal))
            self.note(f"step {step}: {trained.problem}: the weights stay as they were{saved}")
        for breach in breaches:
            if breach.is_told and not breach.is_fatal:
                self.note(f"warning: step {step}: {breach.text}")
        if fatal:
            raise MinirlError(f"step {step}: {fatal[0].text}{saved}; {self.last_checkpoint}")

    def save_bad(self, batch: Batch, version: int, why: str, must_save: bool = True) -> str:
        """With the weights of `version`. Gives the end of a sentence that says where it is."""
        return self._saver.save_bad(batch, version, why, must_save) if self._saver else ""

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """(version, accuracy) of every evaluation that could be graded."""
        graded = [line for line in self.evals if line.get("accuracy") is not None]
        return [(line["version"], line["accuracy"]) for line in graded]

    def is_evaluated(self, step: int) -> bool:
        return any(line["step"] >= step for line in self.evals)

    def _cancel_evaluation(self, version: int) -> None:
        """Also one that ended after the checkpoint is done again: a resumed run repeats all that
        followed it, so that at η = 0 it stays the same run to the bit."""
        ended = [line["step"] for line in self.evals if line["version"] >= version]
        if ended:
            self._files["evals"].write({"rolled_back_to": min(ended) - 1})
            self.evals = [line for line in self.evals if line["step"] < min(ended)]

    def evaluated(self, evaluation: Evaluation) -> None:
        if evaluation.num_failed:
            self.note(f"evaluation: {evaluation.num_failed} answers could not be graded")
        line: Line = {
            "step": evaluation.step,
            "version": -1 if evaluation.version is None else evaluation.version,
            "seconds": round(self.seconds, 3),
            **evaluation.result,
            "answers": evaluation.answers(self.config.log.samples),
        }
        self.evals.append(line)
        self._write("evals", line)
        if line["accuracy"] is not None:
            self.view.evaluated(line["version"], line["accuracy"])

    def stalled(self, report: str) -> Path:
        """Rule 8: everything that helps to find out why, on the screen and in a file."""
        path = self.run_dir / "stall.txt"
        with suppress(OSError), path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{report}\n")
        self.note(report)
        return path

    def summarise(self, is_whole: bool, extra: Line) -> Line:
        lines, accuracies = self.metrics, self.accuracies
        gaps = [line["train/logprob_gap"] for line in lines if "train/logprob_gap" in line]
        summary = {
            "finished": is_whole,
            "steps": len(lines),
            "seconds": lines[-1]["seconds"] if lines else 0.0,
            "accuracy_before": accuracies[0][1] if accuracies else None,
            "accuracy_after": accuracies[-1][1] if accuracies else None,
            "accuracies": accuracies,
            "trained_tokens": self.totals.trained_tokens,
            "staleness_max": max((line["buffer/staleness_max"] for line in lines), default=0),
            "max_staleness_allowed": self.config.buffer.max_staleness,
            "multi_version_trajectories": self.totals.multi_version,
            "logprob_gap_max": max(gaps, default=None),
            **extra,
        }
        try:
            write_text(self.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            self.problems.append(f"summary.json could not be written ({error.strerror})")
        return summary

    def close(self) -> None:
        """`problems` then names all that is not on the disk."""
        for file in self._files.values():
            file.close()
            if file.error:
                self.problems.append(f"{file.path.name} is not whole ({file.error})")
        if self._saver is not None and self._saver.num_missing:
            self.problems.append(f"{self._saver.num_missing} steps were not recorded")


def _buffer_counts(batch: Batch, buffer: Buffer) -> dict[str, float | None]:
    ledger = buffer.ledger
    return {
        "buffer/groups_submitted": ledger.submitted,
        "buffer/groups_trained": ledger.trained,
        "buffer/groups_dropped": ledger.dropped,
        "buffer/groups_in_flight": ledger.in_flight,
        "buffer/truncated_masked": sum(len(group.masked) for group in batch.groups),
        **{DROPPED[reason]: count for reason, count in buffer.drops.items() if count},
    }


def _group_line(group: Group) -> Line:
    first = group.trajectories[0]
    return {
        "id": group.id,
        "prompt": group.prompt_index,
        "prompt_tokens": first.length - first.num_new,
        "rewards": list(group.rewards),
        "lengths": [t.num_written for t in group.trajectories],
        "versions": [[t.head_version, t.tail_version] for t in group.trajectories],
        "stops": [t.stop.name.lower() for t in group.trajectories],
    }
