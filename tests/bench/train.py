"""The train bench: a training step against bare loops, and what its parts save.

    step_over_bare_loop        tokens/s of a whole step (read, pack, forward, backward, clip, AdamW,
                               publish) / of transformers' forward, cross-entropy, backward and
                               AdamW over the same packed micro-batches, given as tensors
    step_over_padded_loop      the same against a plain script: padded, as many sequences at once as
                               the longest of them leaves room for
    dynamic_over_fixed         tokens/s with dynamic micro-batches / with a fixed number of
                               sequences: the most that fit even if all are as long as allowed.
                               The budget is one longest trajectory, the tightest there is; with a
                               roomier one dynamic micro-batches gain less, as the next line shows
    dynamic_over_fixed_roomy   the same with a budget of four longest trajectories
    chunked_over_full_memory   peak memory above the inputs of chunked logprobs and their gradient /
                               of log_softmax over all logits, at a vocabulary of 150 k
    skip_prox_speedup          seconds of a step that runs the forward for π_prox / of one that
                               skips it, with one minibatch
    two_ranks_over_one         tokens/s of two DDP ranks, one core each / of one
    shared_over_packed_*       tokens/s of a step in which the answers of a group share their prompt
                               / of one over whole trajectories, with the peak memory of each:
                               prompts and answers as in the smoke run; prompts of 100 and answers
                               of 25 tokens on 135m; answers of 1,000, where nothing is shared

Each on one core but the last, which is by the wall clock; repeats are interleaved, figures medians.
"""

from minirl.workers import Worker
from tests.bench import Figure, Options, at_least, at_most, median
from tests.bench.batches import Size, draw, write_model
from tests.bench.memory import CHUNKED, FULL, peak_bytes
from tests.bench.models import SHAPES
from tests.bench.processes import Processes, processes
from tests.bench.sharing import Sharing, peak_of, step_of
from tests.bench.trainer_harness import LOOPS, TrainerHarness, bare, count_tokens, step
from tests.bench.two_ranks import tokens_per_s

SIZES = {
    "tiny": Size(
        num_groups=32,
        group_size=8,
        prompt_tokens=64,
        median_new_tokens=48,
        sigma=1.2,
        max_new_tokens=1984,
        max_tokens=8192,
        repeats=5,
    ),
    "135m": Size(
        num_groups=8,
        group_size=4,
        prompt_tokens=32,
        median_new_tokens=24,
        sigma=1.2,
        max_new_tokens=480,
        max_tokens=2048,
        repeats=3,
    ),
}
QUICK = Size(
    num_groups=4,
    group_size=2,
    prompt_tokens=16,
    median_new_tokens=16,
    sigma=1.0,
    max_new_tokens=112,
    max_tokens=512,
    repeats=1,
)
# Model, lengths, goal.
SMOKE = Size(32, 8, 70, 35, 0.6, 110, 16384, repeats=5, min_prompt_tokens=50)
SHORT = Size(2, 8, 110, 25, 0.4, 64, 2048, repeats=2, min_prompt_tokens=90)
LONG = Size(4, 8, 110, 1000, 0.3, 1938, 16384, repeats=3, min_prompt_tokens=90)
SHARED = {
    "smoke": ("tiny", SMOKE, 1.5),
    "short": ("135m", SHORT, 2.5),
    "long": ("tiny", LONG, 0.97),
}


def measure(options: Options) -> list[Figure]:
    shape = SHAPES[options.model]
    size = QUICK if options.is_quick else SIZES[options.model]
    with processes(3) as here:
        folder = write_model(shape, here.folder / "model")
        harness = here.part(here.train_place, TrainerHarness, folder, size, shape.vocab)
        here.result(harness)
        seconds: dict[str, list[float]] = {name: [] for name in LOOPS}
        for repeat in range(size.repeats + 1):
            for name, loop in LOOPS.items():
                took = here.ask(harness, loop)
                if repeat:  # the first is a warm-up
                    seconds[name].append(took)
        took_by = {name: median(times) for name, times in seconds.items()}
        return [
            _against_bare(here, harness, 2 * size.repeats),
            *_speeds(took_by, here.ask(harness, count_tokens)),
            _memory(here, num_tokens=64 if options.is_quick else 4096),
            _two_ranks(folder, size, shape.vocab),
            *([] if options.is_quick else map(_shared, SHARED)),
        ]


def _against_bare(here: Processes, harness: Worker, repeats: int) -> Figure:
    """In an order in which a drift cancels out."""
    ratios = []
    for _ in range(repeats):
        step_s, bare_s, bare_again_s, step_again_s = (
            here.ask(harness, loop) for loop in (step, bare, bare, step)
        )
        ratios.append((bare_s + bare_again_s) / (step_s + step_again_s))
    return at_least("step_over_bare_loop", median(ratios), 0.95, "tokens/s, same packed tokens")


def _speeds(took: dict[str, float], num_tokens: int) -> list[Figure]:
    step_s = took["step"]
    return [
        Figure("step_over_padded_loop", took["padded"] / step_s, note="tokens/s"),
        at_least(
            "dynamic_over_fixed",
            took["tight_fixed"] / took["tight_dynamic"],
            1.3,
            "tokens/s, a budget of one longest trajectory",
        ),
        Figure(
            "dynamic_over_fixed_roomy", took["fixed"] / step_s, note="tokens/s, a budget of four"
        ),
        Figure("skip_prox_speedup", took["with_prox"] / step_s, note="one minibatch"),
        Figure("train_tokens_per_s", num_tokens / step_s, note="one core, prompts too"),
    ]


def _memory(here: Processes, num_tokens: int) -> Figure:
    """Each in a process of its own, which it ends with."""
    peaks = {}
    for kind in (CHUNKED, FULL):
        part = here.part(here.train_place, peak_bytes, kind, num_tokens)
        here.result(part)
        peaks[kind] = here.ask(part, int)  # the part's state is its peak
    mib = [peaks[kind] / 2**20 for kind in (CHUNKED, FULL)]
    note = f"{mib[0]:.0f} / {mib[1]:.0f} MiB, {num_tokens} tokens"
    return at_most("chunked_over_full_memory", mib[0] / mib[1], 0.25, note)


def _two_ranks(folder: str, size: Size, vocab: int) -> Figure:
    drawn, config = draw(size, vocab), size.config(lr=1e-6)
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(2 if size.repeats > 1 else 1):
        for num_ranks, found in speeds.items():
            found.append(tokens_per_s(folder, config, drawn, num_ranks, size.repeats))
    ratio = median(speeds[2]) / median(speeds[1])
    return Figure("two_ranks_over_one", ratio, note="tokens/s, one core each")


def _shared(name: str) -> Figure:
    model, size, goal = SHARED[name]
    shape, ratios, peaks = SHAPES[model], [], []
    with processes(3) as here:
        folder = write_model(shape, here.folder / "model")
        part = here.part(here.train_place, Sharing, folder, size, shape.vocab)
        here.result(part)
        for repeat in range(size.repeats + 1):
            both, packed, again, once = (
                here.ask(part, step_of, can_share) for can_share in (True, False, False, True)
            )
            if repeat:  # the first is a warm-up
                ratios.append((packed + again) / (both + once))
        for can_share in (True, False):
            part = here.part(here.train_place, peak_of, folder, size, shape.vocab, can_share)
            here.result(part)
            peaks.append(here.ask(part, int) / 2**20)
    note = "tokens/s; peak {:.0f} / {:.0f} MiB".format(*peaks)
    return at_least(f"shared_over_packed_{name}", median(ratios), goal, note)
