from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import CONFIGS, source, tokens
from torch import nn

from fla_harmonic import HarmonicAttention
from fla_harmonic.hallamonic.attention_init import INPUT_STD, OUTPUT_STD, AttentionWeights, init_from_attention
from fla_harmonic.hallamonic.convert import convert_model, layer_options

every_source = pytest.mark.parametrize("name", list(CONFIGS))


def attention_of(name: str, layer: int = 1) -> AttentionWeights:
    model = source(name)
    return AttentionWeights.of(model.model.layers[layer], model.config)


def product(maps: nn.Module) -> torch.Tensor:
    """The matrix of a linear or low-rank map."""
    return maps.weight if isinstance(maps, nn.Linear) else maps[1].weight @ maps[0].weight


def layer_of(attention: AttentionWeights, **options: Any) -> HarmonicAttention:
    layer = HarmonicAttention(hidden_size=32, **{"use_output_gate": False, **options})
    init_from_attention(layer, attention)
    return layer


@every_source
@torch.no_grad()
def test_layer_begins_as_moving_averages_of_the_values(name: str) -> None:
    model = source(name)
    attention = attention_of(name)
    layer = layer_of(attention, **layer_options(model.config))
    x = torch.randn(1, 30, 32) * attention.input_scale
    value_std = (attention.value * attention.input_scale).square().sum(1).mean().sqrt()
    expected = torch.zeros(1, 30, 32)
    # head h of four reads the values of group h // 2, and is the group's copy h % 2
    values = (x @ attention.value.T / value_std * INPUT_STD).unflatten(2, (2, 8))
    first = None
    for index, level in enumerate(layer.levels):
        a_min, a_max = level.decay_range
        decay = (a_min + (a_max - a_min) * torch.sigmoid(level.timescale.bias)).unflatten(0, (2, 2, 8))
        read = values if index == 0 else F.layer_norm(x, (32,)) @ attention.value.T * (
            attention.input_scale.square().mean().sqrt() / value_std * INPUT_STD)
        read = read.view(1, 30, 1, 2, 8).expand(1, 30, 2, 2, 8)
        if index == 2:
            read = INPUT_STD * first.mean(2, keepdim=True).expand(1, 30, 2, 2, 8)
        h, states = torch.zeros(1, 2, 2, 8), []
        for t in range(30):
            h = decay * h + (1 - decay) * torch.tanh(read[:, t])
            states.append(h)
        y = F.layer_norm(torch.stack(states, 1).flatten(2), (32,)).unflatten(2, (2, 2, 8))
        first = y if index == 0 else first
        for head in range(4):
            columns = attention.output[:, 8 * head:8 * head + 8]
            expected += y[:, :, head % 2, head // 2] @ columns.T * OUTPUT_STD * value_std / 3
    if attention.value_bias is not None:
        expected += attention.output @ attention.value_bias.view(2, 1, 8).expand(2, 2, 8).flatten()
    # the norms of slow levels magnify rounding at the first tokens
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-3, atol=5e-4)


@every_source
@torch.no_grad()
def test_what_attention_returns_for_zeros_is_exact(name: str) -> None:
    original = source(name)
    mixer = convert_model(original, [1]).model.model.layers[1].self_attn
    attention = original.model.layers[1].self_attn
    x = torch.zeros(1, 9, 32)
    position = original.model.rotary_emb(x, torch.arange(9)[None])
    expected, _ = attention(x, position_embeddings=position, attention_mask=None)
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
@torch.no_grad()
def test_attention_is_nearer_than_random(name: str) -> None:
    original, x = source(name, initializer_range=0.1), tokens(2, 40)
    outputs = {}
    for kind, model in {"source": original, "attention": convert_model(original, [1]).model,
                        "random": convert_model(original, [1], "random").model}.items():
        handle = model.model.layers[1].self_attn.register_forward_hook(
            lambda module, inputs, output, kind=kind: outputs.update({kind: output[0]}))
        model(x)
        handle.remove()
    near, far = (F.cosine_similarity(outputs[kind], outputs["source"], dim=-1).mean() for kind in ("attention", "random"))
    assert near > 0.6
    assert abs(far) < 0.3


@settings(max_examples=15)
@given(rank=st.integers(1, 24), copies=st.integers(1, 2), error=st.booleans(), levels=st.integers(1, 4))
def test_low_rank_maps_keep_the_largest_directions(rank: int, copies: int, error: bool, levels: int) -> None:
    attention = attention_of("llama")
    options: dict[str, Any] = dict(expand_ratio=copies / 2, use_prediction_error=error,
                                   timescales=((2, 8), (10, 40), (50, 90), (100, 300))[:levels])
    full, low = layer_of(attention, **options), layer_of(attention, gate_rank=rank, **options)
    torch.testing.assert_close(full.o_proj.weight, low.o_proj.weight)
    g = attention.input_scale
    for exact, level in zip(full.levels, low.levels, strict=True):
        assert not product(level.gate_proj).any()
        if rank >= 16:
            torch.testing.assert_close(product(level.input_proj), product(exact.input_proj), rtol=1e-4, atol=1e-5)
    # Eckart and Young: no map of this rank is nearer
    exact, kept = (product(layer.levels[0].input_proj) * g for layer in (full, low))
    dropped = torch.linalg.svdvals(exact)[rank:]
    torch.testing.assert_close((exact - kept).norm(), dropped.norm(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [
    {"use_output_gate": True}, {"use_short_conv": True}, {"gate_ratio": 2}, {"use_output_proj": False},
    {"expand_ratio": 0.75}, {"expand_ratio": 2},
], ids=str)
def test_a_layer_that_cannot_begin_as_attention_is_refused(options: dict[str, Any]) -> None:
    layer = HarmonicAttention(hidden_size=32, **{"use_output_gate": False, **options})
    with pytest.raises(ValueError, match=r"a layer that begins as attention needs .* got .* Pass"):
        init_from_attention(layer, attention_of("llama"))
