from fla_harmonic.models.harmonic import HarmonicConfig, HarmonicForCausalLM, HarmonicModel

__all__ = ["HarmonicConfig", "HarmonicForCausalLM", "HarmonicModel"]
