"""Floating point operations: what training spends on a token, and what a device can do in a second."""

import math
from importlib import import_module
from typing import Any

from torch import nn

from fla_harmonic.titan.components.loss import TiedHead

_A100_FLOPS = 312e12


def matmul_flops(model: nn.Module) -> int:
    """
    Operations on a token in the matrix products of one training step: 6 for each weight of a linear map or convolution (2
    forward, 4 backward). The head counts once, tied or not; an embedding table is a look-up and does not count.
    """
    return 6 * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | TiedHead))


def use_honest_peak_flops() -> None:
    """
    Make torchtitan's model FLOPs utilisation NaN on devices that it does not know, the CPU among them: it takes them for an
    A100. Harmless when repeated.
    """
    utils: Any = import_module("torchtitan.tools.utils")
    stock = utils.get_peak_flops
    if getattr(stock, "is_honest", False):
        return

    def get_peak_flops(device_name: str) -> float:
        if utils.device_type == "cpu":
            return math.nan
        peak = stock(device_name)
        return math.nan if peak == _A100_FLOPS and "A100" not in device_name else peak

    get_peak_flops.is_honest = True  # type: ignore[attr-defined]
    utils.get_peak_flops = get_peak_flops
