"""The policy: packed equals a plain forward in logprobs and gradients, for each kind of model."""

from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import plain_script
import pytest
import ranks
import tiny_models
import torch
import torch._dynamo as dynamo
import varlen_cpu  # noqa: F401  registers the kernel of packed attention
from cases import each_case
from hypothesis import given
from hypothesis import strategies as st
from ranks import FIRST_VERSION, LORA, LocalRank, are_equal, of_algorithm, with_train
from safetensors.torch import load_file
from torch import Tensor, nn

from minirl.config import ALGORITHMS, Config, TrainConfig
from minirl.errors import MinirlError
from minirl.records import Batch, Group, StopReason, Trajectory
from minirl.shm.ring import NOTHING, TrajectoryRing
from minirl.train import attention, lora, packing, policy
from minirl.train.attention import boundaries, packed_attention
from minirl.train.batch import items_of, own_micro_batches
from minirl.train.objective import micro_loss
from minirl.train.optimizer import build_optimizer, learning_rate
from minirl.train.packing import Unit, cut, micro_batches, split_units
from minirl.train.policy import Head, Policy, build_policy, check_head, hidden_states, load_policy
from minirl.train.sharing import share

import transformers  # isort: skip  (after minirl, which hides a broken torchvision)

LENGTHS = [9, 5, 5, 1, 12, 1]
TEMPERATURE = 0.7


def random_tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(1, tiny_models.VOCAB, (sum(LENGTHS),))


def one_by_one(model: plain_script.PreTrainedModel, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sequence alone, through Hugging Face's own forward. (logprobs_T, entropy_T)"""
    logprobs, entropies = [], []
    for sequence in tokens_T.split(LENGTHS):
        all_TV = plain_script.distributions(model, sequence.tolist(), TEMPERATURE)
        logprobs.append(plain_script.own(all_TV, sequence.tolist()))
        entropies.append(torch.cat([torch.zeros(1), -(all_TV.exp() * all_TV).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Qwen3Config", "Qwen2Config", "LlamaConfig"])
def test_packed_equals_one_by_one(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "REPEAT_ON", {"cpu"} if tied else set())  # on CUDA, or not
    monkeypatch.setattr("minirl.train.policy.CHUNK", 7 if tied else 64)  # several chunks, or one
    folder = tiny_models.write(tmp_path, tied, kind=kind)
    policy = load_policy(str(folder), gradient_checkpointing=tied)
    plain = plain_script.load(folder)
    tokens_T = random_tokens()
    given = (tokens_T, boundaries(LENGTHS), TEMPERATURE)
    logprobs_T, entropy_T = policy(*given)
    expected_T, expected_entropy_T = one_by_one(plain, tokens_T)
    torch.testing.assert_close(logprobs_T, expected_T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_T, expected_entropy_T, atol=1e-5, rtol=1e-5)
    assert policy.training and not entropy_T.requires_grad
    needed_T = torch.rand(len(tokens_T)) < 0.5
    for some_T, all_T in zip(policy(*given, needed_T), (logprobs_T, entropy_T), strict=True):
        torch.testing.assert_close(some_T, torch.where(needed_T, all_T, 0.0))

    weight_T = torch.randn(len(tokens_T)) / len(tokens_T)
    (logprobs_T * weight_T).sum().backward()
    (expected_T * weight_T).sum().backward()
    grads = {key: p.grad for key, p in policy.model.named_parameters()}
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(grads.pop(key), parameter.grad, atol=1e-5, rtol=1e-5)
    assert not grads


def test_the_optimizer_decays_matrices_only(tied_folder: Path) -> None:
    policy = load_policy(str(tied_folder))
    groups = build_optimizer(policy.parameters(), 1e-2, TrainConfig(weight_decay=0.1)).param_groups
    decays = {p: group["weight_decay"] for group in groups for p in group["params"]}
    assert decays == {p: 0.1 if p.ndim >= 2 else 0.0 for p in policy.parameters()}


def test_the_learning_rate_warms_up_and_then_stays_or_falls_to_zero() -> None:
    def of(schedule: Any, warmup: int) -> list[float]:
        train = TrainConfig(schedule=schedule, warmup_steps=warmup, steps=4 + warmup)
        return [learning_rate(step, 4.0, train) for step in range(train.steps)]

    assert of("constant", 3) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0]
    assert of("linear", 0) == [4.0, 3.0, 2.0, 1.0]
    assert of("linear", 1) == [2.0, 4.0, 3.0, 2.0, 1.0]
    assert of("cosine", 0) == pytest.approx([4.0, 2 + 2 * 0.5**0.5, 2.0, 2 - 2 * 0.5**0.5])
    longer = TrainConfig(schedule="linear", warmup_steps=1, steps=5)  # not negative after its end
    assert learning_rate(9, 4.0, longer) == 0.0


def test_packed_attention_refuses_what_it_cannot_do_only_where_it_matters() -> None:
    torch.manual_seed(0)
    qkv, bounds = [torch.randn(1, heads, 8, 8) for heads in (4, 2, 2)], boundaries([5, 3])

    def packed(**rest: Any) -> Tensor:
        given = dict(cu_seqlens=bounds.cu_seqlens_S1, max_seqlen=5, scaling=0.3, **rest)
        return packed_attention(torch.nn.Identity(), *qkv, None, **given)[0]

    torch.testing.assert_close(packed(sliding_window=5), packed())
    with pytest.raises(MinirlError, match="sliding window of 4 tokens for sequences of 5"):
        packed(sliding_window=4)
    with pytest.raises(MinirlError, match="needs softcap"):
        packed(softcap=30.0)


SMALL: dict[str, Any] = dict(vocab_size=300, hidden_size=64, intermediate_size=128)
SMALL |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


@each_case("families")
def test_a_model_that_packing_would_change_is_refused(case: dict[str, Any]) -> None:
    """`layers` look across packed sequences; those of Qwen3.5 by boundaries of their own."""
    name, layers, values = case.values()
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SMALL, **values)
    kind = transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation=attention.NAME)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.1)
    policy = Policy(model.float().eval())
    if not layers:
        check_head(policy)
        return
    refusal = f"ForCausalLM: {layers} layers look across packed sequences: minirl cannot train it"
    refusal = "more to its logits" if name == "CohereConfig" else refusal
    with pytest.raises(MinirlError, match=refusal):
        check_head(policy)


def test_experts_are_published_by_the_names_of_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds all experts of a layer is fetched once: of slices that is a collective."""
    folder = tiny_models.write(tmp_path, kind="Qwen3MoeConfig", tied=False, **EXPERTS)
    merged, fetched = lora.merged, list[str]()

    def noted(model: Any) -> lora.Weights:
        found = merged(model)
        return {name: lambda name=name: fetched.append(name) or found[name]() for name in found}

    monkeypatch.setattr(lora, "merged", noted)
    published = LocalRank(folder, with_train(), TrajectoryRing(1, 1)).weights()
    assert {name for name in published if ".experts.3." in name}
    assert are_equal(published, load_file(folder / "model.safetensors"))
    assert len(fetched) == len({*fetched}) < len(published)


def test_a_compiled_head_gives_the_same(tied_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 1, where nothing is divided, and at another; over several chunks."""
    monkeypatch.setattr("minirl.train.policy.CHUNK", 7)
    policy, tokens_T, found = load_policy(str(tied_folder)), random_tokens(), []
    compiled = Head(*(torch.compile(part, dynamic=True, backend="eager") for part in Head()[:2]))
    for policy.head in (Head(), compiled):
        for temperature in (1.0, TEMPERATURE):
            policy.zero_grad()
            logprobs_T, entropy_T = policy(tokens_T, boundaries(LENGTHS), temperature)
            (logprobs_T * torch.linspace(-1, 1, len(tokens_T))).sum().backward()
            grads = [parameter.grad for parameter in policy.parameters()]
            found.append([logprobs_T, entropy_T, *grads])
    torch.testing.assert_close(found[2:], found[:2])
    assert not torch.equal(found[0][0], found[1][0])
    recipe = replace(Config(), train=replace(Config().train, compile=True))
    assert build_policy(recipe, str(tied_folder)).head != Head()


# Each prompt is trained once, for whatever is trained and however it is split ---------------------

UNITS = [Unit([0, 1, 2, 3], 9, [4, 1, 30, 4]), Unit([4], 0, [6]), Unit([5, 6, 7], 20, [7, 0, 12])]
UNIT_LENGTHS = [unit.prompt + answer for unit in UNITS for answer in unit.answers]
VOCAB, LONGEST, VERSION = tiny_models.VOCAB, 64, FIRST_VERSION + 3


def unit_tokens() -> Tensor:
    torch.manual_seed(1)
    prompts = [torch.randint(2, VOCAB, (unit.prompt,)) for unit in UNITS]
    pairs = [(p, n) for p, unit in zip(prompts, UNITS, strict=True) for n in unit.answers]
    return torch.cat([torch.cat([p, torch.randint(2, VOCAB, (n,))]) for p, n in pairs])


def gradients(module: nn.Module, out: Tensor) -> list[Tensor]:
    """Of a random sum over tokens, behind the outputs."""
    torch.manual_seed(2)
    module.zero_grad()
    (torch.randn(len(out)).to(out.dtype) @ out).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def gap(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative difference of a tensor."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(1e-30)) for a, b in pairs)


def backbone_of(folder: Path) -> Any:
    backbone = load_policy(str(folder)).model.base_model
    for name, module in [*backbone.named_modules()]:
        if type(module).__name__.endswith("RMSNorm"):  # transformers' own are in float32
            backbone.set_submodule(name, nn.RMSNorm(module.weight.shape, eps=1e-6))
    return backbone


@pytest.mark.parametrize("kind", ["Qwen3Config", "Qwen2Config", "LlamaConfig"])
def test_a_backbone_computes_the_same_in_float64(kind: str, tmp_path: Path) -> None:
    backbone = backbone_of(tiny_models.write(tmp_path, kind=kind))
    tokens_T, bounds, once = unit_tokens(), boundaries(UNIT_LENGTHS), share(UNITS, "cpu")
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


NAMES = ("loss", "grad_norm", "value_loss", "kl", "entropy", "clip_frac", "behav_ratio_mean")
COMPARED = {f"train/{name}" for name in NAMES}

CONFIGS = {name: of_algorithm(name, kl_coef=0.05, critic_lr=1e-3) for name in ALGORITHMS}
CONFIGS["lora"] = of_algorithm("grpo", kl_coef=0.05, **LORA)
CONFIGS["sliced"] = of_algorithm("grpo", kl_coef=0.05, shard="full")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_that_of_packed_trajectories_in_any_split(
    name: str,
    batch: tuple[TrajectoryRing, Batch],
    tied_folder: Path,
    monkeypatch: Any,
    request: pytest.FixtureRequest,
) -> None:
    found, config = [], CONFIGS[name]
    if name == "sliced":
        request.getfixturevalue("one_sharded")
    for least, max_tokens in ((1.15, 160), (float("inf"), 160), (float("inf"), 4096)):
        monkeypatch.setattr(packing, "MIN_SAVING", least)
        split = replace(config, train=replace(config.train, max_tokens=max_tokens))
        rank = LocalRank(tied_folder, split, batch[0])
        before, values = rank.weights(), rank.train(batch[1])
        assert values["train/skipped_updates"] == 0 and not are_equal(rank.weights(), before)
        assert values["train/grad_norm"] > 0 and values["train/kl"] > 0
        states = [replica.state_by_name() for replica in rank.trainer.replicas]
        momenta = [state[key] for state in states for key in state if key.endswith("/exp_avg")]
        micros = [m for part in rank.trainer.prepared.minibatches for m in part.micro_batches]
        found.append((any(micro.shared for micro in micros), values, momenta))
    (some, ours, momenta), *others = found
    assert some and ("train/value_loss" in ours) == (name == "ppo")
    for none, theirs, their_momenta in others:
        assert not none and gap(momenta, their_momenta) < 1e-5
        for key in COMPARED & {*ours}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7), key


def test_two_ranks_with_slices_share_prompts(
    batch: tuple[TrajectoryRing, Batch], tied_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    (ring, own), config = batch, with_train(shard="full")
    items = list(chain(*items_of(own, ring, config.buffer.max_staleness)))
    for rank in range(2):
        setup = ranks.setup_of(tied_folder, config, ring, rank=rank, num_ranks=2)
        assert any(micro.shared for micro in own_micro_batches(items, setup, can_share=True))
    with ranks.ranks(tmp_path, tied_folder, config, ring, 2) as two:
        values = two.train(own)
        two.save(folder := tmp_path / "run" / "checkpoints" / "step-000001")
    monkeypatch.setattr(packing, "MIN_SAVING", float("inf"))
    packed = LocalRank(tied_folder, with_train(), ring)
    assert packed.train(own)["train/loss"] == pytest.approx(values["train/loss"], rel=1e-5)
    assert ranks.relative_error(ranks.momentum(folder), packed.momentum()) < 1e-5


def test_the_first_ratio_is_exact(batch: tuple[TrajectoryRing, Batch], tied_folder: Path) -> None:
    """1 to the bit."""
    config = with_train(max_tokens=LONGEST, num_minibatches=2)
    trainer = LocalRank(tied_folder, config, batch[0]).trainer
    prepared = trainer.preparer.prepare(batch[1])
    assert any(micro.shared for micro in prepared.minibatches[0].micro_batches)
    for micro in prepared.minibatches[0].micro_batches:
        assert torch.equal(micro_loss(trainer.policy, micro, config)[1], micro.prox_T)


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
    model, all_T = load_policy(str(tied_folder), "bfloat16"), unit_tokens()

    def run(units: list[Unit], num: int = len(UNIT_LENGTHS)) -> list[Tensor]:
        bounds, once = boundaries(UNIT_LENGTHS[:num]), share(units, "cpu")
        found = gradients(model, model(all_T[: sum(UNIT_LENGTHS[:num])], bounds, shared=once)[0])
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
