"""The simulator: engines that cost what they should, and runs whose numbers can be worked out."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from minirl.buffer import Buffer, OnStale
from minirl.errors import RecipeError
from minirl.pace import Pace
from minirl.tools.simulate.costs import Costs
from minirl.tools.simulate.engine import Engine, Sequence
from minirl.tools.simulate.lengths import Lengths, long_tailed, of_run, with_mean
from minirl.tools.simulate.simulation import Outcome, Setup, Simulation

SECOND_A_TOKEN = Costs(step_s=1.0)


def sequences(*lengths: int, prompt: int = 0) -> list[Sequence]:
    return [Sequence(i, prompt, length) for i, length in enumerate(lengths)]


def ends(engine: Engine) -> list[tuple[float, int]]:
    """When each sequence is done, in order: (time, group)."""
    found = []
    while (at := engine.next_end_s) is not None:
        found += [(round(at, 6), s.group_id) for s in engine.take_done(at)]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_steps_and_their_time_are_inverse(seed: int) -> None:
    dice = random.Random(seed)
    costs = Costs(dice.random(), dice.random() / 100, dice.choice([0.0, 1e-5, 1e-3]))
    steps, num, context = dice.uniform(0, 5000), dice.randint(1, 200), dice.uniform(0, 1e5)
    assert costs.steps_in(costs.steps_s(steps, num, context), num, context) == pytest.approx(steps)


def test_an_engine_gives_every_sequence_a_token_a_step() -> None:
    engine = Engine(SECOND_A_TOKEN, max_running=4)
    engine.submit(sequences(3, 5, 5, 9), now=0.0)
    assert ends(engine) == [(3.0, 0), (5.0, 1), (5.0, 2), (9.0, 3)]
    assert engine.num_tokens == pytest.approx(22)


def test_what_does_not_fit_waits_its_turn() -> None:
    engine = Engine(SECOND_A_TOKEN, max_running=1)
    engine.submit(sequences(3, 5), now=1.0)
    assert ends(engine) == [(4.0, 0), (9.0, 1)]
    engine.advance(11.0)
    assert engine.idle_s == pytest.approx(1.0 + 2.0)


def test_context_makes_steps_slower_and_is_given_back() -> None:
    engine = Engine(Costs(step_s=1.0, step_per_context_s=0.01), max_running=2)
    engine.submit(sequences(10, prompt=100), now=0.0)
    assert engine.next_end_s == pytest.approx(10 + 0.01 * (10 * 100 + 50))
    ends(engine)
    assert engine._context == pytest.approx(0.0)


def test_new_weights_stop_the_engine_and_are_seen_in_the_versions() -> None:
    engine = Engine(Costs(step_s=1.0, reload_s=3.0, prefill_per_token_s=0.5), 2)
    engine.submit(sequences(10), now=0.0)
    engine.reload(version=1, now=4.0)  # 4 tokens to compute again
    at = engine.next_end_s
    assert at == pytest.approx(10 + 3 + 2)
    (done,) = engine.take_done(at)
    assert (done.head_version, done.tail_version) == (0, 1)
    assert done.mean_version == pytest.approx(0.6)


def test_an_aborted_group_leaves_nothing() -> None:
    engine = Engine(SECOND_A_TOKEN, max_running=2)
    engine.submit(sequences(10, 20, 5, prompt=7), now=0.0)
    engine.abort(0, now=4.0)
    assert ends(engine) == [(9.0, 2), (20.0, 1)]
    assert engine._context == pytest.approx(0.0)


def test_long_tailed_lengths_have_their_mean_and_their_limit() -> None:
    lengths = with_mean(400, 1024, prompt=50)
    assert lengths.mean == pytest.approx(400, rel=0.02)
    assert lengths.longest == 1024 and min(lengths.answers) < 60
    assert long_tailed(100, 1000, 1) == long_tailed(100, 1000, 1)


def test_lengths_of_a_run_are_drawn_again(tmp_path: Path) -> None:
    groups = [{"lengths": [3, 5], "prompt_tokens": 10}, {"lengths": [7], "prompt_tokens": 20}]
    lines = [json.dumps({"step": step, "groups": [group]}) for step, group in enumerate(groups)]
    (tmp_path / "batches.jsonl").write_text("\n".join(lines) + "\n")
    assert of_run(tmp_path) == Lengths((3, 5, 7), 15)
    with pytest.raises(RecipeError, match=r"no batches\.jsonl with a step"):
        of_run(tmp_path / "nowhere")


# -- whole runs

ALIKE = Setup(
    costs=Costs(step_s=1.0, train_fixed_s=50.0),
    lengths=Lengths((100,), 10),
    num_engines=2,
    max_running=8,
    group_size=2,
    num_steps=20,
    num_warm=8,
)


def simulated(setup: Setup, eta: int, size: int = 8, target: float | None = None) -> Outcome:
    pace = None if target is None else Pace(size, size * (eta + 1), target)
    return Simulation(setup, Buffer(size, eta, pace=pace)).run()


def test_synchronous_is_the_sum_and_asynchronous_the_slower_of_the_two() -> None:
    one_batch = 8 * 2 * 100  # tokens; 16 sequences at once: 100 s, then 50 s of training
    assert simulated(ALIKE, eta=0).tokens_per_s == pytest.approx(one_batch / 150)
    assert simulated(ALIKE, eta=2).tokens_per_s == pytest.approx(one_batch / 100, rel=0.01)
    slow = replace(ALIKE, costs=Costs(step_s=1.0, train_fixed_s=300.0))
    assert simulated(slow, eta=2).tokens_per_s == pytest.approx(one_batch / 300, rel=0.01)


def test_idle_shares_add_up() -> None:
    outcome = simulated(ALIKE, eta=0)
    assert outcome.trainer_idle == pytest.approx(100 / 150, abs=0.01)
    assert outcome.engines_idle == pytest.approx(50 / 150, abs=0.01)
    assert (outcome.staleness_mean, outcome.staleness_max) == (0, 0)


def test_a_slow_trainer_finds_data_as_old_as_allowed_unless_it_has_a_target() -> None:
    slow = replace(
        ALIKE,
        costs=Costs(step_s=1.0, train_fixed_s=300.0),
        lengths=long_tailed(80, 400, 10),
        num_steps=60,
        num_warm=20,
    )
    free = simulated(slow, eta=8)
    paced = simulated(slow, eta=8, target=-1.0)
    assert free.staleness_mean > 7
    assert paced.staleness_mean <= 2 and paced.trainer_idle < 0.02
    assert paced.tokens_per_s > 0.97 * free.tokens_per_s


@pytest.mark.parametrize("train_s", [20.0, 100.0, 140.0, 200.0])
def test_the_pace_costs_no_throughput_wherever_the_bottleneck_is(train_s: float) -> None:
    setup = replace(
        ALIKE,
        costs=Costs(step_s=1.0, train_fixed_s=train_s, reload_s=1.0),
        lengths=long_tailed(80, 800, 10),
        max_running=16,
        num_steps=120,
        num_warm=30,
    )
    free, paced = simulated(setup, eta=8), simulated(setup, eta=8, target=-1.0)
    assert paced.tokens_per_s > 0.97 * free.tokens_per_s
    assert paced.staleness_mean < free.staleness_mean + 0.2


@pytest.mark.parametrize("on_stale", OnStale)
@pytest.mark.parametrize("eta", [0, 1, 4])
def test_filters_never_raise_staleness(on_stale: OnStale, eta: int) -> None:
    setup = replace(ALIKE, lengths=long_tailed(80, 300, 10), num_steps=40)
    plain, filtered = (
        Simulation(replace(setup, filtered=share), Buffer(8, eta, on_stale)).run()
        for share in (0.0, 0.6)
    )
    assert filtered.staleness_max <= eta
    assert filtered.staleness_mean <= plain.staleness_mean + 0.15
    assert filtered.num_groups > 1.5 * plain.num_groups


def test_the_same_seed_gives_the_same_run() -> None:
    setup = replace(ALIKE, lengths=long_tailed(80, 300, 10), filtered=0.2)
    assert simulated(setup, 3) == simulated(setup, 3)
    assert simulated(setup, 3) != simulated(replace(setup, seed=1), 3)
