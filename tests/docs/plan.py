"""Prints the table of docs/planning.md: `python -m tests.docs.plan`.

test_plan.py holds that table and the planner to the figures here, of two published tables.
The AReaL paper (arXiv 2505.24298), table 7, gives tokens per second of whole runs; what it does not
give is taken as follows, the same for all rows: R1-Distill-Qwen-1.5B on H800, three GPUs in four
for rollout, 4 minibatches, answers lognormal with a mean of 4,000 tokens in a context of 8k.
Neither system shares prompts in training, so the plan is made without.
prime-rl's benchmarks/results/BENCHMARKS.md ("RL Full", activations recomputed, of 2026-02-01) gives
tokens per second of a trainer alone, two micro-batches of one sequence per step.

plan.MATMUL and plan.ELEMENTWISE lie between the two trainers, and plan.STEP_S was fitted on the
paper's first two rows: the paper's trainer is faster than planned, prime-rl's slower.
"""

from dataclasses import replace
from itertools import product

from minirl.recipe import build
from minirl.tools.plan import CARDS, GIB, GPUS, Plan, usual_lengths
from minirl.tools.simulate import Lengths, long_tailed
from minirl.train.packing import Unit

MODELS = ("Qwen3-0.6B", "Qwen2.5-1.5B", "Qwen3-4B", "Qwen2.5-7B", "Qwen2.5-14B")
METHODS: dict[str, dict[str, object]] = {
    "full": {},
    "8-bit AdamW": {"train.optimizer": "adamw8bit"},
    "FSDP2 over 4": {"train.shard": "full", "devices.train": 4},
    "LoRA r 32": {"train.lora_rank": 32},
}

PAPER = {0: 27_100, 1: 47_800, 4: 49_000, 16: 52_000}  # tokens/s by η
LENGTHS = (16_384, 65_536)
PRIME_RL = {  # tokens/s with sequences of these lengths, by model, GPU and their number
    ("Qwen3-0.6B", "H100", 1): (11_900, 10_150),
    ("Qwen3-0.6B", "A6000", 1): (3_690, 2_040),
    ("Qwen3-4B", "H100", 8): (26_030, 28_970),
    ("Qwen3-4B", "H200", 8): (27_440, 29_540),
}


class PlanApart(Plan):
    """Of a trainer that computes the prompt anew for each answer, as those published do."""

    def split(self, group: Unit) -> list[Unit]:
        return group.apart


def memory_table() -> str:
    """GiB of a training GPU; the smallest card, and the smallest for both pools in turns."""
    rows = [["model", *METHODS], ["---"] * (1 + len(METHODS))]
    rows += [[model, *(memory_cell(model, METHODS[name]) for name in METHODS)] for model in MODELS]
    return "".join(f"|{'|'.join(row)}|\n" for row in rows)


def memory_cell(model: str, method: dict[str, object]) -> str:
    lengths = {"tasks.max_prompt_tokens": 512, "rollout.max_new_tokens": 1024}
    batch = {"train.max_tokens": 1536, "train.gradient_checkpointing": True}
    plan = plan_of(model, "H100", None, lengths | batch | method)
    needed = sum(plan.bills[1].items.values()) / GIB
    shared = plan.changed({"devices.share": True, "buffer.max_staleness": 0})
    shared = shared.changed({"rollout.kv_cache_gib": shared.remedies["rollout.kv_cache_gib"][-1]})
    by_card = {n: replace(shared, gpu=plan.gpu._replace(memory_gib=g)) for n, g in CARDS.items()}
    cards = [size for size, gib in CARDS.items() if gib >= needed]
    both = [size for size, own in by_card.items() if own.fits]
    return f"{needed:.0f}→{(cards or ['–'])[0]}/{(both or ['–'])[0]}"


def plan_of(model: str, gpu: str, lengths: Lengths | None, values: dict[str, object]) -> Plan:
    config = build({"model.path": model, "model.dtype": "bfloat16", **values})
    return PlanApart(config, GPUS[gpu], lengths or usual_lengths(config))


def tokens_per_s(eta: int) -> float:
    """As the paper admits: up to η at once, nothing held back."""
    limit = 8192 - 1024
    lengths = {"tasks.max_prompt_tokens": 1024, "rollout.max_new_tokens": limit}
    batch = {"train.batch_size": 64, "rollout.group_size": 16, "train.num_minibatches": 4}
    devices = {"devices.rollout": 6, "devices.train": 2, "train.max_tokens": 32_768}
    staleness = {"buffer.max_staleness": eta, "buffer.target_staleness": float(eta)}
    values, model = lengths | batch | devices | staleness, "DeepSeek-R1-Distill-Qwen-1.5B"
    return plan_of(model, "H800", long_tailed(4000, limit, 200), values).outcome.tokens_per_s


def prime_rl_errors() -> dict[tuple[str, str, int, int], float]:
    """The planned rate over the published one, less one, by case and length."""
    found = {}
    for case, place in product(PRIME_RL, range(2)):
        (model, gpu, num_gpus), num_tokens = case, LENGTHS[place]
        values = {"devices.train": num_gpus, "train.gradient_checkpointing": True}
        costs = plan_of(model, gpu, Lengths((num_tokens - 1,), 1), values).costs
        total = 2 * num_tokens * num_gpus
        rate = total / (costs.train + total * costs.train_per_token)
        found[*case, num_tokens] = rate / PRIME_RL[case][place] - 1
    return found


if __name__ == "__main__":
    print(memory_table())
