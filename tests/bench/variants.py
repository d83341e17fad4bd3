"""minirl with one part replaced: what an ablation compares with, and what a bench looks into.

    python -m tests.bench.variants NAME train RECIPE …
    python -m tests.bench.sweep RECIPE --vary variant=none,NAME

    waiting   new weights wait until every running answer is finished, and none is begun meanwhile:
              generation that cannot be interrupted (the paper's figure 6b)
    fixed     micro-batches of a fixed number of sequences, the most that fit even if all are as
              long as allowed: what dynamic micro-batches replace (figure 6a); one trainer rank
    behind    a step begins only when every group that may be in flight is ready: then each batch,
              after the first η, is exactly η updates old, on any machine. Give
              buffer.target_staleness = η or more with it
    keeping   nothing is different, but the trainer keeps the weights of every version in
              RUN/weights/<version>.safetensors

These are no settings: no run should train like that. Imports stay inside the bodies, which run in
processes of their own.
"""

import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirl.errors import RecipeError

if TYPE_CHECKING:
    from minirl.loop import Loop
    from minirl.messages import TrainerSetup
    from minirl.rollout.worker import RolloutSetup
    from minirl.shm.board import BoardWriter

KEPT = "weights"  # in the run directory; bench/asynchronous.py looks there


def waiting_engine(setup: "RolloutSetup", board: "BoardWriter", pipe: Connection) -> None:
    from minirl.rollout import worker
    from tests.bench.worker_harness import WaitingWorker

    worker.RolloutWorker = WaitingWorker  # type: ignore[misc]
    worker.run(setup, board, pipe)


def fixed_trainer(setup: "TrainerSetup", board: "BoardWriter", pipe: Connection) -> None:
    from minirl.train import trainer
    from tests.bench.trainer_harness import FixedCount

    class Fixed(trainer.Trainer):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            count = max(1, self.config.train.max_tokens // self.config.max_tokens_per_trajectory)
            self.preparer = FixedCount(**vars(self.preparer), count=count)

    trainer.Trainer = Fixed  # type: ignore[misc, assignment]
    trainer.run(setup, board, pipe)


def keeping_trainer(setup: "TrainerSetup", board: "BoardWriter", pipe: Connection) -> None:
    from safetensors.torch import save_file

    from minirl.train import trainer

    folder = Path(str(Path(setup.rendezvous).parent)) / KEPT
    folder.mkdir(exist_ok=True)

    class Keeping(trainer.Trainer):
        def publish(self, version: int) -> float:
            seconds = super().publish(version)
            own = {name: p.detach() for name, p in self.policy.model.named_parameters()}
            save_file(own, folder / f"{version:06d}.safetensors")
            return seconds

    trainer.Trainer = Keeping  # type: ignore[misc, assignment]
    trainer.run(setup, board, pipe)


def behind_loop() -> type["Loop"]:
    from minirl.loop import Loop

    class Behind(Loop):
        def learn(self) -> None:
            self.feed()  # slots that came back are taken before anything is trained
            slots = self.groups.slots
            if self.groups.evaluation is None and not slots["sampling"] + slots["grading"]:
                super().learn()

    return Behind


BODIES = {
    "waiting": ("rollout", waiting_engine),
    "fixed": ("train", fixed_trainer),
    "keeping": ("train", keeping_trainer),
}
VARIANTS = (*BODIES, "behind")


def program(name: str) -> tuple[str, ...]:
    """minirl as this variant, for `minirl.tools.sweep.train`."""
    return (sys.executable, "-m", "tests.bench.variants", name)


def main() -> None:
    from minirl import cli, launch
    from minirl.messages import Role

    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in VARIANTS:
        remedy = f"one of {', '.join(VARIANTS)}"
        print(f"minirl: {RecipeError('variant', name, 'no such variant', remedy)}", file=sys.stderr)
        sys.exit(RecipeError.exit_code)
    if name == "behind":
        launch.Loop = behind_loop()  # type: ignore[misc]
    else:
        role, body = BODIES[name]
        launch.BODIES[Role(role)] = f"tests.bench.variants:{body.__name__}"
    sys.argv[:2] = ["minirl"]
    cli.main()


if __name__ == "__main__":
    main()
