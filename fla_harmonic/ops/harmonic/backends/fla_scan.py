"""
fla's HGRN kernels as the same function as `torch_scan`: CUDA and the other devices that Triton serves.

`chunk_hgrn` has no gradient to the initial state, none from the final one and no documents. The initial state is therefore
folded into the first input, the final state is read from the last output, the adjoint is one more forward scan over the
reversed sequence, with each decay moved by one token, and packed documents are for `fused_recurrent_hgrn`.
"""

import torch
import torch.nn.functional as F


def scan(
    gate: torch.Tensor,
    x: torch.Tensor,
    state: torch.Tensor,
    is_complement: bool,
    recurrent: bool,
    borders: torch.Tensor | None,
    backwards: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and returns as `torch_scan.scan`."""
    from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn

    entry = gate[:, 0]
    if backwards:
        # s_t = decay_{t+1} s_{t+1} + x_t: backwards in time, the decay of a step is that of the token after it
        gate, x = F.pad(gate[:, 1:], (0, 0, 0, 1), value=float(not is_complement)).flip(1), x.flip(1)
        borders = None if borders is None else x.shape[1] - borders.flip(0)
    elif is_complement:
        x = gate * x
    g = torch.log1p(-gate) if is_complement else gate.log()
    x = x.clone(memory_format=torch.contiguous_format)
    x[:, 0] += _decay(gate[:, 0], is_complement) * state
    if borders is not None:
        h, _ = fused_recurrent_hgrn(x, g.contiguous(), cu_seqlens=borders)
    else:
        h, _ = (fused_recurrent_hgrn if recurrent else chunk_hgrn)(x, g.contiguous())
    if backwards:
        h = h.flip(1)
        return h, _decay(entry, is_complement) * h[:, 0]
    return h, h[:, -1].clone()


def _decay(gate: torch.Tensor, is_complement: bool) -> torch.Tensor:
    return 1 - gate if is_complement else gate
