"""The proof that a run lost nothing. Takes the files that the run itself wrote, gives one Finding
for each property; it uses no process, and nothing of the run's own bookkeeping in memory.

    steps       each log of the run has each step from 1 to the last once, in order, and ends with
                a whole line
    ledger      at every step: submitted = trained + dropped + in flight, and trained = B · step
    once        no prompt and no group was trained twice, by the run's own list
    accounted   what the last checkpoint calls consumed are the prompts that were trained, and as
                many more as were dropped for good by its counts; what it calls in flight are
                others; and every prompt up to the newest is one or the other
    staleness   no trained token is older than η: by the trainer's greatest of each step, and token
                by token for the answers that the logs have in full
    versions    they only grow, and no step began before the one before it was published
    finite      weights and optimizer of the last checkpoint; no update was left out
    clean       nothing half written is left
    rewards     no prompt whose reward is broken (task.py) was trained; all that were consumed count
                as dropped, under their reason; those with a slow reward were trained

Leaves out: when a fault counts as survived (inject.py), and accuracy (accuracy.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from minirl.config import Config
from minirl.errors import MinirlError
from minirl.recipe import load
from minirl.records import Drop
from minirl.tasks.prompts import PromptStream
from minirl.tasks.registry import make_task
from tests.soak import run_files
from tests.soak.follower import stale_line, stale_tokens, unbalanced
from tests.soak.task import BROKEN, KIND, OPTIONS, BadReward, bad_reward_at

FOR_GOOD = [reason for reason in Drop if reason is not Drop.WORKER_DIED]
DUE = {
    Drop.REWARD_ERROR: (BadReward.RAISES, BadReward.EXITS),
    Drop.REWARD_TIMEOUT: (BadReward.HANGS,),
}
NUM_NAMED = 5


@dataclass(frozen=True)
class Finding:
    name: str
    is_held: bool
    detail: str


@dataclass(frozen=True)
class Books:
    """All that is read, once."""

    run_dir: Path
    config: Config
    metrics: list[dict[str, Any]]
    trained: list[dict[str, Any]]  # one line per step: the groups of its batch
    samples: list[dict[str, Any]]
    checkpoint: Path
    state: dict[str, Any]

    @property
    def trained_prompts(self) -> list[int]:
        return [prompt for line in self.trained for prompt in run_files.prompts(line)]

    @property
    def consumed(self) -> set[int]:
        return set(range(self.state["consumed_below"])) | set(self.state["consumed_above"])

    @property
    def drops(self) -> Counter[Drop]:
        return Counter({Drop(k): n for k, n in self.state["history"]["drops"].items()})


def read_books(run_dir: Path) -> Books:
    saved = run_files.saved(run_dir)
    if saved.folder is None or saved.broken:
        raise MinirlError(f"{run_dir}: {'; '.join(saved.broken) or 'there is no checkpoint'}")
    names = (run_files.METRICS, run_files.TRAINED, run_files.SAMPLES)
    metrics, trained, samples = (run_files.lines(run_dir, name) for name in names)
    config = load(run_dir / "recipe.toml").config
    return Books(run_dir, config, metrics, trained, samples, saved.folder, saved.state)


def prove(run_dir: Path, num_verifier_faults: int = 0) -> list[Finding]:
    """`num_verifier_faults`: how often a verifier was killed, frozen or held up from outside. Each
    may cost a group its reward, beside those whose rewards are broken."""
    try:
        books = read_books(run_dir)
    except MinirlError as error:
        return [Finding("checkpoint", False, str(error))]
    checks: dict[str, Callable[[Books], str]] = {
        "steps": steps,
        "ledger": ledger,
        "once": once,
        "accounted": accounted,
        "staleness": staleness,
        "versions": versions,
        "finite": finite,
        "clean": clean,
    }
    if books.config.tasks.kind == KIND:
        checks["rewards"] = lambda books: rewards(books, num_verifier_faults)
    return [_finding(name, check, books) for name, check in checks.items()]


class Violated(Exception):
    """With what was found instead."""


def _finding(name: str, check: Callable[[Books], str], books: Books) -> Finding:
    try:
        return Finding(name, True, check(books))
    except Violated as found:
        return Finding(name, False, str(found))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        why = f"a file is not as it should be ({type(error).__name__}: {error})"
        return Finding(name, False, why)


def need(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise Violated(otherwise)


def named(items: Sequence[object]) -> str:
    more = f" and {len(items) - NUM_NAMED} more" if len(items) > NUM_NAMED else ""
    return ", ".join(map(str, items[:NUM_NAMED])) + more


# One property each: what was seen, or Violated ------------------------------------------------


def steps(books: Books) -> str:
    last = books.state["step"]
    for name in run_files.ALL_STEPS:
        found = [line.get("step") for line in run_files.lines(books.run_dir, name)]
        each = list(dict.fromkeys(found)) if name == run_files.SAMPLES else found
        gaps = sorted(set(range(1, last + 1)) - set(each))
        need(not gaps, f"{name} has no step {named(gaps)}")
        need(each == [*range(1, last + 1)], f"{name} has steps twice or out of order")
        is_whole = (books.run_dir / name).read_bytes().endswith(b"\n")
        need(is_whole, f"{name} ends with a torn line")
    return f"1 to {last}, once each, in {', '.join(run_files.ALL_STEPS)}"


def ledger(books: Books) -> str:
    size = books.config.train.batch_size
    for line in books.metrics:
        need(not (problem := unbalanced(line)), problem)
        trained, step = line["buffer/groups_trained"], line["step"]
        need(trained == size * step, f"step {step}: {trained:g} groups trained, not {size * step}")
    history = books.state["history"]
    need(history["trained"] == size * books.state["step"], "the checkpoint counts otherwise")
    lost = books.drops[Drop.WORKER_DIED]
    return f"adds up at every step: {history['trained']} trained, {lost} lost and given again"


def once(books: Books) -> str:
    for what, of in (("prompt", run_files.prompts), ("group", run_files.group_ids)):
        found = Counter(number for line in books.trained for number in of(line))
        twice = sorted(number for number, count in found.items() if count > 1)
        need(not twice, f"{what} {named(twice)} was trained twice")
    size = books.config.train.batch_size
    short = [line["step"] for line in books.trained if len(run_files.group_ids(line)) != size]
    need(not short, f"step {named(short)} did not train {size} groups")
    return f"{len(books.trained_prompts)} prompts trained, none twice"


def accounted(books: Books) -> str:
    consumed, trained = books.consumed, set(books.trained_prompts)
    skipped = sorted(trained - consumed)
    need(not skipped, f"prompt {named(skipped)} was trained and is not called consumed")
    dropped = consumed - trained
    counted = sum(books.drops[reason] for reason in FOR_GOOD)
    need(
        len(dropped) == counted,
        f"{len(dropped)} prompts are consumed but not trained ({named(sorted(dropped))}), and "
        f"{counted} groups were dropped for good",
    )
    flying = books.state["in_flight"]
    need(len(set(flying)) == len(flying), "a prompt is in flight twice")
    both = sorted(consumed & set(flying))
    need(not both, f"prompt {named(both)} is consumed and in flight")
    newest = max([*consumed, *flying], default=-1)
    holes = sorted(set(range(newest + 1)) - consumed - set(flying))
    need(not holes, f"prompt {named(holes)} is neither consumed nor in flight")
    return (
        f"{newest + 1} prompts = {len(trained)} trained + {len(dropped)} dropped + "
        f"{len(flying)} in flight"
    )


def rewards(books: Books, num_verifier_faults: int) -> str:
    bad = bad_rewards_of(books.config, sorted(books.consumed))
    trained = set(books.trained_prompts)
    wrong = [index for index, kind in bad.items() if kind in BROKEN and index in trained]
    need(not wrong, f"prompt {named(wrong)} was trained, and its reward is broken")
    slow = [index for index, kind in bad.items() if kind is BadReward.SLOW]
    lost = [index for index in slow if index not in trained]
    spare = 0
    for reason, due in DUE.items():
        num, num_due = books.drops[reason], sum(kind in due for kind in bad.values())
        need(num >= num_due, f"{num} groups dropped as {reason}, and {num_due} rewards are so")
        spare += num - num_due
    need(
        spare <= num_verifier_faults,
        f"{spare} more rewards failed than are broken, and verifiers had {num_verifier_faults} "
        "faults",
    )
    others = spare + books.drops[Drop.STALE] + books.drops[Drop.REFUSED]
    need(len(lost) <= others, f"prompt {named(lost)} has a slow reward and was not trained")
    counts = Counter(bad.values())
    said = ", ".join(f"{counts[kind]} {kind}" for kind in BROKEN)
    return (
        f"{said}: all dropped, none trained; {len(slow)} slow: {len(slow) - len(lost)} trained; "
        f"{spare} more lost with their verifier"
    )


def bad_rewards_of(config: Config, indices: Sequence[int]) -> dict[int, BadReward]:
    """Of prompts that have one, by their index in the stream."""
    stream = PromptStream(make_task(config), None, config.seed)
    seed, share = (config.tasks.options[name] for name in OPTIONS[1:])
    found = {index: bad_reward_at(seed, share, stream.place(index)) for index in indices}
    return {index: bad for index, bad in found.items() if bad is not None}


def staleness(books: Books) -> str:
    limit, num_tokens = books.config.buffer.max_staleness, 0
    for line in books.metrics:
        need(not (problem := stale_line(line, limit)), problem)
    began = {line["step"]: line["version"] for line in books.trained}
    for sample in books.samples:
        count, problem = stale_tokens(sample, began[sample["step"]], limit)
        need(not problem, problem)
        num_tokens += count
    greatest = max((line["buffer/staleness_max"] for line in books.metrics), default=0)
    return f"at most {greatest:g} (allowed: {limit}); {num_tokens} tokens looked at one by one"


def versions(books: Books) -> str:
    given = [line["version"] for line in books.metrics]
    need(all(a < b for a, b in pairwise(given)), "a version is not above the one before it")
    before = {line["step"] + 1: line["version"] for line in books.metrics}
    early = [t["step"] for t in books.trained if t["version"] < before.get(t["step"], 0)]
    need(not early, f"step {named(early)} began before the one before it was published")
    need(books.state["history"]["version"] >= given[-1], "the checkpoint has an older version")
    return f"{given[0]} to {given[-1]} in {len(given)} steps"


def finite(books: Books) -> str:
    from safetensors.torch import load_file

    num_values = 0
    for path in sorted(books.checkpoint.rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if tensor.is_floating_point():
                need(bool(tensor.isfinite().all()), f"{path.name}: {name} is not finite")
                num_values += tensor.numel()
    need(num_values > 0, "the checkpoint holds no weights")
    skipped = [line["step"] for line in books.metrics if line.get("train/skipped_updates")]
    need(not skipped, f"step {named(skipped)} left an update out")
    return f"{num_values} numbers of {books.checkpoint.name}; no update was left out"


def clean(books: Books) -> str:
    left = [str(path.relative_to(books.run_dir)) for path in _half_written(books.run_dir)]
    need(not left, f"left behind: {named(left)}")
    return "no half-written file or checkpoint, no rendezvous, no temporary folder"


def _half_written(run_dir: Path) -> Iterator[Path]:
    yield from run_dir.rglob("*.tmp")
    yield from (run_dir / "checkpoints").glob(".step-*")
    yield from (path for name in ("tmp", "rendezvous") if (path := run_dir / name).exists())
