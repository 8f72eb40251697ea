"""GPT-2 and GPT-3 (`GPT2LMHeadModel` of transformers), whose matrices are stored [in, out] and q, k, v in one."""

import torch

from shardwright.conf.schema_model import Model
from shardwright.parallel.mcore.hf.mapping import COPY, QKV, VOCABULARY, Kind, Row
from shardwright.parallel.mcore.hf.rows import OURS

_THEIRS = "transformer.h.{layer}."


def _join_fused_qkv(tensors: list[torch.Tensor], model: Model) -> torch.Tensor:
    """[width, 3 * width] or [3 * width], all queries first → rows grouped by head."""
    return QKV.join(list(_transpose(tensors[0]).chunk(3)), model)


def _split_fused_qkv(tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
    return [_transpose(torch.cat(QKV.split(tensor, model)))]


def _transpose(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix transposed, a bias as it is."""
    return tensor.T.contiguous() if tensor.dim() == 2 else tensor


TRANSPOSED = Kind(join=lambda tensors, _: _transpose(tensors[0]), split=lambda tensor, _: [_transpose(tensor)])
FUSED_QKV = Kind(join=_join_fused_qkv, split=_split_fused_qkv)

_MATRICES = {
    "self_attention.linear_qkv": ("attn.c_attn", FUSED_QKV),
    "self_attention.linear_proj": ("attn.c_proj", TRANSPOSED),
    "mlp.linear_fc1": ("mlp.c_fc", TRANSPOSED),
    "mlp.linear_fc2": ("mlp.c_proj", TRANSPOSED),
}
"""megatron-core's module -> Hugging Face's, and how its weight and bias go over."""
_NORMS = {"self_attention.linear_qkv.layer_norm_": "ln_1.", "mlp.linear_fc1.layer_norm_": "ln_2."}

GPT = (
    Row("embedding.word_embeddings.weight", ("transformer.wte.weight",), VOCABULARY),
    Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",), COPY),
    *(
        Row(f"{OURS}{ours}.{name}", (f"{_THEIRS}{theirs}.{name}",), kind)
        for ours, (theirs, kind) in _MATRICES.items()
        for name in ("weight", "bias")
    ),
    *(
        Row(f"{OURS}{ours}{name}", (f"{_THEIRS}{theirs}{name}",), COPY)
        for ours, theirs in _NORMS.items()
        for name in ("weight", "bias")
    ),
    *(Row(f"decoder.final_layernorm.{name}", (f"transformer.ln_f.{name}",), COPY) for name in ("weight", "bias")),
    Row("output_layer.weight", ("lm_head.weight",), VOCABULARY),
)
