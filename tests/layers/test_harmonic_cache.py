from typing import Any

import pytest
import torch
from decoding import close
from fla.models.utils import Cache
from hypothesis import given
from hypothesis import strategies as st
from test_harmonic_layer import options, randomised

from fla_harmonic import HarmonicAttention

T = 140
splits = st.lists(st.sampled_from([1, 3, 63, 64, 65, 130]), max_size=4).map(sorted)
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": dict(gate_ratio=2, use_output_gate=False, use_output_proj=False),
    "conv": dict(use_short_conv=True, conv_bias=True, expand_ratio=1.5),
    "init": dict(timescale_mode="init", use_prediction_error=False, mode="fused_recurrent"),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def build(variant: str) -> HarmonicAttention:
    torch.manual_seed(0)
    return randomised(HarmonicAttention(hidden_size=8, layer_idx=0, **VARIANTS[variant])).eval()


def assert_same_states(actual: Cache, expected: Cache) -> None:
    assert actual.get_seq_length() == expected.get_seq_length()
    for x, y in zip(actual[0]["recurrent_state"], expected[0]["recurrent_state"], strict=True):
        assert x.dtype == torch.float32
        close(x, y)
    assert (actual[0]["conv_state"] is None) == (expected[0]["conv_state"] is None)
    if actual[0]["conv_state"] is not None:
        close(actual[0]["conv_state"], expected[0]["conv_state"])


def run(layer: HarmonicAttention, x: torch.Tensor, cuts: list[int], cache: Cache, **kwargs: Any) -> torch.Tensor:
    parts = [layer(x[:, i:j], past_key_values=cache, use_cache=True, **kwargs)[0]
             for i, j in zip([0, *cuts], [*cuts, x.shape[1]], strict=True)]
    return torch.cat(parts, 1)


@variants
@given(cuts=splits)
def test_pieces_equal_the_whole(variant: str, cuts: list[int]) -> None:
    layer, x = build(variant), torch.randn(2, T, 8)
    whole, pieces = Cache(), Cache()
    expected = run(layer, x, [], whole)
    close(run(layer, x, cuts, pieces), expected)
    assert_same_states(pieces, whole)
    assert pieces.get_seq_length() == T
    close(layer(x)[0], expected)


@variants
def test_token_by_token_equals_the_whole(variant: str) -> None:
    layer, x = build(variant), torch.randn(2, T, 8)
    whole, tokens = Cache(), Cache()
    with torch.no_grad():
        expected = run(layer, x, [], whole)
        close(run(layer, x, list(range(1, T)), tokens), expected)
    assert_same_states(tokens, whole)


@given(kwargs=options(), cuts=st.lists(st.integers(0, 20), max_size=3).map(sorted))
def test_pieces_equal_the_whole_for_any_option(kwargs: dict[str, Any], cuts: list[int]) -> None:
    layer = randomised(HarmonicAttention(**kwargs, layer_idx=0)).eval()
    x, whole, pieces = torch.randn(2, 20, 8), Cache(), Cache()
    close(run(layer, x, cuts, pieces), run(layer, x, [], whole))
    assert_same_states(pieces, whole)


@variants
def test_gradient_flows_through_a_cached_state(variant: str) -> None:
    layer, x = build(variant), torch.randn(2, 40, 8, requires_grad=True)
    gradients = []
    for cuts in ([], [1, 30]):
        o = run(layer, x, cuts, Cache())
        gradients.append(torch.autograd.grad(o[:, -1].sum(), x)[0])
    close(*gradients)
    assert gradients[0][:, 0].any()


@variants
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@given(data=st.data())
def test_padded_rows_equal_unpadded_runs(variant: str, warm: bool, data: st.DataObject) -> None:
    layer, B, S = build(variant), 3, 30
    kept = [data.draw(st.lists(st.booleans(), min_size=S, max_size=S)) for _ in range(B - 1)]
    # left, right and interior pads, and a row of nothing else
    mask = torch.tensor([*kept, data.draw(st.sampled_from([[False] * S, [False] * 7 + [True] * (S - 7)]))])
    before, x = torch.randn(B, 5, 8), torch.randn(B, S, 8, requires_grad=True)
    cache = Cache()
    if warm:
        layer(before, past_key_values=cache)
    o = layer(x, attention_mask=mask.long(), past_key_values=cache)[0]
    assert not o[~mask].any()
    assert cache.get_seq_length() == S + (5 if warm else 0)
    gradient, = torch.autograd.grad(o.sin().sum(), x)
    assert not gradient[~mask].any()

    for row in range(B):
        alone = Cache()
        if warm:
            layer(before[row:row + 1], past_key_values=alone)
        expected = layer(x[row:row + 1, mask[row]], past_key_values=alone)[0]
        close(o[row, mask[row]], expected[0])
        for level, state in enumerate(cache[0]["recurrent_state"]):
            close(state[row:row + 1], alone[0]["recurrent_state"][level])
        if layer.use_short_conv:
            close(cache[0]["conv_state"][row:row + 1], alone[0]["conv_state"])


@variants
def test_values_in_pads_change_nothing(variant: str) -> None:
    layer, x = build(variant), torch.randn(2, 9, 8)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = mask[1, 4:6] = False
    other = x.masked_fill(~mask[..., None], torch.nan)
    assert torch.equal(layer(other, attention_mask=mask)[0], layer(x, attention_mask=mask)[0])


@variants
@pytest.mark.parametrize("cuts", [[], [3, 64, 65]], ids=["prefill", "pieces"])
def test_left_padded_batch_decodes_as_its_rows_alone(variant: str, cuts: list[int]) -> None:
    layer, x, lengths = build(variant), torch.randn(3, 70, 8), (70, 66, 1)
    mask = torch.stack([torch.arange(70) >= 70 - n for n in lengths]).long()
    cache, parts = Cache(), []
    # the mask covers the past too, as in generation
    for i, j in zip([0, *cuts], [*cuts, 70], strict=True):
        parts.append(layer(x[:, i:j], attention_mask=mask[:, :j], past_key_values=cache)[0])
    o = torch.cat(parts, 1)
    for row, n in enumerate(lengths):
        close(o[row, -n:], layer(x[row:row + 1, -n:])[0][0])


@variants
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(sum))
def test_packed_documents_equal_separate_runs(variant: str, lengths: list[int]) -> None:
    layer, x = build(variant), torch.randn(1, sum(lengths), 8)
    cu_seqlens, cache = torch.tensor([0, *lengths]).cumsum(0), Cache()
    # borders win over a mask
    o = layer(x, torch.zeros(1, sum(lengths)), past_key_values=cache, cu_seqlens=cu_seqlens)[0]
    for n, part in enumerate(x.split(lengths, 1)):
        alone = Cache()
        expected = layer(part, past_key_values=alone)[0]
        close(o[:, cu_seqlens[n]:cu_seqlens[n + 1]], expected)
        for level, state in enumerate(cache[0]["recurrent_state"]):
            close(state[n:n + 1], alone[0]["recurrent_state"][level])


@variants
def test_documents_do_not_see_one_another(variant: str) -> None:
    layer, borders = build(variant), torch.tensor([0, 65, 66, 130])
    x = torch.randn(1, 130, 8, requires_grad=True)
    o = layer(x, cu_seqlens=borders)[0]
    for n in range(3):
        inside = torch.zeros(130, dtype=torch.bool)
        inside[borders[n]:borders[n + 1]] = True
        gradient, = torch.autograd.grad(o[:, inside].sin().sum(), x, retain_graph=True)
        assert not gradient[:, ~inside].any()
        edited = torch.where(inside[:, None], 2 * x, x)
        assert torch.equal(layer(edited, cu_seqlens=borders)[0][:, ~inside], o[:, ~inside])


@variants
def test_cache_is_reordered_and_repeated_with_its_rows(variant: str) -> None:
    layer, x = build(variant), torch.randn(3, 12, 8)
    cache, expected = Cache(), layer(x)[0]
    layer(x[:, :7], past_key_values=cache)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    close(layer(x[order, 7:], past_key_values=cache)[0], expected[order, 7:])
