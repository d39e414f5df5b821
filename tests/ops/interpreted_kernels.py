"""
Our Triton kernels and fla's on CPU tensors, run by Triton's interpreter: started by test_interpreted_kernels.py in a process
of its own, because the interpreter has to be chosen before Triton is imported.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from fla.modules import GatedMLP as FusedGatedMLP
from fla.modules import RMSNorm as FusedRMSNorm
from fla.modules import ShortConvolution as FusedShortConvolution
from fla.modules import activations
from fla.modules.causal_conv1d import ops as conv_kernels
from fla.modules.norm import layernorm
from fla.ops.hgrn import chunk, fused_recurrent
from scans import (
    FLOAT32_BOUND,
    SCANS,
    Problem,
    assert_document_stays_alone,
    assert_equals_oracle,
    outputs_and_gradients,
    poisoned,
    relative_error,
)

from fla_harmonic.modules import GatedMLP, RMSNorm, ShortConvolution
from fla_harmonic.ops.harmonic import chunk as kernels
from fla_harmonic.ops.harmonic import chunk_harmonic


def tensor_range(*bounds: Any) -> Iterator[tl.tensor]:
    for i in range(*(int(bound) for bound in bounds)):
        yield tl.full((), i, tl.int64)


@pytest.fixture(autouse=True, scope="session")
def _interpretable() -> None:
    # the loop variables of a compiled kernel are tensors, those of an interpreted one are Python's
    chunk.range = tensor_range
    # tuning would time the kernels on a device: keep the first configuration
    for module in (chunk, fused_recurrent, layernorm, activations.ops, conv_kernels):
        for kernel in vars(module).values():
            while isinstance(kernel, (triton.runtime.Autotuner, triton.runtime.autotuner.Heuristics)):
                if isinstance(kernel, triton.runtime.Autotuner):
                    kernel.configs = kernel.configs[:1]
                kernel = kernel.fn
    # small chunks, so that short inputs have several, and several tiles of them
    kernels.CHUNK, kernels.TILE, kernels.CHUNK_TILE = 16, 8, 4


BACKENDS = ("fla", "triton")
# one, two and many chunks and tiles of chunks, and one token less and more; the interpreter takes milliseconds an element
SHORT = [
    *(Problem(2, T, 3) for T in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 65)),
    Problem(1, 70, 3, (0, 33, 0, 1, 36, 0)),
    Problem(1, 33, 5, (1, 32), with_state=False),
    Problem(2, 33, 3, masked=True),
    Problem(1, 40, 3, (0, 33, 0, 7, 0), masked=True),
]
# fla's chunks have 128 tokens
LONG = [Problem(2, T, 3) for T in (127, 128, 129)] + [Problem(1, 130, 37, (1, 129), with_state=False)]
PROBLEMS = [*(("triton", p) for p in SHORT), *(("fla", p) for p in SHORT[-5:] + LONG)]

backends = pytest.mark.parametrize("backend", BACKENDS)
scans = pytest.mark.parametrize("name", SCANS)


@scans
@pytest.mark.parametrize(("backend", "problem"), PROBLEMS, ids=lambda x: (
    x if isinstance(x, str) else f"{x}{'-packed' * bool(x.lengths)}{'-masked' * x.masked}"))
def test_kernels_equal_oracle(name: str, backend: str, problem: Problem) -> None:
    scan = SCANS[name]
    assert_equals_oracle(
        scan, problem.inputs(scan), FLOAT32_BOUND, cu_seqlens=problem.cu_seqlens, mask=problem.mask, backend=backend)


@backends
@scans
def test_kernels_without_tokens(name: str, backend: str) -> None:
    state = torch.randn(2, 3)
    empty = torch.empty(2, 0, 3)
    h, final = SCANS[name].run(empty, empty, initial_state=state, output_final_state=True, backend=backend)
    assert h.shape == (2, 0, 3)
    assert torch.equal(final, state)


@backends
def test_kernels_forget_at_infinite_decay(backend: str) -> None:
    x = torch.randn(1, 40, 3)
    g = torch.full_like(x, -torch.inf)
    actual = outputs_and_gradients(SCANS["linear"].run, [g, x, torch.ones(1, 3)], torch.float32, backend=backend)
    assert torch.equal(actual["h"], x)
    assert not actual["d_state"].any()
    assert not actual["d_first"].any()


@backends
@scans
def test_kernels_keep_documents_apart(name: str, backend: str) -> None:
    problem = Problem(1, 40, 3, (21, 19))
    scan = SCANS[name]
    first, second, state = (x.requires_grad_() for x in problem.inputs(scan))
    options = dict(initial_state=state, cu_seqlens=problem.cu_seqlens, backend=backend)
    before = scan.run(first, second, **options)[0]
    after = scan.run(first, torch.cat([-second[:, :21], second[:, 21:]], 1), **options)[0]
    assert torch.equal(before[:, 21:], after[:, 21:])
    assert not torch.equal(before[:, :21], after[:, :21])
    for gradient in torch.autograd.grad(before[:, 21:].square().sum(), (first, second)):
        assert not gradient[:, :21].any()
        assert gradient[:, 21:].any()


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@backends
@scans
def test_one_document_that_is_not_finite_leaves_the_others_bit_equal(name: str, backend: str, value: float) -> None:
    # with chunks of 16 tokens in tiles of 8: borders within a tile, between two, between chunks, and a chunk passed over
    problem = Problem(1, 57, 2, (5, 3, 0, 8, 33, 8))
    for n in (0, 4):
        assert_document_stays_alone(SCANS[name], problem, n, poisoned(SCANS[name], problem, n, value), backend=backend)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@backends
@scans
def test_what_stands_at_a_masked_token_does_not_matter(name: str, backend: str, value: float) -> None:
    scan, problem = SCANS[name], Problem(2, 33, 3, masked=True)
    inputs = problem.inputs(scan)
    masked = ~problem.mask
    other = [*(x.masked_fill(masked[..., None], value) for x in inputs[:2]), inputs[2]]
    before, after = (
        outputs_and_gradients(scan.run, x, torch.float32, mask=problem.mask, backend=backend) for x in (inputs, other))
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@scans
def test_triton_kernels_in_half_precision_lose_only_the_rounding_of_the_output(name: str, dtype: torch.dtype) -> None:
    scan = SCANS[name]
    inputs = [x.to(dtype) for x in Problem(2, 33, 3).inputs(scan)[:2]]
    state = torch.randn(2, 3)
    h, final = scan.run(*inputs, initial_state=state, output_final_state=True, backend="triton")
    expected, state = scan.oracle(*(x.double() for x in inputs), initial_state=state.double(), output_final_state=True)
    assert h.dtype == dtype
    assert final.dtype == torch.float32
    assert relative_error(final, state) < FLOAT32_BOUND
    assert relative_error(h, expected) < torch.finfo(dtype).eps


def test_triton_kernels_repeat_to_the_last_bit() -> None:
    problem = Problem(1, 40, 3, (20, 0, 1, 19))
    scan = SCANS["slow"]
    first, second = (
        outputs_and_gradients(scan.run, problem.inputs(scan), torch.float32, cu_seqlens=problem.cu_seqlens, backend="triton")
        for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_triton_kernels_keep_the_bits_of_a_slow_decay() -> None:
    # 1 - A near 1e-4, constant input: h = 1 - (1 - 1e-4)^T, in which a decay rounded to float32 would err by 3e-4
    T = 128
    u, v = torch.full((1, T, 1), 0.0), torch.full((1, T, 1), 20.0)
    h, _ = chunk_harmonic(u, v, (0.9998, 1.0), backend="triton")
    expected = -torch.expm1(torch.arange(1, T + 1, dtype=torch.float64) * math.log1p(-1e-4))
    assert ((h[0, :, 0] - expected) / expected).abs().max() < 1e-5


def assert_twins(
    twin: torch.nn.Module,
    fused: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    x: torch.Tensor,
    **options: torch.Tensor | bool,
) -> None:
    """Compares values and gradients of the twin's forward with those of fla's on the same module."""
    results = []
    for forward in (type(twin).forward, fused):
        leaf = x.clone().requires_grad_()
        given = {name: y.clone().requires_grad_() if is_float(y) else y for name, y in options.items()}
        outputs = forward(twin, leaf, **given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        # the oldest input in a convolution's state is never read again, and fla drops its gradient
        outputs = [y[..., 1:] for y in outputs if y is not None]
        loss = sum((y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in outputs)
        leaves = [leaf, *filter(is_float, given.values()), *twin.parameters()]
        results.append([*outputs, *torch.autograd.grad(loss, leaves)])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert relative_error(actual, expected) < (1e-5 if x.dtype == torch.float32 else 0.01)


def is_float(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_norm_twin_equals_fla(dtype: torch.dtype, affine: bool) -> None:
    x, residual = torch.randn(2, 3, 7, 12).to(dtype)
    norm = RMSNorm(12, elementwise_affine=affine, bias=affine)
    for p in norm.parameters():
        torch.nn.init.normal_(p)
    assert_twins(norm, FusedRMSNorm.forward, x)
    assert_twins(norm, FusedRMSNorm.forward, x, residual=residual, prenorm=True)
    assert_twins(norm, FusedRMSNorm.forward, x, residual=residual.float(), prenorm=True, residual_in_fp32=True)


@pytest.mark.parametrize("hidden_act", ["swish", "powlu"])
def test_mlp_twin_equals_fla(hidden_act: str) -> None:
    mlp = GatedMLP(8, intermediate_size=20, hidden_act=hidden_act)
    assert_twins(mlp, FusedGatedMLP.forward, 3 * torch.randn(2, 5, 8))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution_twin_equals_fla(bias: bool, activation: str | None) -> None:
    conv = ShortConvolution(8, 4, bias=bias, activation=activation)
    x, cache = torch.randn(2, 9, 8), torch.randn(2, 8, 4)
    assert_twins(conv, FusedShortConvolution.forward, x)
    assert_twins(conv, FusedShortConvolution.forward, x, cache=cache, output_final_state=True)
    borders = torch.tensor([0, 2, 3, 9])
    assert_twins(conv, FusedShortConvolution.forward, x[:1], cu_seqlens=borders)
