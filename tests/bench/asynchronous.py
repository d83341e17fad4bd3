"""The async bench: one recipe, synchronous and asynchronous, on the same two processes.

    async_over_sync   trained tokens/s of the best η ≤ 4 / of η = 0: of each seed, and their median
    share_of_bound    trained tokens/s of that η / of perfect overlap
    bound_over_sync   trained tokens/s of perfect overlap / of η = 0
    eta_…             by η: trained tokens/s, idle shares of both pools, busy seconds of each pool
                      to 1,000 trained tokens, the mean staleness, seconds until the policy is right
                      on 80 % of held-out problems, and its accuracy at the end
    evaluation_cost   share of trained tokens/s lost, at the same η, by evaluating every fourth step
                      / the evaluations' share of all tokens: at most their own, where it is 1
    accuracy_gap…     held-out accuracy at the end, of that η minus of η = 0, seed by seed: the mean
                      and the ends of its 95 % interval, which must reach 0: within the noise

Each is a whole run of `minirl train recipes/async.toml --set train.lr=1e-4`, real vLLM, one engine
and one trainer rank on a core each; η alone differs, and so the number of steps, groups and answers
is the same. At the recipe's own learning rate accuracy at the end wanders by some points. Rates
are of the steps in the middle, by the run's own clock: start-up, the first fill, and the end, where
no more groups are begun than the run still needs, are left out. But for evaluation_cost nothing is
evaluated during a run: the trainer keeps every version's weights (variants.py), and they are
evaluated after it. Seeds are of prompts and sampling; all start from the tiny model of seed 0. A
seed's runs follow each other, in turns from η = 0 upwards and downwards, so that a drift of the
machine cancels out.

Perfect overlap takes as long as the slower pool alone: max(g, t) seconds a token, where g and t are
the busy seconds of the engine and of the trainer to one trained token, a median over seeds, and of
all η, the synchronous one too, the least that was seen. So the bound is not made easier by what
asynchrony itself costs: sharing the cores with the controller and the verifier, which in a
synchronous run work while a pool waits; KV that is computed again at each update; and the bubbles
of the synchronous engine, whose last answers run alone, are not in it either.
"""

import shutil
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from minirl.config import TINY_FOLDER
from minirl.errors import RecipeError
from minirl.run_dir import read_lines
from minirl.statistics import estimate
from minirl.tools.sweep import train
from minirl.workers import Worker
from tests.bench import MODELS, Figure, Options, at_least, at_most, median
from tests.bench.held_out import HeldOut, accuracy_of
from tests.bench.processes import Processes, processes
from tests.bench.variants import KEPT, program

RECIPE = Path(__file__).parents[2] / "recipes" / "async.toml"
KEEPING = program("keeping")
MOST_ETA = 4  # of the figures with a goal
LEAST_GAIN, LEAST_SHARE = 1.7, 0.9
TARGET = 0.8
LR = 1e-4


@dataclass(frozen=True)
class Size:
    etas: tuple[int, ...]  # 0 first
    num_seeds: int
    steps: int
    first: int  # the step after which rates are counted
    last: int  # and the last that counts: groups are begun as ever until then
    num_problems: int

    def order(self, seed: int) -> tuple[int, ...]:
        return self.etas if seed % 2 == 0 else self.etas[::-1]


FULL = Size((0, 1, 2, 4, 8), num_seeds=5, steps=36, first=9, last=27, num_problems=256)
QUICK = Size((0, 1), num_seeds=1, steps=4, first=1, last=3, num_problems=8)


@dataclass(frozen=True)
class Steady:
    """The middle of a run, of which all rates are."""

    seconds: float
    tokens: float
    rollout_idle: float
    train_idle: float
    staleness: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def rollout_busy(self) -> float:
        """Seconds to 1,000 trained tokens."""
        return 1000 * (1 - self.rollout_idle) / self.tokens_per_s

    @property
    def train_busy(self) -> float:
        return 1000 * (1 - self.train_idle) / self.tokens_per_s


@dataclass(frozen=True)
class Run:
    steady: Steady
    seconds_to: float | None  # None: never
    accuracy: float


Runs = dict[int, list[Run]]  # by η, a run a seed


def steady(lines: Sequence[dict[str, Any]], first: int, last: int) -> Steady:
    """Of the steps after `first` up to `last`. Shares are means over time, not over steps."""
    window = lines[first - 1 : last]
    counted = [(b, b["seconds"] - a["seconds"]) for a, b in pairwise(window)]
    seconds = sum(span for _, span in counted)

    def mean(name: str) -> float:
        return sum(line[name] * span for line, span in counted) / seconds

    return Steady(
        seconds,
        sum(line["train/tokens"] for line, _ in counted),
        mean("rollout/idle_frac"),
        mean("train/idle_frac"),
        mean("buffer/staleness_mean"),
    )


def measure(options: Options) -> list[Figure]:
    if options.model != MODELS[0]:
        raise RecipeError("--model", options.model, "has learned nothing", "leave it out")
    if not RECIPE.is_file():
        raise RecipeError("recipe", str(RECIPE), "is not there", "run it from the source tree")
    size = QUICK if options.is_quick else FULL
    folder = TINY_FOLDER
    runs: Runs = {eta: [] for eta in size.etas}
    costs = []
    with processes(1) as here:
        held_out = here.part(here.rollout_place, HeldOut, str(folder), RECIPE, size.num_problems)
        here.result(held_out)
        for seed in range(size.num_seeds):
            for eta in size.order(seed):
                run_dir = here.folder / f"eta-{eta}-seed-{seed}"
                train(RECIPE, run_dir, settings(size, eta, seed, folder), KEEPING)
                runs[eta].append(look_at(run_dir, size, here, held_out))
                shutil.rmtree(run_dir)
            run_dir, eta = here.folder / f"evaluated-seed-{seed}", size.etas[1]
            own = [f"eval.every={-(-size.steps // 9)}", f"eval.num_prompts={size.num_problems}"]
            train(RECIPE, run_dir, settings(size, eta, seed, folder) + own, KEEPING)
            costs.append(evaluation_cost(run_dir, size, runs[eta][-1].steady))
            shutil.rmtree(run_dir)
    cost = at_most("evaluation_cost", median(costs), 1.0, f"η = {eta}, median over seeds")
    return [*figures(runs), cost]


def evaluation_cost(run_dir: Path, size: Size, plain: Steady) -> float:
    """Of a run that was evaluated, against the same run that was not."""
    own = steady(read_lines(run_dir / "metrics.jsonl"), size.first, size.last)
    lines = read_lines(run_dir / "evals.jsonl")
    within = [line for line in lines if size.first <= line["version"] < size.last]
    tokens = sum(line["count"] * line["length_mean"] for line in within)
    return (1 - own.tokens_per_s / plain.tokens_per_s) * (own.tokens + tokens) / tokens


def settings(size: Size, eta: int, seed: int, folder: Path) -> list[str]:
    return [
        f"buffer.max_staleness={eta}",
        f"seed={seed}",
        f'model.path="{folder}"',
        f"train.steps={size.steps}",
        f"train.lr={LR}",
        "eval.every=0",
        "eval.num_prompts=1",  # one evaluation before and one after cannot be switched off
        "checkpoint.every_s=0",
    ]


def look_at(run_dir: Path, size: Size, here: Processes, held_out: Worker) -> Run:
    """When the run has ended: its rates, and what its weights know."""
    lines = read_lines(run_dir / "metrics.jsonl")

    def accuracy(line: dict[str, Any]) -> float:
        kept = run_dir / KEPT / f"{line['version']:06d}.safetensors"
        return here.ask(held_out, accuracy_of, kept)

    last = accuracy(lines[-1])
    reached = None
    if last >= TARGET:
        # By halving: accuracy rises until it is there, and the last version is.
        place = bisect_left(lines[:-1], True, key=lambda line: accuracy(line) >= TARGET)
        reached = lines[place]["seconds"]  # since the first prompt was sent
    return Run(steady(lines, size.first, size.last), reached, last)


# -- figures


def figures(runs: Runs) -> list[Figure]:
    rate = {eta: median([r.steady.tokens_per_s for r in found]) for eta, found in runs.items()}
    best = max((eta for eta in runs if 0 < eta <= MOST_ETA), key=lambda eta: rate[eta])
    gains = {eta: gain(runs, eta) for eta in runs if eta}
    bound = bound_tokens_per_s(runs)
    share = at_least("share_of_bound", rate[best] / bound, LEAST_SHARE, "of perfect overlap")
    found = [
        at_least("async_over_sync", gains[best], LEAST_GAIN, f"trained tokens/s, η = {best}"),
        share,
        Figure("bound_over_sync", bound / rate[0], note="perfect overlap / η = 0"),
        Figure("best_eta", best),
        *accuracies(runs, best),
    ]
    for eta, seeds in runs.items():
        found += by_eta(eta, seeds, gains.get(eta, 1.0))
    return found


def gain(runs: Runs, eta: int) -> float:
    pairs = zip(runs[eta], runs[0], strict=True)
    return median([a.steady.tokens_per_s / b.steady.tokens_per_s for a, b in pairs])


def bound_tokens_per_s(runs: Runs) -> float:
    """Of perfect overlap: see the head of this file."""
    least = [
        min(median([getattr(r.steady, pool) for r in found]) for found in runs.values())
        for pool in ("rollout_busy", "train_busy")
    ]
    return 1000 / max(least)


def accuracies(runs: Runs, best: int) -> list[Figure]:
    """The asynchronous run's against the synchronous one's, seed by seed."""
    pairs = list(zip(runs[best], runs[0], strict=True))
    gap = estimate([a.accuracy - b.accuracy for a, b in pairs])
    found = [Figure("accuracy_gap", gap["mean"], note=f"η = {best} minus η = 0, mean")]
    if gap["half"] is not None:
        low, high = gap["mean"] - gap["half"], gap["mean"] + gap["half"]
        found.append(Figure("accuracy_gap_low", low, note="of its 95 % interval over seeds"))
        found.append(at_least("accuracy_gap_high", high, 0.0, "the interval reaches 0"))
    times = [b.seconds_to / a.seconds_to for a, b in pairs if a.seconds_to and b.seconds_to]
    if times:
        note = f"seconds to {TARGET:.0%} held out, η = 0 / η = {best}"
        found.append(Figure("sooner_by", median(times), note=note))
    return found


def by_eta(eta: int, seeds: Sequence[Run], gained: float) -> list[Figure]:
    def of(name: str) -> float:
        return median([getattr(run.steady, name) for run in seeds])

    times = [run.seconds_to for run in seeds if run.seconds_to is not None]
    name = f"eta_{eta}_{{}}".format
    found = [
        Figure(name("tokens_per_s"), of("tokens_per_s"), note="trained"),
        Figure(name("over_sync"), gained),
        Figure(name("rollout_idle"), of("rollout_idle")),
        Figure(name("train_idle"), of("train_idle")),
        Figure(name("rollout_busy"), of("rollout_busy"), note="s to 1,000 trained tokens"),
        Figure(name("train_busy"), of("train_busy"), note="s to 1,000 trained tokens"),
        Figure(name("staleness"), of("staleness"), note="mean"),
        Figure(name("accuracy"), median([run.accuracy for run in seeds]), note="held out, last"),
    ]
    if len(times) == len(seeds):
        found.append(Figure(name("seconds_to_80"), median(times)))
    return found
