"""
fla's HGRN kernels as the same two functions as `torch_scan`: CUDA and the other devices that Triton serves.

`chunk_hgrn` has no gradient to the initial state and none from the final one. The initial state is therefore folded into
the first input, the final state is read from the last output, and the adjoint is one more forward scan over the reversed
sequence, with each decay moved by one token.
"""

import torch
import torch.nn.functional as F


def forward(
    gate: torch.Tensor,
    x: torch.Tensor,
    state: torch.Tensor,
    is_complement: bool,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and returns as `torch_scan.forward`."""
    h = _scan(gate, gate * x if is_complement else x, state, is_complement, recurrent)
    return h, h[:, -1].clone()


def reverse(
    gate: torch.Tensor,
    dh: torch.Tensor,
    state: torch.Tensor,
    is_complement: bool,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and returns as `torch_scan.reverse`."""
    # s_t = decay_{t+1} s_{t+1} + dh_t: backwards in time, the decay of a step is that of the token after it
    following = F.pad(gate[:, 1:], (0, 0, 0, 1), value=float(not is_complement)).flip(1)
    s = _scan(following, dh.flip(1), state, is_complement, recurrent).flip(1)
    return s, _decay(gate[:, 0], is_complement) * s[:, 0]


def _decay(gate: torch.Tensor, is_complement: bool) -> torch.Tensor:
    return 1 - gate if is_complement else gate


def _scan(gate: torch.Tensor, x: torch.Tensor, state: torch.Tensor, is_complement: bool, recurrent: bool) -> torch.Tensor:
    from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn

    g = torch.log1p(-gate) if is_complement else gate.log()
    x = x.clone()
    x[:, 0] += _decay(gate[:, 0], is_complement) * state
    return (fused_recurrent_hgrn if recurrent else chunk_hgrn)(x.contiguous(), g.contiguous())[0]
