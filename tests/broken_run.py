"""`minirl train` with an engine whose reloads are broken on purpose, one way each.

python broken_run.py not_applied train RECIPE …
"""

import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

from minirl.rollout import extension, worker
from minirl.shm.board import BoardWriter

MISSING = "model.layers.1.mlp.up_proj.weight"
Weights = Iterator[tuple[str, object]]


def not_applied(setup: worker.RolloutSetup, board: BoardWriter, pipe: Connection) -> None:
    _run(lambda store, slot: iter(()), setup, board, pipe)


def one_missing(setup: worker.RolloutSetup, board: BoardWriter, pipe: Connection) -> None:
    def views(store: object, slot: int) -> Weights:
        return (pair for pair in whole(store, slot) if pair[0] != MISSING)

    whole = extension.WeightStore.views
    _run(views, setup, board, pipe)


def torn(setup: worker.RolloutSetup, board: BoardWriter, pipe: Connection) -> None:
    """From the second half on, tensors come from the slot of the version before."""

    def views(store: extension.WeightStore, slot: int) -> Weights:
        other = dict(whole(store, 1 - slot))
        for i, (name, tensor) in enumerate(whole(store, slot)):
            yield name, tensor if i < len(store.table) // 2 else other[name]

    whole = extension.WeightStore.views
    _run(views, setup, board, pipe)


def _run(views, setup, board, pipe) -> None:  # type: ignore[no-untyped-def]
    """The first version arrives as it should; those after it do not."""
    copy = extension.Reloader.copy

    def break_later(self, weights: dict[str, object]) -> None:  # type: ignore[no-untyped-def]
        latest = self._store.latest
        copy(self, dict(views(self._store, latest % 2)) if latest > 0 else weights)

    extension.Reloader.copy = break_later
    worker.run(setup, board, pipe)


if __name__ == "__main__":
    from minirl import cli, launch
    from minirl.workers import Role

    launch.BODIES[Role.ROLLOUT] = f"broken_run:{sys.argv.pop(1)}"
    cli.main()
