"""The generic tests that fla runs on each of its models (its `tests/models/test_modeling_base.py`), on the CPU."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fla_harmonic import HarmonicConfig


def create_model(
    layers: int, heads: int, head_dim: int, dtype: torch.dtype, use_l2warp: bool = True, **kwargs: Any,
) -> PreTrainedModel:
    # fla passes these fields to the configuration of every model
    config = HarmonicConfig(
        hidden_size=heads * head_dim, num_hidden_layers=layers, num_heads=heads, head_dim=head_dim, use_l2warp=use_l2warp,
        vocab_size=1000, **kwargs)
    return AutoModelForCausalLM.from_config(config).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, ratio: float) -> None:
    """fla's measure: the root mean square of the error over that of the expected values."""
    assert actual.shape == expected.shape
    error, base = (x.double().square().mean().sqrt() for x in (actual - expected, expected))
    assert error < ratio * base


@pytest.mark.parametrize(("B", "T", "dtype", "use_l2warp"), [
    pytest.param(4, 256, torch.float32, True, id="fp32-l2warp"),
    pytest.param(4, 256, torch.float32, False, id="fp32"),
    pytest.param(2, 129, torch.bfloat16, False, id="bf16"),
])
@pytest.mark.parametrize("options", [{}, {"use_short_conv": True}], ids=["plain", "conv"])
def test_modeling(B: int, T: int, dtype: torch.dtype, use_l2warp: bool, options: dict[str, Any]) -> None:
    model = create_model(4, 4, 16, dtype, use_l2warp, **options)
    x = torch.randint(1000, (B, T))
    fixed = model(x, output_hidden_states=True).hidden_states[-1]
    assert fixed.shape == (B, T, 64)
    cu_seqlens = torch.arange(0, B * T + 1, T, dtype=torch.int32)
    packed = model(x.view(1, B * T), output_hidden_states=True, cu_seqlens=cu_seqlens).hidden_states[-1]
    assert_close(packed, fixed.view(1, B * T, -1), 1e-3 if dtype == torch.float32 else 2e-2)
    packed.backward(torch.randn_like(packed))
    # the head has no part in the hidden states
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.model.parameters())

    model.zero_grad()
    model(x, labels=x).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"use_short_conv": True, "attn_mode": "fused_recurrent"}], ids=["plain", "conv"])
@torch.no_grad()
def test_generation(options: dict[str, Any]) -> None:
    B, T, chunk = 4, 128, 32
    model = create_model(2, 4, 16, torch.float32, **options).eval()
    x, starts = torch.randint(1000, (B, T)), torch.randint(0, chunk - 1, (B,))
    mask = torch.arange(T) >= starts[:, None]
    expected = torch.cat([model(x[i:i + 1, start:], use_cache=False).logits for i, start in enumerate(starts)], 1)

    out = model(x[:, :chunk], attention_mask=mask[:, :chunk], use_cache=True, past_key_values=None)
    logits = [out.logits]
    for t in range(chunk, T):
        out = model(x[:, t:t + 1], attention_mask=mask[:, :t + 1], use_cache=True, past_key_values=out.past_key_values)
        logits.append(out.logits)
    decoded = torch.cat(logits, 1)
    assert_close(torch.cat([decoded[i:i + 1, start:] for i, start in enumerate(starts)], 1), expected, 2e-3)
