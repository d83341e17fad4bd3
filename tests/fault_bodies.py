"""An engine and a trainer rank that only sleep, for runs that are about faults. They send what real
ones send, over real pipes, boards and a real weight store, whose one tensor counts the updates in
it; checkpoints hold that count. What goes wrong is in the script each is spawned with."""

import json
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from processes import publish
from safetensors.torch import load_file, save_file

from minirl import messages
from minirl.errors import StaleWeights
from minirl.records import Group, StopReason, Trajectory
from minirl.run_dir import replacing
from minirl.shm.board import BEAT_S, BoardWriter, State, Total
from minirl.shm.weights import WeightStore

TICK_S = 0.01
LONG_S = 300.0  # nobody waits for it


@dataclass(frozen=True)
class Script:
    store: WeightStore
    folder: str = ""  # of a trainer: the checkpoint
    rendezvous: str = ""
    is_resumed: bool = False
    version: int = 0
    eta: int = 0
    seconds: float = 0.03  # an answer, a step
    start_s: float = 0.0
    bad: dict[str, int] = field(default_factory=dict)
    """What goes wrong, and when: "die_at_step", "die_in_save", "die_after_publishing", "unsaved"
    (a step), "die_in_load" (after that, once more), "dies" (at once), "deadly_prompt", "deaf" (an
    engine that never answers), "long_save" (a step), "held_save" (a step: it lasts until there is a
    file "begun"), "long_evaluation" (a version), "stale" (an engine that new weights do not reach),
    "broken_from" (a version: no reward from then on)."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def engine(script: Script, board: BoardWriter, pipe: Connection) -> None:
    time.sleep(script.start_s)
    pipe.send(messages.Started())
    running: list[tuple[float, messages.GroupRequest, int, int]] = []
    while True:
        board.enter(State.GENERATING if running else State.WAITING_FOR_PROMPTS)
        board.serving(script.store.latest, len(running))
        if "stale" in script.bad and script.store.latest > 0:
            raise StaleWeights(f"version {script.store.latest} did not reach the engine")
        while pipe.poll(TICK_S):
            message = pipe.recv()
            if isinstance(message, messages.Submit) and "deaf" not in script.bad:
                head = script.store.latest  # asked after the message came, as a real one does
                if any(group.is_eval for group in message.groups):
                    pipe.send(messages.Pinned(head))
                for group in message.groups:
                    if group.prompt[0] == script.bad.get("deadly_prompt"):
                        die()
                    due = time.monotonic() + script.seconds * (1 + group.group_id % 3)
                    if group.is_eval and head == script.bad.get("long_evaluation"):
                        due += LONG_S
                    running += [(due, group, i, head) for i in range(len(group.cells))]
            elif isinstance(message, messages.Abort):
                running = [entry for entry in running if entry[1].group_id != message.group_id]
                pipe.send(messages.Gone(message.group_id, ""))
            elif not isinstance(message, messages.Submit):
                return
        now = time.monotonic()
        board.add(Total.TOKENS, len(running))
        for due, group, i, head in [entry for entry in running if entry[0] <= now]:
            running.remove((due, group, i, head))
            tail = head if group.is_eval else max(head, script.store.latest)
            done = Trajectory(group.cells[i], 12, 4, StopReason.STOP, head, tail)
            pipe.send(messages.Finished(((group.group_id, i, done),)))


def trainer(script: Script, board: BoardWriter, pipe: Connection) -> None:
    if "dies" in script.bad:
        os.write(1, b"the last words of a rank\n")
        raise RuntimeError("CUDA out of memory" if script.bad["dies"] == 2 else "no luck")
    saved = Path(script.folder) / "model.safetensors"
    updates = int(load_file(saved)["w"]) if script.is_resumed else 0
    died = Path(script.rendezvous).with_name("died")
    if "die_in_load" in script.bad and died.exists() and not died.read_text():
        died.write_text("again")
        die()
    publish(script.store, script.version, [torch.tensor([float(updates)])])
    pipe.send(messages.Started())

    def is_due(fault: str, step: int) -> bool:
        """Each fault happens once, unless "always"."""
        is_it = step == script.bad.get(fault) and ("always" in script.bad or not died.exists())
        if is_it:
            died.touch()
        return is_it

    while True:
        board.enter(State.WAITING_FOR_BATCH)
        if not pipe.poll(BEAT_S):
            continue
        request = pipe.recv()
        if isinstance(request, messages.Train):
            board.enter(State.TRAINING)
            time.sleep(script.seconds)
            step, version = request.batch.step, request.batch.version
            if is_due("die_at_step", step):
                die()
            updates += 1
            publish(script.store, version + 1, [torch.tensor([float(updates)])])
            if is_due("die_after_publishing", step):
                time.sleep(10 * script.seconds)  # engines load it, and write under it
                die()
            written = [t for group in request.batch.groups for t in group.trajectories]
            ages = [version - v for t in written for v in (t.head_version, t.tail_version)]
            stale = float(max(age for age in ages if age <= script.eta))  # older ones are masked
            values: dict[str, float | None] = {"train/tokens": 1.0, "train/loss": float(updates)}
            values |= {"buffer/staleness_max": stale, "buffer/staleness_mean": stale}
            shown = tuple(shown_tokens(g, version - script.eta) for g in request.batch.groups)
            pipe.send(messages.Trained(version + 1, values, samples=shown))
        elif isinstance(request, messages.Save):
            board.enter(State.SAVING)
            step = request.state.step
            if is_due("die_in_save", step):
                Path(request.folder).with_name(".step-000099.tmp").mkdir(parents=True)
                die()
            if step == script.bad.get("unsaved"):
                pipe.send(messages.Saved(request.folder, "No space left on device"))
                continue
            while step == script.bad.get("held_save") and not died.with_name("begun").exists():
                time.sleep(TICK_S)
            seconds = LONG_S if step == script.bad.get("long_save") else 0.0
            write_checkpoint(Path(request.folder), request.state, updates, seconds)
            pipe.send(messages.Saved(request.folder))
        elif not isinstance(request, messages.Score):
            return


def shown_tokens(group: Group, oldest: int) -> messages.AnswerTokens:
    """The first and the last token of a group's first answer; what is older is not trained."""
    first = group.trajectories[0]
    versions = [first.head_version, first.tail_version]
    gaps = [0.0 if version >= oldest else None for version in versions]
    return messages.AnswerTokens(["a", "b"], versions, gaps)


def write_checkpoint(
    folder: Path, state: messages.CheckpointState, updates: int, seconds: float = 0.0
) -> None:
    with replacing(folder) as aside:
        (aside / "trainer").mkdir(parents=True)
        time.sleep(seconds)
        for name in ("model.safetensors", "trainer/optimizer.safetensors"):
            save_file({"w": torch.tensor([float(updates)])}, aside / name)
        (aside / "config.json").write_text("{}")
        (aside / "trainer" / "state.json").write_text(json.dumps(asdict(state)))
