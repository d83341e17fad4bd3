"""`minirl data`: what it shows is what a run would see."""

import json
from pathlib import Path

import pytest
from test_cli import ROOT, minirl

from minirl.model import load_tokenizer
from minirl.records import Example
from minirl.tasks.prompts import encode, render

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
ROWS = [
    ("What is 1 + 1?", "2"),
    ("What is 2 + 2?", "#### 4"),
    ("what is  1 + 1?", "2"),  # but for case and space, the first again
    ("What is 3 + 3? " + "Think! " * 40, "6"),
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for split, rows in (("train", ROWS), ("test", [("What is 2 + 2?", "4"), ("And 5?", "5")])):
        lines = [json.dumps({"question": q, "answer": a}) for q, a in rows]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    path = tmp_path / "r.toml"
    path.write_text('[tasks]\nkind = "gsm8k"\ndata = "."\nmax_prompt_tokens = 200\n')
    return path


@pytest.fixture(scope="module")
def with_template(tied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("chat")
    tokenizer = AutoTokenizer.from_pretrained(tied_folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def run(*arguments: str, cwd: Path = ROOT) -> str:
    done = minirl("data", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tiny_models_view_of_rows_of_ones_own(recipe: Path) -> None:
    shown = run(str(recipe), "--show", "1", cwd=recipe.parent.parent)  # from another folder
    for text in (
        "What is 1 + 1?\nPlease reason step by step",
        "reference: 2",
        "4 references score 1",
        "1 of 4 (25.0%) above tasks.max_prompt_tokens = 200",
        "1 prompts that came before",
        "1 of 2 held-out prompts are trained on, such as",
        "the model has none",
    ):
        assert text in shown


def test_a_chat_template_is_applied(recipe: Path, with_template: Path) -> None:
    shown = run(str(recipe), "--set", f"model.path={with_template}")
    assert "<|user|>What is 1 + 1?" in shown and "####.<|assistant|>" in shown


def test_the_light_tokenizer_is_the_runs_own(with_template: Path, tied_folder: Path) -> None:
    from transformers import AutoTokenizer

    chat = Example(({"role": "user", "content": "Tom has 7 apples."},), "")
    for folder in (with_template, tied_folder):
        light, whole = load_tokenizer(folder, False), AutoTokenizer.from_pretrained(folder)
        for example in (chat, Example("Tom has 7 apples.", "")):
            assert encode(example, light) == encode(example, whole)
            assert render(example, light) == render(example, whole)


def test_a_model_without_a_template_gets_plain_text(tied_folder: Path) -> None:
    tokenizer = load_tokenizer(tied_folder, False)
    one = ({"role": "user", "content": "2?"},)
    assert render(Example(one, ""), tokenizer) == "2?\n"
    several = ({"role": "system", "content": "Brief."}, *one)
    assert render(Example(several, ""), tokenizer) == "system: Brief.\nuser: 2?\nassistant:"
