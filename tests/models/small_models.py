"""Small models for the tests: both presets, each with both readings of the timescales."""

from typing import Any

import pytest
import torch
from fla.models.utils import Cache

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


def nets(**kwargs: Any) -> pytest.MarkDecorator:
    """Parametrises `net`: both presets, both readings of the timescales, with and without the short convolution."""
    return pytest.mark.parametrize("net", [
        pytest.param(lambda p=preset, m=mode, c=conv, **k: model(p, m, use_short_conv=c, **{**kwargs, **k}),
                     id=f"{preset}-{mode}-{'conv' if conv else 'plain'}")
        for preset in ("paper", "stack") for mode in ("bounded", "init") for conv in (False, True)])


def assert_same_cache(actual: Cache, expected: Cache, atol: float = 1e-5) -> None:
    """Same length, and the same states of every level and convolution, the recurrent ones in float32."""
    assert len(actual) == len(expected) > 0
    assert actual.get_seq_length() == expected.get_seq_length()
    for x, y in zip(actual, expected, strict=True):
        for state, other in zip(x["recurrent_state"], y["recurrent_state"], strict=True):
            assert state.dtype == torch.float32
            torch.testing.assert_close(state, other, rtol=0, atol=atol)
        assert (x["conv_state"] is None) == (y["conv_state"] is None)
        if x["conv_state"] is not None:
            torch.testing.assert_close(x["conv_state"], y["conv_state"], rtol=0, atol=atol)
