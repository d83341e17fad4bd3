"""minirl without the asynchrony: one file, one process, no queue. Read it before minirl/loop.py.

    python recipes/minimal.py                        # as recipes/smoke.toml, synchronous
    python recipes/minimal.py --steps 10 --seed 1

Each step samples answers with the newest weights, grades them, and trains on them: at η = 0 minirl
does just this, in several processes. Task, model, advantages and loss are the library's. What a
real run adds: vLLM instead of `generate`, generation that goes on while training does, versions and
logprobs for every token, packing under a token budget, several devices, faults.

Axes: T tokens of all sequences, end to end.
"""

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minirl.devices import hide_broken_torchvision
from minirl.model import load_tokenizer, local_folder
from minirl.recipe import load
from minirl.records import Answer, Example, StopReason
from minirl.tasks import Task
from minirl.tasks.prompts import encode
from minirl.tasks.registry import make_task, self_check
from minirl.train.advantage import estimate
from minirl.train.attention import boundaries
from minirl.train.objective import Tokens, loss_of
from minirl.train.optimizer import build_optimizer, learning_rate
from minirl.train.policy import load_policy

hide_broken_torchvision()
from transformers import AutoModelForCausalLM  # noqa: E402

RECIPE = Path(__file__).parent / "smoke.toml"


@dataclass(frozen=True)
class Written:
    """One answer: the prompt's tokens, then the model's own."""

    tokens: list[int]
    num_prompt: int
    reward: float


class Sampler:
    """A second copy of the model that writes answers; the library has vLLM here."""

    def __init__(self, folder: Path, task: Task, config):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = load_tokenizer(folder)
        self.task, self.rollout = task, config.rollout

    def take(self, policy: torch.nn.Module) -> None:
        """The trainer's weights. In the library: published, and swapped under running answers."""
        self.model.load_state_dict(policy.model.state_dict())

    @torch.no_grad()
    def write(self, examples: list[Example]) -> list[Written]:
        """One answer to each, graded."""
        prompts = [list(encode(example, self.tokenizer)) for example in examples]
        longest, pad = max(map(len, prompts)), self.tokenizer.pad_token_id
        rows = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
        is_prompt = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        whole = self.model.generate(
            rows,
            attention_mask=is_prompt,
            do_sample=True,
            temperature=self.rollout.temperature,
            top_k=0,
            max_new_tokens=self.rollout.max_new_tokens,
            pad_token_id=pad,
        )
        answers = whole[:, longest:].tolist()
        return [self.graded(e, p, a) for e, p, a in zip(examples, prompts, answers, strict=True)]

    def graded(self, example: Example, prompt: list[int], answer: list[int]) -> Written:
        eos = self.tokenizer.eos_token_id
        has_ended = eos in answer
        written = answer[: answer.index(eos) + 1] if has_ended else answer
        text = self.tokenizer.decode(written, skip_special_tokens=True)
        stop = StopReason.STOP if has_ended else StopReason.LENGTH
        reward = self.task.reward(example, Answer(text, stop, len(written)))
        return Written([*prompt, *written], len(prompt), reward)


def packed(written: list[Written]) -> tuple[Tensor, Tensor]:
    """(tokens_T, mask_T): all sequences end to end, without padding; the mask is the model's own."""
    tokens = [token for answer in written for token in answer.tokens]
    mask = [place >= answer.num_prompt for answer in written for place in range(len(answer.tokens))]
    return torch.tensor(tokens), torch.tensor(mask)


def mean_loss(policy, groups: list[list[Written]], config) -> Tensor:
    """The recipe's objective, a mean over the tokens that the model wrote."""
    written = [answer for group in groups for answer in group]
    rewards = [[answer.reward for answer in group] for group in groups]
    advantages = [a for group in estimate(config.train.estimator, rewards) for a in group]
    lengths = [len(answer.tokens) for answer in written]
    tokens_T, mask_T = packed(written)
    temperature = config.rollout.temperature
    logprobs_T, _ = policy(tokens_T, boundaries(lengths), temperature, mask_T)
    index_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    # The policy that samples is the one that is trained: behaviour = proximal = current.
    behav_T = logprobs_T.detach()
    tokens = Tokens(
        logprobs_T,
        behav_T,
        behav_T,
        torch.tensor(advantages)[index_T],
        mask_T,
        index_T,
        len(lengths),
    )
    return loss_of(config.train.objective, tokens, config.train)[0] / mask_T.sum()


def update(policy, optimizer, groups: list[list[Written]], config, step: int) -> float:
    """One step of training, counted from 0. Gives the loss before it."""
    train = config.train
    loss = mean_loss(policy, groups, config)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), train.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, train.lr, train)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


@dataclass(frozen=True)
class Learned:
    before: float  # held-out accuracy
    after: float
    rewards: list[float]  # mean of each step


def accuracy(sampler: Sampler, examples: list[Example]) -> float:
    return sum(answer.reward for answer in sampler.write(examples)) / len(examples)


def run(steps: int | None = None, seed: int = 0, folder: Path | None = None, say=print) -> Learned:
    """`folder`: of a model; without it, the recipe's."""
    overrides = [f"seed={seed}"] + ([f"train.steps={steps}"] if steps else [])
    config = load(RECIPE, overrides).config
    train, size = config.train, config.rollout.group_size
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # a model this small is slower on more
    dice = random.Random(seed)
    task = make_task(config)
    self_check(task, config.tasks.kind)
    folder = folder or local_folder(config)
    policy = load_policy(str(folder), config.model.dtype)
    optimizer = build_optimizer(policy.parameters(), train.lr, train)
    sampler = Sampler(folder, task, config)
    heldout = list(task.heldout(config.eval.num_prompts))
    before = accuracy(sampler, heldout)
    say(f"held-out accuracy {before:.1%}")
    started, rewards = time.perf_counter(), []
    for step in range(train.steps):
        examples = [task.train(dice.randrange(task.num_train)) for _ in range(train.batch_size)]
        answers = sampler.write([example for example in examples for _ in range(size)])
        groups = [answers[i : i + size] for i in range(0, len(answers), size)]
        update(policy, optimizer, groups, config, step)
        sampler.take(policy)
        rewards.append(sum(answer.reward for answer in answers) / len(answers))
        seconds = time.perf_counter() - started
        say(f"{seconds:6.1f} s  step {step + 1}/{train.steps}  reward {rewards[-1]:.3f}")
    after = accuracy(sampler, heldout)
    say(f"held-out accuracy {before:.1%} before, {after:.1%} after")
    return Learned(before, after, rewards)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    run(chosen.steps, chosen.seed)
