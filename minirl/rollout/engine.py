"""A vLLM engine whose weights change under running generations. Lives in a rollout worker.

Takes token prompts, gives tokens as they are made, each with the logprob of the distribution it was
sampled from and the version of the weights that made it. `reload` swaps weights between two steps.
In "recompute" mode running sequences are preempted and their KV is built anew under the new
weights; in "keep" mode their KV stays. The prefix cache is salted by version. Without a store
(`minirl eval`, `minirl sample`) vLLM loads the folder's own weights as version 0.
Leaves out: groups, queues and the ring (worker.py).
"""

import gc
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minirl import devices
from minirl.config import Config
from minirl.errors import StaleWeights
from minirl.records import StopReason
from minirl.shm.weights import CANARY_TOKENS, Published, WeightStore

CANARY_PRIORITY = -2  # before evaluation (-1) and training groups (their id)
# Of the canary's gap, the mean |engine - trainer| of its logprobs:
LIMIT = {"float32": 1e-3, "bfloat16": 0.25}  # a run's own limit is never below it
CEILING = {"float32": 1e-2, "bfloat16": 0.5}  # of the first load, where every value was compared
MARGIN = 4.0  # a run's own limit, over the gap of its first load
NOISE = 0.01  # share of the limit below which a gap says nothing
NUM_NEARER = 3  # reloads in a row whose canary is twice as near to the version before


class Sampling(NamedTuple):
    """How one request is sampled, in vLLM's words. Temperature 0 is greedy."""

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0


class Chunk(NamedTuple):
    """What one step gave one request. `stop` is set on its last."""

    key: int
    version: int  # that made these tokens
    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop: StopReason | None


class Canary:
    """Judges the engine's logprobs of the canary (rule 6)."""

    def __init__(self, dtype: str):
        self._dtype, self._limit = dtype, 0.0  # until the first load
        self._before: np.ndarray | None = None  # the trainer's, of the version served before
        self._num_nearer = 0  # reloads in a row
        self.gap = 0.0

    def judge(self, engine: np.ndarray, trainer: np.ndarray) -> str:
        """What is wrong, or ""."""
        self.gap = float(np.abs(engine - trainer).mean())
        limit = self._limit or CEILING[self._dtype]
        off = f"the engine's logprobs of the canary are {self.gap:.2g} off the trainer's"
        if not self.gap <= limit:  # also when it is not a number
            differ = "" if self._limit else ": they compute this model differently"
            return f"{off} (limit {limit:.2g}){differ}"
        self._limit = self._limit or max(LIMIT[self._dtype], MARGIN * self.gap)
        # By chance noise hardly ever lies in the direction of the version before, never so often.
        is_nearer = self._before is not None and self.gap > NOISE * LIMIT[self._dtype]
        is_nearer = is_nearer and np.abs(engine - self._before).mean() < self.gap / 2
        self._num_nearer = self._num_nearer + 1 if is_nearer else 0
        if self._num_nearer >= NUM_NEARER:
            return f"{off}, and far nearer to those of an older version"
        self._before = self._before if is_nearer else trainer
        return ""


class Engine:
    def __init__(
        self, config: Config, folder: str, kind: str, store: WeightStore | None, seed: int
    ):
        devices.hide_broken_torchvision()
        gc.disable()  # imports leave none, and looking for it takes a sixth of their time
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        gc.freeze()  # vLLM collects garbage five times while it starts
        gc.enable()
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=folder,
                dtype=config.model.dtype,
                max_model_len=max(config.max_tokens_per_trajectory, CANARY_TOKENS + 1),
                max_num_seqs=config.rollout.max_num_seqs + 1,  # one for the canary
                tensor_parallel_size=config.devices.tensor_parallel,
                # In a further box vLLM would take Ray for its own processes too.
                distributed_executor_backend="mp" if config.devices.tensor_parallel > 1 else None,
                worker_extension_cls="minirl.rollout.weight_loader.WeightLoader",
                # Weights come from the store, the first time as ever after.
                load_format="auto" if store is None else "dummy",
                skip_tokenizer_init=not config.rollout.stop,
                disable_log_stats=True,
                scheduling_policy="priority",
                logprobs_mode="processed_logprobs",
                seed=seed,
                **devices.engine_arguments(config, kind),
            )
        )
        if config.devices.tensor_parallel > 1:
            devices.keep_names()
        self._rollout, self._store = config.rollout, store
        self.canary = Canary(config.model.dtype)
        self._expected: Published | None = None  # whose canary is on its way
        self._suspect: Published | None = None  # whose canary came back wrong once
        self._drained: list[Chunk] = []  # of steps that a reload had to take
        self.is_asleep = False
        self.version = 0 if store is None else -1
        self._load_slot = partial(self._rpc, "load_slot")
        if store is not None:
            self._rpc("open_store", store.table, store.dtype, store.path)

    def _rpc(self, method: str, *args: object) -> list[Any]:
        """Of WeightLoader, on each tensor-parallel rank."""
        return self._engine.collective_rpc(method, args=args)

    @property
    def kv_tokens(self) -> int:
        """How many tokens' KV fit at once."""
        cache = self._engine.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size

    @property
    def is_behind(self) -> bool:
        return self._store is not None and self._store.latest > self.version

    @property
    def is_busy(self) -> bool:
        return bool(self._drained) or self._engine.has_unfinished_requests()

    def reload(self) -> float:
        """Takes the newest weights; gives the seconds for which generation stood still. Two checks
        must hold (rule 6): every tensor is where it should be, and the engine's logprobs of the
        canary are the trainer's."""
        start = time.perf_counter()
        self.wake()
        was_busy = self.is_busy
        assert self._store is not None
        self._drain()
        self._use(self._store.read(self._load_slot))
        pause = time.perf_counter() - start
        while not was_busy and self._expected is not None:
            self.step()  # alone: what is sampled next does not depend on when it comes
        return pause

    def sleep(self) -> None:
        """For the trainer's turn: drops weights and KV (on CPU vLLM keeps them). Nothing runs."""
        self._engine.sleep(level=2)
        self.is_asleep = True

    def wake(self) -> None:
        """Its weights are no version's until the next reload."""
        if self.is_asleep:
            self._engine.wake_up()
            self.is_asleep, self.version = False, -1

    def _drain(self) -> None:
        """With async scheduling a batch is on its way when a step ends: its tokens are of the
        weights that are still loaded."""
        core = self._engine.engine_core.engine_core
        if core.batch_queue:
            core.pause_scheduler("keep", clear_cache=False)  # no further batch is begun
            while core.batch_queue:
                self._drained += self._step()
            core.resume_scheduler()

    def _use(self, published: Published) -> None:
        """These were loaded. Sends their canary."""
        from vllm import SamplingParams

        lost = [name for by_rank in published.loaded for name in by_rank]
        if lost:
            raise StaleWeights(
                f"version {published.version} did not reach the engine: tensor {lost[0]} "
                f"(and {len(lost) - 1} more) differs after the reload"
            )
        reset = self._engine.reset_prefix_cache
        if self._rollout.on_update != "keep" and not reset(reset_running_requests=True):
            raise StaleWeights(f"version {published.version}: vLLM kept KV of older weights")
        self.version = published.version
        self._engine.set_weight_version(str(self.version))
        if self._expected is not None:  # new weights again, before the last canary came back
            self._engine.abort_request([f"canary-{self._expected.version}"])
        self._expected = published
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True
        )
        tokens = published.canary["tokens"].tolist()
        self._add(f"canary-{self.version}", tokens, params, CANARY_PRIORITY)

    def reseed(self, seed: int) -> None:
        """What is sampled from here on depends on `seed` and on the requests alone: also on no KV
        that an evaluation left in the cache. Not one seed per request: on CPU vLLM fails on these
        in a chunked prefill."""
        self._engine.reset_prefix_cache()
        self._rpc("reseed", seed)

    def add(self, key: int, prompt: Sequence[int], sampling: Sampling, priority: int) -> None:
        """Raises ValueError where vLLM refuses the request."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **sampling._asdict(),
            stop=list(self._rollout.stop),
            stop_token_ids=list(self._rollout.stop_tokens),
            include_stop_str_in_output=True,  # the tokens are there; the text says so too
            logprobs=0,  # of the sampled token only
            detokenize=bool(self._rollout.stop),  # costs 13 %, and only stop texts need it
            output_kind=RequestOutputKind.FINAL_ONLY,  # until then `step` looks for itself
        )
        try:
            self._add(str(key), prompt, params, priority)
        except VLLMClientError as refusal:  # not a ValueError of its own
            raise ValueError(str(refusal)) from refusal

    def _add(self, request_id: str, prompt: Sequence[int], params: object, priority: int) -> None:
        inputs = {"type": "token", "prompt_token_ids": list(prompt)}
        salted = {**inputs, "cache_salt": str(self.version)}
        self._engine.add_request(request_id, salted, params, priority=priority)

    def abort(self, keys: Sequence[int]) -> None:
        self._engine.abort_request([str(key) for key in keys])
        self._drained = [chunk for chunk in self._drained if chunk.key not in keys]

    def step(self) -> list[Chunk]:
        """One forward pass, and what the last reload had to wait for."""
        drained, self._drained = self._drained, []
        chunks = drained + self._step()
        if self._suspect is not None and self._expected is None:
            # Load the same version again, also while an evaluation pins it. Where a newer one has
            # its slot by now, perhaps since amid the copy, the newest: then the evaluation is void.
            assert self._store is not None
            self._drain()
            found = self._store.attempt(self.version, self._load_slot)
            self._use(found or self._store.read(self._load_slot))
        return chunks

    def _step(self) -> list[Chunk]:
        """As LLMEngine.step, but tokens and logprobs are taken as the engine core gives them:
        vLLM's own output records, one per token, cost 10 % of a small model's speed."""
        processor, version = self._engine.output_processor, self.version
        made = self._engine.engine_core.get_output()
        live = [output for output in made.outputs if output.request_id in processor.request_states]
        values = [output.new_logprobs for output in live]
        for output in live:
            output.new_logprobs = None  # else vLLM makes a record of each
        done = processor.process_outputs(made.outputs, weight_version=made.weight_version)
        self._engine.engine_core.abort_requests(done.reqs_to_abort)  # they met a stop text
        stops, canary = {}, None
        for output in done.request_outputs:
            if output.request_id.startswith("canary"):
                canary = output.prompt_logprobs
            elif output.finished:
                cut = output.outputs[0].finish_reason == "length"
                stops[output.request_id] = StopReason.LENGTH if cut else StopReason.STOP
        chunks = []
        for output, found in zip(live, values, strict=True):
            name = output.request_id.partition("-")[0]  # what follows is vLLM's own
            if name != "canary":
                tokens = output.new_token_ids
                logprobs = [] if found is None else found.logprobs[: len(tokens), 0].tolist()
                chunks.append(Chunk(int(name), version, tokens, logprobs, stops.get(name)))
        if canary is not None:
            self._check_canary(canary)
        return chunks

    def _check_canary(self, prompt_logprobs: Sequence[dict]) -> None:
        assert self._expected is not None
        published, self._expected = self._expected, None
        pairs = zip(published.canary["tokens"].tolist(), prompt_logprobs, strict=True)
        ours = np.array([entry[token].logprob for token, entry in pairs if entry is not None])
        wrong = self.canary.judge(ours, published.canary["logprobs"][1:])
        if wrong and self._suspect is not None:
            raise StaleWeights(f"version {published.version}: {wrong}")
        self._suspect = published if wrong else None

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()
