"""One token after another: the recurrence as Triton kernels, for decoding and short inputs, and what the chunks share."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from fla.utils import input_guard

from fla_harmonic.ops.harmonic.op import harmonic

NUM_WARPS = 4


@triton.jit
def _tanh(v):
    # exp of a negative number cannot overflow; small arguments by the series, where the quotient would cancel
    e = tl.exp(-2.0 * tl.abs(v))
    quotient = (1.0 - e) / (1.0 + e)
    square = v * v
    series = v * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    value = tl.where(tl.abs(v) < 0.15, series, tl.where(v < 0, -quotient, quotient))
    return value, 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _gates(a, b, q_min, width, IS_HARMONIC: tl.constexpr):
    """Of a token's logits: `c = 1 - decay`, |dc/da|, the value that the state moves to and its derivative."""
    if IS_HARMONIC:
        e = tl.exp(-tl.abs(a))
        c = q_min + width * (tl.where(a > 0, e, 1.0) / (1.0 + e))
        value, rise = _tanh(b)
        return c, width * (e / ((1.0 + e) * (1.0 + e))), value, rise
    else:
        decay = tl.exp(a)
        return 1.0 - decay, decay, b, b


@triton.jit
def load_gates(
    a, b, kept, t, o_d, tokens, D, q_min, width,
    IS_HARMONIC: tl.constexpr, HAS_MASK: tl.constexpr, LOAD_B: tl.constexpr,
):
    """Gates of the tokens t `[TILE]`; tokens out of range and masked ones leave the state as it is (c = 0)."""
    inside = (t >= 0) & (t < tokens)
    if HAS_MASK:
        # what stands at a masked token is not read: it may be NaN
        inside = inside & (tl.load(kept + t, mask=inside, other=0) != 0)
    m = inside[:, None] & (o_d < D)[None, :]
    offset = t[:, None] * D + o_d[None, :]
    b_a = tl.load(a + offset, mask=m, other=0.0).to(tl.float32)
    if LOAD_B:
        b_b = tl.load(b + offset, mask=m, other=0.0).to(tl.float32)
    else:
        b_b = b_a
    c, slope, value, rise = _gates(b_a, b_b, q_min, width, IS_HARMONIC)
    c = tl.where(inside[:, None], c, 0.0)
    return c, slope, value, rise, inside


@triton.jit
def recurrent_forward_kernel(
    a, b, state, offsets, kept, h_out, final, tokens, D, q_min, width,
    IS_HARMONIC: tl.constexpr, HAS_MASK: tl.constexpr, BD: tl.constexpr,
):
    """One token after another: a program walks one sequence over a block of channels."""
    ND = tl.cdiv(D, BD)
    i_n, i_d = (tl.program_id(0) // ND).to(tl.int64), tl.program_id(0) % ND
    o_d = i_d * BD + tl.arange(0, BD)
    in_d = (o_d < D)[None, :]
    row = i_n * D + o_d[None, :]
    h = tl.load(state + row, mask=in_d, other=0.0)
    start, stop = tl.load(offsets + i_n), tl.load(offsets + i_n + 1)
    for i in range(0, stop - start):
        t = start + i + tl.zeros([1], tl.int64)
        c, _, value, _, live = load_gates(a, b, kept, t, o_d, tokens, D, q_min, width, IS_HARMONIC, HAS_MASK, True)
        if IS_HARMONIC:
            h = h + c * (value - h)
        else:
            h = h - c * h + tl.where(live[:, None], value, 0.0)
        tl.store(h_out + t[:, None] * D + o_d[None, :], h.to(h_out.dtype.element_ty), mask=in_d)
    tl.store(final + row, h, mask=in_d)


@triton.jit
def recurrent_backward_kernel(
    a, b, h, state, offsets, kept, dh, dfinal, da, db, dstate, tokens, D, q_min, width,
    IS_HARMONIC: tl.constexpr, HAS_MASK: tl.constexpr, BD: tl.constexpr,
):
    """The gradients, one token after another from the end of a sequence."""
    ND = tl.cdiv(D, BD)
    i_n, i_d = (tl.program_id(0) // ND).to(tl.int64), tl.program_id(0) % ND
    o_d = i_d * BD + tl.arange(0, BD)
    in_d = (o_d < D)[None, :]
    row = i_n * D + o_d[None, :]
    carry = tl.load(dfinal + row, mask=in_d, other=0.0)
    start, stop = tl.load(offsets + i_n), tl.load(offsets + i_n + 1)
    for i in range(0, stop - start):
        t = stop - 1 - i + tl.zeros([1], tl.int64)
        offset = t[:, None] * D + o_d[None, :]
        q, slope, value, rise, live = load_gates(a, b, kept, t, o_d, tokens, D, q_min, width, IS_HARMONIC, HAS_MASK, True)
        inner = (t > start)[:, None]
        before = tl.load(h + offset - D, mask=inner & in_d, other=0.0).to(tl.float32)
        before = before + tl.load(state + row, mask=~inner & in_d, other=0.0)
        s = carry + tl.load(dh + offset, mask=in_d, other=0.0).to(tl.float32)
        if IS_HARMONIC:
            grad_a = s * (before - value) * slope
            grad_b = s * q * rise
        else:
            grad_a = s * slope * before
            grad_b = s
        tl.store(da + offset, tl.where(live[:, None], grad_a, 0.0).to(da.dtype.element_ty), mask=in_d)
        tl.store(db + offset, tl.where(live[:, None], grad_b, 0.0).to(db.dtype.element_ty), mask=in_d)
        if IS_HARMONIC:
            carry = s - q * s
        else:
            carry = s * tl.where(live[:, None], slope, 1.0)
    tl.store(dstate + row, carry, mask=in_d)


@input_guard
def fused_recurrent_fwd(
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    offsets: torch.Tensor,
    kept: torch.Tensor | None,
    decay_range: Sequence[float] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and returns as `chunk_fwd`."""
    tokens, D = a.shape
    h, final = torch.empty_like(a), state.clone()
    options = kernel_options(D, decay_range, kept)
    recurrent_forward_kernel[(state.shape[0] * triton.cdiv(D, options["BD"]),)](
        a, b, state, offsets, kept, h, final, tokens, D, *gate_range(decay_range), **options)
    return h, final


@input_guard
def fused_recurrent_bwd(
    a: torch.Tensor,
    b: torch.Tensor,
    h: torch.Tensor,
    state: torch.Tensor,
    offsets: torch.Tensor,
    kept: torch.Tensor | None,
    decay_range: Sequence[float] | None,
    dh: torch.Tensor,
    dfinal: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments and returns as `chunk_bwd`."""
    tokens, D = a.shape
    da, db, dstate = torch.empty_like(a), torch.empty_like(a), dfinal.clone()
    options = kernel_options(D, decay_range, kept)
    recurrent_backward_kernel[(state.shape[0] * triton.cdiv(D, options["BD"]),)](
        a, b, h, state, offsets, kept, dh, dfinal, da, db, dstate, tokens, D, *gate_range(decay_range), **options)
    return da, db, dstate


def kernel_options(D: int, decay_range: Sequence[float] | None, kept: torch.Tensor | None) -> dict[str, int | bool]:
    """Compile-time arguments of the kernels."""
    return dict(IS_HARMONIC=decay_range is not None, HAS_MASK=kept is not None, BD=min(64, triton.next_power_of_2(D)),
                num_warps=NUM_WARPS)


def gate_range(decay_range: Sequence[float] | None) -> tuple[float, float]:
    """`(1 - a_max, a_max - a_min)`: the least value of `1 - A`, and how far it goes above it."""
    a_min, a_max = decay_range or (0.0, 1.0)
    return 1 - a_max, a_max - a_min


def fused_recurrent_harmonic(
    u: torch.Tensor,
    v: torch.Tensor,
    decay_range: tuple[float, float],
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_harmonic`, one token after another: for decoding and short inputs. Same arguments, returns and errors."""
    return harmonic(u, v, decay_range, initial_state, output_final_state, cu_seqlens, backend, mask, recurrent=True)
