"""
Mamba's short convolution with its activation; channels stay last, as the projections before and after it have them. On the
CPU it is one `torch.library` operator, which saves its inputs for backward.
"""

import torch
import torch.nn.functional as F

from fla_harmonic.ops.mamba.selective_scan import loops, usable_backends


def causal_conv_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """
    `silu(bias + sum_k weight[:, k] x_{t - K + 1 + k})` for each channel; before the first token there are zeros.

    Args:
        x (torch.Tensor):
            Inputs of shape `[batch, T, D]`; on the CPU with numba read as fp32.
        weight (torch.Tensor):
            Taps of shape `[D, K]`, the last one for the token itself.
        bias (torch.Tensor, Optional):
            Bias of shape `[D]`. Default: zero.

    Returns:
        Outputs of shape `[batch, T, D]` and the input's dtype.

    Raises:
        ValueError: if a shape does not fit the others.
    """
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] == 0:
        raise ValueError(
            f"expected `x` of shape [batch, T, D] and `weight` of shape [D, K], but got {list(x.shape)} and "
            f"{list(weight.shape)}. Remedy: one row of at least one tap for each channel")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"expected `bias` of shape {[weight.shape[0]]}, but got {list(bias.shape)}. Remedy: one for each channel")
    if "numba" not in usable_backends(x):
        D, K = weight.shape
        y = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=K - 1, groups=D)
        return F.silu(y[..., :x.shape[1]]).transpose(1, 2)
    taps = weight.float()
    return causal_conv_op(x.float(), taps, taps.new_zeros(x.shape[2]) if bias is None else bias.float()).to(x.dtype)


@torch.library.custom_op("fla_harmonic::causal_conv_silu", mutates_args=(), device_types="cpu")
def causal_conv_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`causal_conv_silu` of fp32."""
    return loops.conv_forward(x, weight, bias)


@torch.library.custom_op("fla_harmonic::causal_conv_silu_backward", mutates_args=(), device_types="cpu")
def causal_conv_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dy: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the three inputs, each of its input's shape."""
    return loops.conv_backward(x, weight, bias, dy)


@causal_conv_op.register_fake
def _(x, weight, bias):
    return x.new_empty(x.shape)


@causal_conv_backward.register_fake
def _(x, weight, bias, dy):
    return tuple(w.new_empty(w.shape) for w in (x, weight, bias))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grad(ctx, dy):
    return causal_conv_backward(*ctx.saved_tensors, dy)


causal_conv_op.register_autograd(_grad, setup_context=_save)
