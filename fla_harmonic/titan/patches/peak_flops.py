"""torchtitan 0.2.2 takes every device that it does not know, the CPU among them, for an A100: its utilisation becomes NaN."""

import math
from functools import cache

from torchtitan.tools import utils

_A100_FLOPS = 312e12


@cache
def install_peak_flops() -> None:
    """Replace `get_peak_flops`, once."""
    stock = utils.get_peak_flops

    def get_peak_flops(device_name: str) -> float:
        if utils.device_type == "cpu":
            return math.nan
        peak = stock(device_name)
        return math.nan if peak == _A100_FLOPS and "A100" not in device_name else peak

    utils.get_peak_flops = get_peak_flops
