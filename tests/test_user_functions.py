"""A user's objective and estimator: the tutorial's code trains as the built-in ones do, and what
does not fit is one line that names key, file and what the function must take.
"""

import re
from pathlib import Path

import pytest
import torch
from ranks import CONFIG, FRESH, MIXED, Data, LocalRank, are_equal, with_train

from minirl.errors import RecipeError
from minirl.recipe import load
from minirl.tasks.registry import FUNCTIONS, check_functions
from minirl.train.advantage import estimate
from minirl.train.objective import Tokens, loss_of

DOCS = Path(__file__).parent.parent / "docs" / "algorithms.md"
KEYS = {"objective": "my_loss.py:my_loss", "estimator": "my_adv.py:my_advantage"}


def test_the_tutorials_code_trains_as_the_built_in_ones(
    data: Data, tied_folder: Path, tmp_path: Path
) -> None:
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCS.read_text(), re.DOTALL):
        (tmp_path / name).write_text(code)
    written = "".join(f'{key} = "{value}"\n' for key, value in KEYS.items())
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


@pytest.mark.parametrize(
    ("key", "code", "why"),
    [
        ("objective", "def f(tokens): ...", "TypeError: too many positional arguments"),
        ("estimator", "def f(rewards, kl): ...", "TypeError: missing a required argument"),
        ("estimator", "f = 3", "TypeError: 3 is not a callable"),
        ("objective", "def g(tokens, train): ...", "LookupError"),
        ("objective", "import nothing_like_it", "ModuleNotFoundError"),
    ],
)
def test_a_function_that_does_not_fit_is_one_line_at_start(
    key: str, code: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(code)
    value = f"{tmp_path}/own.py:f"
    with pytest.raises(RecipeError) as caught:
        check_functions(with_train(**{key: value}))
    line = str(caught.value)
    said = f"must be a function that takes ({', '.join(FUNCTIONS[f'train.{key}'])}) ({why}"
    assert line.startswith(f'train.{key} = "{value}": {said}') and "\n" not in line
    assert caught.value.exit_code == 2


def test_what_a_function_gives_has_the_form_of_what_it_takes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from minirl.train.objective import Terms\n"
        "def plain(tokens, train): return Terms(tokens.advantages_T * tokens.logprobs_T)\n"
        "def summed(tokens, train): return Terms(tokens.logprobs_T.sum())\n"
        "def flat(groups): return [r for group in groups for r in [group[:1]]]\n"
    )
    ones_T, index_T = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    tokens = Tokens(ones_T, ones_T, ones_T, ones_T, torch.tensor([True, False]), index_T, 1)
    loss, sums = loss_of(f"{tmp_path}/own.py:plain", tokens, CONFIG.train)
    assert loss == -1 and (sums["tokens"], sums["capped"], sums["behav_ratio"]) == (1, 0, 1)
    with pytest.raises(RecipeError, match=r"shape \[\], not \[2\]; give one value per token"):
        loss_of(f"{tmp_path}/own.py:summed", tokens, CONFIG.train)
    with pytest.raises(RecipeError, match="gave not one advantage per reward"):
        estimate(f"{tmp_path}/own.py:flat", [[1.0, 0.0]])
