"""Harmonic: a hierarchy of gated linear recurrences for language models, as a plugin of fla and torchtitan."""

from fla_harmonic.layers import HarmonicAttention
from fla_harmonic.models import HarmonicConfig, HarmonicForCausalLM, HarmonicModel
from fla_harmonic.version import __version__

__all__ = ["HarmonicAttention", "HarmonicConfig", "HarmonicForCausalLM", "HarmonicModel", "__version__"]
