"""One training by TRL's GRPOTrainer, for the peers bench. Runs in a venv of its own, which has TRL
and no minirl: `PYTHON trl_run.py job.json`, where the job is what peers.py wrote.

Gives done.json (seconds since the start and mean reward of each step, trained tokens) and the
trained model, in the job's folder. Float32, all cores. All answers of a step are generated as one
batch: by vLLM in TRL's own process ("colocate") where its venv has it, else by transformers.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MARK = "#### "
HAS_VLLM = importlib.util.find_spec("vllm") is not None


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def main(job: dict[str, Any]) -> None:
    clock, rows, folder = Clock(), job["rows"], Path(job["folder"])

    def reward(completions: list, completion_ids: list, reference: list, **_: Any) -> list[float]:
        """As minirl's arithmetic: the model ended its answer, and the last number is right."""
        found, eos = [], trainer.processing_class.eos_token_id
        for written, ids, wanted in zip(completions, completion_ids, reference, strict=True):
            text = written if isinstance(written, str) else written[0]["content"]
            _, mark, tail = text.rpartition(MARK)
            found.append(float(bool(mark) and ids[-1] == eos and tail.strip() == wanted))
        return found

    size = job["batch_size"] * job["group_size"]
    if HAS_VLLM:
        import vllm._custom_ops as ops

        ops._supports_onednn = False  # else vLLM packs its weights, and no others can be loaded
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            use_vllm=HAS_VLLM,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.1,
            vllm_max_model_length=job["max_length"],
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=job["train_batch"],
            gradient_accumulation_steps=size // job["train_batch"],
            steps_per_generation=size // job["train_batch"],
            num_generations=job["group_size"],
            max_completion_length=job["max_new_tokens"],
            temperature=job["temperature"],
            max_steps=job["steps"],
            learning_rate=job["lr"],
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=job["warmup_steps"],
            weight_decay=0.0,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="dapo",  # a mean over tokens
            epsilon=0.2,
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            seed=job["seed"],
        ),
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "reward" in line]
    done = {
        "seconds": clock.seconds,
        "rewards": [line["reward"] for line in lines],
        "tokens": sum(size * line["completions/mean_length"] for line in lines),
    }
    trainer.save_model(str(folder / "model"))
    (folder / "done.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
