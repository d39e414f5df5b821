from fla_harmonic.models.mamba.modeling_mamba import build_mamba, load_mamba

__all__ = ["build_mamba", "load_mamba"]
