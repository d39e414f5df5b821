"""Harmonic: a hierarchy of gated linear recurrences for language models, as a plugin of fla and torchtitan."""

import warnings

with warnings.catch_warnings():
    # fla warns that it falls back to the CPU where there is no GPU; here the CPU is supported, not a fallback
    warnings.filterwarnings("ignore", "Triton is not supported on current platform")
    import fla.utils  # noqa: F401

from fla_harmonic.hallamonic import HallamonicConfig, HallamonicForCausalLM, HallamonicModel
from fla_harmonic.layers import HarmonicAttention
from fla_harmonic.models import HarmonicConfig, HarmonicForCausalLM, HarmonicModel
from fla_harmonic.version import __version__

__all__ = [
    "HallamonicConfig", "HallamonicForCausalLM", "HallamonicModel", "HarmonicAttention", "HarmonicConfig",
    "HarmonicForCausalLM", "HarmonicModel", "__version__",
]
