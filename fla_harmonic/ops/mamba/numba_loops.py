"""
Mamba's convolution and selective scan as compiled CPU loops, float32: `causal_conv` and `selective_scan` say what they
compute.

A task walks one row of the batch over a block of channels, and every inner loop runs over channels, which the compiler
vectorises. The convolution keeps a window of tokens in the first-level cache, the scan the states `[N, channels]`. Nothing
of `[T, D, N]` is written: the scan's forward pass leaves the state that enters each chunk of tokens, and its backward pass
recomputes the states of one chunk in the second-level cache, and the decays twice.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from fla_harmonic.ops.numba_tools import clamp, compile_loop, exp, exp_parts, thread_pool

_F = np.float32
# channels of a task, and tokens of a chunk: with Mamba's 16 states a channel, the states of a chunk are 256 KB
CHANNELS = 128
CHUNK = 32


@compile_loop
def _sigmoid(v):
    scale, tail = exp_parts(clamp(-v, _F(-87), _F(87)))
    return _F(1) / (_F(1) + (scale + scale * tail))


@compile_loop
def _softplus(v):
    """`log(1 + e)` of e = exp(-|v|) as an odd series in e / (2 + e) <= 1/3: small steps keep their precision."""
    e = exp(-abs(v))
    s = e / (_F(2) + e)
    w = s * s
    p = _F(1 / 15)
    p = p * w + _F(1 / 13)
    p = p * w + _F(1 / 11)
    p = p * w + _F(1 / 9)
    p = p * w + _F(1 / 7)
    p = p * w + _F(1 / 5)
    p = p * w + _F(1 / 3)
    return max(v, _F(0)) + _F(2) * (s + s * (w * p))


@compile_loop
def _conv_forward(x, weight, bias, y, row, lo, hi):
    T, K, width = x.shape[1], weight.shape[0], hi - lo
    # rings of the last K tokens; before the first one there are zeros
    window, taps, start = np.zeros((K, width), np.float32), weight[:, lo:hi].copy(), bias[lo:hi]
    u = np.empty(width, np.float32)
    for t in range(T):
        window[t % K] = x[row, t, lo:hi]
        yt = y[row, t, lo:hi]
        u[:] = start
        for k in range(K):
            tap, source = taps[k], window[(t + 1 + k) % K]
            for i in range(width):
                u[i] += tap[i] * source[i]
        for i in range(width):
            yt[i] = u[i] * _sigmoid(u[i])


@compile_loop
def _conv_backward(x, weight, bias, dy, dx, dweight, dbias, row, lo, hi):
    T, K, width = x.shape[1], weight.shape[0], hi - lo
    window, taps, start = np.zeros((K, width), np.float32), weight[:, lo:hi].copy(), bias[lo:hi]
    # gradients of the last K tokens, which later ones still add to
    dwindow, dtaps, dstart = np.zeros((K, width), np.float32), np.zeros((K, width), np.float32), dbias[row, lo:hi]
    u, du = np.empty(width, np.float32), np.empty(width, np.float32)
    dstart[:] = 0
    for t in range(T + K - 1):
        if t < T:
            window[t % K] = x[row, t, lo:hi]
            dwindow[t % K] = 0
            dyt = dy[row, t, lo:hi]
            u[:] = start
            for k in range(K):
                tap, source = taps[k], window[(t + 1 + k) % K]
                for i in range(width):
                    u[i] += tap[i] * source[i]
            for i in range(width):
                s = _sigmoid(u[i])
                du[i] = dyt[i] * (s + u[i] * s * (_F(1) - s))
                dstart[i] += du[i]
            for k in range(K):
                slot = (t + 1 + k) % K
                tap, source, dtap, dsource = taps[k], window[slot], dtaps[k], dwindow[slot]
                for i in range(width):
                    dtap[i] += du[i] * source[i]
                    dsource[i] += du[i] * tap[i]
        if t >= K - 1:
            dx[row, t - K + 1, lo:hi] = dwindow[(t + 1) % K]
    dweight[row, :, lo:hi] = dtaps


@compile_loop
def _scan_forward(x, v, A, B, C, D, z, y, states, row, lo, hi):
    T, N, width = x.shape[1], A.shape[0], hi - lo
    h, rates = np.zeros((N, width), np.float32), A[:, lo:hi].copy()
    step, inflow, out = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    gate = np.empty(width, np.float32)
    skip = D[lo:hi]
    for t in range(T):
        if t % CHUNK == 0:
            states[row, t // CHUNK, :, lo:hi] = h
        xt, vt, yt = x[row, t, lo:hi], v[row, t, lo:hi], y[row, t, lo:hi]
        gate[:] = z[row, t, lo:hi]
        for i in range(width):
            step[i] = _softplus(vt[i])
            inflow[i] = step[i] * xt[i]
            out[i] = skip[i] * xt[i]
        for n in range(N):
            b, c, hn, rate = B[row, t, n], C[row, t, n], h[n], rates[n]
            for i in range(width):
                new = exp(step[i] * rate[i]) * hn[i] + inflow[i] * b
                hn[i] = new
                out[i] += new * c
        for i in range(width):
            yt[i] = out[i] * (gate[i] * _sigmoid(gate[i]))


# sums over channels vectorise only where they may be reordered
@partial(compile_loop, sums=True)
def _scan_backward(x, v, A, B, C, D, z, states, dout, dx, dv, dA, dB, dC, dD, dz, row, lo, hi):
    T, N, width, block = x.shape[1], A.shape[0], hi - lo, lo // CHANNELS
    rates, skip = A[:, lo:hi].copy(), D[lo:hi]
    h = np.empty((CHUNK + 1, N, width), np.float32)
    steps, inflows, dys = (np.empty((CHUNK, width), np.float32), np.empty((CHUNK, width), np.float32),
                           np.empty((CHUNK, width), np.float32))
    gate, out = np.empty(width, np.float32), np.empty(width, np.float32)
    dstep, dinflow = np.empty(width, np.float32), np.empty(width, np.float32)
    carry, dA_chunk, dA_row = np.zeros((N, width), np.float32), np.empty((N, width), np.float32), dA[row, :, lo:hi]
    dD_row = dD[row, lo:hi]
    dA_row[:] = 0
    dD_row[:] = 0
    for chunk in range((T + CHUNK - 1) // CHUNK - 1, -1, -1):
        first = chunk * CHUNK
        length = min(CHUNK, T - first)
        h[0] = states[row, chunk, :, lo:hi]
        for j in range(length):
            t = first + j
            xt, vt, dot, dzt = x[row, t, lo:hi], v[row, t, lo:hi], dout[row, t, lo:hi], dz[row, t, lo:hi]
            step, inflow, dy = steps[j], inflows[j], dys[j]
            gate[:] = z[row, t, lo:hi]
            for i in range(width):
                step[i] = _softplus(vt[i])
                inflow[i] = step[i] * xt[i]
                out[i] = skip[i] * xt[i]
            for n in range(N):
                b, c, before, after, rate = B[row, t, n], C[row, t, n], h[j, n], h[j + 1, n], rates[n]
                for i in range(width):
                    new = exp(step[i] * rate[i]) * before[i] + inflow[i] * b
                    after[i] = new
                    out[i] += new * c
            for i in range(width):
                s = _sigmoid(gate[i])
                dy[i] = dot[i] * (gate[i] * s)
                dzt[i] = dot[i] * out[i] * (s + gate[i] * s * (_F(1) - s))
        dA_chunk[:] = 0
        for j in range(length - 1, -1, -1):
            t = first + j
            step, inflow, dy = steps[j], inflows[j], dys[j]
            dstep[:] = 0
            dinflow[:] = 0
            for n in range(N):
                b, c, before, after, rate = B[row, t, n], C[row, t, n], h[j, n], h[j + 1, n], rates[n]
                flow, dA_n = carry[n], dA_chunk[n]
                db = dc = _F(0)
                for i in range(width):
                    grad = flow[i] + c * dy[i]
                    dc += after[i] * dy[i]
                    db += grad * inflow[i]
                    dinflow[i] += grad * b
                    grad *= exp(step[i] * rate[i])
                    flow[i] = grad
                    grad *= before[i]
                    dstep[i] += grad * rate[i]
                    dA_n[i] += grad * step[i]
                dB[block, row, t, n] = db
                dC[block, row, t, n] = dc
            xt, vt, dxt, dvt = x[row, t, lo:hi], v[row, t, lo:hi], dx[row, t, lo:hi], dv[row, t, lo:hi]
            for i in range(width):
                dxt[i] = dinflow[i] * step[i] + skip[i] * dy[i]
                dvt[i] = (dstep[i] + dinflow[i] * xt[i]) * _sigmoid(vt[i])
                dD_row[i] += dy[i] * xt[i]
        dA_row += dA_chunk


def conv_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`causal_conv.causal_conv_op`: outputs `[batch, T, D]`."""
    y = torch.empty(x.shape)
    _run(_conv_forward, x, _copied(weight.t()), _copied(bias), y)
    return y


def conv_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dy: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the inputs of `conv_forward`, from the gradient of its outputs."""
    batch, _, width = x.shape
    dx, dweight, dbias = torch.empty(x.shape), torch.empty(batch, weight.shape[1], width), torch.empty(batch, width)
    _run(_conv_backward, x, _copied(weight.t()), _copied(bias), dy.contiguous(), dx, dweight, dbias)
    return dx, dweight.sum(0).t().contiguous(), dbias.sum(0)


def scan_forward(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`selective_scan.selective_scan_op`: outputs `[batch, T, D]`, and states `[batch, chunks, N, D]`."""
    (batch, T, width), N = inputs[0].shape, inputs[2].shape[1]
    y, states = torch.empty(batch, T, width), torch.empty(batch, -(-T // CHUNK), N, width)
    _run(_scan_forward, *_readable(inputs), y, states)
    return y, states


def scan_backward(
    inputs: Sequence[torch.Tensor],
    states: torch.Tensor,
    dy: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the inputs of `scan_forward`, from its states and the gradient of its outputs."""
    (batch, T, width), N = inputs[0].shape, inputs[2].shape[1]
    dx, dv, dz = (torch.empty(batch, T, width) for _ in range(3))
    # what several tasks add to is kept apart and summed in one order, whatever the number of threads
    dB, dC = (torch.empty(-(-width // CHANNELS), batch, T, N) for _ in range(2))
    dA, dD = torch.empty(batch, N, width), torch.empty(batch, width)
    _run(_scan_backward, *_readable(inputs), states, dy.contiguous(), dx, dv, dA, dB, dC, dD, dz)
    return dx, dv, dA.sum(0).t().contiguous(), dB.sum(0), dC.sum(0), dD.sum(0), dz


def _readable(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    x, v, A, B, C, D, z = inputs
    return [x.contiguous(), v.contiguous(), _copied(A.t()), B, C, _copied(D), z]


def _copied(parameter: torch.Tensor) -> torch.Tensor:
    # a tensor that numpy has seen cannot be resized any more, as FSDP resizes parameters
    return parameter.clone(memory_format=torch.contiguous_format)


def _run(kernel: Callable[..., None], x: torch.Tensor, *others: torch.Tensor) -> None:
    batch, _, width = x.shape
    arrays = [x.detach().numpy() for x in (x, *others)]
    tasks = [(row, lo, min(lo + CHANNELS, width)) for row in range(batch) for lo in range(0, width, CHANNELS)]
    threads = min(torch.get_num_threads(), len(tasks))

    def work(thread: int) -> None:
        for task in tasks[thread::threads]:
            kernel(*arrays, *task)

    # this thread works too
    waiting = [thread_pool(threads - 1, os.getpid()).submit(work, thread) for thread in range(1, threads)]
    if tasks:
        work(0)
    for done in waiting:
        done.result()
