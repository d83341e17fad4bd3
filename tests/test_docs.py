"""The pages: links lead somewhere, generated ones are as printed, code runs, and they are short.
Their measured tables and figures are in tests/bench/test_results.py."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import DATA, each_case, refused
from processes import assert_accounted
from ranks import CONFIG, FRESH, MIXED, Data, LocalRank, are_equal, with_train
from test_cli import minirl

from minirl.config import ALGORITHMS, KEYS, SECTIONS
from minirl.errors import RecipeError, toml_value
from minirl.metrics import METRICS
from minirl.recipe import check_task, load
from minirl.records import Answer, StopReason
from minirl.run_dir import read_lines
from minirl.tasks.registry import FUNCTIONS, check_functions, make_task, self_check
from minirl.train.advantage import estimate
from minirl.train.objective import Tokens, loss_of
from tests.docs.pages import PAGES as GENERATED

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
MAX_WORDS = 12_000


def test_algorithms_are_listed_with_what_they_set() -> None:
    text = (DOCS / "algorithms.md").read_text()
    rows = dict(re.findall(r"^\| \[`(\S+)`\]\S+ \| (.*) \|$", text, re.MULTILINE))
    assert {name: re.findall("`([^`]+)`", row) for name, row in rows.items()} == {
        name: [f"{key.removeprefix('train.')} = {toml_value(v)}" for key, v in values.items()]
        for name, values in ALGORITHMS.items()
    }


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_somewhere_and_the_readme_to_every_page() -> None:
    linked = set()
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            assert path.is_file(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(path), f"{page.name}: {target}"
            linked |= {path} if page == README else set()
    assert {*PAGES[1:]} <= linked


def test_the_pages_are_short_and_generated_ones_as_printed() -> None:
    assert sum(len(page.read_text().split()) for page in PAGES) <= MAX_WORDS
    assert all((DOCS / name).read_text() == made() for name, made in GENERATED.items())


@pytest.mark.parametrize("name", ["architecture.md", "troubleshooting.md"])
def test_documents_name_only_metrics_keys_and_files_that_there_are(name: str) -> None:
    words = re.findall(r"`([^`\n]+)`", (DOCS / name).read_text())
    rooms = r"(reward|eval|rollout|buffer|weights|train)/\w+"
    assert {word for word in words if re.fullmatch(rooms, word)} <= METRICS.keys()
    keys = [re.fullmatch(rf"((?:{'|'.join(SECTIONS)})\.\w+)(?: = .*)?", word) for word in words]
    found = {match[1] for match in keys if match and not match[1].endswith((".py", ".jsonl"))}
    assert found and found <= KEYS.keys()
    files = {w.partition(":")[0] for w in words if re.fullmatch(r"[\w/]+\.py(:\w+)?", w)}
    missing = [f for f in files if not [*ROOT.glob(f"minirl/**/{f}"), *ROOT.glob(f"tests/**/{f}")]]
    assert not missing


# docs/write-a-task.md, run: every file is written, every command typed ----------------------------

TUTORIAL = DOCS / "write-a-task.md"
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks() -> Iterator[tuple[str, str, str]]:
    for match in BLOCK.finditer(TUTORIAL.read_text()):
        yield match[1], match[2] or "", match[3]


COMMANDS = [text.removeprefix("minirl ").split() for kind, _, text in blocks() if kind == "sh"]
LOOK, TRAIN, *LOOKS = COMMANDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tutorial")
    for _, name, text in blocks():
        if name:
            (folder / name).write_text(text)
    return folder


def test_the_task_says_what_is_right_and_an_option_changes_it(folder: Path) -> None:
    config = load(folder / "backwards.toml").config
    check_task(config)
    task = make_task(config)
    assert self_check(task, config.tasks.kind).startswith("32 references score 1, 32 shuffled")
    example = task.train(0)
    assert (example.prompt, example.reference) == ("aap backwards is", "paa")
    assert task.reward(example, Answer(" pxx", StopReason.STOP, 2)) == 0.0
    trained = {task.train(i).prompt for i in range(task.num_train)}
    assert trained.isdisjoint(e.prompt for e in task.heldout(100)) and len(trained) == 180
    task = make_task(load(folder / "backwards.toml", ["tasks.options.letters=1"]).config)
    assert task.reward(example, Answer(" pxx", StopReason.STOP, 2)) == 1.0
    # The other has several turns.
    task = make_task(load(folder / "guess.toml").config)
    example = task.train(6)
    assert example.reference == "59!"
    said = [task.reply(example, (text,)) for text in (" 3!", "99!", " 59!", "what?")]
    assert said == [" More.", " Less.", None, None]
    assert task.reward(example, Answer(" 59!", StopReason.STOP, 2, ("3!", " More.", " 59!"))) == 1.0


@pytest.mark.parametrize("command", [LOOK, *LOOKS])
def test_it_can_be_looked_at(folder: Path, command: list[str]) -> None:
    done = minirl(*command, cwd=folder)
    assert "references score 1" in done.stdout and "reference: " in done.stdout
    assert "0 prompts that came before" in done.stdout


@pytest.mark.slow
@pytest.mark.vllm
def test_it_trains_and_resumes_anywhere(folder: Path, tied_folder: Path, tmp_path: Path) -> None:
    model = f"--set=model.path={tied_folder}"  # random weights, in the tiny model's place
    minirl(*TRAIN, model, cwd=folder)
    run = folder / "backwards-run"
    lines = read_lines(run / "metrics.jsonl")
    assert_accounted(lines, max_staleness=2)
    assert len(lines) == 2 and "backwards is" in (run / "samples.jsonl").read_text()
    resumed = load(run / "recipe.toml").config  # as --resume reads it, here from another folder
    with contextlib.chdir(tmp_path):
        self_check(make_task(resumed), resumed.tasks.kind)


# A user's objective and estimator: the code of docs/algorithms.md ---------------------------------

FUNCTION_KEYS = {"objective": "my_loss.py:my_loss", "estimator": "my_adv.py:my_advantage"}


def test_the_tutorials_code_trains(data: Data, tied_folder: Path, tmp_path: Path) -> None:
    for name, code in re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", (DOCS / "algorithms.md").read_text(), re.DOTALL
    ):
        (tmp_path / name).write_text(code)
    written = "".join(f'{key} = "{value}"\n' for key, value in FUNCTION_KEYS.items())
    (tmp_path / "recipe.toml").write_text(f"[train]\n{written}")
    named = load(tmp_path / "recipe.toml").config.train  # beside the recipe: whole paths
    own = with_train(objective=named.objective, estimator=named.estimator, num_minibatches=2)
    check_functions(own)
    found = []
    for config in (own, with_train(estimator="dr_grpo", num_minibatches=2)):
        rank = LocalRank(tied_folder, config, data.ring)
        for step, recipe in enumerate((FRESH, MIXED), start=1):
            rank.train(data.of(recipe, step))
        found.append(rank.weights())
    assert are_equal(*found)


@each_case("wrong_functions")
def test_a_wrong_function_is_one_line(case: dict[str, str], tmp_path: Path) -> None:
    key, code, why = case.values()
    (tmp_path / "own.py").write_text(code)
    value = f"{tmp_path}/own.py:f"
    said = f"must be a function that takes ({', '.join(FUNCTIONS[f'train.{key}'])}) ({why}"
    with refused(f"train.{key}", f'train.{key} = "{value}": {said}') as caught:
        check_functions(with_train(**{key: value}))
    assert caught.value.exit_code == 2


def test_what_a_function_gives_has_the_form_of_what_it_takes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text((DATA / "functions.txt").read_text())
    ones_T, index_T = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    tokens = Tokens(ones_T, ones_T, ones_T, ones_T, torch.tensor([True, False]), index_T, 1)
    loss, sums = loss_of(f"{tmp_path}/own.py:plain", tokens, CONFIG.train)
    found = [sums[name] for name in ("tokens", "capped_frac", "behav_ratio_mean")]
    assert loss == -1 and found == [1, 0, 1]
    with pytest.raises(RecipeError, match=r"shape \[\], not \[2\]; give one value per token"):
        loss_of(f"{tmp_path}/own.py:summed", tokens, CONFIG.train)
    with pytest.raises(RecipeError, match="gave not one advantage per reward"):
        estimate(f"{tmp_path}/own.py:flat", [[1.0, 0.0]])
