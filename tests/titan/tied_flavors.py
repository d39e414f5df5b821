"""The three families with a flavor `tied` beside their own: small models whose embeddings and head are one table."""

from transformers import MambaConfig

import fla_harmonic.titan  # noqa: F401  (registers the families)
from fla_harmonic.models.harmonic import HarmonicConfig
from fla_harmonic.titan.models.flavors import HARMONIC, LLAMA, MAMBA
from fla_harmonic.titan.models.hf_model import HFModelArgs
from fla_harmonic.titan.models.llama import LlamaArgs

HARMONIC["tied"] = HFModelArgs.of(HarmonicConfig.paper(hidden_size=32, vocab_size=256, tie_word_embeddings=True))
MAMBA["tied"] = HFModelArgs.of(MambaConfig(
    hidden_size=32, vocab_size=256, num_hidden_layers=2, initializer_range=0.02, tie_word_embeddings=True,
))
LLAMA["tied"] = LlamaArgs(dim=32, vocab_size=256, n_layers=2, n_heads=4, multiple_of=16, tie_word_embeddings=True)
