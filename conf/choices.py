"""What a key may be chosen from: the enums of the schema.

Enums and not `Literal`, which OmegaConf 2.3 refuses; their names equal their values.
"""

from enum import Enum


class GpuKind(Enum):
    """GPU of the cluster."""

    auto = "auto"
    """Use the GPUs that NVML shows on this machine; without any, the CPU."""
    none = "none"
    """Train on the CPU over gloo, also where GPUs are present."""
    h100 = "h100"
    h200 = "h200"
    b200 = "b200"
    gb200 = "gb200"


class DataSource(Enum):
    """Where the training text comes from."""

    python_stdlib = "python_stdlib"
    """Sources of the standard library of the Python that runs, with a tokenizer that is trained on them."""
    text = "text"
    """Your own files with your own tokenizer."""
    mock = "mock"
    """Random tokens."""


class Normalization(Enum):
    """Normalisation layer, by megatron-core's names."""

    RMSNorm = "RMSNorm"
    LayerNorm = "LayerNorm"


class Activation(Enum):
    """Activation of the MLP; with `gated_linear_unit` silu becomes SwiGLU and gelu GEGLU."""

    silu = "silu"
    gelu = "gelu"
    """By the error function."""
    gelu_tanh = "gelu_tanh"
    """By the hyperbolic tangent, as GPT-2 and GPT-3."""


class PositionEmbedding(Enum):
    """Position embedding, by megatron-core's names."""

    rope = "rope"
    learned_absolute = "learned_absolute"


class RopeType(Enum):
    """Rotary positions of multi-head latent attention, by megatron-core's names."""

    rope = "rope"
    yarn = "yarn"


class ScoreFunction(Enum):
    """What turns a router's logits into weights, by megatron-core's names."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class LoadBalancing(Enum):
    """Auxiliary loss that balances the load of experts, by megatron-core's names."""

    none = "none"
    aux_loss = "aux_loss"
    """Over the tokens of a micro-batch."""
    seq_aux_loss = "seq_aux_loss"
    """Over the tokens of each sequence."""
    global_aux_loss = "global_aux_loss"
    """Over the tokens of the step so far."""


class RouterDType(Enum):
    """Number format of the router."""

    fp32 = "fp32"
    fp64 = "fp64"


class TokenDispatcher(Enum):
    """How tokens travel to their experts, by megatron-core's names."""

    allgather = "allgather"
    alltoall = "alltoall"
    flex = "flex"
    """DeepEP's kernels."""


class TokenDropPolicy(Enum):
    """Which tokens a full expert drops, by megatron-core's names."""

    probs = "probs"
    """Those of the smallest weight."""
    position = "position"
    """The last ones."""


class DType(Enum):
    """Number format of parameters, activations and communication."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class StateDType(Enum):
    """Number format of what the optimizer keeps."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Fp4Format(Enum):
    """FP4 format, by megatron-core's name."""

    e2m1 = "e2m1"


class Fp8Format(Enum):
    """FP8 formats, by megatron-core's names: e4m3 everywhere, or hybrid with e5m2 for gradients."""

    e4m3 = "e4m3"
    hybrid = "hybrid"


class Fp8Recipe(Enum):
    """Scaling recipe, by megatron-core's names."""

    delayed = "delayed"
    """Per tensor, from an amax history."""
    tensorwise = "tensorwise"
    """Per tensor, from its present amax (current scaling)."""
    blockwise = "blockwise"
    """1 x 128 for activations, 128 x 128 for weights; Hopper."""
    mxfp8 = "mxfp8"
    """1 x 32 with E8M0 scales; Blackwell."""


class Recompute(Enum):
    """What the backward pass computes again instead of keeping it."""

    full = "full"
    selective = "selective"


class RecomputeMethod(Enum):
    """Which layers are recomputed in full."""

    uniform = "uniform"
    block = "block"


class NonFinite(Enum):
    """What a loss or gradient norm that is not finite leads to."""

    stop = "stop"
    """All ranks stop before the update; exit code 3."""
    skip = "skip"
    """The update is left out on all ranks and counted; the run goes on."""


class AmaxComputeAlgo(Enum):
    """How delayed scaling reads the amax history."""

    max = "max"
    most_recent = "most_recent"


class LrDecayStyle(Enum):
    """Learning-rate curve after the warm-up, by megatron-core's names."""

    constant = "constant"
    """Stay at `optimizer.lr`."""
    cosine = "cosine"
    linear = "linear"
    WSD = "WSD"
    """Stay at `optimizer.lr` and fall over the last `lr_wsd_decay_iters` steps."""
    inverse_square_root = "inverse_square_root"
    """`optimizer.lr` * sqrt(warm-up / step), never below `optimizer.min_lr`."""


class LrWsdDecayStyle(Enum):
    """How WSD falls, by megatron-core's names."""

    linear = "linear"
    cosine = "cosine"
    exponential = "exponential"
    minus_sqrt = "minus_sqrt"


class WeightDecayIncrStyle(Enum):
    """Curve of the weight decay, by megatron-core's names."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class ResumeMode(Enum):
    """Whether a run continues from its own newest committed checkpoint."""

    auto = "auto"
    """Continue if there is one, else start at step 0 and say so."""
    must = "must"
    """Refuse to start without one."""
    never = "never"
    """Refuse to start if there is one: a new run wants a new folder."""
