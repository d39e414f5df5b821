# registers the backends for the CPU
from fla_harmonic.ops.harmonic import (
    backends,  # noqa: F401
    chunk_harmonic,
    fused_recurrent_harmonic,
    linear_scan,
    naive_recurrent_harmonic,
)

__all__ = ["chunk_harmonic", "fused_recurrent_harmonic", "linear_scan", "naive_recurrent_harmonic"]
