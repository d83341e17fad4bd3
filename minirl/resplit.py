"""devices.split = "auto": how a run shares its devices out, at first and after its own steps.

A run begins with what is planned for its GPU (plan/split.py), a resumed one with what its steps
measured. After NUM_STEPS steps the measured split takes over, once, if the time that it saves in
the rest of the run is worth the restart: the run is saved, and goes on on devices shared out anew.

Takes metric lines and a recipe, gives a recipe. Leaves out: the restart itself (launch.py).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minirl import devices
from minirl.config import Config
from minirl.recipe import load
from minirl.run_dir import read_lines
from minirl.tools.plan.balance import NUM_FIRST, Balance, balance
from minirl.tools.plan.gpus import Gpu, recognise
from minirl.tools.plan.memory import train_bill
from minirl.tools.plan.shapes import shape_of
from minirl.tools.plan.split import possible, recommended, splits, usual_lengths, with_split

NUM_STEPS = 6  # the first says nothing: it waits for the first answers
WORTH = 2.0  # seconds to be saved for each that the restart costs


def begin(config: Config, kind: str, resumed: Path | None) -> Config:
    """`resumed`: the directory of the run that goes on."""
    given = config.devices.rollout + config.devices.train
    if resumed is not None:
        before = load(resumed / "recipe.toml").config.devices
        found = balance(read_lines(resumed / "metrics.jsonl"), before.rollout, before.train)
        if found is not None and before.rollout + before.train == given:
            return with_split(config, *best(found, config, kind))
    gpu = _gpu(kind)
    if gpu is None:  # nothing is known of this device: as the recipe says
        return config
    found_splits = splits(config, gpu, shape_of(config), usual_lengths(config), given)
    planned = recommended(found_splits)
    return with_split(config, planned.rollout, planned.train)


def best(found: Balance, config: Config, kind: str) -> tuple[int, int]:
    """By what was measured, of the splits that the recipe allows and that fit; of all that it
    allows, where none does."""
    pairs = possible(config, found.rollout + found.train)
    gpu = _gpu(kind)
    if gpu is not None:
        shape = shape_of(config)
        fitting = [pair for pair in pairs if train_bill(config, gpu, shape, pair[1]).is_ok]
        pairs = fitting or pairs
    return found.best(pairs)


class Corrector:
    """Looks at the steps of one run, from its start on these devices."""

    def __init__(self, config: Config, kind: str, first_step: int):
        self.config, self.kind, self.first_step = config, kind, first_step
        self.better: tuple[int, int] | None = None
        self.why = ""

    def look(self, lines: Sequence[dict[str, Any]], start_s: float) -> bool:
        """Whether the run should end here, to go on with `better`. `start_s`: seconds from the
        start of its workers until they were up."""
        own = [line for line in lines if line["step"] > self.first_step]
        if len(own) != NUM_STEPS or self.config.is_synchronous:
            return False
        rollout, train = self.config.devices.rollout, self.config.devices.train
        found = balance(own, rollout, train)
        assert found is not None
        pair = best(found, self.config, self.kind)
        num_left = self.config.train.steps - own[-1]["step"]
        step_s = (own[-1]["seconds"] - own[NUM_FIRST - 1]["seconds"]) / (len(own) - NUM_FIRST)
        saved_s = num_left * step_s * (1 - 1 / found.throughput(*pair))
        if pair == (rollout, train) or saved_s < WORTH * start_s:
            return False
        self.better = pair
        self.why = (
            f"devices.split: {found.sentence('device')}; going on with {pair[0]} + {pair[1]}, "
            f"which should save {saved_s:.0f} s"
        )
        return True


def _gpu(kind: str) -> Gpu | None:
    return recognise(*devices.gpu_name_and_bytes()) if kind == "cuda" else None
