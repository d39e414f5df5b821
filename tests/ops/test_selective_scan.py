import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fla_harmonic.ops.mamba import causal_conv_silu, naive_selective_scan, selective_scan
from fla_harmonic.ops.mamba.causal_conv import causal_conv_op
from fla_harmonic.ops.mamba.selective_scan import selective_scan_op
from fla_harmonic.ops.mamba.torch_scan import chunked_selective_scan

NAMES = ("x", "v", "A", "B", "C", "D", "z")
# widths below, at and above a task's channels
SHAPES = [(2, 1, 3, 2), (1, 2, 128, 1), (2, 31, 5, 16), (1, 32, 130, 3), (2, 63, 24, 5), (3, 65, 129, 2), (1, 257, 256, 16)]


def inputs(batch: int, T: int, D: int, N: int) -> list[torch.Tensor]:
    """As a mixer has them: steps around softplus(-3), and B, C and z as views of projections."""
    both, parts = torch.randn(batch, T, 2 * D), torch.randn(batch, T, 4 + 2 * N)
    v, A, skip = torch.randn(batch, T, D) - 3, -torch.rand(D, N) * N, torch.randn(D)
    return [torch.randn(batch, T, D), v, A, parts[..., 4:4 + N], parts[..., 4 + N:], skip, both[..., D:]]


def run(scan, tensors, dtype=torch.float32):
    """Outputs, and the gradients of a weighted sum of them."""
    leaves = [w.to(dtype, copy=True).requires_grad_() for w in tensors]
    y = scan(*leaves)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return y.detach(), torch.autograd.grad((y * weight).sum(), leaves)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str, bound: float = 2e-6) -> None:
    assert actual.shape == expected.shape, name
    assert (actual.double() - expected).abs().max() <= bound * expected.abs().max(), name


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "B{}-T{}-D{}-N{}".format(*s))
def test_values_and_gradients_equal_a_float64_loop(shape: tuple[int, ...], poisoned_memory: None) -> None:
    tensors = inputs(*shape)
    expected, expected_grads = run(naive_selective_scan, tensors, torch.float64)
    y, grads = run(selective_scan, tensors)
    assert_close(y, expected, "y")
    for name, grad, expected_grad in zip(NAMES, grads, expected_grads, strict=True):
        # A, and every gradient through the decay of a first state of zero, has none at one token
        assert expected_grad.abs().max() > 0 or shape[1] == 1, name
        assert_close(grad, expected_grad, name)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1000])
def test_chunks_do_not_change_the_scan(chunk_size: int) -> None:
    tensors = inputs(2, 130, 6, 3)
    expected, expected_grads = run(naive_selective_scan, tensors, torch.float64)
    y, grads = run(partial(chunked_selective_scan, chunk_size=chunk_size), tensors)
    assert_close(y, expected, "y")
    for name, grad, expected_grad in zip(NAMES, grads, expected_grads, strict=True):
        assert_close(grad, expected_grad, name)


def test_views_are_read_as_they_are() -> None:
    tensors = inputs(2, 40, 20, 3)

    def scan_views(*leaves: torch.Tensor) -> torch.Tensor:
        views = [F.pad(w, (1, 1))[..., 1:-1] for w in leaves]
        assert not any(w.is_contiguous() for w in views if w.dim() > 1)
        return selective_scan(*views)

    y, grads = run(selective_scan, [w.contiguous() for w in tensors])
    y_of_views, grads_of_views = run(scan_views, tensors)
    assert torch.equal(y, y_of_views)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_of_views, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_runs_and_threads_agree_bit_for_bit(count: int, threads: None) -> None:
    tensors, weight, bias = inputs(2, 70, 300, 4), torch.randn(300, 4), torch.randn(300)
    torch.set_num_threads(1)
    expected = [run(selective_scan, tensors), run(causal_conv_silu, [tensors[0], weight, bias])]
    torch.set_num_threads(count)
    actual = [run(selective_scan, tensors), run(causal_conv_silu, [tensors[0], weight, bias])]
    for (y, grads), (z, others) in zip(expected, actual, strict=True):
        assert torch.equal(y, z)
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))


def test_extreme_steps_and_gates() -> None:
    tensors = inputs(1, 64, 24, 3)
    extreme = torch.tensor([-200.0, -100, -60, -20, -1e-3, 0, 20, 88])
    tensors[1] = extreme.repeat(1, 64, 3)
    tensors[6] = extreme.roll(3).repeat(1, 64, 3)
    tensors[6][:, 1::2] *= -1
    expected, expected_grads = run(naive_selective_scan, tensors, torch.float64)
    y, grads = run(selective_scan, tensors)
    assert_close(y, expected, "y")
    for name, grad, expected_grad in zip(NAMES, grads, expected_grads, strict=True):
        assert grad.isfinite().all(), name
        assert_close(grad, expected_grad, name)


def test_small_steps_keep_their_precision() -> None:
    # the step as it is the output: h = dt from the first token, nothing decays
    v = torch.linspace(-80, 30, 1101).view(1, 1, -1)
    one = torch.ones(1, 1, 1)
    y = selective_scan(torch.ones_like(v), v, torch.zeros(v.shape[2], 1), one, one, torch.zeros(v.shape[2]),
                             torch.full_like(v, 50))
    expected = F.softplus(v.double(), threshold=1000) * 50
    np.testing.assert_allclose(y.numpy(), expected.numpy(), rtol=4e-7)


def test_a_slow_timescale_does_not_vanish() -> None:
    # a decay of 0.9999 with inputs 1e-4: 1 - 0.9999^20000 = 0.8647
    T, dt = 20000, 1e-4
    x, v = torch.ones(1, T, 1), torch.full((1, T, 1), float(np.log(np.expm1(dt))))
    rate = torch.tensor([[np.log(0.9999) / dt]], dtype=torch.float32)
    y = selective_scan(x, v, rate, x, x, torch.zeros(1), torch.full_like(x, 50))
    assert abs(y[0, -1, 0].item() / 50 - 0.8647) < 1e-3


@pytest.mark.parametrize(("batch", "T", "D"), [(2, 0, 8), (0, 5, 8)], ids=["no-tokens", "no-rows"])
def test_nothing_gives_nothing(batch: int, T: int, D: int) -> None:
    tensors = inputs(batch, T, D, 3)
    y, grads = run(selective_scan, tensors)
    assert y.shape == (batch, T, D)
    assert all(g.shape == w.shape and not g.any() for g, w in zip(grads, tensors, strict=True))
    y, grads = run(causal_conv_silu, [tensors[0], torch.randn(D, 4)])
    assert y.shape == (batch, T, D)
    assert not grads[1].any()


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("T", "D", "K"), [(1, 5, 4), (3, 130, 4), (65, 24, 1), (257, 129, 7)])
def test_the_convolution_equals_torch(T: int, D: int, K: int, has_bias: bool, poisoned_memory: None) -> None:
    x = torch.randn(2, T, 2 * D)[..., :D]
    tensors = [x, torch.randn(D, K), *([torch.randn(D)] if has_bias else [])]

    def conv(x, weight, bias=None):
        return F.silu(F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=K - 1, groups=D)[..., :T]).transpose(1, 2)

    expected, expected_grads = run(conv, tensors, torch.float64)
    y, grads = run(causal_conv_silu, tensors)
    assert_close(y, expected, "y")
    for name, grad, expected_grad in zip(("x", "weight", "bias"), grads, expected_grads, strict=False):
        assert_close(grad, expected_grad, name)


@pytest.mark.parametrize(("D", "N", "K"), [(6, 3, 4), (1, 1, 1)])
def test_parameters_stay_resizable(D: int, N: int, K: int) -> None:
    # FSDP frees and fills the storage of gathered parameters
    tensors, weight, bias = inputs(1, 9, D, N), torch.randn(D, K), torch.randn(D)
    parameters = [tensors[2].requires_grad_(), tensors[5].requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    selective_scan(causal_conv_silu(tensors[0], weight, bias), *tensors[1:]).sum().backward()
    for parameter in parameters:
        assert parameter.untyped_storage().resizable()


def test_operators_keep_the_rules_of_torch() -> None:
    tensors = [w.detach().requires_grad_() for w in inputs(2, 33, 6, 3)]
    torch.library.opcheck(selective_scan_op, tensors)
    torch.library.opcheck(causal_conv_op, [tensors[0], torch.randn(6, 4).requires_grad_(), tensors[5]])


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_shape_is_refused(name: str) -> None:
    tensors = dict(zip(NAMES, inputs(2, 9, 6, 3), strict=True))
    tensors[name] = tensors[name][..., :-1]
    with pytest.raises(ValueError, match=r"expected `\w+` of shape .* but got .* Remedy"):
        selective_scan(**tensors)


@pytest.mark.parametrize(
    ("weight", "bias"), [((6,), (6,)), ((5, 4), (5,)), ((6, 0), (6,)), ((6, 4), (5,))],
    ids=["no-taps", "channels", "empty", "bias"],
)
def test_a_wrong_shape_of_the_convolution_is_refused(weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected .* but got .* Remedy"):
        causal_conv_silu(torch.randn(1, 9, 6), torch.randn(weight), torch.randn(bias))


def test_without_numba_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, weight = inputs(1, 9, 3, 2), torch.randn(3, 4)
    expected = selective_scan(*tensors), causal_conv_silu(tensors[0], weight)
    monkeypatch.setattr(sys.modules[selective_scan.__module__], "HAS_LOOPS", False)
    torch.testing.assert_close((selective_scan(*tensors), causal_conv_silu(tensors[0], weight)), expected)
    with pytest.raises(ValueError, match=r"one of .'torch'.*got 'numba'.*pip install numba"):
        selective_scan(*tensors, backend="numba")
