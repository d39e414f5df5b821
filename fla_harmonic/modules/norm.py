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
        # as in the kernel: the sum is wide, y has x's dtype, and the sum that is returned has the residual's
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
        y = F.rms_norm(total, (self.hidden_size,), None if self.weight is None else self.weight.to(wide), self.eps)
        if self.bias is not None:
            y = y + self.bias
        y = y.to(x.dtype)
        if not prenorm:
            return y
        if residual is not None:
            return y, total.to(residual.dtype)
        return y, total if residual_in_fp32 else x
