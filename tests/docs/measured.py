"""The simulator against real runs.

    python -m tests.docs.measured CALIBRATION_RUN OTHER_RUN...

Takes how fast engines and trainer were while they worked, predicts from these and the recipe how
many tokens a second the run trained, waits and all, and compares it with what it measured: once
with the first run's speeds, and once with the run's own, which leaves out how much the machine
changed in between. Answers are as long as the run's own: lengths are its model's business.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from minirl.buffer import Buffer, OnStale
from minirl.config import Config
from minirl.pace import Pace
from minirl.recipe import load
from minirl.run_dir import read_lines
from minirl.tools.simulate.costs import Costs
from minirl.tools.simulate.lengths import of_run
from minirl.tools.simulate.simulation import Setup, Simulation

NUM_WARM = 3
FIXED_SEQS = 17  # an engine step costs this much before its first sequence, counted in sequences:
# on a CPU with the tiny model 5.2 ms with 32 and 28.8 ms with 256


@dataclass(frozen=True)
class Comparison:
    """In tokens/s, of written tokens."""

    name: str
    by_first: float  # with the speeds of the first run
    by_own: float
    measured: float


def costs_of(run_dir: Path) -> Costs:
    """The medians of its steps."""
    config, lines = load(run_dir / "recipe.toml").config, _steps(run_dir)
    num_engines = config.devices.rollout // config.devices.tensor_parallel
    each = median(  # seconds of an engine step, in sequences
        num_engines
        * max(1e-3, 1 - line["rollout/idle_frac"])
        * line["rollout/batch_mean"]
        / line["rollout/tokens_per_s"]
        / (FIXED_SEQS + line["rollout/batch_mean"])
        for line in lines
        if "rollout/batch_mean" in line  # else no engine stepped in it
    )
    return Costs(
        step_s=FIXED_SEQS * each,
        step_per_seq_s=each,
        reload_s=median(line.get("weights/reload_pause_s", 0.0) for line in lines),
        train_per_token_s=1 / median(line["train/tokens_per_s"] for line in lines),
        train_fixed_s=median(line["weights/publish_s"] for line in lines),
    )


def predict(run_dir: Path, costs: Costs) -> float:
    config = load(run_dir / "recipe.toml").config
    setup = Setup(
        costs=costs,
        lengths=of_run(run_dir),
        num_engines=config.devices.rollout // config.devices.tensor_parallel,
        max_running=config.rollout.max_num_seqs,
        group_size=config.rollout.group_size,
        num_steps=max(config.train.steps, NUM_WARM + 5),
        num_warm=NUM_WARM,
        recomputes=False,  # what it costs is part of the measured speed
    )
    return Simulation(setup, _buffer(config)).run().tokens_per_s


def _buffer(config: Config) -> Buffer:
    size, eta = config.train.batch_size, config.buffer.max_staleness
    pace = Pace(size, config.num_slots, config.buffer.target_staleness) if eta else None
    return Buffer(size, eta, OnStale(config.buffer.on_stale), pace=pace)


def measure(run_dir: Path) -> float:
    """Written tokens of trained trajectories a second, after the first steps."""
    config, lines = load(run_dir / "recipe.toml").config, read_lines(run_dir / "metrics.jsonl")
    num = config.train.batch_size * config.rollout.group_size
    counted = lines[NUM_WARM:]
    tokens = sum(line["rollout/length_mean"] * num for line in counted)
    return tokens / (counted[-1]["seconds"] - lines[NUM_WARM - 1]["seconds"])


def _steps(run_dir: Path) -> list[dict[str, Any]]:
    return read_lines(run_dir / "metrics.jsonl")[NUM_WARM:]


def compare(calibration: Path, others: Sequence[Path]) -> list[Comparison]:
    first = costs_of(calibration)
    return [
        Comparison(run.name, predict(run, first), predict(run, costs_of(run)), measure(run))
        for run in others
    ]


if __name__ == "__main__":
    print("| run | measured tokens/s | by its own speeds | | by the first run's | |")
    print("|---|---|---|---|---|---|")
    for row in compare(Path(sys.argv[1]), [Path(name) for name in sys.argv[1:]]):
        guesses = [f"{p:,.0f} | {p / row.measured - 1:+.1%}" for p in (row.by_own, row.by_first)]
        print(f"| {row.name} | {row.measured:,.0f} | {guesses[0]} | {guesses[1]} |")
