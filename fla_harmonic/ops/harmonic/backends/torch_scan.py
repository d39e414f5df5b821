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


def _steps(is_complement: bool) -> tuple[Advance, Shrink]:
    if is_complement:
        # h + q (v - h): the small q = 1 - A is never rounded into A
        return lambda h, q, v: torch.lerp(h, v, q), lambda x, q: torch.addcmul(x, x, q, value=-1)
    return lambda h, a, x: torch.addcmul(x, a, h), torch.mul


def forward(
    gate: torch.Tensor,
    x: torch.Tensor,
    state: torch.Tensor,
    is_complement: bool,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `h_t = decay_t h_{t-1} + x_t`, or `h_t = h_{t-1} + q_t (x_t - h_{t-1})` of the complements `q = 1 - decay`.

    Args:
        gate (torch.Tensor):
            Decays, or their complements, of shape `[B, T, D]`.
        x (torch.Tensor):
            Inputs of shape `[B, T, D]`.
        state (torch.Tensor):
            Initial states of shape `[B, D]`.
        is_complement (bool):
            Which of the two the gates are.
        recurrent (bool):
            One token after another instead of in chunks.

    Returns:
        h (torch.Tensor):
            States of shape `[B, T, D]`.
        final (torch.Tensor):
            Last states, of shape `[B, D]`.
    """
    advance, shrink = _steps(is_complement)
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


def reverse(
    gate: torch.Tensor,
    dh: torch.Tensor,
    state: torch.Tensor,
    is_complement: bool,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The adjoint: `s_t = dh_t + r_{t+1}`, `r_t = decay_t s_t` from `r_T = state`, backwards over the tokens.

    Args:
        gate, is_complement, recurrent:
            As for `forward`.
        dh (torch.Tensor):
            Gradient that reaches each state from its output, of shape `[B, T, D]`.
        state (torch.Tensor):
            Gradient of the final state, of shape `[B, D]`.

    Returns:
        s (torch.Tensor):
            Gradient of each state, of shape `[B, T, D]`.
        r_0 (torch.Tensor):
            Gradient of the initial state, of shape `[B, D]`.
    """
    _, shrink = _steps(is_complement)
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
