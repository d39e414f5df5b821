from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from fla.modules import GatedMLP as FusedGatedMLP


class GatedMLP(FusedGatedMLP):
    """fla's gated MLP, SwiGLU or PowGLU; in plain torch on the CPU."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if x.device.type != "cpu":
            return super().forward(x, **kwargs)
        gate = self.gate_proj(x)
        if self.hidden_act == "powlu":
            # x^(m / (sqrt(x) + 1)) sigmoid(x) where x > 0; the root of a masked entry would have an infinite slope
            base = torch.where(gate > 0, gate, 1.0)
            power = base ** (self.powglu_power / (base.sqrt() + 1))
            gate = torch.where(gate > 0, power, gate) * torch.sigmoid(gate)
        else:
            gate = F.silu(gate)
        return self.down_proj(gate * self.up_proj(x))


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
