"""Gradient-accumulation fusion: the product that makes a weight's gradient adds to the gradient buffer by itself.

Without it every micro-batch writes a gradient in the parameters' format, which a second kernel then reads and adds.
Transformer Engine's layers fuse by themselves. megatron-core's own, of which on a GPU only the output layer is left, go
through `fused_weight_gradient_mlp_cuda`, an extension of NVIDIA's apex, and refuse to be built without it. What that
extension does is one product of Transformer Engine, so where apex is missing that takes its place.
"""

from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import layers


def install() -> str:
    """Make megatron-core's layers able to fuse; idempotent.

    Returns:
        Who computes the output layer's weight gradient: apex or Transformer Engine.
    """
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=_add_weight_gradient, wgrad_gemm_accum_fp16=_add_weight_gradient
        )
        layers._grad_accum_fusion_available = True
    is_ours = getattr(layers.fused_weight_gradient_mlp_cuda, "wgrad_gemm_accum_fp32", None) is _add_weight_gradient
    return "Transformer Engine" if is_ours else "apex"


def _add_weight_gradient(input_: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [OUT, IN] += grad_output [TOKENS, OUT].T @ input_ [TOKENS, IN], summed in fp32.

    Source: transformer_engine 2.20.2, pytorch/module/linear.py, the product of its own weight gradients.
    """
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    general_gemm(input_, grad_output, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True)
