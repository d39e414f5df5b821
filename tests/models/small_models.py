"""Small models for the tests: both presets, each with both readings of the timescales."""

from typing import Any

import torch

from fla_harmonic import HarmonicConfig, HarmonicForCausalLM

VOCAB = 61
COMMON = dict(hidden_size=16, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def config(preset: str, timescale_mode: str = "bounded", **kwargs: Any) -> HarmonicConfig:
    options = {**COMMON, "timescale_mode": timescale_mode, **kwargs}
    if preset == "paper":
        return HarmonicConfig.paper(**options)
    return HarmonicConfig(**{"num_hidden_layers": 2, "intermediate_size": 24, "use_short_conv": True, **options})


def model(preset: str, timescale_mode: str = "bounded", **kwargs: Any) -> HarmonicForCausalLM:
    """With large weights: at the usual 0.02 a leak would drown in the tolerance."""
    torch.manual_seed(0)
    return HarmonicForCausalLM(config(preset, timescale_mode, **{"initializer_range": 0.5, **kwargs})).eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape)
