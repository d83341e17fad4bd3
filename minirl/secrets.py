"""Secrets are never written down. Takes text, gives it without what looks like one.

A secret is the value of an environment variable whose name says so (HF_TOKEN, WANDB_API_KEY, …),
or text in the form that such keys have. Worker processes that need none are started without these
variables (fleet.py); what is printed, noted or saved goes through `scrub`; a recipe that holds one
is refused, since the saved recipe must stay what was run.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from minirl.config import KEYS, Config, get
from minirl.errors import RecipeError
from minirl.lines import Patient

NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|KEY$|APIKEY|PRIVATE_KEY", re.I)
OPTIONS = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY)$", re.I)
HARMLESS = re.compile(r"TOKENIZERS?_", re.I)
LEAST_LETTERS = 8  # a shorter value is no secret, and would blank out half of a log
FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_-]{20,}"  # OpenAI and its likes
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}"
    r"|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,})"
    r"|(?<=://)[^/\s@]+(?=@)"  # user:password or a token in an address
    r"|(?<=[?&]token=)[^&\s]+|(?<=[?&]key=)[^&\s]+|(?<=[?&]sig=)[^&\s]+"
    r"|(?<=[?&]api_key=)[^&\s]+|(?<=[?&]access_token=)[^&\s]+"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{16,}"
)


def secret_names(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables whose name says that they hold one."""
    variables = os.environ if environ is None else environ
    return [name for name in variables if NAMES.search(name) and not HARMLESS.match(name)]


def scrub(text: str, environ: Mapping[str, str] | None = None) -> str:
    variables = os.environ if environ is None else environ
    for name in secret_names(variables):
        value = variables[name].strip()
        if len(value) >= LEAST_LETTERS:
            text = text.replace(value, f"<{name}>")
    return FORMS.sub("<secret>", text)


def check(config: Config) -> None:
    """No string of the recipe may hold a secret: the recipe is saved with the run."""
    for key in KEYS:
        if _holds_secret(get(config, key)):
            remedy = "give it in the environment (HF_TOKEN, …), not in the recipe"
            raise RecipeError(key, "…", "holds a secret, and recipes are saved", remedy)


def _holds_secret(value: Any, name: str = "") -> bool:
    """`name` is that of a task's own option: it may say so too."""
    if isinstance(value, str):
        is_named = bool(OPTIONS.search(name)) and len(value) >= LEAST_LETTERS
        return is_named or scrub(value) != value
    if isinstance(value, dict):
        return any(_holds_secret(inner, str(key)) for key, inner in value.items())
    return isinstance(value, (tuple, list)) and any(_holds_secret(v, name) for v in value)


class Scrubbed(Patient):
    """A worker's stdout or stderr, without secrets, a line at a time."""

    def write(self, text: str) -> int:
        super().write(scrub(text))
        return len(text)
