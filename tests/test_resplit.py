"""devices.split = "auto": what a run begins with, and when its own steps change it."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import Run, assert_accounted

from minirl.config import Config
from minirl.recipe import load, to_toml
from minirl.resplit import NUM_STEPS, Corrector, begin, best
from minirl.tools.plan.balance import Balance
from minirl.tools.plan.gpus import GPUS
from minirl.tools.plan.split import possible, with_split

BASE = Config()
AUTO = with_split(
    replace(
        BASE,
        devices=replace(BASE.devices, split="auto"),
        train=replace(BASE.train, steps=100, num_minibatches=1),
    ),
    4,
    4,
)


def lines(num: int, train_idle: float = 0.41, first: int = 1, **more: Any) -> list[dict[str, Any]]:
    idle = {"rollout/idle_frac": 0.0, "train/idle_frac": train_idle}
    return [{"step": i, "seconds": 10.0 * i, **idle, **more} for i in range(first, first + num)]


def test_a_resumed_run_begins_with_what_its_steps_recommend(tmp_path: Path) -> None:
    assert begin(AUTO, "cpu", None) == AUTO  # nothing is known of this device
    (tmp_path / "recipe.toml").write_text(to_toml(AUTO))
    assert begin(AUTO, "cpu", tmp_path) == AUTO  # nor of this run yet
    text = "\n".join(json.dumps(line) for line in lines(3))
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    assert begin(AUTO, "cpu", tmp_path) == with_split(AUTO, 5, 3)


def test_only_splits_that_the_recipe_allows_are_taken() -> None:
    assert best(Balance(4, 4, 0.0, 0.41), AUTO, "cpu") == (5, 3)
    pairs = replace(AUTO, devices=replace(AUTO.devices, tensor_parallel=2))
    assert best(Balance(4, 4, 0.0, 0.6), pairs, "cpu") == (6, 2)
    # Two trajectories to a minibatch: no more than two ranks.
    few = replace(AUTO, train=replace(AUTO.train, batch_size=1))
    few = replace(few, rollout=replace(few.rollout, group_size=2))
    assert best(Balance(6, 2, 0.7, 0.0), few, "cpu") == (6, 2)


def test_where_nothing_fits_the_split_is_still_one_that_the_recipe_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = replace(GPUS["3090"], memory_gib=0.1)
    monkeypatch.setattr("minirl.resplit._gpu", lambda kind: small)
    pairs = replace(AUTO, devices=replace(AUTO.devices, tensor_parallel=2))
    assert best(Balance(4, 4, 0.0, 0.41), pairs, "cuda") in possible(pairs, 8)


def test_the_first_steps_correct_the_split_once_and_where_it_is_worth_it() -> None:
    own = lines(NUM_STEPS)
    corrector = Corrector(AUTO, "cpu", 0)
    assert not corrector.look(own[:-1], 30.0)  # too early
    assert corrector.look(own, 30.0) and corrector.better == (5, 3)
    assert corrector.why.startswith("devices.split: generation-bound: trainers idle 41%")
    # 94 steps of 10 s, a fifth of it saved
    assert corrector.why.endswith("going on with 5 + 3, which should save 188 s")
    assert not Corrector(AUTO, "cpu", 0).look(own, 100.0)  # the restart costs more
    assert not Corrector(AUTO, "cpu", 0).look(lines(NUM_STEPS, train_idle=0.02), 1.0)  # balanced
    assert not Corrector(AUTO, "cpu", 0).look(lines(NUM_STEPS + 1), 1.0)  # it was decided
    synchronous = replace(AUTO, buffer=replace(AUTO.buffer, max_staleness=0))
    assert not Corrector(synchronous, "cpu", 0).look(own, 1.0)  # there everybody waits in turn


def test_a_resumed_run_looks_at_its_own_steps_only() -> None:
    before = lines(50, train_idle=0.9)
    corrector = Corrector(AUTO, "cpu", 50)
    assert not corrector.look(before, 1.0)
    assert not corrector.look(before + lines(NUM_STEPS - 1, first=51), 1.0)
    assert corrector.look(before + lines(NUM_STEPS, first=51), 1.0)
    assert corrector.better == (5, 3)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_goes_on_with_another_split_and_loses_nothing(
    tmp_path: Path, tied_folder: Path
) -> None:
    """One engine feeds two ranks, who wait for it: then two engines feed one."""
    run = Run(
        tmp_path / "run",
        model__path=tied_folder,
        devices__rollout=1,
        devices__train=2,
        devices__split='"auto"',
        rollout__max_new_tokens=64,
        rollout__max_num_seqs=2,
        train__steps=2000,
        eval__every=0,
    )
    run.wait_for_step(NUM_STEPS + 3)
    os.kill(run.process.pid, signal.SIGINT)
    ended = run.end()
    assert ended.code == 130, ended
    assert "going on with 2 + 1" in ended.out, ended
    metrics = run.metrics()
    assert_accounted(metrics, max_staleness=2)
    splits = [(line["rollout/devices"], line["train/devices"]) for line in metrics]
    assert splits == [(1, 2)] * NUM_STEPS + [(2, 1)] * (len(metrics) - NUM_STEPS)
    assert load(run.dir / "recipe.toml").config.devices.rollout == 2
