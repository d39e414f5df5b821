"""What the compiled CPU loops of the ops share: how they are compiled, exponentials that vectorise, and their threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from numba import njit

_F = np.float32


def compile_loop(function: Callable[..., Any], sums: bool = False) -> Callable[..., Any]:
    """`sums`: whether sums may be reordered, which those over channels need in order to vectorise."""
    fastmath = {"contract", "nsz"} | ({"reassoc"} if sums else set())
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:
        # no folder that the cache could be written to: every process compiles for itself
        return njit(**options)(function)


@compile_loop
def exp_parts(x):
    """`exp(x) = scale + scale * tail` for |x| < 88: x = n ln 2 + r, scale = 2^n, tail = exp(r) - 1."""
    n = np.floor(x * _F(1.4426950408889634) + _F(0.5))
    r = x - n * _F(0.693359375) - n * _F(-2.12194440e-4)
    p = _F(1 / 5040)
    p = p * r + _F(1 / 720)
    p = p * r + _F(1 / 120)
    p = p * r + _F(1 / 24)
    p = p * r + _F(1 / 6)
    p = p * r + _F(0.5)
    tail = p * (r * r) + r
    scale = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return scale, tail


@compile_loop
def clamp(x, low, high):
    x = low if x < low else x
    return high if x > high else x


@compile_loop
def exp(x):
    scale, tail = exp_parts(clamp(x, _F(-87), _F(87)))
    return _F(0) if x < _F(-87) else scale + scale * tail


@cache
def thread_pool(threads: int, pid: int) -> ThreadPoolExecutor:
    # by process id: a forked child has the object but not its threads
    return ThreadPoolExecutor(threads, thread_name_prefix="harmonic-scan")
