"""What the controller writes about a run while it trains.

Takes what the loop reports (a step, an evaluation, a rollback, a stall), gives the files of the run
directory (run_dir.py) and what a person is shown. A resumed run remembers no more than its files.
"""

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, pstdev
from typing import Protocol

from minirl.buffer import Buffer
from minirl.config import Config
from minirl.errors import MinirlError
from minirl.evaluation import Evaluation
from minirl.groups import GroupState
from minirl.messages import Role, Trained
from minirl.metrics import DROPPED, RateLimit, Values, broken_limits, idle_fault, metrics_line
from minirl.records import Batch, Group, StopReason
from minirl.run_dir import JsonLines, Line, read_lines, write_text
from minirl.shm.board import Total
from minirl.train import checkpoint
from minirl.train.bad_batch import BatchSaver
from minirl.workers import Workers

Metrics = dict[str, float]
States = Mapping[int, GroupState]  # by group id


class View(Protocol):
    def note(self, text: str) -> None: ...
    def step(self, line: Metrics) -> None: ...


class RunLog:
    """`step` is that of the checkpoint a resumed run starts from, `evaluating` the version whose
    evaluation was under way when it was saved."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        workers: Workers,
        view: View,
        saver: BatchSaver,
        step: int = 0,
        evaluating: int | None = None,
    ):
        self.config, self.run_dir, self.step, self._workers = config, run_dir, step, workers
        self.view, self.note, self.saver = view, view.note, saver
        self.seldom = RateLimit(view.note)
        (run_dir / "summary.json").unlink(missing_ok=True)  # it has no result yet
        names = ("metrics", "evals", "samples", "batches")
        self._files = {name: JsonLines(run_dir / f"{name}.jsonl", view.note) for name in names}
        self.metrics: list[Metrics] = read_lines(run_dir / "metrics.jsonl")
        self.evals = read_lines(run_dir / "evals.jsonl")
        self.roll_back(step, evaluating)
        last = self.metrics[-1] if self.metrics else {}
        self.workers_replaced = last.get("faults/workers_replaced", 0)
        self.steps_redone = last.get("faults/steps_redone", 0)
        self._seconds_before, self._began = last.get("seconds", 0.0), time.monotonic()
        self.problems: list[str] = []  # what is missing when the run ends
        self.recent_samples: deque[Line] = deque(maxlen=6)  # for the dashboard
        self.recent_staleness: deque[tuple[int, ...]] = deque(maxlen=20)
        every = config.eval.every
        is_due = not self.is_evaluated(step - step % every if every else 0)
        self.wants_evaluation = is_due or evaluating is not None  # before the first step

    def begin(self) -> None:
        self._began = time.monotonic()
        self._totals = self._read_totals()

    def _read_totals(self) -> list[float]:
        """The time, how long rank 0 was idle, and what all engines together have done."""
        engines, total = self._workers.of(Role.ROLLOUT), self._workers.board.total
        sums = [sum(total(engine.row, column) for engine in engines) for column in Total]
        rank = self._workers.of(Role.TRAIN)[0]
        return [time.monotonic(), total(rank.row, Total.IDLE_S), *sums]

    def _speeds(self) -> Values:
        """Of this step: differences of running totals."""
        before, self._totals = self._totals, self._read_totals()
        done = [now - then for now, then in zip(self._totals, before, strict=True)]
        seconds, rank_idle_s, tokens, idle_s, reload_s, reloads, steps = done
        num_engines = len(self._workers.of(Role.ROLLOUT))
        return {
            "rollout/tokens_per_s": tokens / seconds,
            "rollout/batch_mean": tokens / steps if steps else None,
            "rollout/idle_frac": min(1.0, idle_s / num_engines / seconds),
            "weights/reload_pause_s": reload_s / reloads if reloads else None,
            "train/idle_frac": min(1.0, rank_idle_s / seconds),
        }

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._began

    @property
    def last_checkpoint(self) -> str:
        found = checkpoint.found(self.run_dir)
        return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"

    def sync(self) -> None:
        """Before a checkpoint."""
        for file in self._files.values():
            file.flush(sync=True)

    def roll_back(self, step: int, evaluating: int | None = None) -> None:
        """The run starts again after `step`. The evaluation of version `evaluating` and all later
        ones are repeated, also those that had ended: at η = 0 a resumed run is the same run."""
        first = math.inf if evaluating is None else evaluating
        repeated = [line["step"] - 1 for line in self.evals if line["version"] >= first]
        last_eval = min([step, *repeated])
        if self.metrics or self.evals:
            for name, file in self._files.items():
                file.write({"rolled_back_to": last_eval if name == "evals" else step})
        self.metrics = [line for line in self.metrics if line["step"] <= step]
        self.evals = [line for line in self.evals if line["step"] <= last_eval]

    def trained(self, batch: Batch, trained: Trained, buffer: Buffer, states: States) -> None:
        """Writes the step down; raises where a limit that was broken stops the run."""
        line = metrics_line(
            {
                "step": batch.step,
                "version": batch.version + 1,
                "seconds": round(self.seconds, 3),
                **_batch_values(batch),
                **{f"buffer/groups_{name}": n for name, n in buffer.ledger._asdict().items()},
                **{DROPPED[reason]: count or None for reason, count in buffer.drops.items()},
                "rollout/devices": self.config.devices.rollout * self.config.num_nodes,
                "train/devices": self.config.devices.train,
                "faults/workers_replaced": self.workers_replaced or None,
                "faults/steps_redone": self.steps_redone or None,
                **self._speeds(),
                **trained.values,
            }
        )
        self.recent_staleness.append(trained.staleness_counts)
        self.metrics.append(line)
        self._files["metrics"].write(line)
        groups = [_group_line(group) for group in batch.groups]
        whole = {"step": batch.step, "version": batch.version, "groups": groups}
        self._files["batches"].write(whole)
        self._write_samples(batch, trained, states)
        if self.config.log.record:
            said = self.saver.save("record", batch, "recorded")
            self.seldom.note("record", f"step {batch.step} is recorded{said}")
        self.view.step(line)
        self.check(batch, trained)

    def _write_samples(self, batch: Batch, trained: Trained, states: States) -> None:
        groups = batch.groups[: self.config.log.samples]
        for group, shown in zip_longest(groups, trained.samples[: len(groups)]):
            prompt, texts = states[group.id].prompt, states[group.id].texts
            first = group.trajectories[0]
            sample = {
                "step": batch.step,
                "group": group.id,
                "prompt": prompt.example.prompt,
                "answer": texts[0],
                "reference": prompt.example.reference,
                "reward": group.rewards[0],
                "versions": [first.head_version, first.tail_version],
                "stop": first.stop.name.lower(),
            }
            self.recent_samples.append(sample)
            self._files["samples"].write({**sample, **(shown._asdict() if shown else {})})

    def check(self, batch: Batch, trained: Trained) -> None:
        """Saves a batch that went bad; warns of a limit that was broken; stops a run that no longer
        learns."""
        fault, saved = idle_fault(self.metrics, self.config.train.num_minibatches), ""
        if trained.problem:
            saved = self.saver.save_bad(batch, trained.problem, must_save=bool(fault))
            self.note(f"step {batch.step}: {trained.problem}: the weights stay as they were{saved}")
        if fault:
            raise MinirlError(f"step {batch.step}: {fault}{saved}; {self.last_checkpoint}")
        for limit, text in broken_limits(trained.values).items():
            self.seldom.note(limit, f"warning: step {batch.step}: {limit}: {text}")

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """(version, accuracy) of every evaluation that could be graded."""
        found = [(line["version"], line.get("accuracy")) for line in self.evals]
        return [(version, accuracy) for version, accuracy in found if accuracy is not None]

    def is_evaluated(self, step: int) -> bool:
        return any(line["step"] >= step for line in self.evals)

    def evaluated(self, evaluation: Evaluation) -> None:
        line: Line = {**evaluation.line(self.config.log.samples), "seconds": round(self.seconds, 3)}
        self.evals.append(line)
        self._files["evals"].write(line)
        accuracy = "unknown" if line["accuracy"] is None else f"{line['accuracy']:.1%}"
        failed = f", {line['failures']} answers not graded" if line["failures"] else ""
        self.note(f"held-out accuracy {accuracy} at version {line['version']}{failed}")

    def summarise(self, is_whole: bool, extra: Line) -> Line:
        lines, accuracies = self.metrics, self.accuracies
        gaps = [line["train/logprob_gap"] for line in lines if "train/logprob_gap" in line]
        batches = read_lines(self.run_dir / "batches.jsonl")
        spans = [span for line in batches for group in line["groups"] for span in group["versions"]]
        summary = {
            "finished": is_whole,
            "steps": len(lines),
            "seconds": lines[-1]["seconds"] if lines else 0.0,
            "version": int(lines[-1]["version"]) if lines else 0,
            "accuracy_before": accuracies[0][1] if accuracies else None,
            "accuracy_after": accuracies[-1][1] if accuracies else None,  # of the last evaluation
            "accuracies": accuracies,  # by version; the run may have ended later, at `version`
            "trained_tokens": int(sum(line.get("train/tokens", 0) for line in lines)),
            "staleness_max": max((line["buffer/staleness_max"] for line in lines), default=0),
            "max_staleness_allowed": self.config.buffer.max_staleness,
            "multi_version_trajectories": sum(head != tail for head, tail in spans),
            "logprob_gap_max": max(gaps, default=None),
            "versions_measured": f"{len(gaps)} of {len(lines)}",
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
        self.problems += [file.problem for file in self._files.values() if file.problem]


def _batch_values(batch: Batch) -> Values:
    trajectories = [t for group in batch.groups for t in group.trajectories]
    rewards = [reward for group in batch.groups for reward in group.rewards]
    turns = [t.num_turns for t in trajectories]
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "rollout/length_mean": fmean(t.num_written for t in trajectories),
        "rollout/turns_mean": fmean(turns) if max(turns) > 1 else None,
        "rollout/truncated_frac": fmean(t.stop is StopReason.LENGTH for t in trajectories),
        "buffer/truncated_masked": sum(len(group.masked) for group in batch.groups),
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
