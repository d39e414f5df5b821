"""fla's fused modules with torch twins: on a CPU tensor, where Triton does not run, the twin computes the same."""

from fla_harmonic.modules.attention import Attention
from fla_harmonic.modules.mlp import MLP, GatedMLP
from fla_harmonic.modules.norm import RMSNorm
from fla_harmonic.modules.padding import padding_mask
from fla_harmonic.modules.short_conv import ShortConvolution

__all__ = ["MLP", "Attention", "GatedMLP", "RMSNorm", "ShortConvolution", "padding_mask"]
