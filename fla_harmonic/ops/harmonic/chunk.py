"""
The scans as fused Triton kernels, parallel over chunks of the sequence.

Tokens come flattened, `[tokens, D]`. A step is an affine map `h -> (1 - c) h + x` and maps compose, so that (1) a pass
over all chunks at once gives each chunk's map, (2) a scan over the chunks' maps gives the state that enters each, and
(3) a pass over all chunks at once writes the states. Batch rows and packed documents are one case: the first token of a
sequence has c = 1 and takes in the sequence's initial state, so nothing crosses it and chunks need not respect it.

Gates are computed from the logits inside the kernels: with two-byte logits the forward pass moves 10 bytes an element
(both logits twice, the state once) and the backward pass 16 (gate logits and incoming gradient twice, input logits and
states once, two gradients). Maps carry `c = 1 - decay`, which keeps its bits where the decay is near 1.

Sums are ordered by the program, never by the scheduler: equal inputs give equal bits.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from fla.utils import input_guard

from fla_harmonic.ops.harmonic.fused_recurrent import (
    NUM_WARPS,
    fused_recurrent_bwd,
    fused_recurrent_fwd,
    gate_range,
    kernel_options,
    load_gates,
)
from fla_harmonic.ops.harmonic.op import BACKENDS, Backend, harmonic

# tokens of a chunk, of a tile that is scanned in registers, and of a tile of chunks
CHUNK = 256
TILE = 32
CHUNK_TILE = 32


@triton.jit
def _apply(c, x, h):
    """`(1 - c) h + x`; at c = 1 h does not matter, even if it is NaN or infinite."""
    return tl.where(c == 1.0, 0.0, h - c * h) + x


@triton.jit
def _compose(c_first, x_first, c_second, x_second):
    """The map `h -> (1 - c) h + x` of the first step followed by the second."""
    c = c_first + c_second - c_first * c_second
    # a step that forgets stays one to the last bit
    c = tl.where((c_first == 1.0) | (c_second == 1.0), 1.0, c)
    return c, tl.where(c_second == 1.0, x_second, x_first - c_second * x_first + x_second)


@triton.jit
def _row(x, index, TILE: tl.constexpr):
    """Row `index` of a tile `[TILE, BD]`."""
    return tl.sum(tl.where(tl.arange(0, TILE)[:, None] == index, x, 0.0), 0)


@triton.jit
def _load_maps(
    a, b, state, first, kept, t, o_d, tokens, D, q_min, width,
    IS_HARMONIC: tl.constexpr, HAS_MASK: tl.constexpr,
):
    """The tokens' maps; the first token of a sequence forgets what came before and takes in the initial state."""
    c, _, value, _, inside = load_gates(a, b, kept, t, o_d, tokens, D, q_min, width, IS_HARMONIC, HAS_MASK, True)
    if IS_HARMONIC:
        x = c * value
    else:
        x = tl.where(inside[:, None], value, 0.0)
    sequence = tl.load(first + t, mask=t < tokens, other=-1).to(tl.int64)
    starts = (sequence >= 0)[:, None]
    h0 = tl.load(state + sequence[:, None] * D + o_d[None, :], mask=starts & (o_d < D)[None, :], other=0.0)
    x = tl.where(starts, x + (1.0 - c) * h0, x)
    return tl.where(starts, 1.0, c), x


@triton.jit
def forward_summary_kernel(
    a, b, state, first, kept, chunk_c, chunk_x, tokens, D, q_min, width,
    IS_HARMONIC: tl.constexpr, HAS_MASK: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BD: tl.constexpr,
):
    """(1) the map of each chunk."""
    ND = tl.cdiv(D, BD)
    i_c, i_d = (tl.program_id(0) // ND).to(tl.int64), tl.program_id(0) % ND
    o_d = i_d * BD + tl.arange(0, BD)
    c, x = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for i in range(0, CHUNK, TILE):
        t = i_c * CHUNK + i + tl.arange(0, TILE)
        tile_c, tile_x = _load_maps(a, b, state, first, kept, t, o_d, tokens, D, q_min, width, IS_HARMONIC, HAS_MASK)
        tile_c, tile_x = tl.associative_scan((tile_c, tile_x), 0, _compose)
        c, x = _compose(c, x, _row(tile_c, TILE - 1, TILE), _row(tile_x, TILE - 1, TILE))
    tl.store(chunk_c + i_c * D + o_d, c, mask=o_d < D)
    tl.store(chunk_x + i_c * D + o_d, x, mask=o_d < D)


@triton.jit
def carry_kernel(
    chunk_c, chunk_x, entering, chunks, D,
    REVERSE: tl.constexpr, TILE: tl.constexpr, BD: tl.constexpr,
):
    """(2) what enters each chunk: the chunks' maps applied one after another, from zero."""
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    in_d = (o_d < D)[None, :]
    h = tl.zeros([BD], tl.float32)
    for i in range(0, chunks, TILE):
        k = (i + tl.arange(0, TILE)).to(tl.int64)
        row = chunks - 1 - k if REVERSE else k
        m = (k < chunks)[:, None] & in_d
        c = tl.load(chunk_c + row[:, None] * D + o_d[None, :], mask=m, other=0.0)
        x = tl.load(chunk_x + row[:, None] * D + o_d[None, :], mask=m, other=0.0)
        c, x = tl.associative_scan((c, x), 0, _compose)
        reached = _apply(c, x, h[None, :])
        following = row - 1 if REVERSE else row + 1
        m = ((k + 1) < chunks)[:, None] & in_d
        tl.store(entering + following[:, None] * D + o_d[None, :], reached, mask=m)
        h = _row(reached, TILE - 1, TILE)


@triton.jit
def forward_output_kernel(
    a, b, state, first, last, kept, entering, h_out, final, tokens, D, q_min, width,
    IS_HARMONIC: tl.constexpr, HAS_MASK: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BD: tl.constexpr,
):
    """(3) the states of each chunk, from the state that enters it."""
    ND = tl.cdiv(D, BD)
    i_c, i_d = (tl.program_id(0) // ND).to(tl.int64), tl.program_id(0) % ND
    o_d = i_d * BD + tl.arange(0, BD)
    in_d = (o_d < D)[None, :]
    h_in = tl.load(entering + i_c * D + o_d, mask=o_d < D, other=0.0)
    for i in range(0, CHUNK, TILE):
        t = i_c * CHUNK + i + tl.arange(0, TILE)
        c, x = _load_maps(a, b, state, first, kept, t, o_d, tokens, D, q_min, width, IS_HARMONIC, HAS_MASK)
        c, x = tl.associative_scan((c, x), 0, _compose)
        h = _apply(c, x, h_in[None, :])
        tl.store(h_out + t[:, None] * D + o_d[None, :], h.to(h_out.dtype.element_ty), mask=(t < tokens)[:, None] & in_d)
        sequence = tl.load(last + t, mask=t < tokens, other=-1).to(tl.int64)
        tl.store(final + sequence[:, None] * D + o_d[None, :], h, mask=(sequence >= 0)[:, None] & in_d)
        h_in = _row(h, TILE - 1, TILE)


@triton.jit
def _load_grad(dh, dfinal, last, t, o_d, tokens, D):
    """Gradient that reaches the states of the tokens t from the outputs and, at the end of a sequence, from its state."""
    in_d = (o_d < D)[None, :]
    grad = tl.load(dh + t[:, None] * D + o_d[None, :], mask=((t >= 0) & (t < tokens))[:, None] & in_d, other=0.0)
    sequence = tl.load(last + t, mask=(t >= 0) & (t < tokens), other=-1).to(tl.int64)
    m = (sequence >= 0)[:, None] & in_d
    return grad.to(tl.float32) + tl.load(dfinal + sequence[:, None] * D + o_d[None, :], mask=m, other=0.0)


@triton.jit
def backward_summary_kernel(
    a, b, first, last, kept, dh, dfinal, chunk_c, chunk_x, tokens, D, q_min, width,
    IS_HARMONIC: tl.constexpr, HAS_MASK: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BD: tl.constexpr,
):
    """(1) backwards: the map from the gradient that enters a chunk at its end to the one that leaves it at its start."""
    ND = tl.cdiv(D, BD)
    i_c, i_d = (tl.program_id(0) // ND).to(tl.int64), tl.program_id(0) % ND
    o_d = i_d * BD + tl.arange(0, BD)
    c, x = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for i in range(0, CHUNK, TILE):
        # rows of a tile run backwards in time
        t = (i_c + 1) * CHUNK - 1 - i - tl.arange(0, TILE)
        tile_c, _, _, _, _ = load_gates(a, b, kept, t, o_d, tokens, D, q_min, width, IS_HARMONIC, HAS_MASK, False)
        grad = _load_grad(dh, dfinal, last, t, o_d, tokens, D)
        starts = (tl.load(first + t, mask=t < tokens, other=-1) >= 0)[:, None]
        tile_x = tl.where(starts, 0.0, (1.0 - tile_c) * grad)
        tile_c = tl.where(starts, 1.0, tile_c)
        tile_c, tile_x = tl.associative_scan((tile_c, tile_x), 0, _compose)
        c, x = _compose(c, x, _row(tile_c, TILE - 1, TILE), _row(tile_x, TILE - 1, TILE))
    tl.store(chunk_c + i_c * D + o_d, c, mask=o_d < D)
    tl.store(chunk_x + i_c * D + o_d, x, mask=o_d < D)


@triton.jit
def backward_output_kernel(
    a, b, h, state, first, last, kept, dh, dfinal, entering, da, db, dstate, tokens, D, q_min, width,
    IS_HARMONIC: tl.constexpr, HAS_MASK: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BD: tl.constexpr,
):
    """(3) backwards: the gradients of each chunk's logits, from the gradient that enters it at its end."""
    ND = tl.cdiv(D, BD)
    i_c, i_d = (tl.program_id(0) // ND).to(tl.int64), tl.program_id(0) % ND
    o_d = i_d * BD + tl.arange(0, BD)
    in_d = (o_d < D)[None, :]
    stop = (i_c + 1) * CHUNK
    s_in = tl.load(entering + i_c * D + o_d, mask=o_d < D, other=0.0)
    for i in range(0, CHUNK, TILE):
        t = stop - 1 - i - tl.arange(0, TILE)
        inside = t < tokens
        # s_t = grad_t + decay_{t+1} s_{t+1}; what enters at the end of the chunk has that decay in it
        after, _, _, _, _ = load_gates(a, b, kept, t + 1, o_d, tokens, D, q_min, width, IS_HARMONIC, HAS_MASK, False)
        cut = (tl.load(first + t + 1, mask=t + 1 < tokens, other=-1) >= 0) & (t + 1 < stop)
        after = tl.where((t + 1 < stop)[:, None], tl.where(cut[:, None], 1.0, after), 0.0)
        c, s = tl.associative_scan((after, _load_grad(dh, dfinal, last, t, o_d, tokens, D)), 0, _compose)
        s = _apply(c, s, s_in[None, :])
        s_in = _row(s, TILE - 1, TILE)

        q, slope, value, rise, live = load_gates(a, b, kept, t, o_d, tokens, D, q_min, width, IS_HARMONIC, HAS_MASK, True)
        sequence = tl.load(first + t, mask=inside, other=-1).to(tl.int64)
        starts = (sequence >= 0)[:, None]
        offset = t[:, None] * D + o_d[None, :]
        row = sequence[:, None] * D + o_d[None, :]
        before = tl.load(h + offset - D, mask=(inside[:, None] & ~starts) & in_d, other=0.0).to(tl.float32)
        before = before + tl.load(state + row, mask=starts & in_d, other=0.0)
        if IS_HARMONIC:
            grad_a = s * (before - value) * slope
            grad_b = s * q * rise
        else:
            grad_a = s * slope * before
            grad_b = s
        m = inside[:, None] & in_d
        tl.store(da + offset, tl.where(live[:, None], grad_a, 0.0).to(da.dtype.element_ty), mask=m)
        tl.store(db + offset, tl.where(live[:, None], grad_b, 0.0).to(db.dtype.element_ty), mask=m)
        if IS_HARMONIC:
            out = s - q * s
        else:
            out = s * tl.where(live[:, None], slope, 1.0)
        tl.store(dstate + row, out, mask=starts & in_d)


class Layout(NamedTuple):
    """Where sequences start and end in the flattened tokens: for each token the number of its sequence there, else -1."""
    first: torch.Tensor
    last: torch.Tensor


def layout(offsets: torch.Tensor, tokens: int) -> Layout:
    """The layout of sequences with borders `offsets [N + 1]`; empty ones are in neither array. Nothing waits for the GPU."""
    number = torch.arange(offsets.shape[0] - 1, dtype=torch.int32, device=offsets.device)
    # of sequences with one start the last is not empty, of those with one end the first
    first = torch.full((tokens + 1,), -1, dtype=torch.int32, device=offsets.device)
    first.scatter_reduce_(0, offsets[:-1], number, "amax")
    last = torch.full((tokens + 1,), offsets.shape[0], dtype=torch.int32, device=offsets.device)
    last.scatter_reduce_(0, offsets[1:], number, "amin")
    last = last[1:]
    return Layout(first[:-1].contiguous(), torch.where(last == offsets.shape[0], -1, last))


@input_guard
def chunk_fwd(
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    offsets: torch.Tensor,
    kept: torch.Tensor | None,
    packed: bool,
    decay_range: Sequence[float] | None,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Both scans: Harmonic with a decay range, the bare recurrence without.

    Args:
        a (torch.Tensor):
            Gate logits u, or log-decays g, of shape `[tokens, D]`.
        b (torch.Tensor):
            Input logits v, or inputs x, of shape `[tokens, D]`.
        state (torch.Tensor):
            Initial states, float32 of shape `[N, D]`.
        offsets (torch.Tensor):
            Borders of the sequences, int64 of shape `[N + 1]`, on a's device.
        kept (torch.Tensor, Optional):
            uint8 of shape `[tokens]`: 0 leaves the state unchanged at a token; `None` is all 1.
        packed (bool):
            Whether the sequences are documents, or else rows of equal lengths. The kernels treat both alike.
        decay_range (Sequence[float], Optional):
            `(a_min, a_max)`; `None` for the bare recurrence.
        recurrent (bool):
            One token after another instead of in chunks.

    Returns:
        h (torch.Tensor):
            States of shape `[tokens, D]` and a's dtype.
        final (torch.Tensor):
            Final states, float32 of shape `[N, D]`.
    """
    if recurrent:
        return fused_recurrent_fwd(a, b, state, offsets, kept, decay_range)
    h, final = torch.empty_like(a), state.clone()
    first, last = layout(offsets, a.shape[0])
    scalars, chunk_c, chunk_x, entering, options, grid = _launch(a, state, decay_range, kept)
    if chunk_c.shape[0] > 1:
        forward_summary_kernel[grid](a, b, state, first, kept, chunk_c, chunk_x, *scalars, **options)
        _carry(chunk_c, chunk_x, entering, reverse=False)
    forward_output_kernel[grid](a, b, state, first, last, kept, entering, h, final, *scalars, **options)
    return h, final


@input_guard
def chunk_bwd(
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
    """
    Gradients of `chunk_fwd`.

    Args:
        a, b, state, offsets, kept, packed, decay_range, recurrent:
            As for `chunk_fwd`; without a decay range the values of `b` do not matter.
        h (torch.Tensor):
            The states that it returned.
        dh (torch.Tensor):
            Their gradient, of shape `[tokens, D]`.
        dfinal (torch.Tensor):
            Gradient of the final states, float32 of shape `[N, D]`.

    Returns:
        da, db (torch.Tensor):
            Gradients of `a` and `b`.
        dstate (torch.Tensor):
            Gradient of the initial states, float32 of shape `[N, D]`.
    """
    if recurrent:
        return fused_recurrent_bwd(a, b, h, state, offsets, kept, decay_range, dh, dfinal)
    da, db, dstate = torch.empty_like(a), torch.empty_like(a), dfinal.clone()
    first, last = layout(offsets, a.shape[0])
    scalars, chunk_c, chunk_x, entering, options, grid = _launch(a, state, decay_range, kept)
    if chunk_c.shape[0] > 1:
        backward_summary_kernel[grid](a, b, first, last, kept, dh, dfinal, chunk_c, chunk_x, *scalars, **options)
        _carry(chunk_c, chunk_x, entering, reverse=True)
    backward_output_kernel[grid](
        a, b, h, state, first, last, kept, dh, dfinal, entering, da, db, dstate, *scalars, **options)
    return da, db, dstate


def _launch(a: torch.Tensor, state: torch.Tensor, decay_range: Sequence[float] | None, kept: torch.Tensor | None):
    """Scalar arguments, memory for the chunks' maps and for what enters them, compile-time arguments and grid."""
    tokens, D = a.shape
    chunks = triton.cdiv(tokens, CHUNK)
    chunk_c, chunk_x = (state.new_empty(chunks, D) for _ in range(2))
    options = kernel_options(D, decay_range, kept) | dict(CHUNK=CHUNK, TILE=TILE)
    scalars = (tokens, D, *gate_range(decay_range))
    return scalars, chunk_c, chunk_x, state.new_zeros(chunks, D), options, (chunks * triton.cdiv(D, options["BD"]),)


def _carry(chunk_c: torch.Tensor, chunk_x: torch.Tensor, entering: torch.Tensor, reverse: bool) -> None:
    chunks, D = chunk_c.shape
    BD = min(32, triton.next_power_of_2(D))
    carry_kernel[(triton.cdiv(D, BD),)](
        chunk_c, chunk_x, entering, chunks, D, REVERSE=reverse, TILE=CHUNK_TILE, BD=BD, num_warps=NUM_WARPS)


def serves_triton(x: torch.Tensor) -> bool:
    """Whether Triton kernels run on x's device: its interpreter takes CPU tensors, for tests."""
    interpreted = x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return x.dtype != torch.float64 and (x.device.type in ("cuda", "xpu") or interpreted)


BACKENDS["triton"] = Backend(serves_triton, chunk_fwd, chunk_bwd)


def chunk_harmonic(
    u: torch.Tensor,
    v: torch.Tensor,
    decay_range: tuple[float, float],
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""
    The gated recurrence of one Harmonic level (arXiv 2606.24650), parallel over chunks of the sequence:

        1 - A_t = (1 - a_max) + (a_max - a_min) sigmoid(-u_t)
            h_t = A_t h_{t-1} + (1 - A_t) tanh(v_t)

    Decays and states are float32 whatever the input (float64 for float64 input). Every gradient is exact: of `u`, `v`
    and `initial_state`, through `h` and through `final_state`.

    Args:
        u (torch.Tensor):
            Gate logits of shape `[B, T, D]`; float32, bfloat16, float16 or float64.
        v (torch.Tensor):
            Input logits of shape `[B, T, D]`, of u's dtype and on its device.
        decay_range (tuple[float, float]):
            `(a_min, a_max)` with `0 <= a_min < a_max <= 1`, the range of the decay `A`.
        initial_state (torch.Tensor, Optional):
            States before the first token, of shape `[N, D]`: `N = B`, or the number of documents with `cu_seqlens`.
            Default: zero.
        output_final_state (bool):
            Whether to return the states after the last token. Default: `False`.
        cu_seqlens (torch.Tensor, Optional):
            Borders of packed documents, int32 or int64 of shape `[N + 1]`, from 0 to T; needs `B = 1`. Documents do not
            see one another. Default: `None`.
        backend (str, Optional):
            `"torch"` (anywhere), `"numba"` (CPU), `"triton"` (fused kernels) or `"fla"` (fla's Triton kernels); float64 on
            torch alone. Default: by device and dtype.
        mask (torch.Tensor, Optional):
            0/1 of shape `[B, T]`: at 0 the state stays as it is and the logits get no gradient. Default: all 1.

    Returns:
        h (torch.Tensor):
            States after each token, of shape `[B, T, D]` and u's dtype.
        final_state (torch.Tensor | None):
            States after the last token, float32 of shape `[N, D]`, or `None`.

    Raises:
        ValueError: for a wrong shape, dtype, device, range, border or backend.

    Examples::
        >>> import torch
        >>> from fla_harmonic.ops.harmonic import chunk_harmonic
        >>> u, v = torch.randn(2, 4, 2048, 256)
        >>> h, state = chunk_harmonic(u, v, (0.9, 0.975), output_final_state=True)
        # three documents of 512, 1024 and 512 tokens in one row
        >>> cu_seqlens = torch.tensor([0, 512, 1536, 2048])
        >>> h, states = chunk_harmonic(u[:1], v[:1], (0.9, 0.975), output_final_state=True, cu_seqlens=cu_seqlens)
        >>> states.shape
        torch.Size([3, 256])
    """
    return harmonic(u, v, decay_range, initial_state, output_final_state, cu_seqlens, backend, mask, recurrent=False)
