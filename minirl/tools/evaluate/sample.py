"""A few answers to one prompt, with the logprob of each token. Takes a model, gives answers.

The prompt goes through the model's chat template as what a user says, where the model has one and
unless it is to be taken as it is. Logprobs are those of the distribution that was sampled from; at
temperature 0 that is the model's own.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minirl import model
from minirl.config import Config
from minirl.errors import RecipeError
from minirl.launch import model_folder
from minirl.recipe import check_model, read_model_config
from minirl.records import Example, Trajectory
from minirl.rollout.worker import Finished, Gone, GroupRequest, Submit
from minirl.tasks.prompts import encode
from minirl.tools.evaluate.run import with_devices
from minirl.tools.evaluate.session import LISTEN_S, Session, session
from minirl.tools.evaluate.target import Target
from minirl.view.console import Bar
from minirl.workers import Died


@dataclass(frozen=True)
class Sampled:
    text: str
    stop: str
    tokens: tuple[tuple[str, float], ...]  # text and logprob of each

    @property
    def mean_logprob(self) -> float:
        return sum(value for _, value in self.tokens) / max(1, len(self.tokens))


def sample(target: Target, prompt: str, count: int, is_raw: bool) -> list[Sampled]:
    config, kind, available = with_devices(target.config, None)
    bar = Bar("answers")
    with tempfile.TemporaryDirectory(prefix="minirl-sample-") as name:
        logs = Path(name)
        source = target.folder or model_folder(config, logs, bar)
        tokenizer = model.load_tokenizer(source, config.model.trust_remote_code)
        tokens = render(prompt, tokenizer, is_raw)
        config = fitting(config, len(tokens), source)
        with session(config, source, kind, available, logs, count, is_graded=False) as there:
            there.wait_for_engines(bar)
            done = ask(there, tokens, count)
            return [read(there, done[i], tokenizer) for i in range(count)]


def render(prompt: str, tokenizer: Any, is_raw: bool) -> tuple[int, ...]:
    if is_raw or not getattr(tokenizer, "chat_template", None):
        return encode(Example(prompt, ""), tokenizer)
    return encode(Example(({"role": "user", "content": prompt},), ""), tokenizer)


def fitting(config: Config, num_tokens: int, source: Path) -> Config:
    if not num_tokens:
        raise RecipeError("PROMPT", "", "has no token", "write something")
    devices = replace(config.devices, rollout=config.devices.tensor_parallel)
    tasks = replace(config.tasks, max_prompt_tokens=num_tokens)
    config = replace(config, tasks=tasks, devices=devices)
    check_model(config, read_model_config(config, source))
    return config


def ask(there: Session, tokens: tuple[int, ...], count: int) -> dict[int, Trajectory]:
    request = GroupRequest(0, tokens, tuple(range(count)), is_eval=True)
    there.engines[0].send(Submit((request,)))
    done: dict[int, Trajectory] = {}
    while len(done) < count:
        for worker, message in there.fleet.hear(LISTEN_S):
            if isinstance(message, Finished):
                done |= {place: trajectory for _, place, trajectory in message.trajectories}
            elif isinstance(message, Gone):
                raise RecipeError("PROMPT", "…", f"vLLM refuses it ({message.why})", "shorten it")
            elif isinstance(message, Died):
                raise there.no_use(worker, message)
        there.check_beats(300.0)
    return done


def read(there: Session, trajectory: Trajectory, tokenizer: Any) -> Sampled:
    view = there.ring.read(trajectory.cell, 0)
    ids = [int(token) for token in view.tokens[view.mask == 1]]
    values = [float(value) for value in view.logprobs[view.mask == 1]]
    pieces = tuple(zip([tokenizer.decode([i]) for i in ids], values, strict=True))
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Sampled(text, trajectory.stop.name.lower(), pieces)
