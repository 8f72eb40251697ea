"""The whole configuration as typed dataclasses: one class per Hydra group, a docstring under every field.

YAML files in the folders beside this module give the values (`conf/model/*.yaml`, ...); the classes give types,
meaning, and what a change means to a run that resumes. Field names of `model` and `optimizer` are megatron-core's own.
A config is what the user wrote and never changes: whatever is computed from it lives in frozen objects (`Layout`,
`BatchPlan`). Enums and not `Literal`, which OmegaConf 2.3 refuses; their names equal their values. Not `frozen`:
OmegaConf cannot compose into frozen classes.
"""

from dataclasses import dataclass, field

from shardwright.conf.choices import (
    AmaxComputeAlgo,
    AmaxGroup,
    AttentionBackend,
    CrossEntropy,
    CudaGraph,
    DataSource,
    DType,
    Fallback,
    Fp4Format,
    Fp8Format,
    Fp8Recipe,
    LrDecayStyle,
    LrWsdDecayStyle,
    MatmulPrecision,
    MuonCoefficientType,
    MuonScaleMode,
    MuonTpMode,
    NonFinite,
    NonFiniteAmax,
    OptimizerFormat,
    OptimizerKernel,
    OptimizerKind,
    PrecisionBackend,
    ResumeMode,
    StateDType,
    WeightDecayIncrStyle,
)
from shardwright.conf.keys import ResumePolicy, items, key
from shardwright.conf.schema_cluster import Cluster
from shardwright.conf.schema_model import Model

SCHEMA_VERSION = 1
"""Written into every frozen config; a file with another number is refused with the migration to use."""

BYTES = "bytes"
"""The word that stands in `data.tokenizer` for the tokenizer without a file."""


@dataclass(kw_only=True, slots=True)
class Run:
    """The run itself: its name, folder and seed."""

    name: str = key(resume="free")
    """Name of the run, shown in tables and used in the default folder."""
    dir: str = key(resume="free")
    """Folder of the run; one folder is one run, and its one writer holds a lock."""
    seed: int = key(resume="refuse")
    """Seed of weights, dropout and data order; at least 1."""


@dataclass(kw_only=True, slots=True)
class Parallel:
    """How the model and the batch are split over ranks.

    Optimizer state and main weights are always sharded over the data-parallel ranks (megatron-core's distributed
    optimizer, ZeRO-1).
    """

    tp: int = key(resume="free")
    """Tensor parallelism (megatron-core: tensor_model_parallel_size)."""
    sp: bool = key(resume="free")
    """Sequence parallelism (megatron-core: sequence_parallel): norms and dropout split over the TP ranks."""
    pp: int = key(resume="free")
    """Pipeline parallelism (megatron-core: pipeline_model_parallel_size)."""
    vpp: int = key(resume="free")
    """Model chunks of each pipeline rank (megatron-core: virtual_pipeline_model_parallel_size): more than 1 interleaves
    them, which shortens the idle time at both ends of a step; 1 for plain 1F1B."""
    cp: int = key(resume="free")
    """Context parallelism (megatron-core: context_parallel_size): every sequence split over ranks."""
    ep: int = key(resume="free")
    """Expert parallelism (megatron-core: expert_model_parallel_size): experts split over ranks of the expert grid."""
    etp: int | None = key(resume="free")
    """Tensor parallelism inside an expert (megatron-core: expert_tensor_parallel_size); null for `tp`."""
    pipeline_layout: str | None = key(resume="free")
    """What each of the pp * vpp stages holds (megatron-core: pipeline_model_parallel_layout), stages separated by "|":
    E embedding, t transformer layer, m layer of multi-token prediction, L loss; `Et*3|(t*4|)*2t*3L`. Null for layers
    shared out evenly, or by one of the next four."""
    account_for_embedding_in_pipeline_split: bool = key(resume="free")
    """The embedding counts as a layer, so the first stage holds one less."""
    account_for_loss_in_pipeline_split: bool = key(resume="free")
    """The loss counts as a layer, so the last stage holds one less."""
    num_layers_in_first_pipeline_stage: int | None = key(resume="free")
    """Layers of the first pipeline rank; null for as many as the ranks between first and last."""
    num_layers_in_last_pipeline_stage: int | None = key(resume="free")
    """Layers of the last pipeline rank; null for as many as the ranks between first and last."""
    num_distributed_optimizer_instances: int = key(resume="free")
    """Copies of optimizer state and main weights (megatron-core: num_distributed_optimizer_instances): each is sharded
    over its part of the data-parallel ranks, so that shards are gathered among fewer and nearer ranks; 1 shards them
    over all."""
    allow_tp_across_nodes: bool = key(resume="free")
    """Accept tensor-parallel groups whose ranks stand on several nodes, where every layer waits for the network."""
    overlap_grad_reduce: bool = key(resume="free")
    """Reduce gradients while the backward pass still runs."""
    overlap_param_gather: bool = key(resume="free")
    """Gather updated parameters while the forward pass already runs; needs `overlap_grad_reduce`."""


@dataclass(kw_only=True, slots=True)
class Precision:
    """Number formats."""

    dtype: DType = key(resume="warn")
    """Format of parameters and activations; the optimizer's main weights are fp32 always."""
    grad_reduce_in_fp32: bool = key(resume="warn")
    """Accumulate and reduce gradients in fp32."""
    backend: PrecisionBackend = key(resume="warn")
    """Who computes in FP8 and FP4."""
    fp8: Fp8Format | None = key(resume="warn")
    """FP8 format of the GEMMs of the transformer layers; null for none. Needs Transformer Engine and an FP8 GPU."""
    fp8_recipe: Fp8Recipe = key(resume="warn")
    """How FP8 scales are found."""
    fp8_dot_product_attention: bool = key(resume="warn")
    """Attention's products in FP8 too (megatron-core's name)."""
    fp8_param_gather: bool = key(resume="warn")
    """Parameters of the linear layers are kept in FP8 and gathered in FP8 over data-parallel ranks (megatron-core's
    name)."""
    fp4: Fp4Format | None = key(resume="warn")
    """FP4 format of the GEMMs of the transformer layers (NVFP4); null for none. Needs Blackwell."""
    fp4_random_hadamard_transform: bool = key(resume="warn")
    """NVFP4: transform both operands of the weight gradient, so that outliers spread over their block."""
    fp4_stochastic_rounding: bool = key(resume="warn")
    """NVFP4: round gradients up or down by chance, so that they are right on average."""
    fp8_margin: int = key(resume="warn")
    """Delayed scaling: scales are divided by 2**margin."""
    fp8_amax_history_len: int = key(resume="warn")
    """Delayed scaling: steps of history."""
    fp8_amax_compute_algo: AmaxComputeAlgo = key(resume="warn")
    """Delayed scaling: how the history is read."""
    amax_group: AmaxGroup = key(resume="warn")
    """Delayed scaling: ranks that share amaxes and scales. A larger group saves nothing and has one set of scales in
    the checkpoint; a smaller one waits for fewer ranks, and the checkpoint keeps the scales of every rank."""
    amax_check_interval: int = key(resume="free")
    """Delayed scaling: compare histories and scales over the group, bit by bit, after the first step of an attempt and
    every this many steps; 0 never compares."""
    on_non_finite_amax: NonFiniteAmax = key(resume="free")
    """Delayed scaling: what a NaN or an infinity in a quantised tensor of any rank leads to."""
    bf16_layers: list[str] = items(resume="warn")
    """Globs over names of linear layers that compute in BF16 in spite of the recipe, delayed scaling too. Names are
    megatron-core's with the layer's number in the whole model: `decoder.layers.0.*`, `*.linear_fc2`."""
    num_layers_at_start_in_bf16: int = key(resume="warn")
    """The first so many transformer layers compute in BF16 (megatron-core's name); 0 for none."""
    num_layers_at_end_in_bf16: int = key(resume="warn")
    """The last so many transformer layers compute in BF16 (megatron-core's name); 0 for none."""
    loss_scale: float | None = key(resume="warn")
    """fp16: a constant loss scale; null for one that follows overflows."""
    initial_loss_scale: float = key(resume="warn")
    """fp16: loss scale of the first update."""
    min_loss_scale: float = key(resume="warn")
    """fp16: the scale falls no lower."""
    loss_scale_window: int = key(resume="warn")
    """fp16: the scale doubles after this many updates without an overflow."""
    hysteresis: int = key(resume="warn")
    """fp16: the scale halves after this many overflows in a row; each of them skips its update."""


@dataclass(kw_only=True, slots=True)
class Execution:
    """How a step is computed: kernels, recording, what leaves the GPU's memory, the process around it.

    Results stay the same up to rounding. Null is the choice of the device: on where its kernels exist.
    """

    attention_backend: AttentionBackend = key(resume="free")
    """Kernel of attention on a GPU."""
    cross_entropy: CrossEntropy = key(resume="free")
    """Kernel of the loss."""
    cross_entropy_chunks: int = key(resume="free")
    """Compute output layer and loss in this many pieces of the sequence and again in the backward pass, so that logits
    never exist as a whole; 1 for all at once."""
    bias_activation_fusion: bool | None = key(resume="free")
    """The MLP's activation with its gate and bias in one kernel."""
    bias_dropout_fusion: bool | None = key(resume="free")
    """Bias, dropout and residual in one kernel."""
    apply_rope_fusion: bool | None = key(resume="free")
    """Rotary positions in one kernel."""
    gradient_accumulation_fusion: bool | None = key(resume="free")
    """Weight gradients are added to the gradient buffer by the matrix product itself."""
    cuda_graph_impl: CudaGraph = key(resume="free")
    """What is recorded as a CUDA graph."""
    cpu_offloading_num_layers: int = key(resume="free")
    """Keep the activations of the first so many layers in the host's memory until the backward pass; 0 for none."""
    deterministic_mode: bool = key(resume="free")
    """Only kernels that repeat bit by bit; slower."""
    gc_interval: int = key(resume="free")
    """Python's garbage collector runs every this many steps, on all ranks at the same one; 0 leaves it to Python, which
    stops one rank after another and thereby all."""
    bind_to_gpu: bool = key(resume="free")
    """Keep each rank on the CPU cores next to its GPU, as NVML tells them."""


@dataclass(kw_only=True, slots=True)
class Data:
    """Text, tokenizer and batches."""

    source: DataSource = key()
    """Where the text comes from."""
    files: list[str] | None = field(metadata={"resume": ResumePolicy.free})
    """`text`: paths or globs of `.jsonl` and `.txt` files, each also with `.gz`; null for other sources. Files may move
    between attempts: whether their tokens are those of the checkpoint is checked when the run goes on."""
    text_key: str | None = key()
    """`text`: where a JSON object has its text; null for other sources."""
    tokenizer: str | None = key(resume="free")
    """`text`: path of a Hugging Face `tokenizer.json` or of a SentencePiece `.model`, or `bytes`, which needs no file;
    null for other sources. The file may move, as `files` may."""
    eod_token: str | None = key()
    """`text`: the special token that ends a document; null for the usual one: <|endoftext|>, </s>, <|end_of_text|>."""
    seq_length: int = key()
    """Tokens of one sample."""
    micro_batch_size: int = key(resume="free")
    """Samples of one forward pass on one data-parallel rank."""
    global_batch_size: int = key(resume="warn")
    """Samples of one optimizer step over all data-parallel ranks; with a ramp its end, and of evaluation always."""
    rampup_batch_size: list[int] | None = field(metadata={"resume": ResumePolicy.warn})
    """[start, increment, samples]: grow from `start` to `global_batch_size` by `increment`, in equal shares of the
    first `samples` samples of the run; null for none."""
    cache_dir: str = key(resume="free")
    """Folder of tokenised corpora and sample indices, shared by runs and built once under a lock."""
    vocab_size: int = key()
    """Token ids lie below it: the most entries that a tokenizer gets that is trained on the corpus, or that your own
    may have, special tokens included; the range of random tokens."""
    split: list[float] = field(metadata={"resume": ResumePolicy.refuse})
    """Shares of the documents for training, validation and test; any scale, [98, 1, 1] reads as 98%, 1%, 1%."""
    num_workers: int = key(resume="free")
    """Loader processes per rank; 0 loads in the training process."""


@dataclass(kw_only=True, slots=True)
class ParamOverride:
    """What some parameters have otherwise; an element of `optimizer.overrides`, where only `match` must be given."""

    match: str
    """Glob over parameter names, case-sensitive. Names are megatron-core's with the layer's number in the whole model:
    `decoder.layers.1.mlp.linear_fc1.weight`."""
    lr_mult: float | None = None
    """Their learning rate is that of the schedule times this; null leaves it."""
    wd_mult: float | None = None
    """Their weight decay is that of the schedule times this; null leaves it, which is 0 for norms and biases."""


@dataclass(kw_only=True, slots=True)
class Optimizer:
    """How gradients become updates, by megatron-core's field names."""

    optimizer: OptimizerKind = key()
    """Adam with decoupled weight decay, SGD with momentum, or Muon."""
    kernel: OptimizerKernel = key(resume="free")
    """Whose Adam and SGD are used; Muon is always that of emerging_optimizers, beside this Adam."""
    overrides: list[ParamOverride] = field(metadata={"resume": ResumePolicy.refuse})
    """Other learning rates and weight decays for some parameters, by name; of several that match, the last one that
    gives a value counts."""
    lr: float = key(resume="warn")
    """Peak learning rate."""
    min_lr: float = key(resume="warn")
    """Learning rate at the end of the decay."""
    weight_decay: float = key(resume="warn")
    """Decoupled weight decay, of the first step where it has a schedule; norms and biases have none."""
    adam_beta1: float = key(resume="warn")
    """Decay of the first moment."""
    adam_beta2: float = key(resume="warn")
    """Decay of the second moment."""
    adam_eps: float = key(resume="warn")
    """Added to the root of the second moment."""
    sgd_momentum: float = key(resume="warn")
    """SGD: share of the last update in the next one; 0 for none."""
    muon_momentum: float = key(resume="warn")
    """Muon: decay of the average of gradients that is orthogonalised."""
    muon_nesterov: bool = key(resume="warn")
    """Muon: look one gradient ahead, as Nesterov does."""
    muon_num_ns_steps: int = key(resume="warn")
    """Muon: Newton-Schulz iterations of an update."""
    muon_coefficient_type: MuonCoefficientType = key(resume="warn")
    """Muon: coefficients of these iterations."""
    muon_fp32_matmul_prec: MatmulPrecision = key(resume="warn")
    """Muon: precision of these iterations; medium is bf16."""
    muon_scale_mode: MuonScaleMode = key(resume="warn")
    """Muon: how large an orthogonal update is."""
    muon_extra_scale_factor: float = key(resume="warn")
    """Muon: further factor of the update; 0.2 with `spectral` makes updates as large as Adam's, so that one learning
    rate serves both. Source: arXiv:2502.16982, section 2.2."""
    muon_split_qkv: bool = key(resume="warn")
    """Muon: orthogonalise queries, keys and values apart."""
    muon_tp_mode: MuonTpMode = key(resume="warn")
    """Muon: what tensor-parallel ranks orthogonalise."""
    use_precision_aware_optimizer: bool = key(resume="warn")
    """Let Transformer Engine's Adam keep gradients and moments in the formats below."""
    main_grads_dtype: StateDType = key(resume="warn")
    """Gradients that the optimizer reads; bf16 wants `precision.grad_reduce_in_fp32=false`."""
    exp_avg_dtype: StateDType = key(resume="warn")
    """First moment."""
    exp_avg_sq_dtype: StateDType = key(resume="warn")
    """Second moment."""
    clip_grad: float = key(resume="warn")
    """Largest global gradient norm; 0 switches clipping off."""


@dataclass(kw_only=True, slots=True)
class Schedule:
    """How long, how fast, and when to evaluate. All counts but one are optimizer steps."""

    train_iters: int = key(resume="free")
    """Optimizer steps of the whole run, counted from step 0 of the first attempt."""
    lr_warmup_iters: int | None = key(resume="warn")
    """Linear warm-up: update k (from 1) uses lr * k / lr_warmup_iters, so the first update already moves; 0 for none.
    Exactly one of this, `lr_warmup_samples` and `lr_warmup_fraction` is given, the others are null."""
    lr_warmup_samples: int | None = key(resume="warn")
    """Warm-up in samples: an update uses lr * (samples consumed, its own included) / lr_warmup_samples."""
    lr_warmup_fraction: float | None = key(resume="warn")
    """Warm-up as a share of the decay's length (`lr_decay_iters`), rounded to whole steps."""
    lr_decay_style: LrDecayStyle = key(resume="warn")
    """Curve after the warm-up."""
    lr_decay_iters: int | None = key(resume="warn")
    """Step at which `optimizer.min_lr` is reached, to stay there; null for `train_iters`."""
    lr_wsd_decay_iters: int | None = key(resume="warn")
    """WSD: steps of the fall, the last ones before `lr_decay_iters`; null with other styles."""
    lr_wsd_decay_style: LrWsdDecayStyle = key(resume="warn")
    """WSD: how the learning rate falls."""
    end_weight_decay: float | None = key(resume="warn")
    """Weight decay of step `train_iters`; null for `optimizer.weight_decay` always."""
    weight_decay_incr_style: WeightDecayIncrStyle = key(resume="warn")
    """Curve from `optimizer.weight_decay` to `end_weight_decay`; they may also fall."""
    eval_interval: int = key(resume="free")
    """Evaluate every this many steps and at the end; 0 never evaluates."""
    eval_iters: int = key(resume="free")
    """Global batches of one evaluation; 0 never evaluates."""


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """When checkpoints are written, how many stay, and what a start loads."""

    save_interval: int = key(resume="free")
    """Save every this many steps; the last step is saved always. 0 saves at the end alone."""
    async_save: bool = key(resume="free")
    """Train on while another process writes; training waits for the copy to host memory alone."""
    optimizer_format: OptimizerFormat = key(resume="free")
    """How the optimizer's state is written: for every layout, or faster and for this one alone."""
    keep_last: int = key(resume="free")
    """Newest committed checkpoints that stay on disk; at least 1."""
    keep_every: int = key(resume="free")
    """Checkpoints of steps that are multiples of this stay too; 0 keeps none for it."""
    keep_best: int = key(resume="free")
    """As many checkpoints with the lowest validation loss, of those saved right after an evaluation, stay too."""
    keep_hours: float = key(resume="free")
    """Checkpoints younger than so many hours stay too; 0 keeps none for it."""
    resume: ResumeMode = key(resume="free")
    """Continue from this run's own newest committed checkpoint."""
    load: str | None = key(resume="free")
    """Folder of another run, or of one checkpoint, that a run without own checkpoints starts from."""
    load_step: int | None = key(resume="free")
    """Load exactly this step instead of the newest."""
    trusted: bool = key(resume="free")
    """Take what `load` names also if it is foreign: if it has files of another user, or files that everybody may
    change."""
    fallback: Fallback = key(resume="free")
    """What a damaged checkpoint leads to, where no step was asked for."""


@dataclass(kw_only=True, slots=True)
class Resilience:
    """What the run does about trouble."""

    start_timeout_seconds: int = key(resume="free")
    """A rank that needs longer to import, to connect or to build the model hangs, and the run ends with its stacks in
    the logs. This and the next six: 0 for any time; while ranks start, no phase gets less than those before it, whose
    ranks it waits for."""
    data_timeout_seconds: int = key(resume="free")
    """The same for preparing the data: tokenising, building sample indices."""
    load_timeout_seconds: int = key(resume="free")
    """The same for verifying a checkpoint, and for loading it."""
    first_step_timeout_seconds: int = key(resume="free")
    """The same for each part of the first step, in which kernels are compiled and chosen."""
    step_timeout_seconds: int = key(resume="free")
    """The same for each part of a later step: its data, forward and backward, update, agreement."""
    evaluation_timeout_seconds: int = key(resume="free")
    """The same for an evaluation."""
    save_timeout_seconds: int = key(resume="free")
    """The same for what training waits for in a save: the copy, an earlier save that is not yet done, the commit."""
    distributed_timeout_seconds: int | None = key(resume="free")
    """A collective that takes longer ends the ranks that wait in it, not the one that they wait for; null for a fifth
    more than the longest of the above, so that the rank that hangs is found before."""
    on_non_finite: NonFinite = key(resume="free")
    """What a loss or gradient norm that is not finite leads to; one decision of all ranks."""
    fp8_guard: bool = key(resume="warn")
    """Let layers compute in BF16 for a while when a loss spikes, an update is not finite, or what they quantise leaves
    the format beyond the next two shares; one decision of all ranks. Looks at samples (`telemetry.fp8_interval`)."""
    fp8_guard_overflow: float = key(resume="warn")
    """Guard: largest share of an operand's elements that may saturate."""
    fp8_guard_underflow: float = key(resume="warn")
    """Guard: largest share of an operand's elements that may become 0."""
    fp8_guard_spike: float = key(resume="warn")
    """Guard: a loss above so many times the decaying mean of losses is a spike."""
    fp8_guard_share: float = key(resume="warn")
    """Guard: share of the layers that a spike or an update that is not finite demotes, those that keep least of their
    signal first."""
    fp8_guard_steps: int = key(resume="warn")
    """Guard: a layer stays in BF16 for at least so many steps; twice as many each further time."""
    rollback: int = key(resume="free")
    """How often a run may go back to its last checkpoint from before a rise of the loss, and pass over the data since
    then; counted over all attempts. 0 never goes back."""
    rollback_spike: float = key(resume="free")
    """Rollback: a loss above so many times the decaying mean of losses is high; one that is not finite is too."""
    rollback_patience: int = key(resume="free")
    """Rollback: steps in a row with a high loss."""
    rollback_lr: float = key(resume="warn")
    """Rollback: the learning rate is multiplied by this after each; 1 leaves it."""
    max_requeues: int = key(resume="free")
    """Under Slurm: how often in a row the job is queued again without a new checkpoint; 0 never queues it again."""
    exit_before: int | None = key(resume="free")
    """Under Slurm: so many seconds before the job's end the run saves and leaves by itself. null for what it has
    measured: a step, an evaluation and two saves, and 30 s; 0 never, it waits for Slurm's signal."""


@dataclass(kw_only=True, slots=True)
class Telemetry:
    """What a person sees."""

    log_interval: int = key(resume="free")
    """Steps between two lines where there is no terminal; metrics.jsonl has every step always."""
    straggler_interval: int = key(resume="free")
    """Look for slow ranks every this many steps; 0 never looks."""
    straggler_share: float = key(resume="free")
    """A rank is slow if the others wait for it for more than this share of the step, in the mean."""
    fp8_interval: int | None = key(resume="free")
    """Measure what the linear layers quantise every this many steps, into fp8.jsonl; 0 never. Null for 100, or for
    never where steps are recorded as CUDA graphs, in which nothing can be caught."""
    fp8_share: float = key(resume="free")
    """Samples come later where they would take more than this share of the time."""


@dataclass(kw_only=True, slots=True)
class Config:
    """Everything one run is told."""

    run: Run
    model: Model
    parallel: Parallel
    precision: Precision
    execution: Execution
    data: Data
    optimizer: Optimizer
    schedule: Schedule
    checkpoint: Checkpoint
    resilience: Resilience
    telemetry: Telemetry
    cluster: Cluster

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.cluster.ranks or self.cluster.nodes * self.cluster.gpus_per_node
