"""How many weights a model has and what a token costs, from its configuration alone: integers, no torch.

What tensor and expert parallelism do with a weight is told apart (`Weights`). Layers of multi-token prediction are
counted apart from the model, as everybody counts them who publishes a model with them.

FLOPs count the matrix products of one forward and one backward pass, the backward being twice the forward. Attention is
counted causal: token i attends to i others, so half of the full square. A token passes the experts that it is routed to
and no others. Nothing is added for recomputation. Llama 3 8B at 8192 tokens: 51.47 GFLOP per token.
"""

import math
from dataclasses import dataclass

from shardwright.conf.choices import Normalization, PositionEmbedding
from shardwright.conf.schema_model import Model


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters, told apart by what tensor and expert parallelism do with them."""

    split: int = 0
    """Shared out over the TP ranks: embeddings, the large matrices, shared experts."""
    whole: int = 0
    """Held by every TP rank: norms, routers, learned positions, biases added after a reduction, and the down
    projections of latent attention (which the CPU's layers split)."""
    experts: int = 0
    """Routed experts, shared out over the ranks of expert and expert-tensor parallelism."""

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(self.split + other.split, self.whole + other.whole, self.experts + other.experts)

    def __mul__(self, times: int) -> "Weights":
        return Weights(self.split * times, self.whole * times, self.experts * times)

    @property
    def total(self) -> int:
        """All of them."""
        return self.split + self.whole + self.experts

    def per_rank(self, tp: int, ep: int = 1, etp: int = 1) -> int:
        """Parameters that one rank holds."""
        return self.split // tp + self.whole + self.experts // (ep * etp)

    def active(self, model: Model) -> int:
        """Those that one token passes: of the experts its `moe_router_topk`."""
        return self.split + self.whole + self.experts * (model.moe_router_topk or 0) // (model.num_moe_experts or 1)


def padded_vocab_size(model: Model) -> int:
    """Rows of the embedding; of the model alone, so that its shape is the same in every layout."""
    multiple = model.make_vocab_size_divisible_by
    return math.ceil(model.vocab_size / multiple) * multiple


def weights(model: Model) -> Weights:
    """The whole model, each weight once (a tied embedding too), without layers of multi-token prediction."""
    layers = sum((layer(model, has_experts) for has_experts in model.moe_layers), Weights())
    tied = model.share_embeddings_and_output_weights
    return embedding(model) + layers + norm(model, model.hidden_size) + (Weights() if tied else output(model))


def count_parameters(model: Model) -> int:
    """Trained parameters of the model."""
    return weights(model).total


def embedding(model: Model) -> Weights:
    """The input embedding, and learned positions."""
    learned = model.position_embedding_type is PositionEmbedding.learned_absolute
    return Weights(
        split=padded_vocab_size(model) * model.hidden_size,
        whole=model.max_position_embeddings * model.hidden_size if learned else 0,
    )


def output(model: Model) -> Weights:
    """The output layer, where it is not tied."""
    return Weights(split=padded_vocab_size(model) * model.hidden_size)


def norm(model: Model, width: int) -> Weights:
    """One normalisation."""
    return Weights(whole=width * (2 if model.normalization is Normalization.LayerNorm else 1))


def layer(model: Model, has_experts: bool) -> Weights:
    """One transformer layer."""
    inside = _experts(model) if has_experts else _mlp(model)
    return _attention(model) + inside + norm(model, model.hidden_size) * 2


def multi_token_prediction(model: Model) -> Weights:
    """All layers of multi-token prediction; they share embedding and output layer with the model.

    Source: megatron-core 0.19.2, multi_token_prediction.py: two norms, a projection of both to the width of one, a
    layer as the model's last, a final norm.
    """
    if model.mtp_num_layers is None:
        return Weights()
    width = model.hidden_size
    each = layer(model, model.moe_layers[-1]) + norm(model, width) * 3 + Weights(split=2 * width * width)
    return each * model.mtp_num_layers


def qkv_width(model: Model) -> int:
    """Columns of the projection to queries, keys and values of all heads."""
    return (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels


def head_widths(model: Model) -> tuple[int, int]:
    """Width of a key head and of a value head."""
    if not model.multi_latent_attention:
        return model.kv_channels, model.kv_channels
    return (model.qk_head_dim or 0) + (model.qk_pos_emb_head_dim or 0), model.v_head_dim or 0


def flops_per_token(model: Model, seq_length: int) -> float:
    """FLOPs of forward and backward per token of a sequence of `seq_length` tokens, causal; without multi-token
    prediction.
    """
    layers = sum(_layer_flops(model, has_experts, seq_length) for has_experts in model.moe_layers)
    return 3.0 * (layers + 2 * output(model).total)


def mtp_flops_per_token(model: Model, seq_length: int) -> float:
    """FLOPs per token that multi-token prediction adds: its layers, and the output layer once more for each."""
    if model.mtp_num_layers is None:
        return 0.0
    each = _layer_flops(model, model.moe_layers[-1], seq_length) + 2 * (2 * model.hidden_size**2 + output(model).total)
    return 3.0 * each * model.mtp_num_layers


def _layer_flops(model: Model, has_experts: bool, seq_length: int) -> int:
    """FLOPs of one layer's forward pass per token."""
    inside = _experts(model) if has_experts else Weights(split=_mlp_matrices(model, model.ffn_hidden_size))
    linear = (_attention_matrices(model) + inside).active(model)
    # two products (QK^T and its product with V) of 2 * seq_length * width FLOPs, half of them masked
    return 2 * linear + seq_length * model.num_attention_heads * sum(head_widths(model))


def _attention(model: Model) -> Weights:
    """Matrices, biases and inner norms."""
    found = _attention_matrices(model)
    if model.add_bias_linear:
        found += Weights(whole=model.hidden_size)
    if model.multi_latent_attention:
        ranks = ((model.q_lora_rank or 0) + (model.kv_lora_rank or 0)) if model.qk_layernorm else 0
        return found + norm(model, ranks)
    if model.add_bias_linear or model.add_qkv_bias:
        found += Weights(split=qkv_width(model))
    return found + norm(model, model.kv_channels) * (2 if model.qk_layernorm else 0)


def _attention_matrices(model: Model) -> Weights:
    width, heads = model.hidden_size, model.num_attention_heads
    key, value = head_widths(model)
    if not model.multi_latent_attention:
        return Weights(split=width * (qkv_width(model) + heads * value))
    kv_rank, q_rank = model.kv_lora_rank or 0, model.q_lora_rank
    down = kv_rank + (model.qk_pos_emb_head_dim or 0) + (q_rank or 0)
    up = kv_rank * ((model.qk_head_dim or 0) + value) + (width if q_rank is None else q_rank) * key
    return Weights(split=heads * (up + value * width), whole=width * down)


def _experts(model: Model) -> Weights:
    """Router, routed experts and shared ones: matrices alone, for experts have no biases."""
    number = model.num_moe_experts or 0
    return Weights(
        split=_mlp_matrices(model, model.moe_shared_expert_intermediate_size or 0),
        whole=model.hidden_size * number,
        experts=_mlp_matrices(model, model.moe_ffn_hidden_size or 0) * number,
    )


def _mlp(model: Model) -> Weights:
    width = model.ffn_hidden_size
    biases = Weights(split=_fc1_width(model, width), whole=model.hidden_size) if model.add_bias_linear else Weights()
    return Weights(split=_mlp_matrices(model, width)) + biases


def _mlp_matrices(model: Model, width: int) -> int:
    return model.hidden_size * (_fc1_width(model, width) + width)


def _fc1_width(model: Model, width: int) -> int:
    return width * (2 if model.gated_linear_unit else 1)
