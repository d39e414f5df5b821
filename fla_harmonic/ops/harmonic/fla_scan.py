"""
fla's HGRN kernels as the same four functions as `torch_scan`: CUDA and the other devices that Triton serves.

`chunk_hgrn` has no gradient to the initial state and none from the final one. Both are had around it: the initial
state is folded into the first input, the final state is read from the last output, and the adjoint is one more forward
scan over the reversed sequence, with each decay moved one token on.
"""

import torch
import torch.nn.functional as F


def linear_forward(
    decay: torch.Tensor,
    x: torch.Tensor,
    state: torch.Tensor,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`h_t = decay_t h_{t-1} + x_t` over `[B, T, D]` from `state [B, D]`; returns all states and the last one."""
    return _scan(decay.log(), decay, x, state, recurrent)


def harmonic_forward(
    complement: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`h_t = (1 - complement_t) h_{t-1} + complement_t value_t` over `[B, T, D]` from `state [B, D]`."""
    return _scan(torch.log1p(-complement), 1 - complement, complement * value, state, recurrent)


def linear_reverse(
    decay: torch.Tensor,
    dh: torch.Tensor,
    state: torch.Tensor,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The adjoint; arguments and returns as `torch_scan.linear_reverse`."""
    step = _of_next_token(decay, 1.0)
    s = _scan(step.log(), step, dh.flip(1), state, recurrent)[0].flip(1)
    return s, decay[:, 0] * s[:, 0]


def harmonic_reverse(
    complement: torch.Tensor,
    dh: torch.Tensor,
    state: torch.Tensor,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The adjoint for decays `1 - complement`; arguments and returns as `torch_scan.harmonic_reverse`."""
    step = _of_next_token(complement, 0.0)
    s = _scan(torch.log1p(-step), 1 - step, dh.flip(1), state, recurrent)[0].flip(1)
    return s, (1 - complement[:, 0]) * s[:, 0]


def _of_next_token(gate: torch.Tensor, open_gate: float) -> torch.Tensor:
    # s_t = decay_{t+1} s_{t+1} + dh_t: backwards in time, the decay of a step is that of the token after it
    return F.pad(gate[:, 1:], (0, 0, 0, 1), value=open_gate).flip(1)


def _scan(
    g: torch.Tensor,
    decay: torch.Tensor,
    x: torch.Tensor,
    state: torch.Tensor,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn

    x = x.clone()
    x[:, 0] += decay[:, 0] * state
    h = (fused_recurrent_hgrn if recurrent else chunk_hgrn)(x.contiguous(), g.contiguous())[0]
    return h, h[:, -1].clone()
