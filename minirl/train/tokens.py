"""trajectories.jsonl: what a step trained, for `minirl inspect` and the token view of a report.

One line a step: of every trajectory its reward, advantage, versions and length; of the first
answer of the first `log.samples` groups every token, with the version that wrote it, the engine's
logprob, and how far the trainer's own is from that. Rank 0 writes; values that another rank
computed come with one small sum at the end of the step.

The trainer's logprob is that of the version the step starts from, wherever the recipe computes it
(π_prox, or the first minibatch); else that of the policy as it then was, and `progress` says so.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from minirl.lines import Lines
from minirl.records import Batch
from minirl.train.batch import Item, MicroBatch
from minirl.train.messages import TrainerSetup
from minirl.train.objective import MicroLoss
from minirl.train.prepare import Prepared

FILE = "trajectories.jsonl"
MAX_TOKENS = 512  # of an answer: a few dozen kB a step at most


class TokenLog:
    def __init__(self, setup: TrainerSetup, device: str):
        self._setup, self._device = setup, device
        self._is_on = bool(setup.run_dir)
        self._tokenizer: Any = None
        self._kept: list[tuple[int, Item]] = []  # (group's place in the batch, its first answer)
        self._file: Lines | None = None

    def begin(self, batch: Batch, prepared: Prepared) -> None:
        if not self._is_on:
            return
        self._batch, self._prepared, self._progress = batch, prepared, 0.0
        first, place = [], 0
        for number, group in enumerate(batch.groups[: self._setup.config.log.samples]):
            first.append((number, prepared.items[place]))
            place += len(group.trajectories)
        self._kept = first
        last = first[-1][1] if first else None
        self._end = last.start + last.length if last else 0  # of the tokens to look at
        self._logprobs = torch.zeros(self._end, device=self._device)
        self._known = torch.zeros(self._end, device=self._device)

    def add(self, micro: MicroBatch, found: MicroLoss, progress: float) -> None:
        """No value leaves the device here, so that no micro-batch is waited for."""
        if not self._is_on or not self._end or micro.is_dummy:
            return
        logprobs_T = found.logprobs_T.detach() if micro.prox_T is None else micro.prox_T
        if micro.prox_T is None:
            self._progress = max(self._progress, progress)
        computed_T = micro.trainable_T | micro.at_equal_version_T
        near_T = computed_T & (micro.index_T < self._end)
        at = torch.where(near_T, micro.index_T, 0)
        self._logprobs.index_add_(0, at, torch.where(near_T, logprobs_T.float(), 0.0))
        self._known.index_add_(0, at, near_T.float())

    def write(self) -> None:
        if not self._is_on:
            return
        both = torch.stack([self._logprobs, self._known])
        if self._setup.num_ranks > 1 and self._end:
            dist.all_reduce(both)
        if self._setup.rank != 0:
            return
        logprobs, known = both.cpu().numpy()
        line = {
            "step": self._batch.step,
            "version": self._batch.version,
            "groups": self._groups(),
            "tokens": [self._tokens(n, item, logprobs, known) for n, item in self._kept],
        }
        if self._file is None:  # not before: until the first batch comes, the controller cuts it
            try:
                self._file = Lines(Path(self._setup.run_dir) / FILE)
            except OSError:  # costs the view of this step, not the step
                return
        self._file.write(json.dumps(line, separators=(",", ":"), ensure_ascii=False))

    def sync(self) -> None:
        """Before a checkpoint: its steps are on the disk, those too that a full one made wait."""
        if self._file is not None:
            self._file.sync()

    def _groups(self) -> list[dict[str, Any]]:
        items = iter(self._prepared.items)
        return [
            {
                "group": group.id,
                "prompt": group.prompt_index,
                "rewards": list(group.rewards),
                "advantages": [self._advantage(next(items)) for _ in group.trajectories],
                "versions": [[t.head_version, t.tail_version] for t in group.trajectories],
                "written": [t.num_written for t in group.trajectories],
                "cut": [int(t.stop) for t in group.trajectories],
                "masked": sorted(group.masked),
            }
            for group in self._batch.groups
        ]

    def _advantage(self, item: Item) -> float:
        """Of a trajectory; with a critic, which has one a token, their mean."""
        values = self._prepared.advantages[item.place][item.written]
        return round(float(values.mean()), 5) if len(values) else 0.0

    def _tokens(
        self, number: int, item: Item, logprobs: np.ndarray, known: np.ndarray
    ) -> dict[str, Any]:
        view, at = item.view, np.flatnonzero(item.written)[:MAX_TOKENS]
        engine = view.logprobs[at]
        gaps = [
            float(f"{ours - theirs:.3g}") if is_known else None
            for ours, theirs, is_known in zip(
                logprobs[item.place][at].tolist(),
                engine.tolist(),
                known[item.place][at].tolist(),
                strict=True,
            )
        ]
        return {
            "group": self._batch.groups[number].id,
            "ids": view.tokens[at].tolist(),
            "pieces": self._pieces(view.tokens[at].tolist()),
            "versions": view.versions[at].tolist(),
            "trained": item.trainable[at].astype(int).tolist(),
            "logprobs": [round(value, 4) for value in engine.tolist()],
            "gaps": gaps,  # the trainer's logprob - the engine's
            "progress": self._progress,
            "left_out": int(item.written.sum()) - len(at),
        }

    def _pieces(self, ids: list[int]) -> list[str]:
        """Each token as text, where the model's folder says how."""
        path = Path(self._setup.tokenizer_folder) / "tokenizer.json"
        if self._tokenizer is None and path.is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
        if self._tokenizer is None:
            return [f"<{token}>" for token in ids]
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in ids]
