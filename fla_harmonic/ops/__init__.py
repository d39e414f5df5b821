from fla_harmonic.ops.harmonic import chunk_harmonic, fused_recurrent_harmonic, linear_scan, naive_recurrent_harmonic

__all__ = ["chunk_harmonic", "fused_recurrent_harmonic", "linear_scan", "naive_recurrent_harmonic"]
