"""
Sizes of the three families, matched by parameter count: within 4% of one another, those named 28M of 27,965,952.

`debug` has a vocabulary of 256 bytes, `28M` that of GPT-2. Tables are never tied. Harmonic has two shapes: the paper's
single layer (`debug-paper`, `28M`) and the stack of blocks (`debug`, `28M-stack`).
"""

from transformers import MambaConfig

from fla_harmonic.models.harmonic import HarmonicConfig
from fla_harmonic.titan.llama import LlamaArgs
from fla_harmonic.titan.model import HFModelArgs

_BYTES, _GPT2 = 256, 50257


def _stack(hidden_size: int, vocab_size: int, intermediate_size: int) -> HFModelArgs:
    return HFModelArgs.of(HarmonicConfig(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
    ))


def _mamba(hidden_size: int, vocab_size: int) -> HFModelArgs:
    # the stock layout: expand 2, state 16, convolution 4; the range is mamba-ssm's. transformers' 0.1 would give an untied
    # head logits of deviation 1.6 at the start, where the other families begin near the uniform distribution
    return HFModelArgs.of(MambaConfig(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_hidden_layers=5,
        initializer_range=0.02,
        tie_word_embeddings=False,
    ))


def _llama(dim: int, vocab_size: int) -> LlamaArgs:
    # SwiGLU of 2.5 times the width
    return LlamaArgs(dim=dim, vocab_size=vocab_size, n_layers=3, n_heads=4, multiple_of=64, ffn_dim_multiplier=0.9)


HARMONIC = {
    "debug": _stack(128, _BYTES, intermediate_size=320),
    "debug-paper": HFModelArgs.of(HarmonicConfig.paper(hidden_size=128, vocab_size=_BYTES)),
    "28M": HFModelArgs.of(HarmonicConfig.paper(hidden_size=256, vocab_size=_GPT2)),
    # the largest multiple of 16 that stays below the paper's count
    "28M-stack": _stack(256, _GPT2, intermediate_size=592),
}
MAMBA = {
    "debug": _mamba(128, _BYTES),
    "28M": _mamba(256, _GPT2),
}
LLAMA = {
    "debug": _llama(128, _BYTES),
    "28M": _llama(256, _GPT2),
}
