"""The simulator: engines that cost what they should, and runs whose numbers can be worked out."""

import math
from dataclasses import replace

import pytest

from minirl.buffer import Buffer
from minirl.pace import Pace
from minirl.tools.simulate import (
    Costs,
    Lengths,
    Setup,
    SimulatedEngine,
    Simulation,
    Throughput,
    long_tailed,
)

ALIKE = Setup(
    costs=Costs(step_s=1.0, train_fixed_s=50.0),
    lengths=Lengths((100,), 10),
    num_engines=2,
    max_running=8,
    group_size=2,
    num_steps=20,
    num_warm=8,
)


def ends(engine: SimulatedEngine) -> list[tuple[float, int]]:
    """When each sequence is done, in order: (time, group)."""
    found = []
    while (at := engine.next_end_s) < math.inf:
        found += [(round(at, 6), group_id) for group_id, _ in engine.take_done(at)]
    return found


def test_a_step_gives_every_running_sequence_a_token_and_the_others_wait() -> None:
    engine = SimulatedEngine(ALIKE)
    engine.submit(enumerate((3, 5, 5, 9)), now=0.0)
    assert ends(engine) == [(3.0, 0), (5.0, 1), (5.0, 2), (9.0, 3)]
    engine = SimulatedEngine(replace(ALIKE, max_running=1))
    engine.submit(enumerate((3, 5)), now=1.0)
    assert ends(engine) == [(4.0, 0), (9.0, 1)]
    engine.advance(11.0)
    assert engine.idle_s == pytest.approx(1.0 + 2.0)
    engine = SimulatedEngine(replace(ALIKE, costs=Costs(1.0, 0.5, prefill_per_token_s=0.1)))
    engine.submit([(0, 4), (0, 8)], now=0.0)  # a group is prefilled once
    assert ends(engine) == [(1 + 4 * 2.0, 0), (1 + 4 * 2.0 + 4 * 1.5, 0)]


def test_new_weights_stop_the_engine_and_are_seen_in_the_versions() -> None:
    costs = Costs(step_s=1.0, reload_s=3.0, prefill_per_token_s=0.5)
    engine = SimulatedEngine(replace(ALIKE, costs=costs, lengths=Lengths((8,), 0)))
    engine.submit([(0, 10)], now=0.0)
    engine.reload(version=1, now=4.0)  # 4 tokens, the mean context, to compute again
    assert engine.next_end_s == pytest.approx(10 + 3 + 2)
    ((_, done),) = engine.take_done(engine.next_end_s)
    assert (done.head_version, done.tail_version) == (0, 1)


def test_long_tailed_lengths_have_their_mean_and_their_limit() -> None:
    lengths = long_tailed(400, 1024, prompt=50)
    assert lengths.mean_tokens == pytest.approx(450, rel=0.01)
    assert max(lengths.answers) == 1024 and min(lengths.answers) < 60
    assert 450 / 2 < lengths.mean_context < 450, "the longer ones run longer"
    assert long_tailed(2000, 1000, 1).mean_tokens == 1001


def simulated(setup: Setup, eta: int, target: float | None = None) -> Throughput:
    pace = None if target is None else Pace(8, 8 * (eta + 1), target)
    return Simulation(setup, Buffer(8, eta, pace=pace)).run()


def test_synchronous_is_the_sum_and_asynchronous_the_slower_of_the_two() -> None:
    one_batch = 8 * 2 * 100  # tokens; 16 sequences at once: 100 s, then 50 s of training
    outcome = simulated(ALIKE, eta=0)
    assert outcome.tokens_per_s == pytest.approx(one_batch / 150)
    assert outcome.trainer_idle == pytest.approx(100 / 150, abs=0.01)
    assert outcome.engines_idle == pytest.approx(50 / 150, abs=0.01)
    assert (outcome.staleness_mean, outcome.staleness_max) == (0, 0)
    assert simulated(ALIKE, eta=2).tokens_per_s == pytest.approx(one_batch / 100, rel=0.01)
    slow = replace(ALIKE, costs=Costs(step_s=1.0, train_fixed_s=300.0))
    assert simulated(slow, eta=2).tokens_per_s == pytest.approx(one_batch / 300, rel=0.01)


def test_a_slow_trainer_finds_data_as_old_as_allowed_unless_it_has_a_target() -> None:
    costs = Costs(step_s=1.0, train_fixed_s=300.0)
    slow = replace(ALIKE, costs=costs, lengths=long_tailed(95, 400, 10), num_steps=60, num_warm=20)
    free, paced = simulated(slow, eta=8), simulated(slow, eta=8, target=-1.0)
    assert free == simulated(slow, eta=8), "and the same again"
    assert free.staleness_mean > 7
    assert paced.staleness_mean <= 2 and paced.trainer_idle < 0.02
    assert paced.tokens_per_s > 0.97 * free.tokens_per_s
