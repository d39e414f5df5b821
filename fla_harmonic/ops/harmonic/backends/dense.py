"""
Backends of a scan over `[B, T, D]` that is given its gates: what is around it is computed here, in plain torch.

The gate of a token is its decay, or for Harmonic `1 - decay`, which keeps its bits where the decay is near 1. Packed
documents are one row: the gate of a document's first token forgets, and its input takes in the document's initial state.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from fla_harmonic.ops.harmonic.naive import harmonic_gates
from fla_harmonic.ops.harmonic.op import Backend

# (gate, input, state, is_complement, recurrent, borders, backwards) -> (states, last state), over [B, T, D] and [B, D]
Scan = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool, bool, torch.Tensor | None, bool], tuple[torch.Tensor, torch.Tensor]]


class _Packing(NamedTuple):
    """Non-empty documents of a packed row: their numbers, and the positions of their first and last tokens."""
    documents: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


def dense_backend(serves: Callable[[torch.Tensor], bool], scan: Scan) -> Backend:
    """A backend of a scan and its adjoint, as `torch_scan.scan`."""
    return Backend(serves, partial(_forward, scan), partial(_backward, scan))


def _forward(
    scan: Scan,
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    offsets: torch.Tensor,
    kept: torch.Tensor | None,
    packed: bool,
    decay_range: Sequence[float] | None,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    gate, x = _gates(a, b, kept, decay_range, state.dtype)
    is_complement = decay_range is not None
    if not packed:
        h, final = scan(_batch(gate, state), _batch(x, state), state, is_complement, recurrent, None, False)
        return h.flatten(0, 1).to(a.dtype), final
    documents, first, last = _packing(offsets)
    if is_complement:
        x[first] = torch.lerp(state[documents], x[first], gate[first])
    else:
        x = x.index_put((first,), gate[first] * state[documents], accumulate=True)
    gate[first] = float(is_complement)
    h, _ = scan(gate[None], x[None], torch.zeros_like(state[:1]), is_complement, recurrent, offsets, False)
    return h[0].to(a.dtype), state.index_copy(0, documents, h[0, last])


def _backward(
    scan: Scan,
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
    gate, value = _gates(a, b, kept, decay_range, state.dtype)
    dh, is_complement = dh.to(state.dtype), decay_range is not None
    before = torch.empty_like(h, dtype=state.dtype)
    before[1:] = h[:-1]
    if packed:
        documents, first, last = _packing(offsets)
        before[first] = state[documents]
        entry = 1 - gate[first] if is_complement else gate[first]
        closed = gate.index_fill(0, first, float(is_complement))
        dh = dh.index_put((last,), dfinal[documents], accumulate=True)
        ds, _ = scan(closed[None], dh[None], torch.zeros_like(dfinal[:1]), is_complement, recurrent, offsets, True)
        ds = ds[0]
        dstate = dfinal.index_copy(0, documents, entry * ds[first])
    else:
        _batch(before, state)[:, 0] = state
        ds, dstate = scan(_batch(gate, state), _batch(dh, state), dfinal, is_complement, recurrent, None, True)
        ds = ds.flatten(0, 1)
    if decay_range is None:
        da, db = ds * gate * before, ds
    else:
        # sigmoid(x) sigmoid(-x) and not s (1 - s): the slope of a saturated gate or value keeps its bits
        a_min, a_max = decay_range
        da = ds * (before - value) * ((a_max - a_min) * _slope(a.to(state.dtype)))
        db = ds * gate * (4 * _slope(2 * b.to(state.dtype)))
    if kept is not None:
        live = kept.bool()[:, None]
        da, db = torch.where(live, da, 0.0), torch.where(live, db, 0.0)
    return da.to(a.dtype), db.to(a.dtype), dstate


def _gates(
    a: torch.Tensor,
    b: torch.Tensor,
    kept: torch.Tensor | None,
    decay_range: Sequence[float] | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gates and inputs of the tokens; masked ones leave the state as it is."""
    if decay_range is None:
        gate, x, hold = a.to(dtype).exp(), b.to(dtype), 1.0
    else:
        (gate, x), hold = harmonic_gates(a.to(dtype), b.to(dtype), decay_range), 0.0
    if kept is None:
        return gate, x
    # by selection: a product with the mask would keep NaN
    live = kept.bool()[:, None]
    return torch.where(live, gate, hold), torch.where(live, x, 0.0)


def _packing(offsets: torch.Tensor) -> _Packing:
    documents = (offsets.diff() > 0).nonzero().flatten()
    return _Packing(documents, offsets[documents], offsets[documents + 1] - 1)


def _batch(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return x.unflatten(0, (state.shape[0], -1))


def _slope(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)
