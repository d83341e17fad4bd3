"""A GPU's and a model's costs for the simulator, from the data sheet.

The shares say how much of the data sheet's rates is reached. TRAIN and STEP_S were fitted on two
of the four rows of the paper's table 7 (docs/planning.md); the others are round numbers.
"""

from minirl.config import Config
from minirl.tools.plan.gpus import Gpu
from minirl.tools.plan.memory import bytes_of
from minirl.tools.plan.shapes import Shape
from minirl.tools.simulate.costs import Costs

TRAIN = 0.4  # of the compute rate, packed sequences
PREFILL = 0.5
DECODE = 0.75  # of the memory bandwidth
STEP_S = 0.0035  # launches, scheduling and sampling of an engine step
STEP_PER_SEQ_S = 10e-6  # bookkeeping of one sequence in a step
HOST_GB_S = 20.0  # to and from shared memory
BETWEEN_BOXES_GB_S = 40.0  # of one GPU, 8 to a box


def costs(config: Config, gpu: Gpu, shape: Shape, num_train: int, mean_tokens: float) -> Costs:
    """`mean_tokens`: of a whole trajectory, which its attention costs depend on."""
    width, size = config.devices.tensor_parallel, bytes_of(config.model.dtype)
    num, flops = shape.num_parameters, gpu.flops(config.model.dtype)
    bandwidth = gpu.bandwidth_gb_s * 1e9 * DECODE * width
    forward = 2.0 * num + 2.0 * shape.layers * shape.heads * shape.head_dim * mean_tokens
    weights = num * size
    return Costs(
        step_s=STEP_S + weights / bandwidth,
        step_per_seq_s=STEP_PER_SEQ_S + 2.0 * num / (flops * PREFILL * width),
        step_per_context_s=shape.kv_values_per_token * size / bandwidth,
        prefill_per_token_s=forward / (flops * PREFILL * width),
        reload_s=weights / width / (HOST_GB_S * 1e9),
        train_per_token_s=forward * passes(config) / (flops * TRAIN * num_train),
        train_fixed_s=_fixed_s(config, gpu, num, num_train),
    )


def passes(config: Config) -> float:
    """Forwards' worth of compute to a trained token: backward is two."""
    train = config.train
    is_ratio = train.objective != "naive" and train.proximal == "forward"
    has_proximal = train.num_minibatches > 1 and is_ratio
    learner = 3.0 + train.gradient_checkpointing
    critic = learner + 1 if train.estimator == "gae" else 0.0  # and its values before the step
    return learner + has_proximal + bool(train.kl_coef) + critic


def _fixed_s(config: Config, gpu: Gpu, num: int, num_train: int) -> float:
    link = gpu.link_gb_s if num_train <= 8 else BETWEEN_BOXES_GB_S
    gradients_s = 2 * 4.0 * num / (link * 1e9) if num_train > 1 else 0.0
    optimizer_s = 28.0 * num / (gpu.bandwidth_gb_s * 1e9)
    publish_s = bytes_of(config.model.dtype) * num / (HOST_GB_S * 1e9)
    return config.train.num_minibatches * (gradients_s + optimizer_s) + publish_s
