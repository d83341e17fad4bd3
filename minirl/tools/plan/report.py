"""What `minirl plan` prints, as rows of text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minirl.config import Config
from minirl.errors import RecipeError
from minirl.tools.plan.gpus import GIB, Gpu
from minirl.tools.plan.memory import Bill, rollout_bill, train_bill
from minirl.tools.plan.shapes import shape_of
from minirl.tools.plan.split import Split, ladder, recommended, splits, usual_lengths
from minirl.tools.simulate.lengths import Lengths, of_run

Rows = Iterator[tuple[str, ...]]


@dataclass(frozen=True)
class Question:
    config: Config
    gpu: Gpu
    num_gpus: int
    mean_tokens: float | None = None  # of an answer
    run_dir: Path | None = None  # whose lengths are taken

    @property
    def lengths(self) -> Lengths:
        if self.run_dir is not None:
            return of_run(self.run_dir)
        return usual_lengths(self.config, self.mean_tokens)


def memory_rows(asked: Question) -> Rows:
    config, lengths = asked.config, asked.lengths
    shape = shape_of(config)
    usual = lengths.mean + lengths.prompt
    rollout = rollout_bill(config, asked.gpu, shape, usual)
    yield "model", f"{config.model.path}: {shape.num_parameters / 1e9:.2f} B parameters", ""
    yield from _bill_rows("rollout GPU", rollout)
    fit = f"{rollout.kv_tokens:,} KV tokens: {rollout.num_longest:,} of the longest answers"
    of_usual = f"{rollout.num_usual:,} of the usual {usual:,.0f} tokens"
    yield "", f"{fit}, {of_usual} (rollout.max_num_seqs {config.rollout.max_num_seqs})", ""
    # As many as can train share an optimizer; split_rows says where it is too big for fewer.
    train = max(1, asked.num_gpus - config.devices.tensor_parallel)
    yield from _bill_rows("training GPU", train_bill(config, asked.gpu, shape, train))


def _bill_rows(name: str, bill: Bill) -> Rows:
    parts = ", ".join(f"{what} {size / GIB:.1f}" for what, size in bill.items)
    verdict = "ok" if bill.is_ok else f"TOO BIG: {bill.remedy}"
    yield name, f"{parts} = {bill.total / GIB:.1f} of {bill.available / GIB:.1f} GiB", verdict


def split_rows(asked: Question) -> Rows:
    config, lengths = asked.config, asked.lengths
    yield _HEADER
    found = splits(config, asked.gpu, shape_of(config), lengths, asked.num_gpus)
    best = recommended(found)
    for split in found:
        o = split.outcome
        yield (
            f"{split.rollout} + {split.train}",
            f"{o.tokens_per_s:,.0f}",
            f"{o.engines_idle:.0%}",
            f"{o.trainer_idle:.0%}",
            f"{o.staleness_mean:.2f}",
            f"{o.staleness_max}",
            _advice(split, split is best),
        )


def _advice(split: Split, is_best: bool) -> str:
    if not is_best:
        return "" if split.fits else "too big"
    return "<- take this" if split.fits else "<- take this, once it fits"


_HEADER = ("split", "tokens/s", "engines idle", "trainers idle", "staleness", "max", "")


def scale_rows(asked: Question, first: int, last: int) -> Rows:
    """The best split of each number of GPUs, for the recipe's own batch."""
    config, lengths, shape = asked.config, asked.lengths, shape_of(asked.config)
    yield "GPUs", "best split", "tokens/s", "a GPU", "engines idle", "trainers idle", "staleness"
    for num in ladder(first, last):
        best = recommended(splits(config, asked.gpu, shape, lengths, num))
        o = best.outcome
        yield (
            f"{num}",
            f"{best.rollout} + {best.train}",
            f"{o.tokens_per_s:,.0f}",
            f"{o.tokens_per_s / num:,.0f}",
            f"{o.engines_idle:.0%}",
            f"{o.trainer_idle:.0%}",
            f"{o.staleness_mean:.2f}",
        )


def parse_range(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    if dots and first.isdigit() and last.isdigit() and 2 <= int(first) <= int(last) <= 4096:
        return int(first), int(last)
    raise RecipeError("--gpus", text, "is not a range from 2 to 4096", "write it like 8..512")
