from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from fla.modules import GatedMLP as FusedGatedMLP


class GatedMLP(FusedGatedMLP):
    """fla's SwiGLU MLP; in plain torch on the CPU."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if x.device.type != "cpu":
            return super().forward(x, **kwargs)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MLP(nn.Module):
    """`H -> intermediate_size -> H` with SiLU and without biases: the feed-forward part of the paper's layer."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))
