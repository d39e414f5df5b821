import torch
import torch.nn.functional as F
from fla.modules import RMSNorm as FusedRMSNorm


class RMSNorm(FusedRMSNorm):
    """fla's fused RMSNorm, with optional residual add; in plain torch on the CPU."""

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if x.device.type != "cpu":
            return super().forward(x, residual, prenorm, residual_in_fp32)
        if residual is not None:
            x = x + residual
        y = F.rms_norm(x.float(), (self.hidden_size,), self.weight, self.eps)
        if self.bias is not None:
            y = y + self.bias
        y = y.to(x.dtype)
        return (y, x.float() if residual_in_fp32 else x) if prenorm else y
