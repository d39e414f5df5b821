from fla_harmonic.ops.harmonic.chunk import chunk_harmonic, fused_recurrent_harmonic, linear_scan
from fla_harmonic.ops.harmonic.naive import naive_linear_scan, naive_recurrent_harmonic

__all__ = [
    "chunk_harmonic",
    "fused_recurrent_harmonic",
    "linear_scan",
    "naive_linear_scan",
    "naive_recurrent_harmonic",
]
