"""
The Mamba baseline: transformers' `MambaForCausalLM` on `ops.mamba` wherever mamba-ssm's kernels cannot run. transformers'
own torch path walks the tokens one by one over tensors of `[B, D, T, N]`; the values and gradients are the same.
"""

import os
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MambaConfig, MambaForCausalLM
from transformers.cache_utils import Cache
from transformers.models.mamba.modeling_mamba import MambaMixer

from fla_harmonic.ops.mamba import causal_conv_silu, selective_scan

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
    `MambaMixer` on `ops.mamba`: the same parameters, values and gradients.

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

        if self.activation in ("silu", "swish"):
            x = causal_conv_silu(x, self.conv1d.weight.squeeze(1), self.conv1d.bias)
        else:
            x = self.act(self.conv1d(x.transpose(1, 2))[..., :T]).transpose(1, 2)
        if mask is not None:
            x = x * mask
        dt, B, C = self.x_proj(x).split([self.time_step_rank, self.ssm_state_size, self.ssm_state_size], dim=-1)
        # the step is fp32 from here on: long timescales are small differences of it
        with torch.autocast(x.device.type, enabled=False):
            v = F.linear(dt.float(), self.dt_proj.weight.float(), self.dt_proj.bias.float())
            y = selective_scan(x, v, -torch.exp(self.A_log.float()), B, C, self.D, gate)
        return self.out_proj(y.to(dtype))


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
    A saved `MambaForCausalLM`, in evaluation mode, on `ops.mamba` where mamba-ssm's kernels cannot run.

    Once fla is imported, as it is here, `AutoModelForCausalLM` takes every "mamba" for fla's own class of this name.
    """
    return use_linear_scan(MambaForCausalLM.from_pretrained(directory))


def build_mamba(config: MambaConfig) -> MambaForCausalLM:
    """transformers' `MambaForCausalLM`, initialised by itself, on `ops.mamba` where mamba-ssm's kernels cannot run."""
    return use_linear_scan(MambaForCausalLM(config))
