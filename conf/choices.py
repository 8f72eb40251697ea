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


class OptimizerKind(Enum):
    """Rule of the update, by megatron-core's names."""

    adam = "adam"
    sgd = "sgd"
    muon = "muon"
    """Orthogonalised momentum for the matrices of the layers, Adam for all else."""


class OptimizerKernel(Enum):
    """Whose code updates the weights."""

    auto = "auto"
    """What megatron-core takes by itself: Transformer Engine's, else apex's, else torch's."""
    transformer_engine = "transformer_engine"
    apex = "apex"
    torch = "torch"


class MuonScaleMode(Enum):
    """How large Muon's update of an m x n matrix is, by megatron-core's names."""

    spectral = "spectral"
    """sqrt(max(m, n))"""
    unit_rms_norm = "unit_rms_norm"
    """sqrt(m / n)"""
    shape_scaling = "shape_scaling"
    """sqrt(max(1, m / n))"""


class MuonCoefficientType(Enum):
    """Coefficients of the Newton-Schulz iteration, by the names of emerging_optimizers."""

    simple = "simple"
    quintic = "quintic"
    polar_express = "polar_express"
    cans = "cans"
    aol = "aol"
    deepseekv4 = "deepseekv4"


class MuonTpMode(Enum):
    """Which matrix Muon orthogonalises under tensor parallelism, by megatron-core's names."""

    blockwise = "blockwise"
    """Each rank its own part: no communication, and another result in every layout."""
    duplicated = "duplicated"
    """The whole matrix, on every rank."""
    distributed = "distributed"
    """The whole matrix, together; along the split side, also where that is the longer one."""


class MatmulPrecision(Enum):
    """How exactly fp32 matrices are multiplied, by torch's names."""

    highest = "highest"
    high = "high"
    medium = "medium"


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


class AmaxGroup(Enum):
    """Which ranks share the amaxes, and thereby the scales, of delayed scaling."""

    tp = "tp"
    """The parts of a tensor alone: every context- and data-parallel rank has scales of its own."""
    tp_cp = "tp_cp"
    """Also the pieces of a sequence (megatron-core: tp_only_amax_red)."""
    tp_dp_cp = "tp_dp_cp"
    """Also the data-parallel replicas: one set of scales for each pipeline stage (megatron-core's default)."""


class NonFiniteAmax(Enum):
    """What a NaN or an infinity in a quantised tensor leads to under delayed scaling; no history takes it in."""

    stop = "stop"
    """All ranks stop before the update; exit code 3."""
    skip = "skip"
    """The update is left out on all ranks and counted; the run goes on."""
    keep_scale = "keep_scale"
    """The tensor keeps its scale, the update is made, the event log tells of it."""


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


class Fallback(Enum):
    """What a damaged checkpoint leads to."""

    previous = "previous"
    """Tell what is damaged and continue from the newest one before it that is whole."""
    stop = "stop"
    """Tell what is damaged and do not start."""


class OptimizerFormat(Enum):
    """How a checkpoint holds the optimizer's state, by megatron-core's names."""

    fully_reshardable = "fully_reshardable"
    """By parameter: it loads in every layout. The data-parallel ranks gather it first."""
    dp_reshardable = "dp_reshardable"
    """As the buckets lie in memory: nothing is gathered, and it loads in the layout that wrote it alone."""


class AttentionBackend(Enum):
    """Which kernel of Transformer Engine computes attention, by megatron-core's names."""

    auto = "auto"
    """Transformer Engine's choice: cuDNN's fused attention on Hopper and Blackwell."""
    flash = "flash"
    """The package flash-attn."""
    fused = "fused"
    """cuDNN."""
    unfused = "unfused"
    """Plain matrix products with the whole square of scores in memory."""


class CrossEntropy(Enum):
    """Which kernel computes the loss of a token from its logits."""

    auto = "auto"
    """Transformer Engine's on a GPU, else unfused; unfused where runs must repeat bit by bit."""
    unfused = "unfused"
    """megatron-core's, operation by operation in fp32."""
    native = "native"
    """megatron-core's, compiled by torch; a GPU's."""
    transformer_engine = "transformer_engine"
    """Transformer Engine's Triton kernel, which writes gradients over the logits."""


class CudaGraph(Enum):
    """What is recorded once and replayed, by megatron-core's names."""

    none = "none"
    local = "local"
    """Every layer, recorded by megatron-core."""
    transformer_engine = "transformer_engine"
    """Every layer, recorded by Transformer Engine."""
    full_iteration = "full_iteration"
    """Forward and backward of all micro-batches of a step."""


class PrecisionBackend(Enum):
    """Who computes in a narrow format."""

    transformer_engine = "transformer_engine"
    """Transformer Engine, on a GPU with units for the recipe."""
    emulated = "emulated"
    """The same arithmetic by plain torch operations, on any device: slow, to study a recipe and to check it."""


class Launcher(Enum):
    """What starts the ranks of a Slurm job."""

    srun = "srun"
    """One task of srun per rank."""
    torchrun = "torchrun"
    """One task of srun per node, and in it torchrun, which starts the node's ranks."""
    ft_launcher = "ft_launcher"
    """The same with the launcher of nvidia-resiliency-ext, which starts failed ranks again inside of the job."""


class Container(Enum):
    """What the ranks of a Slurm job run in."""

    none = "none"
    """The node itself."""
    pyxis = "pyxis"
    """An Enroot container that srun starts, by the plugin Pyxis."""
    apptainer = "apptainer"
    """An Apptainer container, one per rank."""
