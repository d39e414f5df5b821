"""Hallamonic: a pretrained Llama-like model whose attention layers become Harmonic layers."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from fla_harmonic.hallamonic.configuration_hallamonic import HallamonicConfig
from fla_harmonic.hallamonic.modeling_hallamonic import HallamonicForCausalLM, HallamonicModel

AutoConfig.register(HallamonicConfig.model_type, HallamonicConfig, exist_ok=True)
AutoModel.register(HallamonicConfig, HallamonicModel, exist_ok=True)
AutoModelForCausalLM.register(HallamonicConfig, HallamonicForCausalLM, exist_ok=True)

__all__ = ["HallamonicConfig", "HallamonicForCausalLM", "HallamonicModel"]
