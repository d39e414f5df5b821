"""
The selective scan in plain torch, on `linear_scan`: a chunk of tokens that fits the cache at a time, the chunks chained by
their states. The backward pass recomputes a chunk, so that no tensor of `[batch, T, D, N]` ever exists.
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fla_harmonic.ops.harmonic import linear_scan

# bytes of one [batch, tokens, D N] tensor of a chunk: on a CPU what its caches hold, elsewhere what keeps the device busy
_CHUNK_BYTES = {"cpu": 2 << 20}
_CHUNK_BYTES_ELSEWHERE = 256 << 20
_MIN_CHUNK = 16


def chunked_selective_scan(
    x: torch.Tensor,
    v: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Arguments and returns as `selective_scan`; `chunk_size` tokens at a time, by default what fits the device's cache."""
    dt = F.softplus(v.float())
    if chunk_size is None:
        budget = _CHUNK_BYTES.get(x.device.type, _CHUNK_BYTES_ELSEWHERE)
        chunk_size = max(_MIN_CHUNK, budget // (4 * max(1, x.shape[0] * A.numel())))
    # channels go last: they are contiguous in every product, sum and scan below
    A = A.float().t().contiguous()
    state: torch.Tensor | None = None
    outputs = []
    for inputs in zip(*(w.split(chunk_size, dim=1) for w in (dt, dt * x.float(), B.float(), C.float())), strict=True):
        if torch.is_grad_enabled():
            y, state = checkpoint(_scan_chunk, state, A, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            y, state = _scan_chunk(state, A, *inputs)
        outputs.append(y)
    return (torch.cat(outputs, dim=1) + x.float() * D.float()) * F.silu(z.float())


def _scan_chunk(
    state: torch.Tensor | None,
    A: torch.Tensor,
    dt: torch.Tensor,
    dx: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    g = dt.unsqueeze(2) * A
    # outer products and contractions over N as matrix products: so are their gradients, without temporaries
    x = B.unsqueeze(3) @ dx.unsqueeze(2)
    h, state = linear_scan(g.flatten(2), x.flatten(2), initial_state=state, output_final_state=True)
    return (C.unsqueeze(2) @ h.unflatten(2, A.shape)).squeeze(2), state
