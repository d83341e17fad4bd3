"""The simulator bench: what the controller's decisions cost, without processes.

group_events_a_minute  groups admitted, made ready, taken into a batch and published: four
                       events a group, through the real Buffer, Pace and Dispatcher
cost_growth            time for a group with 32,768 in flight / with 512: flat is 1
"""

import time

from minirl.buffer import Buffer
from minirl.pace import Pace
from minirl.tools.simulate import Costs, Setup, Simulation, long_tailed
from tests.bench import Figure, Options, at_least, at_most

EVENTS_A_GROUP = 4
ETA = 7


def seconds(batch_size: int, num_groups: int) -> float:
    setup = Setup(
        costs=Costs(0.01, train_fixed_s=1e-3),
        lengths=long_tailed(100, 1000, 10),
        num_engines=6,
        max_running=max(64, batch_size),
        group_size=1,
        num_steps=num_groups // batch_size,
    )
    pace = Pace(batch_size, (ETA + 1) * batch_size)
    simulation = Simulation(setup, Buffer(batch_size, ETA, pace=pace))
    started = time.process_time()
    simulation.run()
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
