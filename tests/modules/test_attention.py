import math

import pytest
import torch
from fla.models.utils import Cache
from hypothesis import given
from hypothesis import strategies as st

from fla_harmonic.modules import Attention

BASE = 100.0


def build(kv_heads: int = 2, window: int | None = None, **kwargs: bool) -> Attention:
    torch.manual_seed(0)
    attention = Attention(16, 4, kv_heads, window_size=window, rope_theta=BASE, layer_idx=0, **kwargs).double()
    with torch.no_grad():
        for p in attention.parameters():
            p.add_(0.5 * torch.randn_like(p))
    return attention


def turned(x: torch.Tensor, t: int) -> torch.Tensor:
    """A head `[D]` at position t: each pair of its two halves is one complex number, turned by its own angle."""
    half = len(x) // 2
    pairs = torch.complex(x[:half], x[half:])
    angles = torch.tensor([t * BASE ** (-i / half) for i in range(half)], dtype=torch.float64)
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag])


def reference(layer: Attention, x: torch.Tensor) -> torch.Tensor:
    """One sequence `[T, hidden]`, one head and token after another."""
    maps = [x @ p.weight.T + (0 if p.bias is None else p.bias) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]
    q, k, v = (y.unflatten(1, (y.shape[1] // layer.head_dim, layer.head_dim)) for y in maps)
    if layer.qk_norm:
        q, k = (y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
                for y, norm in ((q, layer.q_norm), (k, layer.k_norm)))
    rows = []
    for t in range(len(x)):
        begin = 0 if layer.window_size is None else max(0, t - layer.window_size + 1)
        heads = []
        for h in range(layer.num_heads):
            group = h // (layer.num_heads // layer.num_kv_heads)
            scores = torch.stack([turned(q[t, h], t) @ turned(k[s, group], s) for s in range(begin, t + 1)])
            weights = (scores / math.sqrt(layer.head_dim)).exp()
            heads.append((weights / weights.sum()) @ v[begin:t + 1, group])
        rows.append(torch.cat(heads) @ layer.o_proj.weight.T)
    return torch.stack(rows) if rows else x


def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


windows, counts = st.sampled_from([None, 1, 3, 50]), st.sampled_from([1, 2, 4])


@given(kv_heads=counts, window=windows, bias=st.booleans(), norm=st.booleans(), T=st.sampled_from([0, 1, 7]))
def test_attention_equals_a_loop(kv_heads: int, window: int | None, bias: bool, norm: bool, T: int) -> None:
    layer = build(kv_heads, window, qkv_bias=bias, qk_norm=norm)
    x = torch.randn(2, T, 16, dtype=torch.float64, requires_grad=True)
    results = [[layer(x)[0]], [torch.stack([reference(layer, row) for row in x])]]
    for result in results:
        result.extend(torch.autograd.grad(result[0].sin().sum(), [x, *layer.parameters()], materialize_grads=True))
    for actual, expected in zip(*results, strict=True):
        compare(actual, expected)


@given(data=st.data(), window=windows)
def test_pads_and_pieces_equal_the_tokens_alone(data: st.DataObject, window: int | None) -> None:
    layer, S = build(window=window), 12
    masked = data.draw(st.booleans())
    mask = torch.tensor([data.draw(st.lists(st.booleans(), min_size=S, max_size=S)) for _ in range(3)])
    mask = mask if masked else torch.ones_like(mask)
    cuts = sorted(data.draw(st.lists(st.integers(0, S), max_size=4)))
    x = torch.randn(3, S, 16, dtype=torch.float64).masked_fill(~mask.unsqueeze(-1), torch.nan).requires_grad_()
    cache, parts = Cache(), []
    for i, j in zip([0, *cuts], [*cuts, S], strict=True):
        options = dict(attention_mask=mask[:, data.draw(st.sampled_from([0, i])):j]) if masked else {}
        o, attentions, returned = layer(x[:, i:j], past_key_values=cache, **options)
        assert attentions is None
        assert returned is cache
        assert cache.get_seq_length() == j
        parts.append(o)
    o = torch.cat(parts, 1)
    assert not o[~mask].any()
    gradient, = torch.autograd.grad(o.sin().sum(), x)
    assert not gradient[~mask].any()
    for row, kept in enumerate(mask):
        alone = x[row:row + 1, kept].detach().requires_grad_()
        expected = layer(alone)[0]
        compare(o[row, kept], expected[0])
        compare(gradient[row, kept], torch.autograd.grad(expected.sin().sum(), alone)[0][0])
    if window is not None:
        assert cache[0]["attn_state"][0].shape == (3, min(window, S), 8)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), window=windows)
def test_packed_documents_equal_separate_ones(lengths: list[int], window: int | None) -> None:
    layer = build(window=window)
    x = torch.randn(1, sum(lengths), 16, dtype=torch.float64)
    # borders win over a mask
    o = layer(x, torch.zeros(1, sum(lengths), dtype=torch.long), cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))[0]
    compare(o, torch.cat([layer(document)[0] for document in x.split(lengths, 1)], 1))


@pytest.mark.parametrize("window", [None, 3])
def test_rows_of_the_cache_are_reordered(window: int | None) -> None:
    layer, x = build(window=window), torch.randn(3, 9, 16, dtype=torch.float64)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, :4] = mask[2, 2:5] = False
    cache, order = Cache(), torch.tensor([2, 0, 0])
    expected = layer(x, attention_mask=mask)[0]
    layer(x[:, :6], attention_mask=mask[:, :6], past_key_values=cache)
    cache.reorder_cache(order)
    compare(layer(x[order, 6:], attention_mask=mask[order], past_key_values=cache)[0], expected[order, 6:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_narrow_attention_keeps_its_dtype_and_positions(dtype: torch.dtype) -> None:
    layer, x = build(), torch.randn(2, 300, 16)
    expected = layer(x.double())[0]
    o = layer.to(dtype)(x.to(dtype))[0]
    assert o.dtype == dtype
    bound = 1e-4 if dtype == torch.float32 else 5e-2
    assert (o.double() - expected).abs().max() < bound * expected.abs().max()


def test_parameters_are_named_as_in_fla() -> None:
    names = {f"{part}_proj.weight" for part in "qkvo"} | {f"{part}_proj.bias" for part in "qkv"}
    assert set(build(qkv_bias=True, qk_norm=True).state_dict()) == names | {"q_norm.weight", "k_norm.weight"}


def test_impossible_options_and_inputs_are_named() -> None:
    for sizes, message in (((16, 3), "`num_heads` must give heads of an even size; got 3 with hidden_size=16"),
                           ((12, 4), "`num_heads` must give heads of an even size; got 4 with hidden_size=12"),
                           ((16, 4, 3), "`num_kv_heads` must divide num_heads=4; got 3")):
        with pytest.raises(ValueError, match=message):
            Attention(*sizes)
    layer, x = build(), torch.randn(2, 5, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="`cu_seqlens` needs a batch of 1; got 2"):
        layer(x, cu_seqlens=torch.tensor([0, 10]))
    with pytest.raises(ValueError, match="`cu_seqlens` must rise from 0"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="keep no cache of packed documents"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 5]), past_key_values=Cache())
    with pytest.raises(ValueError, match=r"shape \[2, S\] with S >= 5; got \(2, 5, 5\)"):
        layer(x, attention_mask=torch.ones(2, 5, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="requires `layer_idx`"):
        Attention(16, 4)(x.float(), past_key_values=Cache())
    cache = Cache()
    layer(x, past_key_values=cache)
    with pytest.raises(ValueError, match="must hold one sequence for each of the 1 rows; it holds 2"):
        layer(x[:1], past_key_values=cache)
