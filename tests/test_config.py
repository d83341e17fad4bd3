"""Recipes: what is read, what is refused and in which words."""

import dataclasses
import string
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from bad_recipes import BAD_FILES, BAD_SETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minirl import config as c
from minirl import recipe, rules
from minirl.algorithms import ALGORITHMS
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.recipe import load

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder: no recipes/ to suggest from, and short names in messages."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> Path:
    Path(name).write_text(text, encoding="utf-8")
    return Path(name)


def line_of(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("text, line", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_recipe_gives_its_line(folder: Path, text: str, line: str) -> None:
    write("good.toml", "")
    assert line_of(write("bad.toml", text)) == line


@pytest.mark.parametrize("override, line", BAD_SETS)
def test_bad_override_gives_its_line(folder: Path, override: str, line: str) -> None:
    assert line_of(write("good.toml", ""), override) == line


def test_table_is_long_enough() -> None:
    assert len(BAD_FILES) + len(BAD_SETS) >= 50


@pytest.mark.parametrize(
    "text, start",
    [
        ("[model]\npath = tiny", 'minirl: recipe = "bad.toml": is not valid TOML: '),
        ("[train]\nlearning_rate = 1e-5", "minirl: train.learning_rate = 1e-05: no such key; "),
        ("[train]\nbatch_size = 30\nnum_minibatches = 4", "minirl: train.batch_size = 30: "),
        ("[buffer]\nmax_staleness = -1", "minirl: buffer.max_staleness = -1: must be at least 0"),
        ('[tasks]\nkind = "arithmetics"', 'minirl: tasks.kind = "arithmetics": is none of '),
        ('"a\\nb\\u2028" = 1', "minirl: a\\nb\\u2028 = 1: no such key; "),
        ('[model]\npath = "/no/such/model"', 'minirl: model.path = "/no/such/model": no such '),
        ("seed = 0x" + "f" * 4000, "minirl: seed = (huge): must be at most 4,294,967,295; "),
    ],
)
def test_cli_says_one_line_and_exits_with_2(folder: Path, text: str, start: str) -> None:
    write("bad.toml", text)
    done = subprocess.run(
        [sys.executable, "-m", "minirl.cli", "train", "bad.toml"],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(start)
    assert done.stdout == ""
    assert not Path("runs").exists()


def test_files_that_are_none(folder: Path) -> None:
    Path("recipes").mkdir()
    write("recipes/smoke.toml", "")
    assert line_of(Path("smok.toml")) == (
        'recipe = "smok.toml": no such file; did you mean recipes/smoke.toml?'
    )
    assert line_of(Path("recipes")) == (
        'recipe = "recipes": is a folder, not a file; there are recipes/smoke.toml'
    )
    assert "cannot be read (File name too long)" in line_of(Path("x" * 5000))
    Path("latin.toml").write_bytes(b"# \xe9")
    assert (
        line_of(Path("latin.toml")) == 'recipe = "latin.toml": is not UTF-8 text; name a TOML file'
    )
    Path("weights.toml").write_bytes(b"#" * (recipe.MAX_RECIPE_BYTES + 1))
    assert "is too large for a recipe" in line_of(Path("weights.toml"))


def test_empty_recipe_is_the_defaults(folder: Path) -> None:
    loaded = load(write("empty.toml", ""))
    assert loaded.config == Config()
    assert loaded.origins == dict.fromkeys(c.KEYS, "default")


def test_extends_and_set_override_in_order_and_say_so(folder: Path) -> None:
    Path("base").mkdir()
    write("base/root.toml", "seed = 1\n[train]\nlr = 1e-5\nsteps = 7\n")
    write("base/mid.toml", 'extends = "root.toml"\ntrain.lr = 2e-5\n')
    leaf = write("leaf.toml", 'extends = "base/mid.toml"\n\n[rollout]\ntop_k = 20\n')
    loaded = load(leaf, ["train.steps=9", "train.steps = 10", "model.path=some/name"])
    assert loaded.config.seed == 1
    assert loaded.config.train.lr == 2e-5
    assert loaded.config.train.steps == 10
    assert loaded.config.model.path == "some/name"
    assert {k: v for k, v in loaded.origins.items() if v != "default"} == {
        "seed": "root.toml:1",
        "train.lr": "mid.toml:2",
        "train.steps": "--set",
        "rollout.top_k": "leaf.toml:4",
        "model.path": "--set",
    }


def test_an_algorithm_sets_what_the_recipe_leaves_out_and_says_so(folder: Path) -> None:
    write("base.toml", "[train]\nclip_low = 0.1\n")
    leaf = write("leaf.toml", 'extends = "base.toml"\n[train]\nalgorithm = "gspo"\n')
    loaded = load(leaf, ["train.loss_norm=token"])
    train = loaded.config.train
    assert (train.objective, train.behav_level, train.clip_high) == ("gspo", "sequence", 4e-4)
    assert (train.clip_low, train.loss_norm) == (0.1, "token")  # written: it wins
    assert loaded.origins["train.objective"] == "algorithm gspo"
    assert loaded.origins["train.clip_low"] == "base.toml:2"
    assert loaded.origins["train.loss_norm"] == "--set"
    assert loaded.origins["train.lr"] == "default"
    assert "# algorithm gspo" in recipe.to_toml_with_origins(loaded)
    # The saved recipe of a run has every value: its algorithm then changes nothing.
    assert load(write("saved.toml", recipe.to_toml(loaded.config))).config == loaded.config


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_valid_and_sets_the_same_keys(folder: Path, name: str) -> None:
    loaded = load(write("r.toml", f'train.algorithm = "{name}"'))
    assert ALGORITHMS[name].keys() == ALGORITHMS["grpo"].keys()
    assert {k: c.get(loaded.config, k) for k in ALGORITHMS[name]} == ALGORITHMS[name]


def test_the_default_is_grpo(folder: Path) -> None:
    assert load(write("r.toml", 'train.algorithm = "grpo"')).config == Config()


def test_extends_in_a_circle(folder: Path) -> None:
    write("a.toml", 'extends = "b.toml"')
    write("b.toml", 'extends = "a.toml"')
    assert line_of(Path("a.toml")) == (
        'extends = "a.toml": recipes extend each other in a circle '
        "(a.toml -> b.toml -> a.toml); take one of these lines out (b.toml:1)"
    )


def test_error_names_the_layer_that_wrote_the_value(folder: Path) -> None:
    write("base.toml", "[train]\nlr = 0\n")
    leaf = write("leaf.toml", 'extends = "base.toml"\n')
    assert line_of(leaf).endswith("(base.toml:2)")
    assert line_of(leaf, "train.lr=-1").endswith("(--set)")
    assert load(leaf, ["train.lr=1e-6"]).config.train.lr == 1e-6


@pytest.mark.parametrize(
    "override, key, value",
    [
        ("train.lr=1", "train.lr", 1.0),
        ("train.lr = 3e-4", "train.lr", 3e-4),
        ("train.gradient_checkpointing=true", "train.gradient_checkpointing", True),
        ("tasks.data=", "tasks.data", ""),
        ("tasks.data=a=b", "tasks.data", "a=b"),
        ('tasks.data="12"', "tasks.data", "12"),
        ("tasks.kind=my_task.py:MyTask", "tasks.kind", "my_task.py:MyTask"),
        ("buffer.on_stale=wait", "buffer.on_stale", "wait"),
        ("seed=7", "seed", 7),
    ],
)
def test_set(folder: Path, override: str, key: str, value: object) -> None:
    got = c.get(load(write("r.toml", ""), [override]).config, key)
    assert got == value
    assert type(got) is type(value)


def value_of(key: str) -> st.SearchStrategy:
    """Values that each rule on its own allows."""
    if key in rules.CHOICES:
        return st.sampled_from(rules.CHOICES[key])
    kind = c.KEYS[key].type
    if key == c.TABLE:
        plain = st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
        plain = plain | st.text(
            st.characters(exclude_categories=("Cs",), exclude_characters="\x7f")
        )
        names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
        return st.dictionaries(names, plain | st.lists(plain, max_size=3), max_size=3)
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=20)
    if kind == tuple[str, ...]:
        return st.lists(st.text(max_size=5).filter(lambda t: t.isprintable() and t)).map(tuple)
    if kind == tuple[int, ...]:
        return st.lists(st.integers(0, 10**6)).map(tuple)
    if kind == tuple[float, ...]:
        return st.sampled_from([(), (0.0, 1.0), (-1e9, 2.5)])
    limits = rules.RANGES[key]
    if kind is int:
        return st.integers(int(limits.low), int(limits.high))
    return st.floats(
        limits.low, limits.high, exclude_min=limits.is_low_open, exclude_max=limits.is_high_open
    )


@st.composite
def valid_configs(draw: st.DrawFn) -> Config:
    values = {key: draw(value_of(key)) for key in draw(st.sets(st.sampled_from(sorted(c.KEYS))))}
    # What the combinations ask for, so that no draw is thrown away.
    values |= {"train.num_minibatches": 1, "train.max_tokens": 10**8, "devices.tensor_parallel": 1}
    values |= {"tasks.max_failures": 0, "tasks.overlong_tokens": 0, "buffer.target_staleness": -1.0}
    values |= {"log.stall_s": 604_800.0, "devices.train": 2}
    values["tasks.timeout_s"] = min(values.get("tasks.timeout_s", 10.0), 86_399.0)
    values["rollout.top_k"] = values.get("rollout.top_k", 0) & ~1
    values |= {"train.objective": "decoupled", "train.kl_in": "reward"}
    values["train.dual_clip"] = values.get("train.dual_clip", 0.0) and 3.0
    for key in ("model.path", "tasks.kind", "tasks.train_split"):
        values[key] = f"x{values.get(key, '')}"
    values["log.to"] = draw(st.sampled_from([(), ("wandb",), ("trackio", "tensorboard")]))
    options = values.pop(c.TABLE, {})
    return recipe._build(values | {f"{c.TABLE}.{name}": value for name, value in options.items()})


quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quick
@given(config=valid_configs())
def test_to_toml_round_trips(folder: Path, config: Config) -> None:
    text = recipe.to_toml(config)
    assert load(write("round.toml", text)).config == config
    marked = recipe.to_toml_with_origins(recipe.Loaded(config, dict.fromkeys(c.KEYS, "x\ny")))
    assert tomllib.loads(marked) == tomllib.loads(text)


def only_recipe_errors(path: Path, *overrides: str) -> None:
    try:
        loaded = load(path, overrides)
    except RecipeError as error:
        assert len(str(error).splitlines()) == 1
    else:
        rules.validate(loaded.config)


@quick
@given(data=st.binary(max_size=200))
def test_random_bytes_give_only_recipe_errors(folder: Path, data: bytes) -> None:
    Path("fuzz.toml").write_bytes(data)
    only_recipe_errors(Path("fuzz.toml"))


scalars = (
    st.none().map(lambda _: "nan")
    | st.booleans().map(lambda b: str(b).lower())
    | st.integers().map(str)
    | st.floats().map(repr)
    | st.text(string.printable, max_size=8).map(repr)
    | st.sampled_from(["[]", "{}", "{a=1}", "[[1]]", "1979-05-27", "07:32:00", "0x1F", "1_000", ""])
    | st.sampled_from(["1e999", "-0.0", "+inf", '"""', "9" * 4400, "0x" + "f" * 400, '"\\u0000"'])
)
names = st.sampled_from(
    [*c.KEYS, *c.SECTIONS, "extends", "train.lr.x", "lr", '"a b"', '"\\n"', "", ".", "a.b.c", "[x]"]
)
toml_lines = st.one_of(
    st.tuples(names, scalars).map(lambda kv: f"{kv[0]} = {kv[1]}"),
    names.map(lambda name: f"[{name}]"),
    names.map(lambda name: f"[[{name}]]"),
)


@quick
@given(lines=st.lists(toml_lines, max_size=4))
def test_random_toml_gives_only_recipe_errors(folder: Path, lines: list[str]) -> None:
    only_recipe_errors(write("fuzz.toml", "\n".join(lines)))


@quick
@given(
    text=st.one_of(st.text(max_size=20), st.tuples(names, scalars).map("=".join)),
    more=st.tuples(names, st.text(max_size=10)).map("=".join),
)
def test_random_overrides_give_only_recipe_errors(folder: Path, text: str, more: str) -> None:
    only_recipe_errors(write("empty.toml", ""), text, more)


@quick
@given(name=st.text(max_size=12))
def test_random_names_give_only_recipe_errors(folder: Path, name: str) -> None:
    config = Config(tasks=c.TasksConfig(kind=name), model=c.ModelConfig(path=name))
    for check in (rules.check_task, rules.find_model):
        try:
            check(config)
        except RecipeError as error:
            assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_load_and_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 30
    assert path.read_text().startswith("# ")
    rules.check_task(load(path).config)


def test_gsm8k_is_the_published_setting() -> None:
    assert {p.stem for p in RECIPES} == {
        "async",
        "gsm8k",
        "gsm8k-2gpu",
        "smoke",
        "smollm2",
        "staleness",
    }
    gsm8k = load(ROOT / "recipes/gsm8k.toml").config
    assert (gsm8k.rollout.group_size, gsm8k.train.batch_size) == (4, 256)
    assert (gsm8k.train.lr, gsm8k.train.clip_high) == (1.7e-5, 0.4)


def test_every_field_is_explained_and_every_number_has_a_range() -> None:
    for key, field in c.KEYS.items():
        section, _, name = key.rpartition(".")
        assert c.explain(section, name).endswith("."), key
        assert (key in rules.RANGES) == (field.type in (int, float)), key
    assert c.explain("train", "lr") == "Learning rate of AdamW."
    rules.validate(Config())


BUILT_IN = ", ".join(rules.BUILTIN_TASKS)


def small(**sections: object) -> Config:
    return dataclasses.replace(Config(), **sections)


def test_check_model() -> None:
    model = {"max_position_embeddings": 512, "num_attention_heads": 14}
    rules.check_model(Config(), model)
    rules.check_model(Config(), {})
    with pytest.raises(RecipeError) as caught:
        rules.check_model(small(rollout=c.RolloutConfig(max_new_tokens=400)), model)
    assert str(caught.value) == (
        "rollout.max_new_tokens = 400: with tasks.max_prompt_tokens that is 656, "
        "past the model's 512 positions; shorten one: together at most 512"
    )
    config = small(devices=c.DevicesConfig(rollout=4, tensor_parallel=4))
    with pytest.raises(RecipeError) as caught:
        rules.check_model(config, {"text_config": model})
    assert str(caught.value) == (
        "devices.tensor_parallel = 4: must divide the model's 14 attention heads; "
        "one of 1, 2, 7, 14"
    )


@pytest.mark.parametrize(
    "devices, kind, available, line",
    [
        (c.DevicesConfig(), "cuda", 2, ""),
        (c.DevicesConfig(rollout=2, train=2), "cpu", 1, ""),
        (c.DevicesConfig(rollout=2, tensor_parallel=2), "cuda", 3, ""),
        (
            c.DevicesConfig(rollout=4, train=4),
            "cuda",
            2,
            "devices.rollout = 4: with devices.train = 4 that is 8, more than 2 CUDA devices "
            "allow; the two together may be at most 2",
        ),
        (
            c.DevicesConfig(),
            "cuda",
            1,
            "devices.rollout = 1: with devices.train = 1 that is 2, more than 1 CUDA device "
            "allows; one GPU is not enough for both pools; two are",
        ),
        (
            c.DevicesConfig(rollout=4),
            "cpu",
            2,
            "devices.rollout = 4: with devices.train = 1 that is 5, more than 2 cores allow; "
            "the two together may be at most 4",
        ),
        (
            c.DevicesConfig(kind="cuda"),
            "cpu",
            2,
            'devices.kind = "cuda": there is no CUDA device here; '
            "run it where there is one, or --set devices.kind=cpu",
        ),
        (c.DevicesConfig(rollout=2, tensor_parallel=2), "cpu", 8, ""),
    ],
)
def test_check_devices(devices: c.DevicesConfig, kind: str, available: int, line: str) -> None:
    if not line:
        rules.check_devices(small(devices=devices), kind, available)
        return
    with pytest.raises(RecipeError) as caught:
        rules.check_devices(small(devices=devices), kind, available)
    assert str(caught.value) == line


def test_check_memory() -> None:
    config = Config()
    assert config.ring_bytes == 3 * 32 * 8 * (256 + 128) * 13
    rules.check_memory(config, config.ring_bytes)
    with pytest.raises(RecipeError, match="the trajectory ring would take"):
        rules.check_memory(config, config.ring_bytes - 1)


@pytest.mark.parametrize(
    "kind, line",
    [
        ("gsm8k", ""),
        ("here.py:MyTask", ""),
        ("package.module:MyTask", ""),
        ("gsm8", f'is none of {BUILT_IN}; did you mean "gsm8k"?'),
        ("chess", f'is none of {BUILT_IN}; your own is "my_task.py:MyTask"'),
        ("here.py", f'is none of {BUILT_IN}; your own is "my_task.py:MyTask"'),
        ("here.py:", 'has no class name; write "my_task.py:MyTask"'),
        (
            "gone.py:MyTask",
            "there is no file gone.py; "
            "it is looked for beside the recipe, then in the working folder",
        ),
        (
            "a-b:MyTask",
            "names neither a .py file nor a module; "
            'write "my_task.py:MyTask" or "package.module:MyTask"',
        ),
    ],
)
def test_check_task(folder: Path, kind: str, line: str) -> None:
    write("here.py", "")
    config = small(tasks=c.TasksConfig(kind=kind))
    if not line:
        rules.check_task(config)
        return
    with pytest.raises(RecipeError) as caught:
        rules.check_task(config)
    assert str(caught.value) == f'tasks.kind = "{kind}": {line}'


def test_find_model(folder: Path) -> None:
    assert rules.find_model(Config()) is None
    Path("model").mkdir()
    config = small(model=c.ModelConfig(path="model"))
    with pytest.raises(RecipeError, match=r"the folder has no config\.json"):
        rules.find_model(config)
    write("model/config.json", "[")
    with pytest.raises(RecipeError, match=r"its config\.json cannot be read"):
        rules.read_model_config(config, Path("model"))
    write("model/config.json", '{"num_attention_heads": 2}')
    assert rules.find_model(config) == Path("model")
    assert rules.read_model_config(config, Path("model")) == {"num_attention_heads": 2}


def test_files_are_looked_for_beside_the_recipe_and_then_here(folder: Path) -> None:
    Path("mine").mkdir()
    for name in ("mine/task.py", "mine/rows.jsonl", "here.py"):
        write(name, "")
    mine = write("mine/r.toml", '[tasks]\nkind = "task.py:T"\ndata = "rows.jsonl"\n')
    tasks = load(mine).config.tasks
    assert tasks.kind == f"{folder / 'mine/task.py'}:T"
    assert tasks.data == str(folder / "mine/rows.jsonl")
    leaf = write("leaf.toml", 'extends = "mine/r.toml"\n')
    assert load(leaf).config.tasks == tasks, "beside the recipe that names it"
    assert load(mine, ["tasks.kind=here.py:T"]).config.tasks.kind == f"{folder / 'here.py'}:T"
    for kind in ("task.py:T", "package.module:T", "gsm8k"):  # not here, or no file at all
        assert load(mine, [f"tasks.kind={kind}"]).config.tasks.kind == kind
    saved = write("saved.toml", recipe.to_toml(load(mine).config))
    assert load(saved).config == load(mine).config


def test_options_come_from_every_layer_and_each_knows_where(folder: Path) -> None:
    write("base.toml", '[tasks.options]\na = 1\nb = ["x", "y\\n"]\n')
    leaf = write("leaf.toml", 'extends = "base.toml"\ntasks.options.a = 2\n')
    loaded = load(leaf, ["tasks.options.c=0.5", "tasks.options={d=true}"])
    assert loaded.config.tasks.options == {"a": 2, "b": ["x", "y\n"], "c": 0.5, "d": True}
    assert loaded.origins["tasks.options.b"] == "base.toml:3"
    assert 'options = {a = 2, b = ["x", "y\\n"], c = 0.5, d = true}' in recipe.to_toml(
        loaded.config
    )
