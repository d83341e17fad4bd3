"""One exam from beginning to end. Takes a target, gives its results, in a folder of their own."""

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from minirl import model
from minirl.config import Config
from minirl.devices import find_devices
from minirl.errors import RecipeError
from minirl.launch import heldout_prompts, model_folder
from minirl.recipe import check_model, read_model_config, to_toml
from minirl.shm.ring import TrajectoryRing
from minirl.tasks.registry import make_task, self_check
from minirl.tasks.turns import dialogue_of
from minirl.tools.evaluate import results
from minirl.tools.evaluate.examiner import Examiner
from minirl.tools.evaluate.results import Result
from minirl.tools.evaluate.session import session
from minirl.tools.evaluate.target import Target
from minirl.view.console import Bar

RING_BYTES = 2**30  # what answers in flight may take before problems are asked in turns
EVALS = Path("evals")


@dataclass(frozen=True)
class Done:
    name: str
    folder: Path
    results: list[Result]
    summary: dict[str, Any]


def examine(target: Target, k: int, num_devices: int | None, out: Path | None) -> Done:
    """Ctrl-C leaves the problems that were done in results.jsonl, and no process."""
    config, kind, available = with_devices(target.config, num_devices)
    task = make_task(config)
    self_check(task, config.tasks.kind)
    folder = choose_folder(target, out)
    bar = Bar("problems")
    try:
        bar.note(f"{target.folder or target.name} on {config.tasks.kind}")
        source = target.folder or model_folder(config, folder / "logs", bar)
        check_model(config, read_model_config(config, source))
        tokenizer = model.load_tokenizer(source, config.model.trust_remote_code)
        prompts = heldout_prompts(config, task, tokenizer)
        dialogue = dialogue_of(task, config.tasks.kind, tokenizer)
        (folder / "recipe.toml").write_text(to_toml(config))
        kept: list[Result] = []
        num_cells = k * num_at_once(config, len(prompts), k)
        started = time.monotonic()
        with (
            (folder / results.RESULTS).open("w", buffering=1, encoding="utf-8") as file,
            session(config, source, kind, available, folder / "logs", num_cells, dialogue) as there,
        ):
            there.wait_for_engines(bar)
            bar.total(len(prompts))
            began = time.monotonic()

            def keep(result: Result) -> None:
                kept.append(result)
                file.write(results.line_of(result))
                bar.at(len(kept), _so_far(kept))

            examiner = Examiner(config, there, prompts, k, tokenizer, bar, keep)
            examiner.run()
        seconds = time.monotonic() - began
    except KeyboardInterrupt:
        bar.note(f"interrupted: what was done is in {folder}")
        raise
    finally:
        bar.close()
    summary = {
        "target": target.name,
        "model": str(source),
        **_setting(config, k),
        **results.summarise(kept),
        "prompts_too_long": len(task.heldout(config.eval.num_prompts)) - len(prompts),
        "prompts_refused": examiner.num_refused,
        "seconds": round(seconds, 3),
        "start_seconds": round(began - started, 3),
        "tokens_per_s": sum(a.length for r in kept for a in r.answers) / max(seconds, 1e-9),
    }
    results.write(folder, kept, summary)
    return Done(target.name, folder, sorted(kept, key=lambda r: r.problem), summary)


def with_devices(config: Config, num_devices: int | None) -> tuple[Config, str, int]:
    """As asked; else on CUDA all GPUs, on CPU one engine with all cores."""
    kind, available = find_devices(config.devices.kind)
    if config.devices.kind == "cuda" and kind != "cuda":
        remedy = "run it where there is one, or --set devices.kind=cpu"
        raise RecipeError("devices.kind", "cuda", "there is no CUDA device here", remedy)
    width = config.devices.tensor_parallel
    everything = available // width * width if kind == "cuda" else width
    num = num_devices or everything
    limit = available if kind == "cuda" else max(4, 2 * available)
    if num > limit or num % width or num < 1:
        rule = f"must be 1 to {limit} here, and a multiple of devices.tensor_parallel = {width}"
        raise RecipeError("--devices", num, rule, f"{max(width, everything)} would do")
    return replace(config, devices=replace(config.devices, rollout=num)), kind, available


def num_at_once(config: Config, num_problems: int, k: int) -> int:
    """All problems where their answers take little memory; else enough to keep engines full."""
    engines = config.devices.rollout // config.devices.tensor_parallel
    seats = 2 * engines * config.rollout.max_num_seqs // k + 1
    cell_bytes = TrajectoryRing.bytes_needed(1, config.max_tokens_per_trajectory)
    return min(num_problems, max(seats, RING_BYTES // (k * cell_bytes)))


def choose_folder(target: Target, out: Path | None) -> Path:
    if out is None:
        stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
        if target.run_dir is not None and target.folder is not None:
            out = target.run_dir / "evals" / f"{target.folder.name}-{stamp}"
        else:
            out = EVALS / f"{Path(target.name).name}-{stamp}"
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise RecipeError("--out", str(out), "is not empty", "name a new directory")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    return out


def _setting(config: Config, k: int) -> dict[str, Any]:
    return {
        "task": config.tasks.kind,
        "data": config.tasks.data,
        "seed": config.seed,
        "k": k,
        "temperature": config.eval.temperature,
        "max_new_tokens": config.rollout.max_new_tokens,
        "dtype": config.model.dtype,
        "engines": config.devices.rollout // config.devices.tensor_parallel,
    }


def _so_far(kept: list[Result]) -> str:
    with suppress(ZeroDivisionError):
        means = [result.mean for result in kept if result.mean is not None]
        return f"accuracy so far {sum(means) / len(means):.1%}"
    return ""
