"""
fla's Triton kernels on CPU tensors, run by Triton's interpreter: started by test_interpreted_kernels.py in a process of
its own, because the interpreter has to be chosen before Triton is imported.
"""

from collections.abc import Callable, Iterator

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
from scans import FLOAT32_BOUND, SCANS, Problem, Scan, assert_equals_oracle, outputs_and_gradients, relative_error

from fla_harmonic.modules import GatedMLP, RMSNorm, ShortConvolution
from fla_harmonic.ops.harmonic import naive_linear_scan, naive_recurrent_harmonic, scan_op


def tensor_range(*bounds: object) -> Iterator[tl.tensor]:
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


def harmonic(decay_range: tuple[float, float], recurrent: bool) -> Scan:
    def run(u, v, initial_state=None, output_final_state=True, cu_seqlens=None):
        return scan_op.harmonic_scan(u, v, initial_state, cu_seqlens, *decay_range, "fla", recurrent)

    return Scan(run, lambda u, v, **options: naive_recurrent_harmonic(u, v, decay_range, **options), SCANS["medium"].make)


def linear(recurrent: bool) -> Scan:
    def run(g, x, initial_state=None, output_final_state=True, cu_seqlens=None):
        return scan_op.linear_scan(g, x, initial_state, cu_seqlens, "fla", recurrent)

    return Scan(run, naive_linear_scan, SCANS["linear"].make)


KERNELS = {
    "harmonic-chunk": harmonic((0.9, 0.975), False),
    "harmonic-recurrent": harmonic((0.992, 0.999), True),
    "linear-chunk": linear(False),
    "linear-recurrent": linear(True),
}
PROBLEMS = [
    *(Problem(2, T, 5) for T in (1, 63, 65, 130)),
    Problem(1, 130, 5, (64, 0, 1, 65)),
    Problem(1, 130, 37, (1, 129), with_state=False),
]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p}-packed" if p.lengths else str(p))
def test_fla_backend_equals_oracle(name: str, problem: Problem) -> None:
    scan = KERNELS[name]
    assert_equals_oracle(scan, problem.inputs(scan), FLOAT32_BOUND, cu_seqlens=problem.cu_seqlens)


@pytest.mark.parametrize("name", KERNELS)
def test_fla_backend_without_tokens(name: str) -> None:
    state = torch.randn(2, 3)
    h, final = KERNELS[name].run(torch.empty(2, 0, 3), torch.empty(2, 0, 3), state)
    assert h.shape == (2, 0, 3)
    assert torch.equal(final, state)


@pytest.mark.parametrize("name", ["linear-chunk", "linear-recurrent"])
def test_fla_backend_forgets_at_infinite_decay(name: str) -> None:
    x = torch.randn(1, 130, 5)
    g = torch.full_like(x, -torch.inf)
    actual = outputs_and_gradients(KERNELS[name].run, [g, x, torch.ones(1, 5)], torch.float32)
    assert torch.equal(actual["h"], x)
    assert not actual["d_state"].any()
    assert not actual["d_first"].any()


def test_fla_backend_keeps_documents_apart() -> None:
    problem = Problem(1, 130, 5, (66, 64))
    scan = KERNELS["harmonic-chunk"]
    u, v, state = problem.inputs(scan)
    before = scan.run(u, v, state, cu_seqlens=problem.cu_seqlens)[0]
    after = scan.run(u, torch.cat([-v[:, :66], v[:, 66:]], 1), state, cu_seqlens=problem.cu_seqlens)[0]
    assert torch.equal(before[:, 66:], after[:, 66:])
    assert not torch.equal(before[:, :66], after[:, :66])


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
