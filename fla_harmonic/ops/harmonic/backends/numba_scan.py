"""
The scans as compiled CPU loops: one pass over memory, float32.

Tokens come flattened, `[tokens, D]` with `offsets [N + 1]`, so that batch rows and packed documents are one case. A
task walks some sequences over a block of channels with the states of the block in cache; reading the gates, the
recurrence and writing the states are one loop that the compiler vectorises over channels. Exponentials are own
polynomials because calls into the maths library would keep that loop scalar (relative error below 2e-7).

Tasks run in a thread pool of `torch.get_num_threads()` threads (the kernels hold no GIL), not in numba's own threads:
those abort when two Python threads enter them.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import torch

from fla_harmonic.ops.numba_tools import clamp, compile_loop, exp, exp_parts, thread_pool

_F = np.float32
# channels of a task, a page of memory: their state and a token's rows stay in the first-level cache
BLOCK = 1024
# channels that a step back in time walks at once. Whole rows, read forwards while the rows go backwards, send the
# hardware's prefetcher the wrong way (4 to 6 times slower); pieces of 4 cache lines from the end of a row to its beginning
# are one descending stream
PIECE = 64
HUGE_PAGE = 2 << 20
# of <sys/mman.h>
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23


@compile_loop
def _sigmoid_of_minus(u):
    """`sigmoid(-u)` and its derivative's magnitude `sigmoid(-u) sigmoid(u)`."""
    scale, tail = exp_parts(clamp(u, _F(-87), _F(87)))
    e = scale + scale * tail
    s = _F(1) / (_F(1) + e)
    return s, s * (e * s)


@compile_loop
def _tanh(v):
    """`tanh(v)` and its derivative, through `exp(2 v) - 1`: small values and small derivatives keep their precision."""
    scale, tail = exp_parts(clamp(_F(2) * v, _F(-40), _F(40)))
    m = scale * tail + (scale - _F(1))
    r = _F(1) / (m + _F(2))
    return m * r, _F(4) * (scale + scale * tail) * (r * r)


@compile_loop
def _harmonic_forward(u, v, h0, offsets, kept, q_min, width, h, ht, n_lo, n_hi, d_lo, d_hi):
    D = d_hi - d_lo
    state = np.empty(D, np.float32)
    for n in range(n_lo, n_hi):
        state[:] = h0[n, d_lo:d_hi]
        for t in range(offsets[n], offsets[n + 1]):
            ut, vt, out = u[t, d_lo:d_hi], v[t, d_lo:d_hi], h[t, d_lo:d_hi]
            if len(kept) and not kept[t]:
                out[:] = state
                continue
            for i in range(D):
                s, _ = _sigmoid_of_minus(ut[i])
                q = q_min + width * s
                value, _ = _tanh(vt[i])
                new = state[i] + q * (value - state[i])
                state[i] = new
                out[i] = new
        ht[n, d_lo:d_hi] = state


@compile_loop
def _harmonic_backward(u, v, h, h0, offsets, kept, dh, dht, q_min, width, du, dv, dh0, n_lo, n_hi, d_lo, d_hi):
    D = d_hi - d_lo
    carry = np.empty(D, np.float32)
    for n in range(n_lo, n_hi):
        carry[:] = dht[n, d_lo:d_hi]
        for t in range(offsets[n + 1] - 1, offsets[n] - 1, -1):
            ut, vt, dht_, dut, dvt = u[t, d_lo:d_hi], v[t, d_lo:d_hi], dh[t, d_lo:d_hi], du[t, d_lo:d_hi], dv[t, d_lo:d_hi]
            if len(kept) and not kept[t]:
                dut[:] = 0
                dvt[:] = 0
                carry += dht_
                continue
            before = h[t - 1, d_lo:d_hi] if t > offsets[n] else h0[n, d_lo:d_hi]
            for lo in range((D - 1) // PIECE * PIECE, -1, -PIECE):
                hi = min(lo + PIECE, D)
                u_, v_, before_, grad_, carry_ = ut[lo:hi], vt[lo:hi], before[lo:hi], dht_[lo:hi], carry[lo:hi]
                du_, dv_ = dut[lo:hi], dvt[lo:hi]
                for i in range(hi - lo):
                    s, slope = _sigmoid_of_minus(u_[i])
                    q = q_min + width * s
                    value, rise = _tanh(v_[i])
                    grad = grad_[i] + carry_[i]
                    du_[i] = grad * (before_[i] - value) * (width * slope)
                    dv_[i] = grad * q * rise
                    carry_[i] = grad - q * grad
        dh0[n, d_lo:d_hi] = carry


@compile_loop
def _linear_forward(g, x, h0, offsets, kept, h, ht, n_lo, n_hi, d_lo, d_hi):
    D = d_hi - d_lo
    state = np.empty(D, np.float32)
    for n in range(n_lo, n_hi):
        state[:] = h0[n, d_lo:d_hi]
        for t in range(offsets[n], offsets[n + 1]):
            gt, xt, out = g[t, d_lo:d_hi], x[t, d_lo:d_hi], h[t, d_lo:d_hi]
            if len(kept) and not kept[t]:
                out[:] = state
                continue
            for i in range(D):
                new = exp(gt[i]) * state[i] + xt[i]
                state[i] = new
                out[i] = new
        ht[n, d_lo:d_hi] = state


@compile_loop
def _linear_backward(g, h, h0, offsets, kept, dh, dht, dg, dx, dh0, n_lo, n_hi, d_lo, d_hi):
    D = d_hi - d_lo
    carry = np.empty(D, np.float32)
    for n in range(n_lo, n_hi):
        carry[:] = dht[n, d_lo:d_hi]
        for t in range(offsets[n + 1] - 1, offsets[n] - 1, -1):
            gt, dht_, dgt, dxt = g[t, d_lo:d_hi], dh[t, d_lo:d_hi], dg[t, d_lo:d_hi], dx[t, d_lo:d_hi]
            if len(kept) and not kept[t]:
                dgt[:] = 0
                dxt[:] = 0
                carry += dht_
                continue
            before = h[t - 1, d_lo:d_hi] if t > offsets[n] else h0[n, d_lo:d_hi]
            for lo in range((D - 1) // PIECE * PIECE, -1, -PIECE):
                hi = min(lo + PIECE, D)
                g_, before_, grad_, carry_ = gt[lo:hi], before[lo:hi], dht_[lo:hi], carry[lo:hi]
                dg_, dx_ = dgt[lo:hi], dxt[lo:hi]
                for i in range(hi - lo):
                    grad = grad_[i] + carry_[i]
                    dx_[i] = grad
                    flow = grad * exp(g_[i])
                    dg_[i] = flow * before_[i]
                    carry_[i] = flow
        dh0[n, d_lo:d_hi] = carry


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    offsets: torch.Tensor,
    kept: torch.Tensor | None,
    packed: bool,
    decay_range: Sequence[float] | None,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both scans; arguments and returns as `chunk_fwd`. There is one way to walk: `recurrent` does not matter."""
    kernel = _linear_forward if decay_range is None else _harmonic_forward
    x, y = _wide(a), _wide(b)
    h, final = _fresh(x), torch.empty_like(state)
    _run(kernel, offsets, [x, y, state, offsets, _kept(kept)], decay_range, [h, final])
    return h.to(a.dtype), final


def backward(
    a: torch.Tensor,
    b: torch.Tensor,
    h: torch.Tensor,
    state: torch.Tensor,
    offsets: torch.Tensor,
    kept: torch.Tensor | None,
    packed: bool,
    decay_range: Sequence[float] | None,
    recurrent: bool,
    dh: torch.Tensor,
    dfinal: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `forward`; arguments and returns as `chunk_bwd`."""
    kernel = _linear_backward if decay_range is None else _harmonic_backward
    x = _wide(a)
    logits = [x] if decay_range is None else [x, _wide(b)]
    da, db, dstate = _fresh(x), _fresh(x), torch.empty_like(state)
    inputs = [*logits, _wide(h), state, offsets, _kept(kept), _wide(dh), dfinal]
    _run(kernel, offsets, inputs, decay_range, [da, db, dstate])
    return da.to(a.dtype), db.to(b.dtype), dstate


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous()


def _kept(kept: torch.Tensor | None) -> torch.Tensor:
    # of no length where nothing is masked
    return torch.empty(0, dtype=torch.uint8) if kept is None else kept


def _fresh(like: torch.Tensor) -> torch.Tensor:
    """
    Uninitialised memory. Above 32 MB the allocator maps it again each time, and the kernel hands it out in pages of 4 KB,
    which takes longer than the scan: ask for pages of 2 MB.
    """
    out = torch.empty_like(like)
    if _is_large(out):
        _advise(out, 0, _bytes(out), MADV_HUGEPAGE)
    return out


def _is_large(x: torch.Tensor) -> bool:
    return _bytes(x) >= 32 << 20


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _map(outputs: list[torch.Tensor], backwards: bool) -> None:
    """Maps fresh memory, ahead of the kernel that fills it: for a thread that would be idle."""
    step = 4 * HUGE_PAGE
    # the first pieces are the kernel's own: two threads at one page would both clear it
    for lo in range(2 * step, max(map(_bytes, outputs)), step):
        for out in outputs:
            size = _bytes(out)
            start = size - lo - step if backwards else lo
            if not _advise(out, start, min(start + step, size), MADV_POPULATE_WRITE):
                return


def _advise(x: torch.Tensor, start: int, end: int, advice: int) -> bool:
    """Advises the kernel on the huge pages that lie within bytes `start` to `end`; it may refuse, which costs only time."""
    if (madvise := _madvise()) is None:
        return False
    first = -(-(x.data_ptr() + max(start, 0)) // HUGE_PAGE) * HUGE_PAGE
    size = x.data_ptr() + end - first
    return size <= 0 or madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice) == 0


@cache
def _madvise() -> Callable[..., int] | None:
    return ctypes.CDLL(None).madvise if sys.platform == "linux" else None


def _run(
    kernel: Callable[..., None],
    offsets: torch.Tensor,
    inputs: list[torch.Tensor],
    decay_range: Sequence[float] | None,
    outputs: list[torch.Tensor],
) -> None:
    gates = () if decay_range is None else (_F(1 - decay_range[1]), _F(decay_range[1] - decay_range[0]))
    args = (*(x.numpy() for x in inputs), *gates, *(x.numpy() for x in outputs))
    threads = torch.get_num_threads()
    own, *others = _tasks(offsets.numpy(), outputs[0].shape[1], threads)
    if threads == 1:
        for task in (own, *others):
            kernel(*args, *task)
        return
    # this thread works too
    pool = thread_pool(threads - 1, os.getpid())
    waiting = [pool.submit(kernel, *args, *task) for task in others]
    # the last output is the states of sequences, which are few
    fresh = [out for out in outputs[:-1] if _is_large(out)]
    if fresh and len(others) < threads - 1:
        waiting.append(pool.submit(_map, fresh, len(outputs) > 2))
    kernel(*args, *own)
    for done in waiting:
        done.result()


def _tasks(offsets: np.ndarray, D: int, threads: int) -> list[tuple[int, int, int, int]]:
    """
    Cuts the work into (first sequence, end, first channel, end), at least one.

    Sequences go to threads in groups of about equal tokens, channels in blocks of a page of memory. Narrower blocks are
    slower than one thread: a scan is bound by memory, which likes to be read in order.
    """
    N, tokens = len(offsets) - 1, int(offsets[-1])
    groups = max(1, min(threads, N))
    cuts = np.searchsorted(offsets, np.arange(1, groups) * tokens / groups)
    bounds = sorted({0, N, *(int(c) for c in cuts)})
    blocks = [(d, min(d + BLOCK, D)) for d in range(0, max(D, 1), BLOCK)]
    return [(i, j, *block) for i, j in pairwise(bounds) for block in blocks] or [(0, 0, 0, 0)]
