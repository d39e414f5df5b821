"""
The Mamba baseline: transformers' `MambaForCausalLM`, whose selective scan runs on own loops where mamba-ssm's kernels
cannot: on the CPU on `fused_selective_scan`, elsewhere and without numba on `linear_scan`.

transformers' own torch path walks the tokens one by one over tensors of `[B, D, T, N]`, which none of these ever has. For
`linear_scan` a chunk of tokens that fits the cache is scanned at a time, the chunks are chained by their states, and the
backward pass computes a chunk anew. The values and gradients are the same.
"""

import os
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import MambaConfig, MambaForCausalLM
from transformers.cache_utils import Cache
from transformers.models.mamba.modeling_mamba import MambaMixer

from fla_harmonic.ops.harmonic import linear_scan
from fla_harmonic.ops.mamba.causal_conv import causal_conv_silu
from fla_harmonic.ops.mamba.selective_scan import HAS_LOOPS, fused_selective_scan

# bytes of one [B, tokens, D N] tensor of a chunk: on a CPU what its caches hold, elsewhere what keeps the device busy
_CHUNK_BYTES = {"cpu": 2 << 20}
_CHUNK_BYTES_ELSEWHERE = 256 << 20
_MIN_CHUNK = 16

Model = TypeVar("Model", bound=nn.Module)


def _has_kernels() -> bool:
    try:
        import causal_conv1d  # noqa: F401
        from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn  # noqa: F401
    except Exception:
        # a build for another torch or driver fails with anything from ImportError to RuntimeError
        return False
    return True


# whether mamba-ssm's scan, and the convolution that it needs, are what transformers runs on CUDA
HAS_MAMBA_KERNELS = _has_kernels()


class LinearScanMambaMixer(MambaMixer):
    """
    `MambaMixer` on `fused_selective_scan` or `linear_scan`; the same parameters, values and gradients.

    With a cache, or with mamba-ssm's kernels on their device, the parent's forward runs: pass `use_cache=False` to a
    model in evaluation that needs no cache.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states (torch.Tensor):
                Input of shape `[B, T, hidden_size]`.
            cache (Cache, Optional):
                transformers' cache. Default: `None`.
            attention_mask (torch.Tensor, Optional):
                0/1 of shape `[B, T]`: as in the parent, tokens at 0 put nothing into the convolution and the scan.

        Returns:
            Output of shape `[B, T, hidden_size]` and the input's dtype.
        """
        if cache is not None or "cache_params" in kwargs or (hidden_states.is_cuda and HAS_MAMBA_KERNELS):
            return super().forward(hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)

        dtype, T = hidden_states.dtype, hidden_states.shape[1]
        mask = None if attention_mask is None else attention_mask[..., None].to(dtype)
        if mask is not None:
            hidden_states = hidden_states * mask
        x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)

        is_fused = HAS_LOOPS and x.device.type == "cpu" and x.dtype != torch.float64
        if is_fused and self.activation in ("silu", "swish"):
            x = causal_conv_silu(x, self.conv1d.weight.squeeze(1), self.conv1d.bias)
        else:
            x = self.act(self.conv1d(x.transpose(1, 2))[..., :T]).transpose(1, 2)
        if mask is not None:
            x = x * mask
        dt, B, C = self.x_proj(x).split([self.time_step_rank, self.ssm_state_size, self.ssm_state_size], dim=-1)
        # the step is fp32 from here on: long timescales are small differences of it
        with torch.autocast(x.device.type, enabled=False):
            v = F.linear(dt.float(), self.dt_proj.weight.float(), self.dt_proj.bias.float())
            A = -torch.exp(self.A_log.float())
            if is_fused:
                y = fused_selective_scan(x, v, A, B, C, self.D, gate)
            else:
                y = selective_scan(x.float(), F.softplus(v), A, B.float(), C.float())
                y = (y + x.float() * self.D.float()) * F.silu(gate.float())
        return self.out_proj(y.to(dtype))


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """
    Mamba's scan `h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t`, `y_t = C_t h_t`, in chunks chained by their states.

    Args:
        x (torch.Tensor):
            Inputs of shape `[batch, T, D]`, fp32.
        dt (torch.Tensor):
            Positive steps of shape `[batch, T, D]`.
        A (torch.Tensor):
            Negative rates of shape `[D, N]`.
        B (torch.Tensor):
            Input weights of shape `[batch, T, N]`.
        C (torch.Tensor):
            Output weights of shape `[batch, T, N]`.
        chunk_size (int, Optional):
            Tokens of a chunk. Default: what fits the device's cache.

    Returns:
        Outputs of shape `[batch, T, D]`.
    """
    batch, _T, _D = x.shape
    if chunk_size is None:
        budget = _CHUNK_BYTES.get(x.device.type, _CHUNK_BYTES_ELSEWHERE)
        chunk_size = max(_MIN_CHUNK, budget // (4 * batch * A.numel()))
    # channels go last: they are contiguous in every product, sum and scan below
    A = A.t().contiguous()
    state: torch.Tensor | None = None
    outputs = []
    for inputs in zip(*(z.split(chunk_size, dim=1) for z in (dt, dt * x, B, C)), strict=True):
        if torch.is_grad_enabled():
            y, state = checkpoint(_scan_chunk, state, A, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            y, state = _scan_chunk(state, A, *inputs)
        outputs.append(y)
    return torch.cat(outputs, dim=1) if outputs else torch.zeros_like(x)


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


def use_linear_scan(model: Model) -> Model:
    """
    Give the Mamba mixers of a model that is built already, or was loaded, the forward of `LinearScanMambaMixer`.

    Args:
        model (nn.Module):
            Any model that holds transformers' `MambaMixer`s; it is changed in place, and no other model is.

    Returns:
        The model.
    """
    for module in model.modules():
        if type(module) is MambaMixer:
            module.__class__ = LinearScanMambaMixer
    return model


def load_mamba(directory: str | os.PathLike) -> MambaForCausalLM:
    """
    A saved `MambaForCausalLM`, in evaluation mode, on `linear_scan` where mamba-ssm's kernels cannot run.

    Once fla is imported, as it is here, `AutoModelForCausalLM` takes every "mamba" for fla's own class of this name.
    """
    return use_linear_scan(MambaForCausalLM.from_pretrained(directory))


def build_mamba(config: MambaConfig) -> MambaForCausalLM:
    """transformers' `MambaForCausalLM`, initialised by itself, on `linear_scan` where mamba-ssm's kernels cannot run."""
    return use_linear_scan(MambaForCausalLM(config))
