"""Each prompt is trained once: loss and gradients are those of packed trajectories, for whatever is
trained and however it is split; groups are cut where they must be."""

from dataclasses import replace
from itertools import chain, count
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
from ranks import FIRST_VERSION, LocalRank, are_equal, ranks, relative_error, with_train
from torch import Tensor, nn

from minirl.config import ALGORITHMS, Config
from minirl.errors import MinirlError
from minirl.records import Batch, Group, StopReason, Trajectory
from minirl.shm.ring import NOTHING, TrajectoryRing
from minirl.train import attention, packing, policy
from minirl.train.attention import boundaries
from minirl.train.objective import micro_loss
from minirl.train.packing import Unit, cut, micro_batches, split_units
from minirl.train.policy import check_head, hidden_states, load_policy
from minirl.train.sharing import share

UNITS = [Unit([0, 1, 2, 3], 9, [4, 1, 30, 4]), Unit([4], 0, [6]), Unit([5, 6, 7], 20, [7, 0, 12])]
LENGTHS = [unit.prompt + answer for unit in UNITS for answer in unit.answers]
VOCAB, LONGEST, VERSION = tiny_models.VOCAB, 64, FIRST_VERSION + 3


def random_tokens() -> Tensor:
    torch.manual_seed(1)
    prompts = [torch.randint(2, VOCAB, (unit.prompt,)) for unit in UNITS]
    pairs = [(p, n) for p, unit in zip(prompts, UNITS, strict=True) for n in unit.answers]
    return torch.cat([torch.cat([p, torch.randint(2, VOCAB, (n,))]) for p, n in pairs])


def gradients(module: nn.Module, out: Tensor) -> list[Tensor]:
    """Of a random sum over tokens, behind the outputs."""
    torch.manual_seed(2)
    module.zero_grad()
    (torch.randn(len(out), dtype=out.dtype) @ out).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def gap(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative difference of a tensor."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(1e-30)) for a, b in pairs)


@pytest.mark.parametrize("kind", ["Qwen3Config", "Qwen2Config", "LlamaConfig"])
def test_a_backbone_computes_the_same_in_float64(kind: str, tmp_path: Path) -> None:
    backbone = load_policy(str(tiny_models.write(tmp_path, kind=kind))).model.base_model
    for name, module in [*backbone.named_modules()]:
        if type(module).__name__.endswith("RMSNorm"):  # transformers' own are in float32
            backbone.set_submodule(name, nn.RMSNorm(module.weight.shape, eps=1e-6))
    tokens_T, bounds, once = random_tokens(), boundaries(LENGTHS), share(UNITS, "cpu")
    assert once is not None and len(once.rows_U) == 9 + 39 + 6 + 20 + 19
    assert torch.equal(tokens_T[once.rows_U][once.unique_T], tokens_T)
    given = (backbone.double(), torch.float64, tokens_T, bounds)
    hidden_TE = hidden_states(*given, once)[0][once.unique_T], hidden_states(*given, None)[0]
    assert gap(*(gradients(backbone, out_TE) for out_TE in hidden_TE)) < 1e-10


@pytest.fixture(scope="module")
def batch() -> tuple[TrajectoryRing, Batch]:
    """With two turns, answers of one token, several versions, stale tokens, masked members."""
    ring, rng, groups = TrajectoryRing(24, LONGEST), np.random.default_rng(0), []
    for group_id in range(4):
        prompt, found = rng.integers(2, VOCAB, rng.integers(9, 20)), []
        for cell in range(6 * group_id, 6 * group_id + 6):
            num = (1, *rng.integers(2, 30, 5))[cell % 6]
            versions = np.sort(rng.integers(FIRST_VERSION, VERSION + 1, num))
            versions[num // 3 : num // 2] = NOTHING if num > 5 else versions[0]
            answer, logprobs = rng.integers(2, VOCAB, num), -6 + 0.5 * rng.random(num)
            ring.write(cell, group_id, prompt, answer, logprobs, versions)
            lengths = len(prompt) + num, int((versions != NOTHING).sum())
            found.append(Trajectory(cell, *lengths, StopReason.STOP, versions[0], versions[-1]))
        rewards = tuple(float(place % 2) + place / 8 for place in range(6))
        groups.append(Group(group_id, group_id, tuple(found), rewards, frozenset({2})))
    return ring, Batch(1, VERSION, tuple(groups))


def num_shared(rank: LocalRank) -> int:
    parts = rank.trainer.prepared.minibatches
    return sum(micro.shared is not None for part in parts for micro in part.micro_batches)


NAMES = ("loss", "grad_norm", "value_loss", "kl", "entropy", "clip_frac", "behav_ratio_mean")
COMPARED = {f"train/{name}" for name in NAMES}


def algorithm(name: str, **values: Any) -> Config:
    parts = {key.removeprefix("train."): value for key, value in ALGORITHMS[name].items()}
    return with_train(**{**parts, "kl_coef": 0.05, **values})


LORA = {"lora_rank": 4, "gradient_checkpointing": True}
CONFIGS = {
    **{name: algorithm(name, num_minibatches=2, critic_lr=1e-3) for name in ALGORITHMS},
    "lora": algorithm("grpo", num_minibatches=2, **LORA),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_that_of_packed_trajectories_in_any_split(
    name: str, batch: tuple[TrajectoryRing, Batch], tied_folder: Path, monkeypatch: Any
) -> None:
    found, config = [], CONFIGS[name]
    for least, max_tokens in ((1.15, 160), (float("inf"), 160), (float("inf"), 4096)):
        monkeypatch.setattr(packing, "MIN_SAVING", least)
        split = replace(config, train=replace(config.train, max_tokens=max_tokens))
        rank = LocalRank(tied_folder, split, batch[0])
        before, values = rank.weights(), rank.train(batch[1])
        assert values["train/skipped_updates"] == 0 and not are_equal(rank.weights(), before)
        assert values["train/grad_norm"] > 0 and values["train/kl"] > 0
        states = [replica.state_by_name() for replica in rank.trainer.replicas]
        momenta = [state[key] for state in states for key in state if key.endswith("/exp_avg")]
        found.append((num_shared(rank), values, momenta))
    (some, ours, momenta), *others = found
    assert some and ("train/value_loss" in ours) == (name == "ppo")
    for none, theirs, their_momenta in others:
        assert not none and gap(momenta, their_momenta) < 1e-5
        for key in COMPARED & {*ours}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7), key


def test_two_ranks_make_the_step_of_one_whose_first_ratio_is_1_to_the_bit(
    batch: tuple[TrajectoryRing, Batch], tied_folder: Path, tmp_path: Path
) -> None:
    config = with_train(max_tokens=LONGEST, num_minibatches=2)
    alone = LocalRank(tied_folder, config, batch[0])
    for micro in alone.trainer.preparer.prepare(batch[1]).minibatches[0].micro_batches:
        assert torch.equal(micro_loss(alone.trainer.policy, micro, config)[1], micro.prox_T)
    expected = alone.train(batch[1])
    with ranks(tmp_path, tied_folder, config, batch[0], 2) as two:
        values, weights = two.train(batch[1]), two.weights()
    assert num_shared(alone) and relative_error(weights, alone.weights()) < 1e-5
    assert values["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)


def test_a_model_whose_layers_look_at_the_token_before_is_never_shared(tied_folder: Path) -> None:
    found = load_policy(str(tied_folder))

    def mix(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        return (args[0] + args[0].roll(1, 1) * (kwargs["position_ids"] > 0)[..., None],), kwargs

    found.model.base_model.layers[0].register_forward_pre_hook(mix, with_kwargs=True)
    assert found.can_share
    check_head(found)
    assert not found.can_share


def test_bfloat16_is_as_near_and_one_graph_serves_all(tied_folder: Path, monkeypatch: Any) -> None:
    """The branch that CUDA takes, packed and shared: one graph each, without a break."""
    model, all_T = load_policy(str(tied_folder), "bfloat16"), random_tokens()

    def run(units: list[Unit], num: int = len(LENGTHS)) -> list[Tensor]:
        bounds, once = boundaries(LENGTHS[:num]), share(units, "cpu")
        found = gradients(model, model(all_T[: sum(LENGTHS[:num])], bounds, shared=once)[0])
        assert {tensor.dtype for tensor in found} == {torch.float32}
        return found

    exact = run([])
    monkeypatch.setattr(attention, "VARLEN_ON", {"cpu"})
    monkeypatch.setattr(policy, "AUTOCAST_ON", {"cpu"})
    most = 1.5 * gap(run([]), exact)
    assert gap(run(UNITS), exact) < most < 0.1
    dynamo.reset()
    dynamo.utils.counters.clear()
    model.model.base_model.compile(dynamic=True, backend="aot_eager")
    for units in (UNITS, [*chain(*(unit.apart for unit in UNITS[:2])), UNITS[2]]):
        assert gap(run(units), exact) < most
    assert gap(run([]), exact) < most
    run([], num=3)
    assert not dynamo.utils.counters["graph_break"]
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 2


@given(
    st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(0, 40), min_size=1, max_size=8))),
    st.integers(1, 5),
)
def test_units_are_whole_within_the_budget_and_balanced_as_trajectories_are(
    drawn: list[tuple[int, list[int]]], num_ranks: int
) -> None:
    places = count()
    groups = [Unit([next(places) for _ in answers], n, answers) for n, answers in drawn]
    apart, most = [alone for group in groups for alone in group.apart], []
    for units in (groups, apart):
        split = split_units(units, num_ranks, 100)
        assert len({len(own) for own in split}) == 1 and len(split) == num_ranks and split[0]
        assert all(sum(unit.size for unit in micro) <= 100 for own in split for micro in own)
        for own in split:
            assert own.count([]) == max(0, len(own) - sum(map(len, own)))
        found = [alone for unit in chain(*chain(*split)) for alone in unit.apart]
        assert sorted(found) == sorted(apart)
        loads = [sum(unit.cost for unit in chain(*own)) for own in split]
        most.append(max(loads))
    assert most[0] <= most[1] + 1e-6
    assert max(loads) - min(loads) <= max((unit.cost for unit in apart), default=0) + 1e-9


def test_algorithm_1_by_hand() -> None:
    # 6 opens the first; 5 does not fit (11 > 10) and opens the second; 4 fits both: the first has
    # as few as the second and comes first; 3 fits only the second; 2 fits the second (8 + 2).
    assert micro_batches([4, 6, 5, 3, 2], 10) == [[1, 0], [2, 3, 4]]
    # 41 joins 60 (101), 40 opens the second; 9 fits both (110, 49) and goes where there is one.
    assert micro_batches([60, 41, 40, 9], 110) == [[0, 1], [2, 3]]


def test_a_group_is_cut_where_it_must_be_and_long_answers_stay_apart() -> None:
    group = Unit([0, 1, 2, 3], 50, [10, 40, 10, 20])
    assert cut(group, 200, 1) == [Unit([1, 3, 0, 2], 50, [40, 20, 10, 10])]
    assert cut(group, 100, 1) == [Unit([1], 0, [90]), Unit([3, 0, 2], 50, [20, 10, 10])]
    assert len(cut(group, 200, 4)) == 4 and cut(group, 89, 1) == group.apart
    long = Unit([0, 1], 100, [1000, 900])
    assert cut(long, 9999, 1) == long.apart == [Unit([0], 0, [1100]), Unit([1], 0, [1000])]
    assert [len(micro) for own in split_units([group], 2, 200) for micro in own] == [1, 1]
    with pytest.raises(MinirlError, match="raise it to 90"):
        split_units([group], 1, 89)
