"""Peak memory of logprobs and their gradient over a large vocabulary, chunked and not.

Measured as the kernel counts it: the process's resident peak, less what the inputs took.
Axes: N tokens, E width, V vocabulary.
"""

from multiprocessing.connection import Connection
from pathlib import Path

import torch

from minirl.train.policy import Head, HeadLogprobs

VOCAB, WIDTH = 150_000, 128
CHUNKED, FULL = "chunked", "full"


def peak_bytes(pipe: Connection, kind: str, num_tokens: int) -> int:
    """Run in a process of its own, which keeps the memory that it was given."""
    torch.manual_seed(0)
    hidden_NE = torch.randn(num_tokens, WIDTH, requires_grad=True)
    weight_VE = torch.randn(VOCAB, WIDTH, requires_grad=True)
    targets_N = torch.randint(VOCAB, (num_tokens,))
    _warm_up()
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    if kind == CHUNKED:
        logprobs_N, _ = HeadLogprobs.apply(hidden_NE, weight_VE, targets_N, Head())
    else:
        logprobs_NV = (hidden_NE @ weight_VE.T).log_softmax(-1)
        logprobs_N = logprobs_NV.gather(1, targets_N[:, None])[:, 0]
    logprobs_N.sum().backward()
    return resident_bytes("VmHWM") - before


def _warm_up() -> None:
    """What a first product and a first backward allocate once is not the head's."""
    small = torch.randn(8, 8, requires_grad=True)
    (small @ small).log_softmax(-1).sum().backward()


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")
