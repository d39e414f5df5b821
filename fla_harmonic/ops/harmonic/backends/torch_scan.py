"""
Carry-first chunked scan in plain torch: any device, float32 or float64.

A chunk of the recurrence is an affine map of the state that enters it. One pass over all chunks at once gives each
chunk's map (its decay product and the state it reaches from zero), a short loop over the chunks gives the state that
enters each of them, and one more pass writes the outputs. The scan of the backward pass does the same from the end, on the
same memory: nothing is flipped, shifted or concatenated.
"""

from itertools import pairwise

import torch


def scan(
    gate: torch.Tensor,
    x: torch.Tensor,
    state: torch.Tensor,
    is_complement: bool,
    recurrent: bool,
    borders: torch.Tensor | None,
    backwards: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `h_t = decay_t h_{t-1} + x_t`, or `h_t = h_{t-1} + q_t (x_t - h_{t-1})` of the complements `q = 1 - decay`; or the
    adjoint of both, `s_t = x_t + r_{t+1}` and `r_t = decay_t s_t` from `r_T = state`, backwards over the tokens.

    Args:
        gate (torch.Tensor):
            Decays, or their complements, of shape `[B, T, D]`.
        x (torch.Tensor):
            Inputs, or the gradients that reach the states from the outputs, of shape `[B, T, D]`.
        state (torch.Tensor):
            Initial states, or gradients of the final ones, of shape `[B, D]`.
        is_complement (bool):
            Which of the two the gates are.
        recurrent (bool):
            One token after another instead of in chunks.
        borders (torch.Tensor, Optional):
            Of the documents of a packed row, `[N + 1]`: nothing crosses them, not even NaN.
        backwards (bool):
            Whether to compute the adjoint.

    Returns:
        h (torch.Tensor):
            States, or their gradients, of shape `[B, T, D]`.
        last (torch.Tensor):
            Final states, or gradients of the initial ones, of shape `[B, D]`.
    """
    B, T, D = x.shape
    # near sqrt(T), so that a pass over a chunk and the loop over the carries are equally long
    length = T if recurrent else 1 << (T.bit_length() // 2)
    chunks = T // length
    starts = None
    if borders is not None:
        starts = torch.zeros(T + 1, 1, dtype=torch.bool, device=x.device).index_fill(0, borders, True)[:-1]
    h = torch.empty_like(x)

    def shrink(r: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(r, r, q, value=-1) if is_complement else r * q

    def cut(r: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
        # by selection: a product with zero would keep NaN
        return r if start is None else torch.where(start, 0.0, r)

    def step(
        r: torch.Tensor, q: torch.Tensor, v: torch.Tensor, start: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token's output and what it passes on."""
        if backwards:
            s = v + r
            return s, shrink(cut(s, start), q)
        r = cut(r, start)
        # h + q (v - h): the small q = 1 - A is never rounded into A
        r = torch.lerp(r, v, q) if is_complement else torch.addcmul(v, q, r)
        return r, r

    def walk(r: torch.Tensor, tokens: range, gate: torch.Tensor, x: torch.Tensor, h: torch.Tensor,
             starts: torch.Tensor | None) -> torch.Tensor:
        for t in reversed(tokens) if backwards else tokens:
            h[..., t, :], r = step(r, gate[..., t, :], x[..., t, :], None if starts is None else starts[..., t, :])
        return r

    tail = range(chunks * length, T)
    if backwards:
        state = walk(state, tail, gate, x, h, starts)
    if chunks:
        gates, inputs, outputs = (y[:, :tail.start].unflatten(1, (chunks, length)) for y in (gate, x, h))
        inner = None if starts is None else starts[:tail.start].unflatten(0, (chunks, length))
        reached = x.new_zeros(B, chunks, D)
        product = x.new_ones(B, chunks, D)
        if chunks > 1:
            for j in reversed(range(length)) if backwards else range(length):
                start = None if inner is None else inner[:, j]
                reached = step(reached, gates[:, :, j], inputs[:, :, j], start)[1]
                product = shrink(cut(product, start), gates[:, :, j])
        order = range(chunks - 1, -1, -1) if backwards else range(chunks)
        entering = torch.empty_like(reached)
        entering[:, order[0]] = state
        for k, following in pairwise(order):
            passing = cut(entering[:, k], None if inner is None else inner[k].any())
            torch.addcmul(reached[:, k], product[:, k], passing, out=entering[:, following])
        state = walk(entering, range(length), gates, inputs, outputs, inner)[:, order[-1]]
    if not backwards:
        state = walk(state, tail, gate, x, h, starts)
    return h, state.clone()
