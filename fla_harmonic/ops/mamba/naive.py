"""The oracle: the selective scan as one loop over the tokens, differentiable by autograd, in float32 or float64."""

import torch
import torch.nn.functional as F


def naive_selective_scan(
    x: torch.Tensor,
    v: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
) -> torch.Tensor:
    """Arguments and returns as `selective_scan`."""
    dt = F.softplus(v)
    h, outputs = x.new_zeros(x.shape[0], *A.shape), []
    for t in range(x.shape[1]):
        h = torch.exp(dt[:, t, :, None] * A) * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        outputs.append((h * C[:, t, None]).sum(-1))
    return (torch.stack(outputs, 1) + D * x) * F.silu(z)
