"""The simulator: engines that cost what they should, and runs whose numbers can be worked out."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from minirl.buffer import Buffer
from minirl.errors import RecipeError
from minirl.tools.simulate import (
    Costs,
    Engine,
    Lengths,
    Outcome,
    Sequence,
    Setup,
    Simulation,
    long_tailed,
    of_run,
    with_mean,
)

SECOND_A_TOKEN = Costs(step_s=1.0)


def sequences(*lengths: int, prompt: int = 0) -> list[Sequence]:
    return [Sequence(i, prompt, length) for i, length in enumerate(lengths)]


def ends(engine: Engine) -> list[tuple[float, int]]:
    """When each sequence is done, in order: (time, group)."""
    found = []
    while (at := engine.next_end_s) < math.inf:
        found += [(round(at, 6), s.group_id) for s in engine.take_done(at)]
    return found


def test_steps_and_their_time_are_inverse() -> None:
    dice = random.Random(0)
    for _ in range(20):
        costs = Costs(dice.random(), dice.random() / 100, dice.choice([0.0, 1e-5, 1e-3]))
        steps, num, context = dice.uniform(0, 5000), dice.randint(1, 200), dice.uniform(0, 1e5)
        seconds = costs.steps_s(steps, num, context)
        assert costs.steps_in(seconds, num, context) == pytest.approx(steps)


def test_a_step_gives_every_running_sequence_a_token_and_the_others_wait() -> None:
    engine = Engine(SECOND_A_TOKEN, max_running=4)
    engine.submit(sequences(3, 5, 5, 9), now=0.0)
    assert ends(engine) == [(3.0, 0), (5.0, 1), (5.0, 2), (9.0, 3)]
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
    assert done.versions == pytest.approx(6.0)  # of 10 tokens, 6 are of version 1


def test_long_tailed_lengths_have_their_mean_and_their_limit() -> None:
    lengths = with_mean(400, 1024, prompt=50)
    assert lengths.mean == pytest.approx(400, rel=0.02)
    assert lengths.longest == 1024 and min(lengths.answers) < 60
    assert long_tailed(100, 1000, 1) == long_tailed(100, 1000, 1)


def test_lengths_of_a_run_are_drawn_again(tmp_path: Path) -> None:
    groups = [{"prompt_tokens": 10, "lengths": [3, 5]}, {"prompt_tokens": 20, "lengths": [7, 9]}]
    lines = [{"step": i, "groups": [group]} for i, group in enumerate(groups, 1)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "batches.jsonl").write_text(text + text[:9])  # the last line is torn
    assert of_run(tmp_path) == Lengths((3, 5, 7, 9), 15)
    (tmp_path / "batches.jsonl").write_text(text[:9])
    with pytest.raises(RecipeError, match=r"no step in its batches\.jsonl"):
        of_run(tmp_path)


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
    return Simulation(setup, Buffer(size, eta, target_staleness=target)).run()


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


def test_the_same_seed_gives_the_same_run() -> None:
    setup = replace(ALIKE, lengths=long_tailed(80, 300, 10))
    assert simulated(setup, 3) == simulated(setup, 3)
    assert simulated(setup, 3) != simulated(replace(setup, seed=1), 3)
