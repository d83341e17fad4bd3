"""Recipes: what is read, what is refused and in which words, also by a dry run."""

import dataclasses
import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import huggingface_hub.constants
import pytest
from annotated_types import Ge, Gt, Le, Lt
from cases import cases, each_case
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl import cli, model, recipe
from minirl import config as c
from minirl.config import ALGORITHMS, KEYS, TINY_FOLDER, Config
from minirl.errors import RecipeError
from minirl.recipe import check_model, kv_bytes_per_token, load


def write(name: str, text: str) -> Path:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    return Path(name)


def line_of(path: Path | None, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    return str(caught.value)


@each_case("bad_recipes")
def test_bad_recipe_gives_its_line(here: Path, case: dict[str, str]) -> None:
    """The whole line. The recipe is bad.toml, or there is none but one --set."""
    path = write("bad.toml", case["recipe"]) if "recipe" in case else None
    assert line_of(path, *([] if path else [case["set"]])) == case["line"]


TEXTS = ("x", "é 💡", 'a "quoted" \\ text', "x' # ] =", "x\u2028", "true")
TABLE = {"a": 1, "_b2": [-0.5, 1e300, "]"], "c": [], "d": True}
OWN: dict[str, Any] = {  # values that their type does not tell
    **dict.fromkeys(("tasks.options", "tasks.template"), ({}, TABLE, {"a": TEXTS[2]})),
    **{"rollout.stop": ((), TEXTS), "rollout.stop_tokens": ((), (0, 10**6))},
    **{"devices.nodes": (1, 1024, "auto"), "log.to": ((), ("wandb", "tensorboard"))},
    **recipe.BUILT_IN,
}
ALLOWED = {"train.max_tokens": 10**8, "log.stall_s": 604_800.0, "devices.train": 2}


@pytest.mark.parametrize("key", KEYS)
def test_every_field_is_explained_and_all_limits_and_choices_kept(key: str, here: Path) -> None:
    limits = [m for m in KEYS[key].metadata if isinstance(m, (Ge, Gt, Le, Lt))]
    kind = KEYS[key].annotation
    assert (KEYS[key].description or "").endswith(".")
    assert len(limits) == 2 * (kind in (int, float))
    wrong: list[Any] = [None, [None], float("nan")] + ["wrong"] * (get_origin(kind) is Literal)
    right = OWN.get(key) or {bool: (False, True), str: TEXTS}.get(kind) or get_args(kind)
    if limits:
        low, high = (next(iter(dataclasses.asdict(limit).values())) for limit in limits)
        wrong += [low - isinstance(limits[0], Ge), high + isinstance(limits[1], Le), True]
        ends = [low] * isinstance(limits[0], Ge) + [high] * isinstance(limits[1], Le)
        right = map(kind, [(low + high) / 2, *ends])
    for value in wrong:
        with pytest.raises(RecipeError) as caught:
            recipe.build({key: value})
        assert caught.value.key == key and caught.value.remedy
    for value in right:
        config = recipe.build(ALLOWED | {key: value})
        if refusal(recipe.validate, ALLOWED | {key: value}):
            continue  # beside the other values
        text, marks = recipe.to_toml(config), dict.fromkeys(KEYS, "x\ny")
        assert c.get(config, key) == value and load(write("round.toml", text)).config == config
        assert tomllib.loads(recipe.to_toml(config, marks)) == tomllib.loads(text)


def test_extends_and_set_override_in_order_and_say_so(here: Path) -> None:
    write("base/root.toml", "tasks.options = {a = 1, b = 1}\n[train]\nlr = 0\nsteps = 7\n")
    write("base/mid.toml", 'extends = "root.toml"\ntasks.options.a = 2\nrollout.top_k = 20\n')
    leaf = write("leaf.toml", 'extends = "base/mid.toml"\n')
    assert line_of(leaf).endswith("(root.toml)")
    assert line_of(leaf, "train.lr=-1").endswith("(--set)")
    sets = ["train.lr=2e-5", "train.steps=9", "train.steps = 10", "tasks.options={c=3}"]
    loaded = load(leaf, sets)
    written = [(key, origin) for key, origin in loaded.origins.items() if origin != "default"]
    assert {key: (c.get(loaded.config, key), origin) for key, origin in written} == {
        "train.lr": (2e-5, "--set"),
        "train.steps": (10, "--set"),
        "rollout.top_k": (20, "mid.toml"),
        "tasks.options": ({"a": 2, "b": 1, "c": 3}, "--set"),
    }


@pytest.mark.parametrize("name", get_args(KEYS["train.algorithm"].annotation))
def test_an_algorithm_sets_what_the_recipe_leaves_out_and_says_so(here: Path, name: str) -> None:
    base = write("base.toml", f'[train]\nclip_low = 0.1\nalgorithm = "{name}"\n')
    config, origins = load(base, ["train.loss_norm=token"])
    written = {"train.clip_low": 0.1, "train.loss_norm": "token"}  # it wins
    for key, value in (ALGORITHMS[name] | written).items():
        assert c.get(config, key) == value
        assert (origins[key] == f"algorithm {name}") == (key not in written)
        assert key in written or value != c.get(Config(), key), "the table says nothing twice"
    # The saved recipe of a run has every value: its algorithm then changes nothing.
    assert load(write("saved.toml", recipe.to_toml(config))).config == config


@pytest.mark.parametrize("key", recipe.BUILT_IN)
def test_own_code_is_looked_for_beside_the_recipe_and_then_here(here: Path, key: str) -> None:
    for name in ("mine/own.py", "mine/rows.jsonl", "mine/model/config.json", "here.py", "tiny/x"):
        write(name, "")
    data = 'tasks.data = "rows.jsonl"\nmodel.path = "model"\n'
    own = write("mine/r.toml", f'{key} = "own.py:it"\n{data}')
    config = load(own).config
    assert config.model.path == str(here / "mine/model")
    assert load(own, ["model.path=tiny"]).config.model.path == "tiny"
    assert c.get(config, key) == f"{here / 'mine/own.py'}:it"
    assert config.tasks.data == str(here / "mine/rows.jsonl")
    leaf = write("leaf.toml", 'extends = "mine/r.toml"\n')
    assert load(leaf).config == config, "beside the recipe that names it"
    assert load(write("saved.toml", recipe.to_toml(config))).config == config
    config = load(own, [f"{key}=here.py:it"]).config
    assert c.get(config, key) == f"{here / 'here.py'}:it"
    for name in ("gone.py:it", "package.module:it", recipe.BUILT_IN[key][-1]):
        assert c.get(load(own, [f"{key}={name}"]).config, key) == name
    assert not refusal(recipe.check_task, {key: "here.py:it"}, key)
    assert "there is no such file" in refusal(recipe.check_task, {key: "gone.py:it"}, key)


texts = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=20)
SCALARS = ["[]", "{}", "{a=1}", "[[1]]", "1979-05-27", "07:32:00", "0x1F", "1_000", "", "true"]
SCALARS += ["1e999", "-0.0", "+inf", '"""', "9" * 4400, "0x" + "f" * 400, '"\\u0000"']
scalars = st.sampled_from(SCALARS) | (st.integers() | st.floats() | texts).map(repr)
NAMES = ["extends", "train.lr.x", "lr", '"a b"', '"\\n"', "", ".", "a.b.c", "[x]"]
names = st.sampled_from([*KEYS, *c.SECTIONS, *NAMES])
toml_lines = st.builds("{} = {}".format, names, scalars)
toml_lines = toml_lines | st.builds(str.format, st.sampled_from(["[{}]", "[[{}]]"]), names)


@settings(max_examples=300)
@given(data=st.binary(max_size=200) | st.lists(toml_lines, max_size=4).map("\n".join))
def test_random_files_give_only_recipe_errors(here: Path, data: bytes | str) -> None:
    Path("fuzz.toml").write_bytes(data if isinstance(data, bytes) else data.encode())
    try:
        load(Path("fuzz.toml"))
    except RecipeError as error:
        assert len(str(error).splitlines()) == 1


def refusal(check: Callable[..., Any], values: dict[str, Any], *args: Any) -> str:
    """The line with which a check refuses these values, or ""."""
    try:
        check(recipe.build(values), *args)
    except RecipeError as error:
        return str(error)
    return ""


def test_devices_and_memory_are_checked() -> None:
    for case in cases("device_counts"):
        rollout, train, kind, available, line = case.values()
        values = {"devices.rollout": rollout, "devices.train": train}
        found = refusal(recipe.check_devices, values, kind, available)
        assert bool(found) == bool(line) and line in found
    assert not refusal(recipe.check_devices, {}, "cuda", 1, 0)  # of `minirl sft`: no engines
    found = refusal(recipe.check_devices, {"devices.kind": "cuda"}, "cpu", 2)
    assert found == 'devices.kind = "cuda": there is no CUDA device here; "cpu" works'
    num_bytes = Config().ring_bytes
    assert num_bytes == 3 * 32 * 8 * (256 + 128) * 13
    assert not refusal(recipe.check_memory, {}, num_bytes)
    assert "the trajectory ring would take" in refusal(recipe.check_memory, {}, num_bytes - 1)


def test_a_model_is_found_and_checked(here: Path) -> None:
    assert recipe.find_model(Config()) == TINY_FOLDER
    assert recipe.find_model(recipe.build({"model.path": str(here)})) == here
    for path in ("/no/such/model", "a/b/c", "a?b", "x" * 5000):
        found = refusal(recipe.find_model, {"model.path": path})
        assert "no such folder, nor a hub name" in found
    for case in cases("model_sizes"):
        text, values, line = case.values()
        write("config.json", text)
        found = refusal(recipe.check_model, values, here)
        assert bool(found) == bool(line) and line in found


# `minirl train --dry-run` refuses what `minirl train` would, at once ------------------------------

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not loud %}.{% endif %}"


@pytest.fixture
def with_model(here: Path) -> Path:
    shutil.copytree(TINY_FOLDER, "model")
    write("r.toml", '[model]\npath = "model"\n[devices]\nkind = "cpu"\n')
    return here


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garble(path: Path) -> None:
    path.write_bytes(b"\xff\x00{" * 50)


def pickled(path: Path) -> None:
    path.rename(path.with_name("pytorch_model.bin"))


HARMS = {"unlink": Path.unlink, "pickled": pickled, "cut": cut, "garble": garble}


@each_case("refused_runs")
def test_it_is_refused(
    with_model: Path, case: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    harm, name, line = case.values()
    monkeypatch.setattr(model, "ask_hub", lambda: pytest.fail("the hub was asked"))
    if harm:
        HARMS[harm](with_model / "model" / name)
    overrides = [] if harm else name.split(" --set ")
    with pytest.raises(RecipeError) as caught:
        cli.train(Path("r.toml"), overrides, dry_run=True)
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("runs").exists()


def test_only_layers_that_keep_all_tokens_count_for_the_kv_cache(with_model: Path) -> None:
    config = load(with_model / "r.toml", ["rollout.kv_cache_gib=3.7e-4"]).config
    check_model(config, with_model / "model", "cpu")
    check_model(load(None, ["rollout.kv_cache_gib=1e-9"]).config, with_model / "model", "cuda")
    sizes = json.loads((with_model / "model/config.json").read_text())
    assert kv_bytes_per_token(config, sizes) == 2 * 2 * 2 * 32 * 4
    sizes["layer_types"][0] = "sliding_attention"
    assert kv_bytes_per_token(config, sizes) == 2 * 1 * 2 * 32 * 4


def test_the_chat_template_is_given_the_recipes_table(with_model: Path) -> None:
    (with_model / "model/chat_template.jinja").write_text(CHAT)
    chat = [{"role": "user", "content": "Hi"}]
    for options, text in (([], "Hi."), (["tasks.template.loud=true"], "Hi")):
        config = load(with_model / "r.toml", options).config
        tokenizer = model.tokenizer_of(config, with_model / "model")
        assert tokenizer.apply_chat_template(chat, tokenize=False) == text
    with pytest.raises(RecipeError, match="chat template does not read lud"):
        config = load(with_model / "r.toml", ["tasks.template.lud=true"]).config
        model.tokenizer_of(config, with_model / "model")


def test_without_a_network_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")  # silence
    model.ask_hub.cache_clear()
    model.ask_hub()
    assert huggingface_hub.constants.is_offline_mode() and os.environ.pop("HF_HUB_OFFLINE") == "1"
