from fla_harmonic.ops.harmonic.chunk import chunk_harmonic
from fla_harmonic.ops.harmonic.fused_recurrent import fused_recurrent_harmonic
from fla_harmonic.ops.harmonic.naive import naive_linear_scan, naive_recurrent_harmonic
from fla_harmonic.ops.harmonic.op import linear_scan, usable_backends

__all__ = [
    "chunk_harmonic",
    "fused_recurrent_harmonic",
    "linear_scan",
    "naive_linear_scan",
    "naive_recurrent_harmonic",
    "usable_backends",
]
