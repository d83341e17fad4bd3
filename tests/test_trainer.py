"""Trainer ranks: the update is a plain script's, however it is split; what is too stale trains
nothing; a checkpoint is an ordinary folder, and training that resumes from it changes no bit. What
a recipe may ask of them: algorithms, LoRA, a critic, shards; a batch that blows up.

Most run in this process with one rank; what ranks must agree on runs in real processes.
"""

import itertools
import multiprocessing
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plain_script
import pytest
import ranks
import torch
import torch._dynamo as dynamo
import torch.distributed as dist
import varlen_cpu  # noqa: F401  registers the kernel of packed attention
from plain_script import PlainScript, Weights
from processes import CUDA_TRAINER_PLACE, TRAINER_PLACE
from ranks import CONFIG, FRESH, LORA, MIXED, Data, LocalRank, are_equal, relative_error, with_train

from minirl.buffer import History
from minirl.config import BufferConfig, Config, DevicesConfig, ModelConfig
from minirl.errors import MinirlError, RecipeError
from minirl.messages import CheckpointState, RankSetup, Save, Saved, Score, Train, Trained
from minirl.recipe import check_packages, to_toml
from minirl.records import Batch, Group
from minirl.resume import check_changes
from minirl.shm.board import Board
from minirl.shm.ring import TrajectoryRing
from minirl.supervisor import SLOW_LIMIT_S
from minirl.train import attention, optimizer, policy, trainer
from minirl.train.attention import boundaries
from minirl.train.batch import items_of, staleness_metrics
from minirl.train.checkpoint import read_state, read_whole
from minirl.train.policy import load_policy, model_flops

from transformers import AutoModelForCausalLM, AutoTokenizer  # isort: skip


# (ranks, max_tokens, minibatches)
@pytest.mark.parametrize("split", [(1, 4096, 1), (1, ranks.LONGEST, 2), (2, ranks.LONGEST, 2)])
def test_the_update_is_a_plain_scripts_however_it_is_split(
    split: tuple[int, int, int], data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    """One rank in this process, several in processes of their own."""
    num_ranks, max_tokens, num_minibatches = split
    config = with_train(max_tokens=max_tokens, num_minibatches=num_minibatches)
    started = ranks.ranks(tmp_path, tied_folder, config, data.ring, num_ranks)
    if num_ranks == 1:
        started = nullcontext(LocalRank(tied_folder, config, data.ring))
    plain = PlainScript(tied_folder, config)
    initial = plain.weights()
    checkpoints = tmp_path / "run" / "checkpoints"
    with started as trainer:
        assert trainer.store.latest == ranks.FIRST_VERSION
        assert are_equal(trainer.weights(), initial)
        for recipe, batch in zip(ranks.RECIPES, data.batches, strict=True):
            before = plain.weights()
            values = trainer.train(batch)
            assert trainer.store.latest == batch.version + 1
            for name, value in plain.train(batch, data.ring).items():
                assert values[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
            views = [data.ring.read(t.cell, g.id) for g in batch.groups for t in g.trajectories]
            stale = batch.version - np.concatenate([v.versions[v.mask == 1] for v in views])
            assert values["buffer/masked_frac"] == pytest.approx((stale > ranks.ETA).mean())
            cut = [group._replace(masked=frozenset({0})) for group in batch.groups]  # truncated
            of = items_of(batch._replace(groups=tuple(cut)), data.ring, ranks.ETA)
            found = staleness_metrics([*itertools.chain(*of)], ranks.ETA)
            assert found["buffer/masked_frac"] == pytest.approx(values["buffer/masked_frac"])
            assert values["buffer/staleness_max"] == max(stale[stale <= ranks.ETA], default=0)
            assert values["buffer/versions_per_trajectory"] == len(recipe.versions)
            if recipe in (ranks.EQUAL, ranks.STALE):  # nothing to learn: not a bit moves
                assert values["train/grad_norm"] == 0
                assert are_equal(trainer.weights(), initial)
                continue
            folder = checkpoints / f"step-{batch.step:06d}"
            trainer.save(folder)
            assert relative_error(ranks.momentum(folder), plain.momentum()) < 1e-4
            # Looser: Adam turns a rounding error of a gradient near 0 into a part of the step.
            assert relative_error(trainer.weights(), plain.weights(), before) < 1e-3
            if recipe is FRESH:  # sampled by the very weights that the step starts from
                assert values["train/behav_ratio_mean"] == pytest.approx(1, abs=1e-5)
                assert values["train/logprob_gap"] == pytest.approx(0, abs=1e-5)
        if isinstance(trainer, ranks.Ranks):
            trainer.stop()
    kept = sorted(path.name for path in checkpoints.iterdir())
    assert kept == ["step-000004", "step-000005"]  # checkpoint.keep is 2


def in_bfloat16(config: Config) -> Config:
    return replace(config, model=ModelConfig(dtype="bfloat16"))


@pytest.mark.parametrize(
    "config",
    [
        with_train(num_minibatches=2),
        # In bfloat16 an update this small is lost on every weight: only masters can add them up.
        in_bfloat16(with_train(lr=1e-6, num_minibatches=2)),
        ranks.of_algorithm("ppo", critic_lr=3e-3),
        in_bfloat16(with_train(lora_rank=4)),
    ],
    ids=["float32", "bfloat16", "critic", "lora"],
)
def test_resume_is_exact(config: Config, data: Data, tied_folder: Path, tmp_path: Path) -> None:
    """To the bit, from a checkpoint that is an ordinary folder."""
    first, second = data.of(FRESH), data.of(MIXED, 2)
    folders = [tmp_path / "one" / "checkpoints" / f"step-00000{i}" for i in (1, 2)]
    one = LocalRank(tied_folder, config, data.ring)
    one.train(first)
    published = one.weights()
    state = CheckpointState(1, History(second.version), 0)
    one.save(folders[0], state)
    one.train(second)
    one.save(folders[1])
    assert sorted((tmp_path / "one" / "checkpoints").iterdir()) == folders  # and no temporary file
    assert read_state(folders[0]) == state
    # transformers loads it as it is, and finds the weights that were published.
    assert are_equal(_parameters(AutoModelForCausalLM.from_pretrained(folders[0])), published)
    tokenizer, text = AutoTokenizer.from_pretrained(folders[0]), "3 plus 4 is 7\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(tied_folder).encode(text)

    two = LocalRank(tied_folder, config, data.ring, **ranks.resumed(folders[0], second.version))
    assert two.store.latest == second.version
    assert are_equal(two.weights(), published)
    two.train(second)
    assert are_equal(two.weights(), one.weights())
    assert are_equal(two.momentum(), one.momentum())
    for ours, theirs in zip(one.trainer.replicas, two.trainer.replicas, strict=True):
        assert are_equal(*(dict(r.module.named_parameters()) for r in (ours, theirs)))
    if config.train.lora_rank:
        return
    assert not are_equal(ranks.masters(folders[1]), ranks.masters(folders[0]))
    rounded = {n: w.to(one.store.torch_dtype) for n, w in ranks.masters(folders[1]).items()}
    assert are_equal(rounded, one.weights())


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_lora_publishes_and_saves_merged_weights(
    gradient_checkpointing: bool, data: Data, untied_folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    config = with_train(lora_rank=4, gradient_checkpointing=gradient_checkpointing)
    rank = LocalRank(untied_folder, config, data.ring)
    base = plain_script.load(untied_folder)
    assert are_equal(rank.weights(), _parameters(base))  # B is 0: nothing has changed yet
    rank.train(data.of(FRESH))
    folder = rank.save(tmp_path / "run" / "checkpoints" / "step-000001")
    published = rank.weights()
    changed = {name for name, w in published.items() if not torch.equal(w, _parameters(base)[name])}
    assert changed and all(name.endswith("_proj.weight") for name in changed)
    # peft itself merges the saved adapter to the same, and the checkpoint is an ordinary folder.
    theirs = PeftModel.from_pretrained(base, str(folder / "adapter")).merge_and_unload()
    assert relative_error(published, _parameters(theirs)) < 1e-7
    assert are_equal(_parameters(AutoModelForCausalLM.from_pretrained(folder)), published)


def _parameters(model: torch.nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(data: Data, tied_folder: Path) -> None:
    found = []
    for is_compiled in (False, True):
        rank = LocalRank(tied_folder, with_train(compile=is_compiled), data.ring)
        for step, recipe in enumerate((FRESH, MIXED), start=1):
            rank.train(data.of(recipe, step))
        found.append(rank.momentum())
    assert relative_error(*found) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_a_rank_on_cuda_learns_the_same_and_resumes_from_its_checkpoint(
    dtype: str, bound: float, data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    config = replace(CONFIG, model=ModelConfig(dtype=dtype))
    first, second = data.of(FRESH), data.of(MIXED, 2)
    folders = [tmp_path / "one" / "checkpoints" / f"step-00000{i}" for i in (1, 2)]
    plain, place = PlainScript(tied_folder, config), {"placement": CUDA_TRAINER_PLACE}
    with ranks.ranks(tmp_path / "one", tied_folder, config, data.ring, **place) as one:
        values, expected = one.train(first), plain.train(first, data.ring)
        for name in ("train/grad_norm", "train/entropy"):
            assert values[name] == pytest.approx(expected[name], rel=bound), name
        one.save(folders[0])
        assert relative_error(ranks.momentum(folders[0]), plain.momentum()) < bound
        one.train(second)
        one.save(folders[1])
    again = tmp_path / "two" / "checkpoints" / "step-000002"
    place |= ranks.resumed(folders[0], second.version)
    with ranks.ranks(tmp_path / "two", tied_folder, config, data.ring, **place) as two:
        two.train(second)
        two.save(again)
    assert relative_error(ranks.momentum(again), ranks.momentum(folders[1])) < 1e-3
    ours, theirs, before = map(ranks.masters, (again, folders[1], folders[0]))
    assert relative_error(ours, theirs, before) < 1e-2


def test_every_version_has_a_gap_whatever_the_staleness_of_its_batch(tied_folder: Path) -> None:
    """Measured before the first update, over the batch's own tokens and those to score. A score of
    another version and a cell that was reused count nothing."""
    ring, version = TrajectoryRing(12, ranks.LONGEST), ranks.FIRST_VERSION
    model = plain_script.load(tied_folder)
    writer = ranks.GroupWriter(model, ring)
    stale = ranks.Recipe(versions=(-1,))
    kinds = (stale, stale, FRESH, ranks.Recipe(noise=0.5))
    older, old, fresh, noisy = (writer.write(kind, i, version) for i, kind in enumerate(kinds))
    errors = []
    for trajectory in noisy.trajectories:
        view = ring.read(trajectory.cell, noisy.id)
        exact = plain_script.logprobs(model, view.tokens.tolist(), CONFIG.rollout.temperature)
        errors += np.abs(view.logprobs - exact.detach().numpy())[view.mask == 1].tolist()
    cells = tuple((trajectory.cell, noisy.id) for trajectory in noisy.trajectories)

    def gap(groups: tuple[Group, ...], *scores: Score) -> float | None:
        rank = LocalRank(tied_folder, with_train(num_minibatches=2), ring)
        ours, rank.trainer.pipe = multiprocessing.Pipe()
        for score in scores:
            ours.send(score)
        return rank.train(Batch(1, version, groups))["train/logprob_gap"]

    score = Score(version, cells)
    assert gap((older, old)) is None
    assert gap((older, old), Score(version - 1, cells), Score(version, ((cells[0][0], 9),))) is None
    assert gap((older, old), score) == pytest.approx(np.mean(errors), abs=1e-5)
    num_fresh = sum(trajectory.num_written for trajectory in fresh.trajectories)
    expected = sum(errors) / (len(errors) + num_fresh)
    assert gap((fresh, older), score) == pytest.approx(expected, abs=1e-5)


def test_mfu_is_a_metric_where_the_rate_is_known(data: Data, tied_folder: Path) -> None:
    batch = data.of(FRESH)
    assert "train/mfu" not in LocalRank(tied_folder, CONFIG, data.ring).train(batch)
    rank = LocalRank(tied_folder, CONFIG, data.ring, peak_flops=1e12)
    rank.trainer.policy.can_share = False  # all tokens are computed
    values = rank.train(batch)
    lengths = [t.length for group in batch.groups for t in group.trajectories]
    num = sum(p.numel() for p in rank.trainer.policy.parameters())
    attention = 6 * 2 * 128 * sum(n * n for n in lengths)  # layers, width of all heads
    flops_per_token = 6 * num + attention / sum(lengths)
    expected = values["train/tokens_per_s"] * flops_per_token / 1e12
    assert values["train/mfu"] == pytest.approx(expected)
    adapted = LocalRank(tied_folder, with_train(lora_rank=4), data.ring).trainer.policy
    assert 4 * num < model_flops(adapted, [1]) < 5 * num


# What makes large models fit: slices (FSDP2), a resting model in model.dtype, AdamW in 8 bits -----

PPO = {"estimator": "gae", "critic_lr": 1e-3, "loss_norm": "sequence"}
MANY = {"max_tokens": 64, "gradient_checkpointing": True, "num_minibatches": 2}
MANY["estimator"] = "reinforce++"  # one reward that is not finite spoils both minibatches
COMPARED = {"train/loss", "train/grad_norm", "train/value_loss", "train/kl", "train/logprob_gap"}


def train_twice(rank: Any, data: Data) -> list[dict[str, float | None]]:
    return [rank.train(data.of(kind, i)) for i, kind in enumerate((FRESH, MIXED), 1)]


def assert_same(ours: Any, theirs: Any) -> None:
    for values, others in zip(ours, theirs, strict=True):
        for key in COMPARED & {*others}:
            assert values[key] == pytest.approx(others[key], rel=1e-5, abs=1e-6), key


def test_in_bfloat16_slices_are_float32_and_products_are_not(
    data: Data, tied_folder: Path, one_sharded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA. What flows from layer to layer is float32. It learns as in float32."""
    exact = LocalRank(tied_folder, with_train(), data.ring)
    assert exact.train(data.of(FRESH))["train/logprob_gap"] < 1e-5
    monkeypatch.setattr(policy, "AUTOCAST_ON", {"cpu"})
    monkeypatch.setattr(attention, "VARLEN_ON", {"cpu"})
    found, seen = [], set()
    for shard in ("none", "full"):
        rank = LocalRank(tied_folder, in_bfloat16(with_train(shard=shard)), data.ring)
        layer = rank.trainer.policy.model.model.layers[1]
        layer.mlp.up_proj.register_forward_hook(lambda m, x, out: seen.add(m.weight.dtype))
        layer.register_forward_hook(lambda m, x, out: seen.add(f"flows {out.dtype}"))
        assert {w.dtype for w in rank.trainer.learner.slices.values()} == {torch.float32}
        assert 1e-3 < rank.train(data.of(FRESH))["train/logprob_gap"] < 0.1
        found.append(rank.trainer.learner.state_by_name())
        if shard == "none":
            assert 1e-4 < relative_error(exact.momentum(), rank.momentum()) < 0.1
    rank.trainer.learner.zero_grad()
    assert all(part.grad is None for part in rank.trainer.learner.slices.values()), "a second copy"
    assert seen == {torch.float32, torch.bfloat16, "flows torch.float32"}
    assert relative_error(*found) < 0.02  # norms are rounded too


def test_under_ddp_gradients_are_its_buckets_from_the_start(
    data: Data, tied_folder: Path, one_sharded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else there would be a second copy of them, also in a micro-batch that does not sync. The one
    graph of a compiled model is made then, too."""
    monkeypatch.setattr(policy, "AUTOCAST_ON", {"cpu"})
    monkeypatch.setattr(attention, "VARLEN_ON", {"cpu"})
    setup = ranks.setup_of(tied_folder, ranks.CONFIG, data.ring, num_ranks=2)
    compiled = load_policy(str(tied_folder), "bfloat16")
    compiled.model.base_model.compile(dynamic=True, backend="eager")
    dynamo.reset()
    dynamo.utils.counters.clear()
    replica = optimizer.Replica(compiled, setup, 1e-3)
    parameters = list(replica.module.parameters())
    before = [parameter.grad.data_ptr() for parameter in parameters]
    for is_last, lengths in ((False, [5, 4]), (True, [9, 7, 7, 2]), (False, [64]), (True, [8, 8])):
        with replica.syncing(is_last):
            tokens_T = torch.arange(sum(lengths))
            replica.parallel(tokens_T, boundaries(lengths))[0].sum().backward()
        assert [parameter.grad.data_ptr() for parameter in parameters] == before
        assert any(parameter.grad.any() for parameter in parameters)
        replica.zero_grad()
        assert not any(parameter.grad.any() for parameter in parameters)
    assert len({p.grad.untyped_storage().data_ptr() for p in parameters}) < len(parameters)
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_ranks_wait_for_each_other_as_long_as_one_may_save(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *given: joined.extend(given))
    optimizer.join_ranks(RankSetup(config=CONFIG, folder="", placement=TRAINER_PLACE, num_ranks=2))
    assert joined[2].total_seconds() >= SLOW_LIMIT_S and joined[3:] == [2, 0]


def test_a_shared_gpu_is_emptied_last_before_the_engine_wakes(
    tied_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each tensor that is published is a heartbeat."""
    turns = replace(CONFIG, devices=DevicesConfig(share=True), buffer=BufferConfig(max_staleness=0))
    rank, seen = LocalRank(tied_folder, turns, TrajectoryRing(1, 1)), list[Any]()
    canary, before = rank.trainer.canary, rank.store.latest
    monkeypatch.setattr(rank.trainer, "canary", lambda: seen.append("canary") or canary())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(rank.store.latest))
    monkeypatch.setattr(rank.trainer.board, "enter", lambda *_, **__: seen.append("beat"))
    rank.trainer.publish(before + 1)
    assert seen == [*["beat"] * len(rank.store.table), "canary", before]


def test_the_host_holds_one_whole_model(
    data: Data, tied_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that keep slices load it one after another."""
    calls = list[str]()
    monkeypatch.setattr(trainer, "over_ranks", lambda value: calls.append("all") or value)
    monkeypatch.setattr(trainer.Trainer, "build", lambda self: calls.append("this rank"))
    setup = ranks.setup_of(tied_folder, with_train(shard="full"), data.ring, rank=1, num_ranks=3)
    trainer.Trainer(setup, Board(1).writer(0))
    assert calls == ["all", "this rank", "all", "all"]


ALL = {**LORA, **PPO, "kl_coef": 0.1}


@pytest.mark.parametrize(
    ("num_ranks", "options", "dtype"),
    [
        (2, {"shard": "full", **MANY}, "float32"),
        (3, {"shard": "full", **ALL}, "float32"),
        (2, {"shard": "optimizer", "num_minibatches": 2, **ALL}, "float32"),
        pytest.param(2, {"shard": "full", **LORA}, "bfloat16", marks=pytest.mark.slow),
    ],
    ids=["sliced", "sliced with all", "optimizer sliced with all", "sliced in bfloat16"],
)
def test_several_ranks_give_the_update_of_one(
    num_ranks: int,
    options: dict[str, Any],
    dtype: Any,
    data: Data,
    tied_folder: Path,
    tmp_path: Path,
) -> None:
    """With all that ranks must tell each other: values, adapters, what blew up; and where answers
    are scored by rank 0 while all of them train."""
    folder = tmp_path / "checkpoints" / "step-000001"
    whole = replace(with_train(**options | {"shard": "none"}), model=ModelConfig(dtype=dtype))
    config = replace(whole, train=with_train(**options).train)
    alone = LocalRank(tied_folder, whole, data.ring)
    before, expected = alone.weights(), train_twice(alone, data)
    with ranks.ranks(tmp_path, tied_folder, config, data.ring, num_ranks) as some:
        assert are_equal(some.weights(), before)
        skipped = some.train(ranks.with_reward(data.of(FRESH), 0, float("inf")))
        assert skipped["train/skipped_updates"] > 0 and are_equal(some.weights(), before)
        batch, (scorer, *others) = data.of(FRESH), some.workers
        cells = tuple((t.cell, g.id) for g in batch.groups[:2] for t in g.trajectories)
        scorer.send(Train(batch))
        scorer.send(Score(batch.version, cells))  # before the other ranks begin the step
        for worker in others:
            worker.send(Train(batch))
        found = [some.inbox.take(scorer, Trained).values, some.train(data.of(MIXED, 2))]
        some.save(folder)
        weights = some.weights()
    if dtype == "bfloat16":  # rounded otherwise in micro-batches of other sequences
        for key in ("train/loss", "train/grad_norm"):
            assert found[0][key] == pytest.approx(expected[0][key], rel=1e-3), key
        assert relative_error(ranks.momentum(folder), alone.momentum()) < 0.05
        return
    assert_same(found, expected)
    assert relative_error(ranks.momentum(folder), alone.momentum()) < 1e-5
    # Looser: Adam turns a rounding error of a gradient near 0 into a part of the step.
    near = 1e-5 if "lora_rank" in options else 5e-5
    assert relative_error(weights, alone.weights(), before) < near


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_any_number_of_ranks_resumes_from_shares(
    shard: str, data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    """Under a learning rate that changes every step, which each rank's share must follow."""
    options = {"weight_decay": 0.1, "warmup_steps": 1, "schedule": "linear", "steps": 3}
    whole, files = with_train(**options), ["model", "trainer/optimizer"]
    if shard == "full":
        whole = in_bfloat16(with_train(**options, **PPO))
        files = ["trainer/master", "trainer/critic"]
        files += ["trainer/optimizer", "trainer/critic_optimizer"]
    config = replace(whole, train=replace(whole.train, shard=shard))
    folder, *others = (tmp_path / str(i) / "checkpoints" / "step-000001" for i in range(4))
    first, second = data.of(FRESH), data.of(MIXED, 2)
    with ranks.ranks(tmp_path / "0", tied_folder, config, data.ring, 2) as two:
        two.train(first)
        two.save(folder)
        two.train(second)
        parts = others[0].with_name(f".{others[0].name}.shares")
        (parts / "optimizer-1-of-2.safetensors").mkdir(parents=True)  # in the way
        two.send(Save(str(others[0]), ranks.STATE))
        error = two.inbox.take(two.workers[0], Saved).error
        assert error == "it could not be written (another rank could not write its share)"
        assert not others[0].exists() and not parts.exists()
        two.save(others[0])
    again = ranks.resumed(folder, second.version)
    for num, other in zip((2, 3), others[1:], strict=True):
        with ranks.ranks(tmp_path / str(num), tied_folder, config, data.ring, num, **again) as some:
            some.train(second)
            some.save(other)
        for name in files:
            both = ranks.saved(other, name), ranks.saved(others[0], name)
            assert are_equal(*both) or num == 3
            assert relative_error(*both) < 1e-6
    for given, batches in ((again, [second]), ({}, [first, second])):
        rank = LocalRank(tied_folder, whole, data.ring, **given)
        assert len({rank.train(batch)["train/lr"] for batch in batches}) == len(batches)
        trained = ranks.saved(others[0], files[0])
        assert relative_error(rank.trainer.learner.slices, trained) < 1e-6
        assert relative_error(rank.momentum(), ranks.momentum(others[0])) < 1e-4
    read_whole(folder)
    (folder / "trainer" / "optimizer-0-of-2.safetensors").unlink()
    with pytest.raises(MinirlError, match="lacks the optimizer's state, or a share of it"):
        read_whole(folder)


def test_under_lora_the_model_rests_in_its_dtype_and_is_merged_exactly_to_rounding(
    data: Data, untied_folder: Path
) -> None:
    wide = LocalRank(untied_folder, with_train(**LORA), data.ring)
    rank = LocalRank(untied_folder, in_bfloat16(with_train(**LORA)), data.ring)
    model, base = rank.trainer.policy.model, rank.weights()
    assert are_equal(base, {n: w.bfloat16() for n, w in wide.weights().items()})
    assert train_twice(rank, data) != train_twice(wide, data)  # rounded
    assert relative_error(rank.momentum(), wide.momentum()) < 0.1
    resting = [p for p in model.parameters() if not p.requires_grad]
    assert sum(p.nbytes for p in resting) < 0.52 * sum(4 * p.numel() for p in resting)
    for name, weight in rank.weights().items():
        layer, expected = model.get_submodule(name.removesuffix(".weight")), base[name]
        if hasattr(layer, "lora_A"):
            a, b = (own["default"].weight for own in (layer.lora_A, layer.lora_B))
            expected = (base[name].float() + 2 * (b @ a)).bfloat16()
            assert a.dtype == torch.float32 and not torch.equal(expected, base[name])
        assert torch.equal(weight, expected), name


@pytest.mark.parametrize("shard", ["none", "full"])
def test_an_8bit_state_takes_a_quarter_and_resumes_to_the_bit(
    shard: str, data: Data, tied_folder: Path, tmp_path: Path, one_sharded: None
) -> None:
    pytest.importorskip("bitsandbytes")
    config, second = with_train(optimizer="adamw8bit", shard=shard), data.of(MIXED, 2)
    plain = LocalRank(tied_folder, with_train(), data.ring)
    small, before = LocalRank(tied_folder, config, data.ring), plain.weights()
    for rank in (plain, small):
        rank.train(data.of(FRESH))
    folder = small.save(tmp_path / "run" / "checkpoints" / "step-000001")
    other = LocalRank(tied_folder, config, data.ring, **ranks.resumed(folder, second.version))
    for rank in (plain, small, other):
        rank.train(second)
    states = [rank.trainer.learner.state_by_name() for rank in (small, plain)]
    sizes = [sum(tensor.nbytes for tensor in state.values()) for state in states]
    assert sizes[0] < 0.3 * sizes[1]
    assert relative_error(small.weights(), plain.weights(), before) < 0.1
    assert are_equal(small.weights(), other.weights())


def test_what_cannot_be_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_train(shard="full", optimizer="adamw8bit")
    monkeypatch.setattr("minirl.recipe.find_spec", lambda name: None)
    rule, remedy = "bitsandbytes is not installed", r'pip install "minirl\[adamw8bit\]", or take it'
    with pytest.raises(RecipeError, match=f'train.optimizer = "adamw8bit": {rule}; {remedy}'):
        check_packages(config)
    two, three = (replace(config, devices=replace(config.devices, train=n)) for n in (2, 3))
    (tmp_path / "recipe.toml").write_text(to_toml(two))
    with pytest.raises(RecipeError, match=r"another recipe: devices\.train 2 → 3; set these"):
        check_changes(three, tmp_path)
