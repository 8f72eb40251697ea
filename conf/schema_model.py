"""The section `model`: the decoder of every family, by megatron-core's field names.

Three parts are optional, and a family without one has null, false or 0 in its keys: experts (`num_moe_experts` and
`moe_*`), multi-head latent attention (`multi_latent_attention` and what follows it), and multi-token prediction
(`mtp_*`). `decoder.yaml` has all three switched off; `pretrain/checks_model.py` has their rules.
"""

import re
from dataclasses import dataclass, field

from shardwright.conf.choices import (
    Activation,
    LoadBalancing,
    Normalization,
    PositionEmbedding,
    Recompute,
    RecomputeMethod,
    RopeType,
    RouterDType,
    ScoreFunction,
    TokenDispatcher,
    TokenDropPolicy,
)
from shardwright.conf.keys import ResumePolicy, key

_TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*([1-9][0-9]{0,3}))?")


@dataclass(kw_only=True, slots=True)
class Model:
    """The GPT decoder, by megatron-core's field names."""

    num_layers: int = key()
    """Transformer layers; those of multi-token prediction come on top."""
    hidden_size: int = key()
    """Width of the residual stream."""
    ffn_hidden_size: int = key()
    """Width of the MLP of a layer without experts; with `gated_linear_unit` of each of its two halves."""
    num_attention_heads: int = key()
    """Query heads."""
    num_query_groups: int = key()
    """Key/value heads (grouped-query attention); `num_attention_heads` for plain multi-head attention."""
    kv_channels: int = key()
    """Width of one head; with multi-head latent attention nothing reads it but megatron-core's own defaults."""
    vocab_size: int = key()
    """Entries of the vocabulary before padding; a trained tokenizer gets this size."""
    make_vocab_size_divisible_by: int = key()
    """The embedding is padded up to a multiple of this, and of nothing else, so that its shape is the same in every
    layout and a checkpoint fits all of them."""
    max_position_embeddings: int = key()
    """Longest sequence; the table's length with learned positions."""
    position_embedding_type: PositionEmbedding = key()
    """Rotary or learned absolute positions."""
    rotary_base: int = key()
    """Base of the rotary frequencies (theta)."""
    rope_scaling: bool = key()
    """Stretch low rotary frequencies as Llama 3.1 does, counted from 8192 positions (low factor 1, high factor 4)."""
    rope_scaling_factor: float | None = key()
    """How far `rope_scaling` stretches: 8 in Llama 3.1, 32 in Llama 3.2; null without it."""
    normalization: Normalization = key()
    """RMSNorm or LayerNorm."""
    layernorm_epsilon: float = key()
    """Epsilon of every normalisation."""
    activation_func: Activation = key()
    """Activation of the MLP and of experts."""
    gated_linear_unit: bool = key()
    """Gate the MLP (SwiGLU with silu)."""
    add_bias_linear: bool = key()
    """Biases in the linear layers of attention and MLP."""
    add_qkv_bias: bool = key()
    """A bias in the QKV projection even without `add_bias_linear`."""
    qk_layernorm: bool = key()
    """Normalise queries and keys per head; with multi-head latent attention their compressed forms."""
    share_embeddings_and_output_weights: bool = key()
    """Tie the input embedding to the output layer."""
    hidden_dropout: float = key(resume="warn")
    """Dropout on the residual stream."""
    attention_dropout: float = key(resume="warn")
    """Dropout on attention weights."""
    recompute_granularity: Recompute | None = key(resume="free")
    """Compute activations again in the backward pass instead of keeping them: whole layers, or `recompute_modules`."""
    recompute_method: RecomputeMethod | None = key(resume="free")
    """Full recomputation: uniform groups of `recompute_num_layers` layers, or only that many layers of each stage."""
    recompute_num_layers: int | None = key(resume="free")
    """Full recomputation: see `recompute_method`."""
    recompute_modules: list[str] = field(metadata={"resume": ResumePolicy.free})
    """Selective recomputation: core_attn, layernorm, mlp."""
    init_method_std: float = key()
    """Standard deviation of the initial weights; output projections use it divided by sqrt(2 * num_layers)."""

    # ---- experts -----------------------------------------------------------------------------------------------------

    num_moe_experts: int | None = key()
    """Routed experts of a MoE layer; null for a model without experts."""
    moe_layer_freq: str = key()
    """Which layers have experts: `2` for every second one from the first, or a pattern over all layers with 1 for such
    a layer and 0 for a dense one, `[0]*3+[1]*58` or `[0,1,0,1]`."""
    moe_ffn_hidden_size: int | None = key()
    """Width of one expert."""
    moe_shared_expert_intermediate_size: int | None = key()
    """Width of all shared experts together, which every token passes; null for none."""
    moe_router_topk: int | None = key()
    """Experts that a token is sent to."""
    moe_router_score_function: ScoreFunction = key()
    """What turns the router's logits into weights of experts."""
    moe_router_pre_softmax: bool = key()
    """Softmax over all experts and then the top k, whose weights do not add up to 1; else softmax over the top k."""
    moe_router_num_groups: int | None = key()
    """Group-limited routing: the experts come in this many groups; null for none."""
    moe_router_group_topk: int | None = key()
    """Group-limited routing: groups that a token may use."""
    moe_router_topk_scaling_factor: float | None = key()
    """The weights of a token's experts are multiplied by this; null for 1."""
    moe_router_enable_expert_bias: bool = key()
    """Balance the load by a bias on each expert's score, moved after every step and used for choosing alone."""
    moe_router_bias_update_rate: float = key(resume="warn")
    """How far that bias moves at each step."""
    moe_router_load_balancing_type: LoadBalancing = key(resume="warn")
    """Auxiliary loss that balances the load."""
    moe_aux_loss_coeff: float = key(resume="warn")
    """Weight of that loss."""
    moe_z_loss_coeff: float | None = key(resume="warn")
    """Weight of the loss on the router's logits that keeps them small; null for none."""
    moe_router_dtype: RouterDType | None = key(resume="warn")
    """Number format of the router; null for that of the parameters."""
    moe_token_dispatcher_type: TokenDispatcher = key(resume="free")
    """How tokens travel to the ranks of their experts."""
    moe_expert_capacity_factor: float | None = key(resume="warn")
    """An expert takes at most this times its even share of the tokens of a micro-batch, and the rest are dropped; null
    drops none."""
    moe_pad_expert_input_to_capacity: bool = key(resume="free")
    """Pad every expert's tokens to its capacity, so that shapes do not change."""
    moe_token_drop_policy: TokenDropPolicy = key(resume="warn")
    """Which tokens go where an expert is full."""
    moe_grouped_gemm: bool = key(resume="free")
    """All experts of a rank in one grouped GEMM; on the CPU they are computed one after the other in any case."""
    moe_permute_fusion: bool = key(resume="free")
    """Fused kernels for sorting tokens by expert; on a GPU alone."""
    moe_router_fusion: bool = key(resume="free")
    """Fused kernels for choosing experts and for the auxiliary loss; on a GPU alone."""
    moe_router_padding_for_quantization: bool = key(resume="free")
    """FP8: fill an expert up to a multiple of 16 tokens (MXFP8: 32) by choosing more, not by padding with zeros."""

    # ---- multi-head latent attention ---------------------------------------------------------------------------------

    multi_latent_attention: bool = key()
    """Attention over compressed queries, keys and values (DeepSeek-V2)."""
    q_lora_rank: int | None = key()
    """Width of compressed queries; null projects them directly."""
    kv_lora_rank: int | None = key()
    """Width of compressed keys and values together."""
    qk_head_dim: int | None = key()
    """Width of the part of a query or key head that has no position."""
    qk_pos_emb_head_dim: int | None = key()
    """Width of the part that has a rotary position; all heads share the key's."""
    v_head_dim: int | None = key()
    """Width of a value head."""
    rope_type: RopeType | None = key()
    """Plain rotary positions or YaRN's."""
    rotary_scaling_factor: float | None = key()
    """YaRN: how far positions are stretched; 1 with plain ones."""
    original_max_position_embeddings: int | None = key()
    """YaRN: longest sequence before stretching."""
    beta_fast: float | None = key()
    """YaRN: frequencies that turn more often than this over the original length stay."""
    beta_slow: float | None = key()
    """YaRN: frequencies that turn less often than this over the original length are stretched in full."""
    mscale: float | None = key()
    """YaRN: scale of rotary sines and cosines, relative to `mscale_all_dim`'s."""
    mscale_all_dim: float | None = key()
    """YaRN: scale of the attention logits; 0 leaves them alone."""

    # ---- multi-token prediction --------------------------------------------------------------------------------------

    mtp_num_layers: int | None = key()
    """Layers that each predict one token further ahead (DeepSeek-V3); null for none."""
    mtp_loss_scaling_factor: float | None = key(resume="warn")
    """Weight of the mean of their losses."""

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts, first layer first.

        Raises:
            ValueError: `moe_layer_freq` cannot be read, or has another number of layers.
        """
        if self.num_moe_experts is None:
            return (False,) * self.num_layers
        return layer_pattern(self.moe_layer_freq, self.num_layers)

    @property
    def has_fused_activation(self) -> bool:
        """Whether megatron-core has one kernel for the activation with its gate and bias.

        Source: megatron-core 0.19.2, fused_bias_swiglu.py, fused_bias_gelu.py and fused_bias_geglu.py (the tanh form);
        experts fuse SwiGLU alone (experts.py).
        """
        if self.activation_func is Activation.silu:
            return self.gated_linear_unit
        has_kernel = self.gated_linear_unit or self.add_bias_linear
        return self.activation_func is Activation.gelu_tanh and has_kernel and self.num_moe_experts is None

    @property
    def has_fused_rope(self) -> bool:
        """Whether a kernel applies the rotary positions: of latent attention YaRN's alone, to heads of some widths.

        Source: megatron-core 0.19.2, fused_mla_yarn_rope_apply.py, a kernel of Triton, whose ranges are powers of two.
        """
        if not self.multi_latent_attention:
            return True
        widths = self.qk_head_dim, self.v_head_dim, self.qk_pos_emb_head_dim
        return self.rope_type is RopeType.yarn and all((width or 0).bit_count() == 1 for width in widths)


def layer_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """`moe_layer_freq` for `num_layers` layers; megatron-core's command line has the same notation.

    Raises:
        ValueError: it cannot be read, or has another number of layers.
    """
    compact = text.replace(" ", "")
    if compact.isdecimal() and int(compact) >= 1:
        return tuple(layer % int(compact) == 0 for layer in range(num_layers))
    layers: list[bool] = []
    for term in compact.split("+"):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ValueError("is neither a number nor a pattern like [0]*3+[1]*58")
        layers += [digit == "1" for digit in match[1].split(",")] * int(match[2] or 1)
    if len(layers) != num_layers:
        raise ValueError(f"is a pattern of {len(layers)} layers, and model.num_layers={num_layers}")
    return tuple(layers)
