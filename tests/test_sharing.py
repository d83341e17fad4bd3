"""Each prompt is trained once: loss and every gradient are those of the packed form, whatever is
trained and however a batch is split; groups are cut where they must be; a model that cannot share
falls back."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import torch._dynamo as dynamo
import varlen_cpu  # noqa: F401  registers the kernel of packed attention
from hypothesis import given
from hypothesis import strategies as st
from ranks import ETA, FIRST_VERSION, LocalRank, ranks, relative_error, with_train
from torch import Tensor

from minirl.config import ALGORITHMS, Config
from minirl.errors import MinirlError
from minirl.records import Batch, Group, StopReason, Trajectory
from minirl.shm.ring import NOTHING, TrajectoryRing
from minirl.train import attention, packing, policy
from minirl.train.attention import boundaries
from minirl.train.objective import micro_loss
from minirl.train.packing import Unit, cut, units_over_ranks
from minirl.train.policy import check_head, hidden_states, load_policy
from minirl.train.sharing import share

UNITS = [Unit([0, 1, 2, 3], 9, [4, 1, 30, 4]), Unit([4], 0, [6]), Unit([5, 6, 7], 20, [7, 0, 12])]
LENGTHS = [unit.prompt + answer for unit in UNITS for answer in unit.answers]
LONGEST = 64


def random_tokens() -> Tensor:
    """Of the trajectories of UNITS."""
    torch.manual_seed(1)
    parts = []
    for unit in UNITS:
        prompt = torch.randint(2, tiny_models.VOCAB, (unit.prompt,))
        for answer in unit.answers:
            parts += [prompt, torch.randint(2, tiny_models.VOCAB, (answer,))]
    return torch.cat(parts)


def gradients(module: torch.nn.Module, out: Tensor) -> list[Tensor]:
    """Of a random sum, and the outputs."""
    torch.manual_seed(2)
    module.zero_grad()
    (out * torch.randn(out.shape[0], *[1] * (out.ndim - 1), dtype=out.dtype)).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def gap(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative difference of a tensor."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


@pytest.mark.parametrize("kind", ["Qwen3Config", "Qwen2Config", "LlamaConfig"])
def test_a_backbone_computes_the_same_in_float64(kind: str, tmp_path: Path) -> None:
    backbone = load_policy(str(tiny_models.write(tmp_path, kind=kind))).model.base_model
    for name, module in [*backbone.named_modules()]:
        if type(module).__name__.endswith("RMSNorm"):  # transformers' own are in float32
            norm = torch.nn.RMSNorm(module.weight.shape, module.variance_epsilon)
            backbone.set_submodule(name, norm)
    backbone.double()
    tokens_T, bounds, once = random_tokens(), boundaries(LENGTHS), share(UNITS, "cpu")
    assert once is not None and len(once.rows_U) == sum(unit.size for unit in UNITS)
    assert torch.equal(tokens_T[once.rows_U][once.unique_T], tokens_T)
    both = [hidden_states(backbone, torch.float64, tokens_T, bounds, s)[0] for s in (once, None)]
    found = [gradients(backbone, hidden_TE) for hidden_TE in (both[0][once.unique_T], both[1])]
    assert gap(*found) < 1e-10


# -- a trainer's step


@pytest.fixture(scope="module")
def batch() -> tuple[TrajectoryRing, Batch]:
    """Two turns in some answers, one token in others, versions that change in the middle, tokens
    that are too stale, a masked member."""
    rng, version, groups = np.random.default_rng(0), FIRST_VERSION + ETA + 1, []
    ring = TrajectoryRing(24, LONGEST)
    for group_id in range(4):
        prompt, found = rng.integers(2, tiny_models.VOCAB, rng.integers(9, 20)), []
        for cell in range(6 * group_id, 6 * group_id + 6):
            num = (1, *rng.integers(2, 30, 5))[cell % 6]
            versions = np.sort(rng.integers(FIRST_VERSION, version + 1, num))
            versions[num // 3 : num // 2] = NOTHING if num > 5 else versions[0]
            answer, logprobs = rng.integers(2, tiny_models.VOCAB, num), -6 + 0.5 * rng.random(num)
            ring.write(cell, group_id, prompt, answer, logprobs, versions)
            lengths = len(prompt) + num, int((versions != NOTHING).sum())
            found.append(Trajectory(cell, *lengths, StopReason.STOP, versions[0], versions[-1]))
        rewards = tuple(float(place % 2) + place / 8 for place in range(6))
        groups.append(Group(group_id, group_id, tuple(found), rewards, frozenset({2})))
    return ring, Batch(1, version, tuple(groups))


def num_shared(rank: LocalRank) -> int:
    parts = rank.trainer.prepared.minibatches
    return sum(micro.shared is not None for part in parts for micro in part.micro_batches)


def algorithm(name: str, **values: Any) -> Config:
    parts = {key.removeprefix("train."): value for key, value in ALGORITHMS[name].items()}
    return with_train(**{**parts, "num_minibatches": 1, "kl_coef": 0.05, **values})


CONFIGS = {
    **{name: algorithm(name, max_tokens=160) for name in ALGORITHMS},
    "kl in the reward": algorithm("ppo", kl_in="reward", max_tokens=LONGEST),
    "lora": algorithm("grpo", lora_rank=4, gradient_checkpointing=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_that_of_packed_trajectories(
    name: str, batch: tuple[TrajectoryRing, Batch], tied_folder: Path, monkeypatch: Any
) -> None:
    found = []
    for least in (1.15, float("inf")):
        monkeypatch.setattr(packing, "MIN_SAVING", least)
        rank = LocalRank(tied_folder, CONFIGS[name], batch[0])
        values = rank.train(batch[1])
        models = [replica.module for replica in rank.trainer.replicas]
        grads = [p.grad for model in models for p in model.parameters() if p.grad is not None]
        found.append((num_shared(rank), values, grads))
    (some, ours, our_grads), (none, theirs, their_grads) = found
    assert some and not none and gap(our_grads, their_grads) < 1e-5
    for key in ("train/loss", "train/grad_norm", "train/kl", "train/entropy"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7), key


def test_the_ratio_is_1_to_the_bit_at_the_first_minibatch(
    batch: tuple[TrajectoryRing, Batch], tied_folder: Path
) -> None:
    rank = LocalRank(tied_folder, with_train(num_minibatches=2, max_tokens=128), batch[0])
    first = rank.trainer.preparer.prepare(batch[1]).minibatches[0]
    assert any(micro.shared for micro in first.micro_batches)
    for micro in first.micro_batches:
        logprobs_T = micro_loss(rank.trainer.policy, micro, rank.trainer.config)[1]
        assert torch.equal(logprobs_T, micro.prox_T)


def test_two_ranks_make_the_step_of_one(
    batch: tuple[TrajectoryRing, Batch], tied_folder: Path, tmp_path: Path
) -> None:
    config = with_train(max_tokens=LONGEST)
    alone = LocalRank(tied_folder, config, batch[0])
    expected = alone.train(batch[1])
    with ranks(tmp_path, tied_folder, config, batch[0], 2) as two:
        values = two.train(batch[1])
        weights = two.weights()
    assert num_shared(alone) and relative_error(weights, alone.weights()) < 1e-5
    assert values["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)


def test_a_model_whose_layers_look_at_the_token_before_is_never_shared(tied_folder: Path) -> None:
    """It packs exactly: it knows where sequences begin. But an answer's prompt is not before it."""
    found = load_policy(str(tied_folder))
    assert found.can_share

    def mix(module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        before_1TE = args[0].roll(1, 1) * (kwargs["position_ids"] > 0)[..., None]
        return (args[0] + before_1TE, *args[1:]), kwargs

    layer = found.model.base_model.layers[0]
    layer.register_forward_pre_hook(mix, with_kwargs=True)
    check_head(found)
    assert not found.can_share


# -- as on CUDA


def test_in_bfloat16_it_is_as_near_as_packed_and_one_graph_serves_all(
    tied_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens_T = load_policy(str(tied_folder), "bfloat16"), random_tokens()

    def run(units: list[Unit] | None) -> list[Tensor]:
        once = share(units, "cpu") if units else None
        return gradients(model, model(tokens_T, *boundaries(LENGTHS), shared=once)[0])

    exact = run(None)
    monkeypatch.setattr(attention, "VARLEN_ON", {"cpu"})
    monkeypatch.setattr(policy, "AUTOCAST_ON", {"cpu"})
    packed, shared = run(None), run(UNITS)
    assert gap(shared, exact) < 1.5 * gap(packed, exact) < 0.1
    dynamo.reset()
    dynamo.utils.counters.clear()
    model.model.base_model.compile(dynamic=True, backend="aot_eager")
    assert gap(run(UNITS), exact) < 1.5 * gap(packed, exact)
    run([Unit([i], 0, [n]) for i, n in enumerate(LENGTHS[:5])] + UNITS[2:])
    assert not dynamo.utils.counters["graph_break"]
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1


# -- packing

groups_lists = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.integers(0, 40), min_size=1, max_size=8)), max_size=9
)


@given(groups_lists, st.integers(1, 5))
def test_units_are_whole_within_the_budget_and_equally_many(
    groups: list[tuple[int, list[int]]], num_ranks: int
) -> None:
    places = iter(range(1000))
    wholes = [Unit([next(places) for _ in answers], n, answers) for n, answers in groups]
    lengths = {p: u.prompt + a for u in wholes for p, a in zip(u.places, u.answers, strict=True)}
    split = units_over_ranks(wholes, num_ranks, 100)
    assert len({len(own) for own in split}) == 1 and len(split) == num_ranks
    units = [*chain.from_iterable(chain.from_iterable(split))]
    again = {p: u.prompt + a for u in units for p, a in zip(u.places, u.answers, strict=True)}
    assert again == lengths and len(lengths) == sum(len(unit.places) for unit in units)
    assert all(sum(unit.size for unit in micro) <= 100 for own in split for micro in own)
    loads = [sum(unit.cost for micro in own for unit in micro) for own in split]
    apart = [alone for whole in wholes for alone in whole.apart]
    assert max(loads) <= sum(u.cost for u in apart) / num_ranks + max(
        map(packing.cost, [*lengths.values(), 0])
    )


def test_a_group_is_cut_where_it_must_be_and_long_answers_stay_apart() -> None:
    group = Unit([0, 1, 2, 3], 50, [10, 40, 10, 20])
    assert cut(group, 200, 1) == [Unit([1, 3, 0, 2], 50, [40, 20, 10, 10])]
    assert cut(group, 100, 1) == [Unit([1, 0], 50, [40, 10]), Unit([3, 2], 50, [20, 10])]
    assert len(cut(group, 200, 4)) == 4 and cut(group, 89, 1) == group.apart
    long = Unit([0, 1], 100, [1000, 900])
    assert cut(long, 10_000, 1) == [Unit([0], 0, [1100]), Unit([1], 0, [1000])]
    # Two ranks, one group: each has a part and a copy of the prompt.
    assert [len(micro) for own in units_over_ranks([group], 2, 200) for micro in own] == [1, 1]
    with pytest.raises(MinirlError, match="raise it to 90"):
        units_over_ranks([group], 1, 89)
