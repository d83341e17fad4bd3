"""A snapshot as a run in the middle of its work would give it, for tests of the dashboard."""

import math
import time
from typing import Any

from minirl.view.dashboard.snapshot import Curve, Lane, Note, Sample, Snapshot


def example(
    num_engines: int = 2, num_ranks: int = 1, num_steps: int = 40, **changes: Any
) -> Snapshot:
    strip = ("g" * 9 + "r" + "g" * 14 + "." * 3) * 5
    engines = [
        Lane(
            f"rollout-{i}",
            "generating",
            3.0,
            0.1,
            num_steps,
            31,
            0.12,
            strip[-120 + i :],
            900 << 20,
        )
        for i in range(num_engines)
    ]
    strip = ("t" * 8 + "p" + "." * 7) * 8
    ranks = [
        Lane(f"train-{i}", "waiting for a batch", 2.1, 2.1, -1, 0, 0.41, strip[-120:], 1200 << 20)
        for i in range(num_ranks)
    ]
    steps = [float(step) for step in range(1, num_steps + 1)]
    reward = Curve(steps, [1 - math.exp(-step / 15) + 0.05 * math.sin(step * 7) for step in steps])
    speed = Curve(steps, [7000 + 500 * math.sin(step) for step in steps])
    values: dict[str, Any] = {
        "name": "smoke-20260101-120000",
        "time": time.time(),
        "state": "running",
        "step": num_steps,
        "steps": 100,
        "version": num_steps,
        "seconds": 321.0,
        "eta_s": 480.0,
        "verdict": "generation-bound: trainers idle 41%, one GPU more for rollout would give +20%",
        "lanes": engines + ranks,
        "slots": {"sampling": 48, "grading": 2, "ready": 12, "training": 32, "free": 2},
        "batch_size": 32,
        "staleness": [71000, 24000, 5000],
        "max_staleness": 2,
        "max_new_tokens": 128,
        "tokens_per_s": 7105.0,
        "curves": {
            "reward/mean": reward,
            "rollout/tokens_per_s": speed,
            "train/tokens_per_s": speed,
            "rollout/length_mean": speed,
            "train/logprob_gap": Curve(steps, [3e-6] * len(steps)),
        },
        "last": {
            "train/tokens_per_s": 12033.0,
            "rollout/length_mean": 43.2,
            "rollout/truncated_frac": 0.03,
            "train/logprob_gap": 3.1e-6,
            "reward/mean": 0.7,
        },
        "accuracies": Curve([0, 10, 20, 30], [0.21, 0.44, 0.7, 0.81]),
        "free_bytes": 9 << 30,
        "samples": [
            Sample(
                step,
                "Tom has 7 apples and buys 12 more. How many apples does Tom have now?",
                "Tom has 7 apples.\n7 + 12 = 19, so Tom has 19 apples.\nThe answer is 19.",
                "19",
                1.0,
                [step - 2, step - 1],
                "stop",
            )
            for step in range(num_steps - 5, num_steps + 1)
        ],
        "notes": [
            Note(0.1, "waiting for workers to start"),
            Note(93.4, "held-out accuracy 81.2% at version 30"),
            Note(99.0, "rollout-1 was killed by SIGKILL: replaced"),
        ],
        **changes,
    }
    return Snapshot(**values)
