"""The simulator: engines that cost what they should, and runs whose numbers can be worked out."""

import math

import pytest

from minirl.recipe import build
from minirl.tools.simulate import Costs, Lengths, SimulatedEngine, Simulation, Throughput


@pytest.mark.parametrize(
    ("costs", "max_running", "lengths", "expected"),
    [
        (Costs(step=1.0), 8, (3, 5, 5, 9), [(3.0, 0), (5.0, 1), (5.0, 2), (9.0, 3)]),
        (Costs(step=1.0), 1, (3, 5), [(3.0, 0), (8.0, 1)]),  # the others wait
        (Costs(1.0, step_per_seq=0.5, prefill=0.1), 8, (4, 8), [(8.2, 0), (8.2 + 4 * 1.5, 1)]),
    ],
)
def test_a_step_gives_every_running_sequence_a_token(
    costs: Costs, max_running: int, lengths: tuple[int, ...], expected: list[tuple[float, int]]
) -> None:
    engine, found = SimulatedEngine(costs, max_running), []
    engine.submit(enumerate(lengths), now=1.0)
    while (at := engine.next_end_s) < math.inf:
        found += [(round(at - 1.0, 6), group_id) for group_id, _ in engine.take_done(at)]
    assert found == expected
    engine.advance(engine.now + 2.0)
    assert engine.idle_s == pytest.approx(1.0 + 2.0)


def simulated(train_s: float, eta: int) -> Throughput:
    values = {"buffer.max_staleness": eta, "buffer.target_staleness": eta}
    values |= {"devices.rollout": 2, "rollout.group_size": 2, "train.batch_size": 8}
    costs = Costs(step=1.0, train=train_s)
    return Simulation(build(values), costs, Lengths((100,), 10), max_running=8).run(60, num_warm=8)


def test_synchronous_is_the_sum_and_asynchronous_the_slower_of_the_two() -> None:
    one_batch = 8 * 2 * 100  # tokens; 16 sequences at once: 100 s, then 50 s of training
    outcome = simulated(50, eta=0)
    assert outcome.tokens_per_s == pytest.approx(one_batch / 150)
    assert outcome.trainer_idle == pytest.approx(100 / 150, abs=0.01)
    assert outcome.engines_idle == pytest.approx(50 / 150, abs=0.01)
    assert outcome.staleness == 0
    for train_s, slower_s in ((50, 100), (300, 300)):
        rate = simulated(train_s, eta=2).tokens_per_s
        assert rate == pytest.approx(one_batch / slower_s, rel=0.01)
