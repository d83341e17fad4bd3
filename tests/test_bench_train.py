"""The trainer's bench: what it trains on, and that it runs through."""

import pytest

from tests.bench import Options, run
from tests.bench.batches import draw
from tests.bench.train import QUICK, SIZES


@pytest.mark.parametrize("name", SIZES)
def test_a_batch_is_long_tailed_and_as_its_descriptors_say(name: str) -> None:
    size = SIZES[name]
    drawn = draw(size, 100)
    trajectories = [(g, t) for g in drawn.batch.groups for t in g.trajectories]
    for (group, t), tokens in zip(trajectories, drawn.sequences, strict=True):
        view = drawn.ring.read(t.cell, group.id)
        assert view.tokens.tolist() == tokens
        assert t.length == len(tokens) <= size.longest and t.num_written == view.mask.sum()
    lengths = sorted(map(len, drawn.sequences))
    assert lengths[-1] > 3 * lengths[len(lengths) // 2]
    assert size.max_tokens >= 4 * size.longest  # the roomy budget


@pytest.mark.slow
def test_it_runs_through() -> None:
    figures = {figure.name for figure in run("train", Options(is_quick=True)).figures}
    assert {"step_over_bare_loop", "dynamic_over_fixed", "chunked_over_full_memory"} <= figures
    assert QUICK.repeats == 1
