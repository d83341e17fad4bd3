"""Every split of the GPUs between rollout and training, simulated, and the one to take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from minirl.buffer import Buffer, OnStale
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.pace import Pace
from minirl.tools.plan.gpus import Gpu
from minirl.tools.plan.memory import rollout_bill, train_bill
from minirl.tools.plan.roofline import costs
from minirl.tools.plan.shapes import Shape
from minirl.tools.simulate.lengths import Lengths, with_mean
from minirl.tools.simulate.simulation import Outcome, Setup, Simulation

USUAL_SHARE = 0.4  # of max_new_tokens that an answer has, where nothing is known
AS_GOOD = 0.98  # of the best throughput: then the freshest data wins
MAX_STEPS = 60
MANY = 17  # splits to a number of GPUs at most


@dataclass(frozen=True)
class Split:
    rollout: int
    train: int
    outcome: Outcome
    fits: bool  # in memory: the fewer training GPUs share an optimizer, the more each holds


def usual_lengths(config: Config, mean: float | None = None) -> Lengths:
    limit = config.rollout.max_new_tokens
    return with_mean(mean or USUAL_SHARE * limit, limit, config.tasks.max_prompt_tokens // 2)


def simulate(
    config: Config, gpu: Gpu, shape: Shape, lengths: Lengths, rollout: int, train: int
) -> Outcome:
    mean_tokens = lengths.mean + lengths.prompt
    bill = rollout_bill(config, gpu, shape, mean_tokens)
    eta, size = config.buffer.max_staleness, config.train.batch_size
    num_warm = min(MAX_STEPS // 2, eta + 3)
    setup = Setup(
        costs=costs(config, gpu, shape, train, mean_tokens),
        lengths=lengths,
        num_engines=rollout // config.devices.tensor_parallel,
        max_running=max(1, bill.num_usual),
        group_size=config.rollout.group_size,
        num_steps=min(MAX_STEPS, 2 * num_warm + 6),
        num_warm=num_warm,
        recomputes=config.rollout.on_update == "recompute",
        seed=config.seed,
    )
    pace = Pace(size, config.num_slots, config.buffer.target_staleness) if eta else None
    buffer = Buffer(size, eta, OnStale(config.buffer.on_stale), pace=pace)
    return Simulation(setup, buffer).run()


def possible(config: Config, num_gpus: int) -> list[tuple[int, int]]:
    """Pairs of (rollout, train); with many GPUs only some of them."""
    width = config.devices.tensor_parallel
    share = config.train.batch_size // config.train.num_minibatches * config.rollout.group_size
    pairs = [(n, num_gpus - n) for n in range(width, num_gpus, width) if num_gpus - n <= share]
    if not pairs:
        rule = f"{num_gpus} cannot be split into engines of {width} and at least one to train"
        raise RecipeError("--num", num_gpus, rule, f"take {width + 1} or more")
    if len(pairs) <= MANY:
        return pairs
    return [pairs[round(i * (len(pairs) - 1) / (MANY - 1))] for i in range(MANY)]


def splits(config: Config, gpu: Gpu, shape: Shape, lengths: Lengths, num_gpus: int) -> list[Split]:
    return [
        Split(
            rollout,
            train,
            simulate(config, gpu, shape, lengths, rollout, train),
            train_bill(config, gpu, shape, train).is_ok,
        )
        for rollout, train in possible(config, num_gpus)
    ]


def recommended(found: Sequence[Split]) -> Split:
    """Of those that fit; of all, where none does."""
    usable = [split for split in found if split.fits] or found
    best = max(split.outcome.tokens_per_s for split in usable)
    good = [split for split in usable if split.outcome.tokens_per_s >= AS_GOOD * best]
    return min(good, key=lambda split: (split.outcome.staleness_mean, split.train))


def with_split(config: Config, rollout: int, train: int) -> Config:
    return replace(config, devices=replace(config.devices, rollout=rollout, train=train))


def ladder(first: int, last: int) -> Iterable[int]:
    """8..512 by doubling, the last one too."""
    number = first
    while number < last:
        yield number
        number *= 2
    yield last
