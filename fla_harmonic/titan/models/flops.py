"""Floating point operations that training spends per token."""

from torch import nn

from fla_harmonic.titan.components.loss import TiedHead


def matmul_flops(model: nn.Module) -> int:
    """
    Operations per token in the matrix products of one training step: 6 for each weight of a linear map or convolution (2
    forward, 4 backward). The head counts once, tied or not; an embedding table is a look-up and does not count.
    """
    return 6 * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | TiedHead))
