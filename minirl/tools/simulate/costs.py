"""What generation and training cost: a few constants, linear in what they count.

An engine step gives each running sequence one token. Decoding is bound by memory: the step reads
all weights once and the KV of every running sequence; each sequence adds a little compute and
bookkeeping. Prefill (also of running sequences after an update) and training are bound by compute.

The constants come from a GPU's data sheet and a model's shape (plan/roofline.py), or from a run
(measure.py).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    step_s: float  # an engine step, however few sequences: weights through memory, launches
    step_per_seq_s: float = 0.0  # one sequence's token: compute, sampling, bookkeeping
    step_per_context_s: float = 0.0  # reading one token's KV
    prefill_per_token_s: float = 0.0
    reload_s: float = 0.0  # an engine stands still for new weights
    train_per_token_s: float = 0.0  # of the whole training pool
    train_fixed_s: float = 0.0  # a training step: optimizer, gradient sums, publication

    def steps_s(self, num_steps: float, num_seqs: int, context: float) -> float:
        """The time of so many engine steps: the context grows by a token a sequence each."""
        grown = num_steps * context + num_seqs * num_steps * num_steps / 2
        return num_steps * self.base_s(num_seqs) + self.step_per_context_s * grown

    def steps_in(self, seconds: float, num_seqs: int, context: float) -> float:
        """The inverse of `steps_s`."""
        slope = self.base_s(num_seqs) + self.step_per_context_s * context
        bend = self.step_per_context_s * num_seqs
        if bend * seconds < 1e-9 * slope * slope:
            return seconds / slope
        return (-slope + (slope * slope + 2 * bend * seconds) ** 0.5) / bend

    def base_s(self, num_seqs: int) -> float:
        return self.step_s + num_seqs * self.step_per_seq_s

    def train_s(self, num_tokens: int) -> float:
        return self.train_fixed_s + num_tokens * self.train_per_token_s
