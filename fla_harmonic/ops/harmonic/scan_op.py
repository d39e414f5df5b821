"""
The two scans as `torch.library` operators: opaque to torch.compile, visible to selective activation checkpointing.

Each operator has one forward and one backward for every backend. Saved for backward are the inputs, the output and the
initial state; decays are computed again.
"""

from typing import NamedTuple

import torch

from fla_harmonic.ops.harmonic import fla_scan, torch_scan, triton_scan
from fla_harmonic.ops.harmonic.naive import harmonic_gates

NO_NUMBA = ""
try:
    from fla_harmonic.ops.harmonic import numba_scan
except ImportError as error:
    numba_scan = None  # type: ignore[assignment]
    NO_NUMBA = str(error)

HAS_NUMBA = numba_scan is not None
# backends that read the logits of flattened tokens, and know sequences and masks themselves
_FUSED = {"triton": triton_scan, "numba": numba_scan}
# backends that scan [B, T, D] with given decays
_DENSE = {"torch": torch_scan, "fla": fla_scan}


class _Packing(NamedTuple):
    """Non-empty documents of a packed row: their numbers, and the positions of their first and last tokens."""
    documents: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """States and decays are float32 whatever the input, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.custom_op("fla_harmonic::harmonic_scan", mutates_args=())
def harmonic_scan(
    u: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    mask: torch.Tensor | None,
    a_min: float,
    a_max: float,
    backend: str,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`chunk_harmonic` behind its validation; always returns the final state."""
    state = _state(u, initial_state, cu_seqlens)
    if backend in _FUSED:
        h, final = _FUSED[backend].forward(
            _rows(u), _rows(v), state, _borders(u, cu_seqlens), (a_min, a_max), recurrent, _kept(mask))
        return h.view(u.shape), final
    if u.numel() == 0:
        return torch.empty_like(u), state.clone()
    complement, value = _masked_gates(u, v, (a_min, a_max), mask)
    packing = _packing(cu_seqlens, u.shape[1])
    if packing is None:
        h, final = _DENSE[backend].harmonic_forward(complement, value, state, recurrent)
    else:
        documents, first, last = packing
        value[0, first] = torch.lerp(state[documents], value[0, first], complement[0, first])
        complement[0, first] = 1
        h, _ = _DENSE[backend].harmonic_forward(complement, value, torch.zeros_like(state[:1]), recurrent)
        final = state.index_copy(0, documents, h[0, last])
    return h.to(u.dtype), final


@torch.library.custom_op("fla_harmonic::harmonic_scan_backward", mutates_args=())
def harmonic_scan_backward(
    u: torch.Tensor,
    v: torch.Tensor,
    h: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    mask: torch.Tensor | None,
    dh: torch.Tensor | None,
    dfinal: torch.Tensor | None,
    a_min: float,
    a_max: float,
    backend: str,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `u`, `v` and the initial state (float32, `[N, D]`)."""
    state = _state(u, initial_state, cu_seqlens)
    dh = torch.zeros_like(h) if dh is None else dh
    dfinal = torch.zeros_like(state) if dfinal is None else dfinal.to(state.dtype).contiguous()
    if backend in _FUSED:
        du, dv, dstate = _FUSED[backend].backward(
            _rows(u), _rows(v), _rows(h), state, _borders(u, cu_seqlens), (a_min, a_max), _rows(dh), dfinal, recurrent,
            _kept(mask))
        return du.view(u.shape), dv.view(v.shape), dstate
    if u.numel() == 0:
        return torch.empty_like(u), torch.empty_like(v), dfinal.clone()
    packing = _packing(cu_seqlens, u.shape[1])
    complement, value = _masked_gates(u, v, (a_min, a_max), mask)
    ds, dstate = _adjoint(complement, True, dh.to(state.dtype), dfinal, packing, backend, recurrent)
    # sigmoid(x) sigmoid(-x) and not s (1 - s): the slope of a saturated gate or value keeps its bits
    du = ds * (_before(h, state, packing) - value) * ((a_max - a_min) * _slope(u.to(state.dtype)))
    dv = ds * complement * (4 * _slope(2 * v.to(state.dtype)))
    if mask is not None:
        du, dv = _unmasked(du, mask), _unmasked(dv, mask)
    return du.to(u.dtype), dv.to(v.dtype), dstate


@torch.library.custom_op("fla_harmonic::linear_scan", mutates_args=())
def linear_scan(
    g: torch.Tensor,
    x: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    mask: torch.Tensor | None,
    backend: str,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_scan` behind its validation; always returns the final state."""
    state = _state(x, initial_state, cu_seqlens)
    if backend in _FUSED:
        h, final = _FUSED[backend].forward(
            _rows(g), _rows(x), state, _borders(x, cu_seqlens), None, recurrent, _kept(mask))
        return h.view(x.shape), final
    if x.numel() == 0:
        return torch.empty_like(x), state.clone()
    decay, wide = _masked_decay(g, mask, state.dtype), x.to(state.dtype)
    if mask is not None:
        wide = _unmasked(wide, mask)
    packing = _packing(cu_seqlens, x.shape[1])
    if packing is None:
        h, final = _DENSE[backend].linear_forward(decay, wide, state, recurrent)
    else:
        documents, first, last = packing
        wide = wide.index_put((torch.zeros_like(first), first), decay[0, first] * state[documents], accumulate=True)
        decay[0, first] = 0
        h, _ = _DENSE[backend].linear_forward(decay, wide, torch.zeros_like(state[:1]), recurrent)
        final = state.index_copy(0, documents, h[0, last])
    return h.to(x.dtype), final


@torch.library.custom_op("fla_harmonic::linear_scan_backward", mutates_args=())
def linear_scan_backward(
    g: torch.Tensor,
    h: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    mask: torch.Tensor | None,
    dh: torch.Tensor | None,
    dfinal: torch.Tensor | None,
    backend: str,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `g`, `x` and the initial state (float32, `[N, D]`)."""
    state = _state(h, initial_state, cu_seqlens)
    dh = torch.zeros_like(h) if dh is None else dh
    dfinal = torch.zeros_like(state) if dfinal is None else dfinal.to(state.dtype).contiguous()
    if backend in _FUSED:
        # the gradients do not depend on x, and the log-decays stand in for it
        dg, dx, dstate = _FUSED[backend].backward(
            _rows(g), _rows(g), _rows(h), state, _borders(h, cu_seqlens), None, _rows(dh), dfinal, recurrent, _kept(mask))
        return dg.view(g.shape), dx.view(h.shape), dstate
    if h.numel() == 0:
        return torch.empty_like(g), torch.empty_like(h), dfinal.clone()
    packing = _packing(cu_seqlens, h.shape[1])
    decay = _masked_decay(g, mask, state.dtype)
    ds, dstate = _adjoint(decay, False, dh.to(state.dtype), dfinal, packing, backend, recurrent)
    dg = ds * decay * _before(h, state, packing)
    if mask is not None:
        dg, ds = _unmasked(dg, mask), _unmasked(ds, mask)
    return dg.to(g.dtype), ds.to(h.dtype), dstate


@harmonic_scan.register_fake
def _(u, v, initial_state, cu_seqlens, mask, a_min, a_max, backend, recurrent):
    return torch.empty_like(u, memory_format=torch.contiguous_format), _empty_state(u, cu_seqlens)


@harmonic_scan_backward.register_fake
def _(u, v, h, initial_state, cu_seqlens, mask, dh, dfinal, a_min, a_max, backend, recurrent):
    du, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (u, v))
    return du, dv, _empty_state(u, cu_seqlens)


@linear_scan.register_fake
def _(g, x, initial_state, cu_seqlens, mask, backend, recurrent):
    return torch.empty_like(x, memory_format=torch.contiguous_format), _empty_state(x, cu_seqlens)


@linear_scan_backward.register_fake
def _(g, h, initial_state, cu_seqlens, mask, dh, dfinal, backend, recurrent):
    dg, dx = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (g, h))
    return dg, dx, _empty_state(h, cu_seqlens)


def _save_harmonic(ctx, inputs, output):
    u, v, initial_state, cu_seqlens, mask, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(u, v, output[0], initial_state, cu_seqlens, mask)


def _harmonic_grad(ctx, dh, dfinal):
    u, v, h, initial_state, cu_seqlens, mask = ctx.saved_tensors
    du, dv, dstate = harmonic_scan_backward(u, v, h, initial_state, cu_seqlens, mask, dh, dfinal, *ctx.options)
    return du, dv, _state_grad(dstate, initial_state), None, None, None, None, None, None


def _save_linear(ctx, inputs, output):
    g, _, initial_state, cu_seqlens, mask, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(g, output[0], initial_state, cu_seqlens, mask)


def _linear_grad(ctx, dh, dfinal):
    g, h, initial_state, cu_seqlens, mask = ctx.saved_tensors
    dg, dx, dstate = linear_scan_backward(g, h, initial_state, cu_seqlens, mask, dh, dfinal, *ctx.options)
    return dg, dx, _state_grad(dstate, initial_state), None, None, None, None


harmonic_scan.register_autograd(_harmonic_grad, setup_context=_save_harmonic)
linear_scan.register_autograd(_linear_grad, setup_context=_save_linear)


def _state_grad(dstate: torch.Tensor, initial_state: torch.Tensor | None) -> torch.Tensor | None:
    return None if initial_state is None else dstate.to(initial_state.dtype)


def _state(x: torch.Tensor, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    dtype = state_dtype(x.dtype)
    if initial_state is not None:
        return initial_state.to(dtype).contiguous()
    return x.new_zeros(_num_sequences(x, cu_seqlens), x.shape[2], dtype=dtype)


def _empty_state(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(_num_sequences(x, cu_seqlens), x.shape[2], dtype=state_dtype(x.dtype))


def _num_sequences(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten(0, 1)


def _borders(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Borders of the sequences in the flattened tokens, int64 of shape `[N + 1]`, on x's device."""
    if cu_seqlens is None:
        B, T, _ = x.shape
        return torch.arange(B + 1, device=x.device) * T
    return check_cu_seqlens(cu_seqlens, x.shape[1]).to(x.device)


def _kept(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else mask.to(torch.uint8).contiguous().flatten()


def _masked_gates(
    u: torch.Tensor,
    v: torch.Tensor,
    decay_range: tuple[float, float],
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`harmonic_gates` in the state's dtype; masked tokens leave the state as it is."""
    dtype = state_dtype(u.dtype)
    complement, value = harmonic_gates(u.to(dtype), v.to(dtype), decay_range)
    return (complement, value) if mask is None else (_unmasked(complement, mask), _unmasked(value, mask))


def _unmasked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Zero at masked tokens, whatever is there: a product with the mask would keep NaN."""
    return torch.where(mask.bool().unsqueeze(2), x, 0.0)


def _masked_decay(g: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    decay = g.to(dtype).exp()
    return decay if mask is None else torch.where(mask.bool().unsqueeze(2), decay, 1.0)


def check_cu_seqlens(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """
    Returns the borders on the CPU as int64.

    Raises:
        ValueError: if they do not rise from 0 to the number of tokens.
    """
    bounds = cu_seqlens.to("cpu", torch.int64)
    if bounds[0] != 0 or bounds[-1] != tokens or (bounds.diff() < 0).any():
        raise ValueError(
            f"`cu_seqlens` must rise from 0 to the number of tokens ({tokens}); got {bounds.tolist()[:16]}. "
            "Pass cumulative lengths: [0, len_0, len_0 + len_1, ...].")
    return bounds


def _packing(cu_seqlens: torch.Tensor | None, tokens: int) -> _Packing | None:
    if cu_seqlens is None:
        return None
    bounds = check_cu_seqlens(cu_seqlens, tokens).to(cu_seqlens.device)
    documents = (bounds.diff() > 0).nonzero().flatten()
    return _Packing(documents, bounds[documents], bounds[documents + 1] - 1)


def _slope(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


def _adjoint(
    gate: torch.Tensor,
    is_complement: bool,
    dh: torch.Tensor,
    dfinal: torch.Tensor,
    packing: _Packing | None,
    backend: str,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of every state `[B, T, D]` and of the initial states `[N, D]`; the gate is the decay or 1 - decay."""
    reverse = _DENSE[backend].harmonic_reverse if is_complement else _DENSE[backend].linear_reverse
    if packing is None:
        return reverse(gate, dh, dfinal, recurrent)
    documents, first, last = packing
    entry = 1 - gate[0, first] if is_complement else gate[0, first]
    gate = gate.index_put((torch.zeros_like(first), first), torch.full_like(entry, float(is_complement)))
    dh = dh.index_put((torch.zeros_like(last), last), dfinal[documents], accumulate=True)
    ds, _ = reverse(gate, dh, torch.zeros_like(dfinal[:1]), recurrent)
    return ds, dfinal.index_copy(0, documents, entry * ds[0, first])


def _before(h: torch.Tensor, state: torch.Tensor, packing: _Packing | None) -> torch.Tensor:
    """The state that enters each token, `[B, T, D]`."""
    before = torch.empty_like(h, dtype=state.dtype)
    before[:, 1:] = h[:, :-1]
    if packing is None:
        before[:, 0] = state
    else:
        before[0, packing.first] = state[packing.documents]
    return before
