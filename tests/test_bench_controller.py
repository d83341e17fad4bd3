"""The two benches of the controller run, and mean what they say."""

import pytest

from tests.bench import BENCHES, Options

QUICKLY = Options(is_quick=True)


@pytest.mark.slow
def test_the_controller_bench_has_its_figure() -> None:
    figures = {f.name: f for f in BENCHES["controller"].measure(QUICKLY)}
    assert figures["efficiency"].goal == 0.97
    pools = (figures["generation_efficiency"].value, figures["training_efficiency"].value)
    assert figures["efficiency"].value == min(pools)
    assert min(pools) > 0.7  # 1 but for what else this machine does


def test_the_simulator_bench_counts_events() -> None:
    figures = {f.name: f for f in BENCHES["simulator"].measure(QUICKLY)}
    each = figures["us_a_group"].value
    assert figures["group_events_a_minute"].value * each / 60e6 == pytest.approx(4)
