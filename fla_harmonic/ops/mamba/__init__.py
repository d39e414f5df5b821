from fla_harmonic.ops.mamba.causal_conv import causal_conv_silu
from fla_harmonic.ops.mamba.naive import naive_selective_scan
from fla_harmonic.ops.mamba.selective_scan import selective_scan, usable_backends

__all__ = ["causal_conv_silu", "naive_selective_scan", "selective_scan", "usable_backends"]
