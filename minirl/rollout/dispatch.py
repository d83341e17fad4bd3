"""Who samples which group. Takes group sizes and what comes back, gives a worker for each group.

A pure structure, so that a simulator can drive it. A group goes to the worker with the fewest
trajectories outstanding; all of a group go to one worker, where they share their prompt's KV.
"""


class Dispatcher:
    def __init__(self, num_workers: int):
        self._outstanding: list[dict[int, int]] = [{} for _ in range(num_workers)]
        self._load = [0] * num_workers
        self._place: dict[int, int] = {}

    def assign(self, group_id: int, num_trajectories: int) -> int:
        worker = self._load.index(min(self._load))
        self._outstanding[worker][group_id] = num_trajectories
        self._load[worker] += num_trajectories
        self._place[group_id] = worker
        return worker

    def worker_of(self, group_id: int) -> int | None:
        return self._place.get(group_id)

    def trajectory_done(self, group_id: int) -> None:
        worker = self._place[group_id]
        self._outstanding[worker][group_id] -= 1
        self._load[worker] -= 1
        if not self._outstanding[worker][group_id]:
            self.forget(group_id)

    def forget(self, group_id: int) -> None:
        worker = self._place.pop(group_id, None)
        if worker is not None:
            self._load[worker] -= self._outstanding[worker].pop(group_id)

    def lost(self, worker: int) -> list[int]:
        """The worker died: its unfinished groups, which are nobody's now."""
        groups = list(self._outstanding[worker])
        for group_id in groups:
            self.forget(group_id)
        return groups
