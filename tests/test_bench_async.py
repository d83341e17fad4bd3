"""`minirl bench async`: what its figures are made of, on runs with known answers."""

import pytest

from tests.bench.asynchronous import FULL, Run, Steady, bound_tokens_per_s, figures, steady


def line(step: int, seconds: float, tokens: float, rollout: float, train: float) -> dict:
    return {
        "step": step,
        "seconds": seconds,
        "train/tokens": tokens,
        "rollout/idle_frac": rollout,
        "train/idle_frac": train,
        "buffer/staleness_mean": float(step),
    }


def test_rates_are_of_the_middle_and_shares_are_of_time() -> None:
    lines = [
        line(1, 50.0, 9e9, 1.0, 1.0),  # the first fill
        line(2, 51.0, 9e9, 1.0, 1.0),
        line(3, 52.0, 1000, 0.5, 0.0),
        line(4, 55.0, 3000, 0.1, 0.2),
        line(5, 99.0, 9e9, 1.0, 1.0),  # the end
    ]
    found = steady(lines, first=2, last=4)
    assert found.seconds == 4.0 and found.tokens == 4000 and found.tokens_per_s == 1000
    assert found.rollout_idle == pytest.approx((0.5 * 1 + 0.1 * 3) / 4)
    assert found.train_idle == pytest.approx(0.15)
    assert found.rollout_busy == pytest.approx(0.8)
    assert found.staleness == pytest.approx((3 * 1 + 4 * 3) / 4)


def run(rate: float, rollout: float, train: float, seconds: float | None, accuracy: float) -> Run:
    return Run(Steady(10.0, 10 * rate, rollout, train, 1.0), seconds, accuracy)


RUNS = {
    # The engine takes 0.6 s to 1,000 tokens, the trainer 0.4 s, one after the other.
    0: [run(1000, 0.4, 0.6, 20.0, 0.90), run(1000, 0.4, 0.6, 24.0, 0.92)],
    # Beside each other the engine takes 0.625 s.
    1: [run(1600, 0.0, 0.3, 12.0, 0.92), run(1500, 0.0, 0.3, 12.0, 0.90)],
    4: [run(1580, 0.0, 0.3, 12.0, 0.92), run(1400, 0.0, 0.3, 12.0, 0.90)],
    8: [run(1650, 0.0, 0.3, None, 0.92), run(1650, 0.0, 0.3, 12.0, 0.90)],
}


def test_the_bound_is_the_slower_pools_least_busy_time_in_any_run() -> None:
    # The engine's is the synchronous one's, but for 8: 1 / 1.65 = 0.606.
    assert bound_tokens_per_s(RUNS) == pytest.approx(1000 / 0.6)
    # A trainer that is slowed down by the engine beside it does not make the bound easier.
    slowed = {0: RUNS[0], 1: [run(1000, 0.5, 0.0, None, 0.9)] * 2}
    assert bound_tokens_per_s(slowed) == pytest.approx(1000 / 0.5)


def test_figures_are_of_the_best_eta_up_to_4_and_paired_by_seed() -> None:
    found = {figure.name: figure for figure in figures(RUNS)}
    value = {name: figure.value for name, figure in found.items()}
    assert value["best_eta"] == 1, "8 is faster, and does not count"
    assert value["async_over_sync"] == pytest.approx(1.55) and not found["async_over_sync"].ok
    assert value["bound_over_sync"] == pytest.approx(1 / 0.6)
    assert value["share_of_bound"] == pytest.approx(1.55 * 0.6) and found["share_of_bound"].ok
    assert value["accuracy_gap"] == pytest.approx(0.0)
    half = 12.706 * 0.02  # two seeds, 0.02 to either side
    assert (value["accuracy_gap_low"], value["accuracy_gap_high"]) == pytest.approx((-half, half))
    assert value["sooner_by"] == pytest.approx((20 / 12 + 2) / 2)
    assert value["eta_4_over_sync"] == pytest.approx(1.49)
    assert value["eta_0_seconds_to_80"] == 22.0
    assert "eta_8_seconds_to_80" not in value, "one of its runs never got there"


def test_an_accuracy_that_is_lower_in_every_seed_is_no_noise() -> None:
    sync = [run(1000, 0.4, 0.6, 20.0, accuracy) for accuracy in (0.90, 0.91, 0.92)]
    worse = [run(1600, 0.0, 0.3, 12.0, accuracy) for accuracy in (0.85, 0.86, 0.86)]
    found = {figure.name: figure for figure in figures({0: sync, 4: worse})}
    assert found["accuracy_gap"].value == pytest.approx(-0.16 / 3)
    assert found["accuracy_gap_high"].value < 0 and not found["accuracy_gap_high"].ok


def test_seeds_run_in_turns_and_the_counted_steps_are_far_from_both_ends() -> None:
    assert FULL.order(0) == FULL.order(1)[::-1] and FULL.order(0)[0] == 0
    # All slots are filled before the first, and groups are begun as ever until the last.
    assert FULL.first > max(FULL.etas) and FULL.last < FULL.steps - max(FULL.etas)
