from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from scans import BACKENDS, FLOAT32_BOUND, SCANS, Problem, outputs_and_gradients, problems, relative_error
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fla_harmonic.ops.harmonic import chunk_harmonic, linear_scan, op

backends = pytest.mark.parametrize("backend", BACKENDS)
scans = pytest.mark.parametrize("name", SCANS)
PACKED = Problem(1, 200, 40, (70, 0, 1, 129))


def run(name: str, problem: Problem, backend: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return outputs_and_gradients(
        SCANS[name].run, problem.inputs(SCANS[name]), dtype, cu_seqlens=problem.cu_seqlens, mask=problem.mask,
        backend=backend)


def assert_bit_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert not [key for key in expected if not torch.equal(actual[key], expected[key])]


@backends
@scans
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_in_and_out_with_a_wide_state(name: str, backend: str, dtype: torch.dtype) -> None:
    first, second, state = PACKED.inputs(SCANS[name])
    narrow = [x.to(dtype).requires_grad_() for x in (first, second)]
    options = dict(initial_state=state, output_final_state=True, cu_seqlens=PACKED.cu_seqlens)
    h, final = SCANS[name].run(*narrow, backend=backend, **options)
    wide, expected = SCANS[name].oracle(*(x.double() for x in narrow), **options)
    assert h.dtype == dtype
    assert final.dtype == torch.float32
    # the output is rounded once, at the end, and the state not at all
    assert relative_error(final, expected) < FLOAT32_BOUND
    assert relative_error(h, wide) < torch.finfo(dtype).eps

    weights = torch.randn_like(h)
    gradients = torch.autograd.grad(h, narrow, weights)
    reference = [x.detach().double().requires_grad_() for x in narrow]
    expected = torch.autograd.grad(SCANS[name].oracle(*reference, **options)[0], reference, weights.double())
    assert all(x.dtype == dtype for x in gradients)
    assert max(map(relative_error, gradients, expected)) < 2 * torch.finfo(dtype).eps


@backends
@scans
def test_state_of_another_dtype_has_its_gradient_in_that_dtype(name: str, backend: str) -> None:
    first, second, state = Problem(2, 5, 3).inputs(SCANS[name])
    state = state.bfloat16().requires_grad_()
    final = SCANS[name].run(first, second, initial_state=state, output_final_state=True, backend=backend)[1]
    assert final.dtype == torch.float32
    assert torch.autograd.grad(final.sum(), state)[0].dtype == torch.bfloat16


@backends
@scans
def test_strided_inputs_equal_contiguous_ones(name: str, backend: str) -> None:
    inputs = Problem(2, 130, 40).inputs(SCANS[name])
    expected = outputs_and_gradients(SCANS[name].run, inputs, torch.float32, backend=backend)
    strided = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    assert not any(x.is_contiguous() for x in strided)
    assert_bit_equal(outputs_and_gradients(SCANS[name].run, strided, torch.float32, backend=backend), expected)
    # one row broadcast over the batch and over time
    first, second, state = (x[:1] for x in inputs)
    row = SCANS[name].run(first, second, initial_state=state, backend=backend)[0]
    rows = SCANS[name].run(first.expand(3, -1, -1), second.expand(3, -1, -1), initial_state=state.expand(3, -1),
                           backend=backend)[0]
    assert torch.equal(rows, row.expand_as(rows))


@backends
@scans
def test_inputs_are_not_written_to(name: str, backend: str) -> None:
    inputs = PACKED.inputs(SCANS[name])
    copies = [x.clone() for x in inputs]
    outputs_and_gradients(SCANS[name].run, inputs, torch.float32, cu_seqlens=PACKED.cu_seqlens, backend=backend)
    assert all(map(torch.equal, inputs, copies))


@backends
@scans
@pytest.mark.usefixtures("poisoned_memory")
@given(problem=problems(max_tokens=100))
def test_every_element_is_written(name: str, backend: str, problem: Problem) -> None:
    assert all(x.isfinite().all() for x in run(name, problem, backend).values())


@backends
@scans
def test_repeated_run_is_bit_equal(name: str, backend: str) -> None:
    assert_bit_equal(run(name, PACKED, backend), run(name, PACKED, backend))


@backends
@scans
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("problem", [Problem(3, 130, 100), Problem(1, 130, 100), PACKED], ids=["rows", "channels", "packed"])
def test_number_of_threads_changes_nothing(name: str, backend: str, problem: Problem) -> None:
    torch.set_num_threads(1)
    expected = run(name, problem, backend)
    for count in (2, 5):
        torch.set_num_threads(count)
        actual = run(name, problem, backend)
        if backend == "numba":
            assert_bit_equal(actual, expected)
        else:
            # torch's own sigmoid rounds the last elements of each thread's share otherwise than the others
            assert max(relative_error(actual[key], expected[key]) for key in expected) < 1e-6


@pytest.mark.parametrize("name", ["slow", "linear"])
@pytest.mark.usefixtures("threads")
def test_memory_that_an_idle_thread_maps_changes_nothing(name: str) -> None:
    # above 32 MB, where memory is mapped anew
    problem = Problem(1, 8200, 1030)
    torch.set_num_threads(1)
    expected = run(name, problem, "numba")
    # as many tasks as blocks of channels, and a thread without one
    torch.set_num_threads(4)
    assert_bit_equal(run(name, problem, "numba"), expected)


@backends
@pytest.mark.usefixtures("threads")
def test_two_python_threads_at_once(backend: str) -> None:
    torch.set_num_threads(2)
    work = [("medium", Problem(2, 100, 70)), ("linear", PACKED)] * 6
    expected = [run(*job, backend) for job in work]
    # threads share the random generator that makes the inputs
    inputs = [problem.inputs(SCANS[name]) for name, problem in work]
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(outputs_and_gradients, SCANS[name].run, given, torch.float32,
                        cu_seqlens=problem.cu_seqlens, mask=problem.mask, backend=backend)
            for (name, problem), given in zip(work, inputs, strict=True)
        ]
        for job, reference in zip(jobs, expected, strict=True):
            assert_bit_equal(job.result(), reference)


def mixed(u: torch.Tensor, v: torch.Tensor, state: torch.Tensor, backend: str) -> torch.Tensor:
    h, final = chunk_harmonic(u.sin(), v, (0.9, 0.975), state, True, backend=backend)
    x, last = linear_scan(-h.square(), v * h, final, True, backend=backend)
    return x.square().mean() + last.sum()


@backends
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.processes])])
def test_compiled_whole_equals_eager(backend: str, compiler: str) -> None:
    inputs = [torch.randn(2, 65, 8), torch.randn(2, 65, 8), torch.randn(2, 8)]
    results = []
    for function in (mixed, torch.compile(mixed, fullgraph=True, backend=compiler)):
        given = [x.clone().requires_grad_() for x in inputs]
        loss = function(*given, backend=backend)
        results.append([loss.detach(), *torch.autograd.grad(loss, given)])
    assert max(map(relative_error, *results)) < FLOAT32_BOUND


@backends
@pytest.mark.parametrize("borders", [None, (0, 3, 3, 9)], ids=["dense", "packed"])
def test_operators_keep_the_contract_of_torch_library(backend: str, borders: tuple[int, ...] | None) -> None:
    cu_seqlens = None if borders is None else torch.tensor(borders)
    first, second = -torch.rand(1, 9, 5, requires_grad=True), torch.randn(1, 9, 5, requires_grad=True)
    state = torch.randn(1 if borders is None else 3, 5, requires_grad=True)
    torch.library.opcheck(op.harmonic_scan, (first, second, state, cu_seqlens, None, [0.5, 0.9], backend, False))
    torch.library.opcheck(op.bare_scan, (first, second, state, cu_seqlens, None, None, backend, False))


def block(u: torch.Tensor, v: torch.Tensor, state: torch.Tensor, backend: str) -> torch.Tensor:
    h, final = chunk_harmonic(u * 2, v.cos(), (0.9, 0.975), state, True, backend=backend)
    return (h * u).sum() + final.sum()


@backends
@pytest.mark.parametrize("saved", [False, True], ids=["full", "selective"])
def test_activation_checkpointing_changes_no_gradient(
    backend: str, saved: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    own = op.BACKENDS[backend]
    monkeypatch.setitem(op.BACKENDS, backend, own._replace(forward=lambda *args: calls.append(backend) or own.forward(*args)))

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op is torch.ops.fla_harmonic.harmonic_scan.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    options = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if saved else {}
    inputs = [x.requires_grad_() for x in (torch.randn(1, 70, 5), torch.randn(1, 70, 5), torch.randn(1, 5))]
    expected = torch.autograd.grad(block(*inputs, backend=backend), inputs)
    calls.clear()
    loss = checkpoint(block, *inputs, backend, use_reentrant=False, **options)
    assert all(map(torch.equal, torch.autograd.grad(loss, inputs), expected))
    # a saved scan is not run again
    assert len(calls) == (1 if saved else 2)


@backends
def test_autocast(backend: str) -> None:
    maps = torch.nn.ModuleList([torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)])
    x = torch.randn(2, 130, 16)

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        h, _ = chunk_harmonic(maps[0](x), maps[1](x), (0.9, 0.975), backend=backend)
        return h, h.float().square().sum()

    expected = torch.autograd.grad(loss()[1], list(maps.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        h, value = loss()
    assert h.dtype == torch.bfloat16
    gradients = torch.autograd.grad(value, list(maps.parameters()))
    assert max(map(relative_error, gradients, expected)) < 0.03
