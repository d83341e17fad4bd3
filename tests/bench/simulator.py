"""The simulator bench: what the controller's decisions cost, without processes.

group_events_a_minute  groups admitted, made ready, taken into a batch and published: four
                       events a group, through the real Buffer, Admission and Dispatcher
cost_growth            time for a group with 32,768 in flight / with 512: flat is 1
"""

import time
from dataclasses import replace

from minirl.config import Config
from minirl.tools.simulate import Costs, Simulation, long_tailed
from tests.bench import Figure, Options, at_least, at_most

EVENTS_A_GROUP = 4
ETA = 7


def seconds(batch_size: int, num_groups: int) -> float:
    base = Config()
    config = replace(
        base,
        devices=replace(base.devices, rollout=6),
        buffer=replace(base.buffer, max_staleness=ETA),
        train=replace(base.train, batch_size=batch_size),
    )
    costs, lengths = Costs(0.01, train=1e-3), long_tailed(126, 1000, 10)
    simulation = Simulation(config, costs, lengths, max(64, batch_size))
    simulation.group_size = 1  # fewer than a recipe may have: groups are what is timed
    started = time.process_time()
    simulation.run(num_groups // batch_size)
    return (time.process_time() - started) / simulation.num_groups


def measure(options: Options) -> list[Figure]:
    num = 8_192 if options.is_quick else 2_500_000
    few, many = seconds(64, num // 10), seconds(4096, max(8 * 4096, num // 10))
    each = seconds(256, num)
    return [
        at_least("group_events_a_minute", 60 * EVENTS_A_GROUP / each, 10e6, f"{4 * num:,} run"),
        at_most("cost_growth", many / few, 1.5, "32,768 groups in flight / 512"),
        Figure("us_a_group", 1e6 * each, note="CPU time"),
    ]
