"""An engine on two ranks, bfloat16 on both sides: no healthy reload is stopped, and one that went
wrong is noticed at once (rule 6). One rank is in test_engine.py."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_engine import FAULTS, HALF, Remote, check_healthy, check_noticed, running

from minirl import devices
from minirl.config import DevicesConfig
from minirl.rollout.engine import NUM_NEARER, Canary
from minirl.rollout.weight_loader import find_piece


@pytest.fixture(scope="module")
def engine(biased_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    config = replace(HALF, devices=DevicesConfig(kind="cpu", rollout=2, tensor_parallel=2))
    (place,), _ = devices.place(config, "cpu", devices.num_cores(), ranks=False)
    logs = tmp_path_factory.mktemp("engine")
    settings, place = {"half": (config, biased_folder)}, devices.with_own_temp(place, logs)
    try:
        with running(logs, settings, place) as engines:
            yield engines["half"]
    finally:
        devices.sweep_temp(logs)


@pytest.mark.vllm
def test_no_healthy_version_is_stopped(engine: Remote) -> None:
    check_healthy(engine)


@pytest.mark.vllm
@pytest.mark.parametrize("fault", FAULTS)
def test_a_reload_that_went_wrong_is_noticed_at_once(fault: str, engine: Remote) -> None:
    check_noticed(engine, fault, "" if fault in ("all", "torn") else f"{fault} ")


@pytest.mark.parametrize(
    ("room", "full", "num_ranks", "rows"),
    [
        (6, 6, 2, [(0, 6), (0, 6)]),  # the same on all
        (3, 6, 2, [(0, 3), (3, 6)]),
        (2, 4, 4, [(0, 2), (0, 2), (2, 4), (2, 4)]),  # two key-value heads on four ranks
        (8, 13, 2, [(0, 8), (8, 13)]),  # a padded vocabulary
        (16, 13, 1, [(0, 13)]),
    ],
)
def test_rank_slices(room: int, full: int, num_ranks: int, rows: list[tuple[int, int]]) -> None:
    tensor = torch.arange(3.0 * full).view(full, 3)
    for rank, (start, stop) in enumerate(rows):
        for of, held in ((tensor, torch.zeros(room, 3)), (tensor.T, torch.zeros(3, room))):
            piece, own = find_piece(held, of.shape, rank, num_ranks), tensor[start:stop]
            assert piece is not None and piece.held.shape == of[piece.of].shape
            assert torch.equal(of[piece.of], own.T if len(of) == 3 else own)


def through(canary: Canary, noise: float, change: float, is_stale: bool, count: int) -> list[str]:
    """What the canary says of each version: the trainer's logprobs change by `change`."""
    dice, trainer, said = np.random.default_rng(0), np.zeros(63), []
    first = trainer
    for _ in range(count):
        serves = first if is_stale else trainer
        said.append(canary.judge(serves + noise * dice.standard_normal(63), trainer))
        trainer = trainer + change * dice.standard_normal(63)
    return said


@pytest.mark.parametrize("noise", [1e-6, 0.1])
@pytest.mark.parametrize("change", [0.0, 0.1, 1.0, 10.0])
def test_the_canary_knows_noise_from_an_older_version(noise: float, change: float) -> None:
    dtype = "bfloat16" if noise > 1e-3 else "float32"
    assert not any(through(Canary(dtype), noise, change * noise, False, 1000))
    said = through(Canary(dtype), noise, change * noise, True, 400)
    if noise == 0.1 and change >= 1:
        assert not any(said[:NUM_NEARER]) or change > 3
        assert "older version" in "".join(said) or "(limit" in "".join(said)


def test_the_limit_comes_from_the_first_load() -> None:
    for gap, later, is_fine in ((0.01, 0.24, True), (0.01, 0.26, False), (0.1, 0.39, True)):
        canary, trainer = Canary("bfloat16"), np.zeros(63)
        assert canary.judge(trainer + gap, trainer) == ""
        assert (canary.judge(trainer - later, trainer) == "") == is_fine
        assert "nan off" in canary.judge(trainer * np.nan, trainer)
    for dtype, gap in (("bfloat16", 0.51), ("float32", 0.011)):
        assert Canary(dtype).judge(np.full(63, gap), np.zeros(63)).endswith("model differently")
