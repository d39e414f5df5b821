import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fla.models.utils import Cache
from harmonic_reference import reference
from hypothesis import given
from hypothesis import strategies as st

from fla_harmonic import HarmonicAttention
from fla_harmonic.layers.harmonic import TIMESCALES

RANGES = ((2.2, 8.3), (10.0, 40.0), (125.0, 1000.0), (2000.0, 9000.0))


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Any valid combination of the layer's options, in small."""
    use_output_proj = draw(st.booleans())
    maps = draw(st.sampled_from([{}, {"gate_ratio": 2}, {"gate_rank": 3}]))
    return dict(
        mode=draw(st.sampled_from(["chunk", "fused_recurrent"])),
        hidden_size=8,
        expand_ratio=draw(st.sampled_from([0.5, 1, 1.5, 2])) if use_output_proj else 1,
        timescales=draw(st.lists(st.sampled_from(RANGES), min_size=1, max_size=4)),
        timescale_mode=draw(st.sampled_from(["bounded", "init"])),
        use_prediction_error=draw(st.booleans()),
        use_output_gate=draw(st.booleans()),
        use_output_proj=use_output_proj,
        use_short_conv=draw(st.booleans()),
        conv_size=draw(st.integers(1, 4)),
        conv_bias=draw(st.booleans()),
        **maps,
    )


def randomised(layer: HarmonicAttention) -> HarmonicAttention:
    """Moves every parameter off its initial value, so that a norm's weight or a bias that is left out shows."""
    with torch.no_grad():
        for p in layer.parameters():
            p += 0.3 * torch.randn_like(p)
    return layer


@given(kwargs=options(), T=st.sampled_from([1, 2, 9, 17]))
def test_layer_equals_the_equations_of_the_paper(kwargs: dict[str, Any], T: int) -> None:
    layer = randomised(HarmonicAttention(**kwargs, layer_idx=0)).double()
    x = torch.randn(2, T, 8, dtype=torch.float64, requires_grad=True)
    cache = Cache()
    o, attentions, returned = layer(x, past_key_values=cache)
    assert attentions is None
    assert returned is cache
    assert o.shape == x.shape
    results = [[o, *cache[0]["recurrent_state"]], [*reference(layer, x)]]
    results[1] = [results[1][0], *results[1][1]]
    leaves = [x, *layer.parameters()]
    for result in results:
        loss = sum((i + 1) * part.sin().sum() for i, part in enumerate(result))
        result.extend(torch.autograd.grad(loss, leaves, materialize_grads=True))
    for actual, expected in zip(*results, strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@given(kwargs=options())
def test_every_parameter_is_trained(kwargs: dict[str, Any]) -> None:
    layer = randomised(HarmonicAttention(**kwargs))
    layer(torch.randn(2, 9, 8))[0].sin().sum().backward()
    idle = {name for name, p in layer.named_parameters() if p.grad is None or not p.grad.any()}
    assert not idle


@given(kwargs=options(), T=st.integers(0, 9))
def test_float32_layer_equals_the_float64_one(kwargs: dict[str, Any], T: int) -> None:
    layer = randomised(HarmonicAttention(**kwargs))
    x = torch.randn(2, T, 8)
    o = layer(x)[0]
    assert (o.shape, o.dtype) == (x.shape, torch.float32)
    torch.testing.assert_close(o.double(), layer.double()(x.double())[0], rtol=1e-4, atol=1e-4)


def timescales_at_rest(layer: HarmonicAttention) -> list[torch.Tensor]:
    """`tau = 1 / (1 - A)` of each channel at zero gate logits, computed in float64."""
    taus = []
    for level in layer.levels:
        a_min, a_max = level.decay_range
        taus.append(1 / ((1 - a_max) + (a_max - a_min) * torch.sigmoid(-level.timescale.bias.detach().double())))
    return taus


def assert_spread(layer: HarmonicAttention) -> None:
    for tau, (low, high) in zip(timescales_at_rest(layer), layer.timescales, strict=True):
        # logarithms rise in equal steps; half a step is left at either end
        step = math.log(high / low) / len(tau)
        expected = torch.exp(math.log(low) + step * (torch.arange(len(tau), dtype=torch.float64) + 0.5))
        torch.testing.assert_close(tau, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("timescale_mode", ["bounded", "init"])
@pytest.mark.parametrize("maps", [{}, {"gate_ratio": 2}, {"gate_rank": 4}], ids=["linear", "mlp", "low-rank"])
def test_channels_spread_log_uniformly_over_the_range(timescale_mode: str, maps: dict[str, int]) -> None:
    options = dict(hidden_size=64, timescales=RANGES, timescale_mode=timescale_mode, **maps)
    assert_spread(HarmonicAttention(**options))

    with torch.device("meta"):
        layer = HarmonicAttention(**options)
    layer.to_empty(device="cpu")
    for p in layer.parameters():
        torch.nn.init.constant_(p, torch.nan)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not any(p.isnan().any() for p in layer.parameters())
    assert_spread(layer)


@given(
    low=st.floats(1.001, 1e4), ratio=st.floats(1.01, 1e3), mode=st.sampled_from(["bounded", "init"]), size=st.integers(1, 64))
def test_any_range_of_timescales_is_met(low: float, ratio: float, mode: str, size: int) -> None:
    assert_spread(HarmonicAttention(hidden_size=size, timescales=[(low, low * ratio)], timescale_mode=mode))


@given(scale=st.sampled_from([0.0, 1.0, 1e4]))
def test_bounded_timescales_never_leave_their_range(scale: float) -> None:
    layer = HarmonicAttention(hidden_size=16, timescales=RANGES)
    for level, (low, high) in zip(layer.levels, RANGES, strict=True):
        u, _ = level(scale * torch.randn(1, 50, 16))
        a_min, a_max = level.decay_range
        tau = 1 / ((1 - a_max) + (a_max - a_min) * torch.sigmoid(-u.double()))
        assert tau.min() >= low * (1 - 1e-6)
        assert tau.max() <= high * (1 + 1e-6)


def test_default_is_the_papers_hierarchy() -> None:
    layer = HarmonicAttention(hidden_size=8)
    assert layer.timescales == TIMESCALES == ((2.2, 8.3), (10, 40), (125, 1000))
    ranges = [tuple(round(a, 3) for a in level.decay_range) for level in layer.levels]
    # 2.2 and 8.3 tokens are the paper's decays of 0.55 and 0.88, rounded
    assert ranges == [(0.545, 0.88), (0.9, 0.975), (0.992, 0.999)]


def test_timescale_biases_are_exempt_from_weight_decay() -> None:
    with torch.device("meta"):
        layer = HarmonicAttention(hidden_size=8)
    layer.to_empty(device="cpu")
    for level in layer.levels:
        level.timescale.reset_parameters()
    assert marked(layer) == {f"levels.{i}.timescale.bias" for i in range(3)}


def marked(layer: torch.nn.Module) -> set[str]:
    return {name for name, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}


def assigned(layer: HarmonicAttention) -> HarmonicAttention:
    with torch.device("meta"):
        twin = HarmonicAttention(hidden_size=8)
    twin.load_state_dict(layer.state_dict(), assign=True)
    return twin


@pytest.mark.parametrize("replace", [
    copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), lambda layer: layer.bfloat16(),
    lambda layer: layer.to_empty(device="meta"), assigned,
], ids=["deepcopy", "pickle", "cast", "empty", "assign"])
def test_exemption_from_weight_decay_outlives_the_parameter(
    replace: Callable[[HarmonicAttention], HarmonicAttention],
) -> None:
    layer = HarmonicAttention(hidden_size=8)
    layer = replace(layer)
    assert marked(layer) == {f"levels.{i}.timescale.bias" for i in range(3)}


@pytest.mark.parametrize("timescale_mode", ["bounded", "init"])
def test_narrow_logits_keep_the_timescales_on_average(timescale_mode: str) -> None:
    layer = HarmonicAttention(hidden_size=64, timescale_mode=timescale_mode)
    # as spread as the logits of a new model
    gate = 0.3 * torch.randn(1, 4000, 64).bfloat16()
    for level in layer.levels:
        u = level.timescale(gate)
        assert u.dtype == torch.bfloat16
        taus = []
        for logits in (u.double(), gate.double() + level.timescale.bias.double()):
            a_min, a_max = level.decay_range
            taus.append(1 / ((1 - a_max) + (a_max - a_min) * torch.sigmoid(-logits)))
        # a bias rounded to bfloat16 would be off by up to 1.6% in every token
        assert (taus[0].mean((0, 1)) / taus[1].mean((0, 1)) - 1).abs().max() < 2e-3
        assert (taus[0] / taus[1] - 1).abs().max() < 0.04


@given(kwargs=options())
def test_state_size_counts_what_the_cache_holds(kwargs: dict[str, Any]) -> None:
    layer, cache = HarmonicAttention(**kwargs, layer_idx=0), Cache()
    for T in (1, 6):
        layer(torch.randn(1, T, 8), past_key_values=cache)
        state = cache[0]
        held = sum(s.numel() for s in state["recurrent_state"])
        held += 0 if state["conv_state"] is None else state["conv_state"].numel()
        assert layer.state_size() == held


@pytest.mark.parametrize("expand_ratio", [0.29, 0.57, 1.13])
def test_fractional_width_is_rounded_to_the_nearest(expand_ratio: float) -> None:
    assert HarmonicAttention(hidden_size=100, expand_ratio=expand_ratio).level_size == round(100 * expand_ratio)


@pytest.mark.parametrize(("field", "value"), [
    ("mode", "parallel"), ("timescale_mode", "free"), ("hidden_size", 0), ("hidden_size", 8.0), ("hidden_size", True),
    ("hidden_size", None), ("gate_ratio", 0), ("gate_ratio", 1.5), ("gate_rank", -1), ("conv_size", 0), ("conv_size", None),
    ("expand_ratio", 0), ("expand_ratio", -1), ("expand_ratio", math.nan), ("expand_ratio", math.inf),
    ("expand_ratio", "2"), ("expand_ratio", None), ("expand_ratio", True),
    ("use_prediction_error", "no"), ("use_output_gate", 1), ("use_output_proj", None), ("use_short_conv", "no"),
    ("conv_bias", 0), ("norm_eps", -1), ("norm_eps", 0), ("norm_eps", "1e-5"), ("norm_eps", math.nan), ("norm_eps", None),
    ("timescales", ()), ("timescales", [(1, 2)]), ("timescales", [(5, 5)]), ("timescales", [(8, 2)]),
    ("timescales", [(2, math.inf)]), ("timescales", [(2, 3, 4)]), ("timescales", 5),
    ("timescales", [("a", "b")]), ("timescales", None),
])
def test_impossible_option_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must"):
        HarmonicAttention(**{"hidden_size": 8, field: value})


def test_options_that_exclude_one_another() -> None:
    with pytest.raises(ValueError, match="`gate_ratio` and `gate_rank` exclude one another; got 2 and 3"):
        HarmonicAttention(hidden_size=8, gate_ratio=2, gate_rank=3)
    with pytest.raises(ValueError, match=r"`expand_ratio` must .* got 2 with hidden_size=8 and use_output_proj=False"):
        HarmonicAttention(hidden_size=8, expand_ratio=2, use_output_proj=False)


def test_bad_input_is_named() -> None:
    layer, x = HarmonicAttention(hidden_size=8), torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match=r"`hidden_states` must have shape \[B, T, 8\]; got \(2, 5, 7\)"):
        layer(x[..., :7])
    with pytest.raises(ValueError, match=r"`hidden_states` must have shape \[B, T, 8\]; got \(5, 8\)"):
        layer(x[0])
    for shape in ((2, 4), (3, 5), (2, 5, 5), (5,)):
        with pytest.raises(ValueError, match=r"`attention_mask` must be a 0/1 mask of shape \[2, S\] with S >= 5; got"):
            layer(x, attention_mask=torch.ones(shape, dtype=torch.long))
    with pytest.raises(ValueError, match="additive mask"):
        layer(x, attention_mask=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="`cu_seqlens` needs a batch of 1; got 2"):
        layer(x, cu_seqlens=torch.tensor([0, 10]))
    with pytest.raises(ValueError, match="must hold 0 and 1 alone; got values from 1 to 3"):
        layer(x, attention_mask=torch.tensor([[1, 1, 2, 2, 3]] * 2))
    with pytest.raises(ValueError, match="requires `layer_idx`"):
        layer(x, past_key_values=Cache())


@pytest.mark.parametrize("use_short_conv", [False, True])
def test_cache_that_does_not_fit_is_named(use_short_conv: bool) -> None:
    layer, x = HarmonicAttention(hidden_size=8, layer_idx=0, use_short_conv=use_short_conv), torch.randn(2, 5, 8)
    cache = Cache()
    layer(x, past_key_values=cache)
    for options in (dict(x=x[:1]), dict(x=x[:1], cu_seqlens=torch.tensor([0, 2, 4, 5])),
                    dict(x=torch.cat([x, x]), attention_mask=torch.ones(4, 5, dtype=torch.long))):
        rows = len(options["x"]) if "cu_seqlens" not in options else 3
        with pytest.raises(ValueError, match=rf"`past_key_values` must hold 3 states of shape \({rows}, 8\) for layer 0"):
            layer(options.pop("x"), past_key_values=cache, **options)
    for other in (dict(timescales=[(2, 3)]), dict(expand_ratio=2), dict(use_short_conv=not use_short_conv)):
        twin = HarmonicAttention(**{"hidden_size": 8, "layer_idx": 0, "use_short_conv": use_short_conv, **other})
        with pytest.raises(ValueError, match="Pass a cache that this model made of as many sequences"):
            twin(x, past_key_values=cache)
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0, 0)])
def test_no_tokens_or_no_rows_with_a_mask(shape: tuple[int, int]) -> None:
    o, _, _ = HarmonicAttention(hidden_size=8)(torch.randn(*shape, 8), attention_mask=torch.ones(shape, dtype=torch.long))
    assert o.shape == (*shape, 8)
