"""What this box's GPUs really do: `minirl doctor --gpu [RECIPE]`.

Takes a recipe; gives one finding per figure, with what was expected of it, and gpu.json, from which
`minirl plan` then takes this GPU instead of its table. Each function of MEASURES runs in a child
process with a deadline. With the kind "cpu" they measure a CPU: so they are tested. Those of
NEED_MODEL take the recipe's, and are left out where that is not on this machine.
"""

import gc
import json
import os
import time
from collections.abc import Callable
from functools import partial
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.nn.functional as F

from minirl import devices, recipe
from minirl.config import Config
from minirl.launch import spawn_ranks
from minirl.messages import RankSetup, Role
from minirl.metrics import MAX_LOGPROB_GAP
from minirl.rollout.engine import LIMIT, Engine, Sampling
from minirl.shm.board import BoardWriter
from minirl.shm.ring import TrajectoryRing
from minirl.shm.segment import Segment
from minirl.shm.weights import CANARY_TOKENS
from minirl.tools import plan as planning
from minirl.tools.doctor import GIB, Finding, run_child
from minirl.train import attention as packed
from minirl.train.bad_batch import lone_trainer
from minirl.train.optimizer import join_ranks, over_ranks
from minirl.train.packing import Unit
from minirl.train.sharing import Shared, share
from minirl.train.trainer import Trainer
from minirl.workers import Workers

DEADLINE_S = 600
NUM_DRAWN = 32  # tokens of an answer
PROMPT = [*range(CANARY_TOKENS)]  # tokens that every model has
REMEDY = f"send {planning.MEASURED} and the output of `minirl doctor` with an issue"
Figures = dict[str, float]
Drawn = tuple[list[int], list[float]]  # an answer's tokens and their logprobs, by the engine


def seconds(kind: str, work: Callable[[], Any]) -> float:
    """Of one call, after one that warms up."""
    finish = torch.cuda.synchronize if kind == "cuda" else int
    for _ in range(2):
        finish()
        began = time.perf_counter()
        work()
        finish()
    return time.perf_counter() - began


def attention(kind: str, config: Config) -> Figures:
    """Packed attention in bfloat16, of three answers to one prompt and of another sequence, against
    SDPA of each trajectory alone: outputs and gradients."""
    units = [Unit([0, 1, 2], 70, [33, 150, 1]), Unit([3], 0, [64])]
    once, lengths = cast(Shared, share(units, kind)), [103, 220, 71, 64]
    shape = (1, 8, len(once.rows_U), 64)
    q, k, v = (torch.randn(shape, device=kind, requires_grad=True) for _ in range(3))
    k, v = (x[:, ::2].detach().requires_grad_() for x in (k, v))  # half as many heads
    half, bounds = (q.bfloat16(), k.bfloat16(), v.bfloat16()), once.segments
    at: dict[str, Any] = {"cu_seqlens": bounds.cu_seqlens_S1, "max_seqlen": bounds.max_seqlen}
    ours, _ = packed.packed_attention(torch.nn.Module(), *half, None, keys=once.keys, **at)
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    alone = list(map(sdpa, *(x[:, :, once.unique_T].split(lengths, 2) for x in (q, k, v))))
    outs = ours.transpose(1, 2).float()[:, :, once.unique_T], torch.cat(alone, 2)
    found = [[out, *torch.autograd.grad(out.square().sum(), (q, k, v))] for out in outs]
    gaps = [((a - b).norm() / b.norm()).item() for a, b in zip(*found, strict=True)]
    return {"attention error": max(gaps)}


def rates(kind: str, config: Config) -> Figures:
    """Memory that a process can have, products in bfloat16, and copies of 1 GiB: on the device, and
    to and from memory such as the weight store's, before and after it is page-locked."""
    size = 16384 if kind == "cuda" else 256
    a, b = (torch.randn(size, size, device=kind, dtype=torch.bfloat16) for _ in range(2))
    here, there = (torch.empty(size, size, device=kind) for _ in range(2))
    host = torch.from_numpy(Segment(here.nbytes).array("float32", (size, size)))
    copies = [partial(here.copy_, host), partial(host.copy_, here)]
    total = torch.cuda.mem_get_info()[1] if kind == "cuda" else devices.free_memory_bytes()
    return {
        "memory": total / GIB,
        "matmul": 2e-12 * size**3 / seconds(kind, lambda: a @ b),
        "device copy": 2e-9 * here.nbytes / seconds(kind, lambda: there.copy_(here)),
        "pageable copy": 1e-9 * here.nbytes / max(seconds(kind, copy) for copy in copies),
        "page-locked": float(kind == "cpu" or devices.pin(host)),  # from here on
        "host copy": 1e-9 * here.nbytes / max(seconds(kind, copy) for copy in copies),
    }


def training(kind: str, config: Config) -> Figures:
    """A whole micro-batch of the recipe's model, with an update."""
    trainer = make_trainer(kind, config)
    length = round(planning.usual_lengths(config).mean_tokens)
    whole, rest = divmod(config.train.max_tokens, length)
    lengths = [length] * whole + [rest] * (rest > 0)
    tokens_T = torch.randint(0, 100, (sum(lengths),), device=kind)

    def step() -> None:
        trainer.policy(tokens_T, packed.boundaries(lengths, kind))[0].sum().backward()
        trainer.learner.optimizer.step()

    speed = len(tokens_T) / seconds(kind, step)
    peak = {"training memory": torch.cuda.max_memory_allocated() / GIB} if kind == "cuda" else {}
    return {"training": speed, **peak}


def make_trainer(kind: str, config: Config) -> Trainer:
    place, ring = devices.Placement(kind), TrajectoryRing(1, 1)
    return lone_trainer(config, cast(Path, recipe.find_model(config)), place, ring)


def links(kind: str, config: Config) -> Figures:
    """The sum of 1 GiB over the trainer ranks, which are placed and joined as in a run."""
    places = devices.place(config, kind, devices.find_devices(kind)[1], engines=False)[1]
    if len(places) == 1:
        return {}
    with TemporaryDirectory(prefix="minirl-") as folder:
        meeting, workers = f"{folder}/rendezvous", Workers(Path(folder), len(places))
        first = RankSetup(config=config, folder="", placement=places[0], rendezvous=meeting)
        try:
            spawn_ranks(workers, Role.TRAIN, first, places, f"{__name__}:sum_over_ranks")
            speeds = [workers.next_message(DEADLINE_S) for _ in places]
        finally:
            workers.kill()
    return {"all-reduce": min(cast(list[float], speeds))}


def sum_over_ranks(setup: RankSetup, board: BoardWriter, pipe: Connection) -> None:
    """The body of a rank. Sends the GB/s at which its link was used, as NCCL counts them."""
    devices.use_training_device(setup.placement)
    join_ranks(setup)
    kind, num = setup.placement.kind, setup.num_ranks
    values = torch.ones(2**28 if kind == "cuda" else 2**16, device=kind)
    moved = 2e-9 * values.nbytes * (num - 1) / num
    pipe.send(moved / seconds(kind, lambda: over_ranks(values)))
    pipe.poll(None)  # the controller ends all


def generation(kind: str, config: Config) -> Figures:
    """An engine that loads what a trainer published: reload, speed, logprobs of both."""
    trainer = make_trainer(kind, config)
    trainer.publish(0)
    trainer.policy.to("cpu")  # the engine wants its share of the memory free
    engine = Engine(config, trainer.setup.folder, kind, trainer.setup.store, seed=0)
    engine.reload()  # the first finds out where each tensor belongs
    reload_s, (_, greedy) = engine.reload(), *answers(engine, PROMPT, 1, 0.0)
    began = time.perf_counter()
    drawn = answers(engine, trainer.canary_tokens, config.rollout.max_num_seqs, 1.0)
    took = time.perf_counter() - began
    found = {"reload": reload_s, "canary gap": engine.canary.gap, "reloaded": sum(greedy)}
    end(engine)
    trainer.policy.to(kind)
    gaps = torch.cat([gap_N(trainer, answer) for answer in drawn[:64]])
    decoding = sum(len(tokens) for tokens, _ in drawn) / took
    return {**found, "decoding": decoding, "logprob gap": gaps.mean().item()}


def end(engine: Engine) -> None:
    """Gives its memory back."""
    engine.shutdown()
    del engine._engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fresh(kind: str, config: Config) -> Figures:
    """The same greedy answer by an engine that read the model's files: no reload was in between."""
    engine = Engine(config, str(recipe.find_model(config)), kind, None, seed=0)
    found = {"fresh": sum(answers(engine, PROMPT, 1, 0.0)[0][1])}
    end(engine)
    return found


def answers(engine: Engine, prompt: list[int], num: int, temperature: float) -> list[Drawn]:
    for key in range(num):
        engine.add(key, prompt, Sampling(NUM_DRAWN, temperature), key)
    found: list[Drawn] = [([], []) for _ in range(num)]
    while engine.is_busy:
        for chunk in engine.step():
            found[chunk.key][0].extend(chunk.tokens)
            found[chunk.key][1].extend(chunk.logprobs)
    return found


@torch.no_grad()
def gap_N(trainer: Trainer, answer: Drawn) -> torch.Tensor:
    """|engine - trainer| of the logprobs of an answer's N tokens."""
    tokens = [*trainer.canary_tokens, *answer[0]]
    bounds = packed.boundaries([len(tokens)], trainer.device)
    logprobs_T, _ = trainer.policy(torch.tensor(tokens, device=trainer.device), bounds)
    own = logprobs_T[-len(answer[0]) :].float().cpu()
    return (own - torch.tensor(answer[1])).abs()


NEED_MODEL = (training, generation, fresh)
MEASURES = (attention, rates, links, *NEED_MODEL)


def main(name: str, kind: str, file: str, overrides: list[str]) -> None:
    """In the child process; `file` is the recipe."""
    os.environ.update(devices.vllm_environment(kind))
    config = recipe.load(Path(file) if file else None, overrides).config
    print(json.dumps(globals()[name](kind, config)))


def examine(kind: str, file: Path | None, overrides: list[str]) -> list[Finding]:
    gpus = devices.gpus() if kind == "cuda" else [devices.Gpu("CPU", 1, (0, 0))]
    if not gpus:
        return [Finding("GPU", False, "there is none here", "run this on the GPU box")]
    figures: Figures = {}
    config, failed = recipe.load(file, overrides).config, []
    planning.shape_of(config)  # a model that cannot be planned is refused before all that time
    folder = recipe.find_model(config)
    has_model = folder is not None and any(folder.glob("*.safetensors"))
    for name in [each.__name__ for each in MEASURES if has_model or each not in NEED_MODEL]:
        arguments = name, kind, str(file or ""), overrides
        code = f"from minirl.tools.measure import main; main{arguments}"
        output, error = run_child(code, DEADLINE_S)
        if error:
            failed.append(Finding(name, False, f"could not be measured: {error}", REMEDY))
        else:
            found = [line for line in output.splitlines() if line.startswith("{")]  # vLLM talks too
            figures |= json.loads(found[-1])
    findings, own = judge(config, gpus[0], figures)
    about = {"gpu": str(gpus[0]), "measured": figures, "plan": own._asdict()}
    planning.MEASURED.write_text(json.dumps(about, indent=1) + "\n")
    return failed + findings


def judge(
    config: Config, found: devices.Gpu, figures: Figures
) -> tuple[list[Finding], planning.GpuKind]:
    """Each figure against the plan for this GPU in the table, and the GPU as it was measured. One
    that is not in the table is planned with what it reached."""
    matmul, moved = (figures.get(name, 1.0) for name in ("matmul", "device copy"))
    link = figures.get("all-reduce", 25.0)
    reached = planning.GpuKind(1.0, matmul / planning.MATMUL, matmul / 4, moved, link)
    gpu = planning.recognise(found.name, found.memory_bytes) or reached
    plan = planning.Plan(config, gpu, planning.usual_lengths(config))
    alone = plan.changed({"devices.train": 1, "train.shard": "none"})  # as a trainer is measured
    costs, speed, items = plan.costs, 1 / alone.costs.train_per_token, alone.bills[1].items
    counted = sum(items[name] for name in items if name not in planning.LIBRARIES) / GIB
    if "fresh" in figures and "reloaded" in figures:
        figures["reload error"] = abs(figures.pop("reloaded") - figures.pop("fresh"))
    drawn = planning.Plan(config, gpu, planning.Lengths((NUM_DRAWN,), CANARY_TOKENS)).costs
    decoding = 1 / (drawn.step / config.rollout.max_num_seqs + drawn.step_per_seq)
    findings = []
    for name, least, most, unit in (
        ("attention error", 0.0, 0.03, ""),
        ("memory", 0.95 * gpu.memory_gib, inf, "GiB"),
        ("matmul", planning.MATMUL * gpu.bf16_tflops, inf, "TFLOPS"),
        ("device copy", 0.75 * gpu.bandwidth_gb_s, inf, "GB/s"),
        ("pageable copy", 2.0, inf, "GB/s"),
        ("page-locked", 1.0, 1.0, "(1: yes)"),
        ("host copy", 15.0, inf, "GB/s"),
        ("all-reduce", 0.4 * gpu.link_gb_s, inf, "GB/s"),
        ("reload", 0.0, 3 * costs.reload + 0.2, "s"),
        ("reload error", 0.0, 0.0, "nats"),
        ("canary gap", 0.0, LIMIT[config.model.dtype], "nats"),
        ("logprob gap", 0.0, MAX_LOGPROB_GAP, "nats"),
        ("decoding", decoding / planning.TRUST[1], inf, "tokens/s"),
        ("training", speed / planning.TRUST[1], inf, "tokens/s"),
        ("training memory", 0.95 * counted, 1.05 * counted, "GiB"),
    ):
        if (value := figures.get(name)) is not None:
            wanted = f"at least {least:,.3g}" if most == inf else f"{least:,.3g} to {most:,.3g}"
            detail = f"{value:,.3g} {unit}; expected {wanted}"
            remedy = devices.PIN_REMEDY if name == "page-locked" else REMEDY
            findings.append(Finding(name, least <= value <= most, detail, remedy))
    own = gpu._replace(train_speed=figures.get("training", speed) / speed)
    own = own._replace(decode_speed=figures.get("decoding", decoding) / decoding)
    fields = {"memory_gib": "memory", "host_gb_s": "host copy"}
    return findings, own._replace(**{f: figures[n] for f, n in fields.items() if n in figures})
