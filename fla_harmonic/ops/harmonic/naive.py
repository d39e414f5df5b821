"""The oracle: both recurrences as one loop over the tokens, differentiable by autograd, in float32 or float64."""

from collections.abc import Sequence
from itertools import pairwise

import torch


def harmonic_gates(
    u: torch.Tensor,
    v: torch.Tensor,
    decay_range: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The gates of one Harmonic level (arXiv 2606.24650, the recurrence of a level).

    Args:
        u (torch.Tensor):
            Gate logits of shape `[..., D]`.
        v (torch.Tensor):
            Input logits of shape `[..., D]`.
        decay_range (tuple[float, float]):
            `(a_min, a_max)`, the range of the decay `A`.

    Returns:
        complement (torch.Tensor):
            `1 - A` as `(1 - a_max) + (a_max - a_min) sigmoid(-u)`: no bit is lost near `A = 1`. Shape `[..., D]`.
        value (torch.Tensor):
            `tanh(v)`, what the state moves towards. Shape `[..., D]`.
    """
    a_min, a_max = decay_range
    return (1 - a_max) + (a_max - a_min) * torch.sigmoid(-u), torch.tanh(v)


def naive_linear_scan(
    g: torch.Tensor,
    x: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`h_t = exp(g_t) h_{t-1} + x_t`, one token after another. Arguments and returns as `linear_scan`."""
    h, final_state = _loop(*_unless_masked(_widen(g).exp(), _widen(x), mask), initial_state, cu_seqlens)
    return h.to(x.dtype), final_state if output_final_state else None


def naive_recurrent_harmonic(
    u: torch.Tensor,
    v: torch.Tensor,
    decay_range: tuple[float, float],
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`h_t = A_t h_{t-1} + (1 - A_t) tanh(v_t)`, one token after another. Arguments and returns as `chunk_harmonic`."""
    complement, value = harmonic_gates(_widen(u), _widen(v), decay_range)
    h, final_state = _loop(*_unless_masked(1 - complement, complement * value, mask), initial_state, cu_seqlens)
    return h.to(u.dtype), final_state if output_final_state else None


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _unless_masked(
    decay: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if mask is None:
        return decay, x
    kept = mask.bool().unsqueeze(2)
    return torch.where(kept, decay, 1.0), torch.where(kept, x, 0.0)


def _loop(
    decay: torch.Tensor,
    x: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    B, T, D = x.shape
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        states = [None] * (len(bounds) - 1) if initial_state is None else initial_state.split(1)
        parts = [_loop(decay[:, i:j], x[:, i:j], h0, None) for (i, j), h0 in zip(pairwise(bounds), states, strict=True)]
        return torch.cat([h for h, _ in parts], 1), torch.cat([ht for _, ht in parts])
    h = x.new_zeros(B, D) if initial_state is None else initial_state.to(x)
    outputs = []
    for t in range(T):
        h = decay[:, t] * h + x[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1) if outputs else x, h
