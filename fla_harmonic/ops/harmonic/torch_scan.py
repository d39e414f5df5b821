"""
Carry-first chunked scan in plain torch: any device, float32 or float64.

A chunk of the recurrence is an affine map of the state that enters it. One pass over all chunks at once gives each
chunk's map (its decay product and the state it reaches from zero), a short loop over the chunks gives the state that
enters each of them, and one more pass writes the outputs. The reversed scan of the backward pass goes the same way
from the end, on the same memory: nothing is flipped, shifted or concatenated.
"""

from collections.abc import Callable

import torch

# (state, gate of a token, input of a token) -> next state; (decay product, gate of a token) -> next product
Advance = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Shrink = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _chunk_length(T: int, recurrent: bool) -> int:
    """Tokens in a chunk: near sqrt(T), so that a pass over a chunk and the loop over the carries are equally long."""
    return T if recurrent else 1 << (T.bit_length() // 2)


def linear_forward(
    decay: torch.Tensor,
    x: torch.Tensor,
    state: torch.Tensor,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`h_t = decay_t h_{t-1} + x_t` over `[B, T, D]` from `state [B, D]`; returns all states and the last one."""
    return _forward(lambda h, a, x: torch.addcmul(x, a, h), torch.mul, decay, x, state, recurrent)


def harmonic_forward(
    complement: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`h_t = h_{t-1} + complement_t (value_t - h_{t-1})` over `[B, T, D]`: the small `1 - A` is never rounded into `A`."""
    return _forward(lambda h, q, v: torch.lerp(h, v, q), _shrink_by_complement, complement, value, state, recurrent)


def _shrink_by_complement(x: torch.Tensor, complement: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(x, x, complement, value=-1)


def _forward(
    advance: Advance,
    shrink: Shrink,
    gate: torch.Tensor,
    x: torch.Tensor,
    state: torch.Tensor,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    B, T, D = x.shape
    length = _chunk_length(T, recurrent)
    chunks = T // length
    h = torch.empty_like(x)
    if chunks:
        gates, inputs, outputs = (_whole_chunks(y, chunks, length) for y in (gate, x, h))
        reached = x.new_zeros(B, chunks, D)
        product = x.new_ones(B, chunks, D)
        if chunks > 1:
            for j in range(length):
                reached = advance(reached, gates[:, :, j], inputs[:, :, j])
                product = shrink(product, gates[:, :, j])
        entering = torch.empty_like(reached)
        entering[:, 0] = state
        for k in range(1, chunks):
            torch.addcmul(reached[:, k - 1], product[:, k - 1], entering[:, k - 1], out=entering[:, k])
        running = entering
        for j in range(length):
            running = advance(running, gates[:, :, j], inputs[:, :, j])
            outputs[:, :, j] = running
        state = running[:, -1]
    for t in range(chunks * length, T):
        state = advance(state, gate[:, t], x[:, t])
        h[:, t] = state
    return h, state.clone()


def linear_reverse(
    decay: torch.Tensor,
    dh: torch.Tensor,
    state: torch.Tensor,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The adjoint: `s_t = dh_t + r_{t+1}`, `r_t = decay_t s_t` from `r_T = state`, backwards over the tokens.

    Args:
        decay (torch.Tensor):
            Decays of shape `[B, T, D]`.
        dh (torch.Tensor):
            Gradient that reaches each state from its output, of shape `[B, T, D]`.
        state (torch.Tensor):
            Gradient of the final state, of shape `[B, D]`.
        recurrent (bool):
            One token after another instead of in chunks.

    Returns:
        s (torch.Tensor):
            Gradient of each state, of shape `[B, T, D]`.
        r_0 (torch.Tensor):
            Gradient of the initial state, of shape `[B, D]`.
    """
    return _reverse(torch.mul, decay, dh, state, recurrent)


def harmonic_reverse(
    complement: torch.Tensor,
    dh: torch.Tensor,
    state: torch.Tensor,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The adjoint for decays `1 - complement`, of which the small complement is never rounded into the decay."""
    return _reverse(_shrink_by_complement, complement, dh, state, recurrent)


def _reverse(
    shrink: Shrink,
    gate: torch.Tensor,
    dh: torch.Tensor,
    state: torch.Tensor,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    B, T, D = dh.shape
    length = _chunk_length(T, recurrent)
    chunks = T // length
    s = torch.empty_like(dh)
    for t in range(T - 1, chunks * length - 1, -1):
        s[:, t] = dh[:, t] + state
        state = shrink(s[:, t], gate[:, t])
    if chunks:
        gates, inputs, outputs = (_whole_chunks(y, chunks, length) for y in (gate, dh, s))
        reached = dh.new_zeros(B, chunks, D)
        product = dh.new_ones(B, chunks, D)
        if chunks > 1:
            for j in range(length - 1, -1, -1):
                reached = shrink(reached + inputs[:, :, j], gates[:, :, j])
                product = shrink(product, gates[:, :, j])
        entering = torch.empty_like(reached)
        entering[:, -1] = state
        for k in range(chunks - 2, -1, -1):
            torch.addcmul(reached[:, k + 1], product[:, k + 1], entering[:, k + 1], out=entering[:, k])
        running = entering
        for j in range(length - 1, -1, -1):
            grad = inputs[:, :, j] + running
            outputs[:, :, j] = grad
            running = shrink(grad, gates[:, :, j])
        state = running[:, 0]
    return s, state.clone()


def _whole_chunks(x: torch.Tensor, chunks: int, length: int) -> torch.Tensor:
    return x[:, :chunks * length].unflatten(1, (chunks, length))
