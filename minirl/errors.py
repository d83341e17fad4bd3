"""What can go wrong. Each error is one line a person can act on, and an exit code of the CLI.

    MinirlError            exit 1: the run cannot continue
    ├── RecipeError        exit 2: the user's input is wrong: key, value, rule, remedy
    ├── WorkerDied         exit 1: a process ended that cannot be replaced; carries its log tail
    ├── StaleWeights       exit 1: the engine does not run the weights it should (rule 6)
    ├── Stalled            exit 3: nothing moved for too long; stacks are in the run directory
    └── CannotTrain        exit 3: one group after another was dropped for a fault
    Interrupted            exit 130: Ctrl-C or SIGTERM, where nothing is waited for any more

A failed rollout or reward is data: a dropped group with a reason and a count.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

# What readers raise at a file that is not what it should be.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class MinirlError(Exception):
    exit_code = 1


class RecipeError(MinirlError):
    """`origin` says where the value was written ("smoke.toml"), where that is known."""

    exit_code = 2

    def __init__(self, key: str, value: object, rule: str, remedy: str, origin: str = ""):
        where = f" ({one_line(origin)})" if origin else ""
        shown = one_line(toml_value(value))
        super().__init__(f"{one_line(key)} = {shown}: {rule}; {remedy}{where}")
        self.key, self.value, self.rule, self.remedy = key, value, rule, remedy

    def __reduce__(self) -> tuple[Any, ...]:  # it goes through the pipe of a self-check
        return type(self), (self.key, self.value, self.rule, self.remedy)


class Unreachable(RecipeError):
    """On the hub, which does not answer: a dry run goes without it."""


class WorkerDied(MinirlError): ...


class StaleWeights(MinirlError): ...


class Stalled(MinirlError):
    exit_code = 3


class CannotTrain(MinirlError):
    exit_code = 3


class Interrupted(KeyboardInterrupt):
    """Not a KeyboardInterrupt itself: one that passes through an exec (as in any dataclass that is
    just being imported) makes Python 3.11 end by SIGINT, whatever exit code is asked for later."""


def one_line(text: str, limit: int = 200) -> str:
    """Text as it may stand in a one-line message: nothing unprintable, nothing endless."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[:limit] + "…"


def removed(what: str) -> dict[str, str]:
    """The "keys" or "commands" of earlier versions, and what to do instead."""
    return tomllib.loads(Path(__file__).with_name("removed.toml").read_text())[what]


def toml_value(value: object) -> str:
    """A value as TOML writes it."""
    match value:
        case bool():
            return str(value).lower()
        case str():  # a TOML string is a JSON string, save for one control character
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case dict():
            return f"{{{', '.join(f'{name} = {toml_value(v)}' for name, v in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case int() if value.bit_length() > 10_000:  # Python refuses to print huge ones
            return "(huge)"
    return str(value)
