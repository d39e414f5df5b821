from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from fla_harmonic.models.harmonic.configuration_harmonic import HarmonicConfig
from fla_harmonic.models.harmonic.modeling_harmonic import HarmonicForCausalLM, HarmonicModel

AutoConfig.register(HarmonicConfig.model_type, HarmonicConfig, exist_ok=True)
AutoModel.register(HarmonicConfig, HarmonicModel, exist_ok=True)
AutoModelForCausalLM.register(HarmonicConfig, HarmonicForCausalLM, exist_ok=True)

__all__ = ["HarmonicConfig", "HarmonicForCausalLM", "HarmonicModel"]
