from fla_harmonic.layers.harmonic import HarmonicAttention

__all__ = ["HarmonicAttention"]
