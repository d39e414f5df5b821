import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scans import (
    BACKENDS,
    FLOAT32_BOUND,
    LENGTHS,
    SCANS,
    Problem,
    assert_equals_oracle,
    outputs_and_gradients,
    problems,
    relative_error,
)

from fla_harmonic.ops.harmonic import chunk_harmonic, linear_scan, naive_linear_scan, naive_recurrent_harmonic

backends = pytest.mark.parametrize("backend", BACKENDS)
scans = pytest.mark.parametrize("name", SCANS)
lengths = pytest.mark.parametrize("problem", [Problem(2, T, 40) for T in LENGTHS], ids=str)
# one channel, pieces of a row, and more channels than a task takes
widths = pytest.mark.parametrize("problem", [Problem(2, 67, D) for D in (1, 63, 64, 65, 1000, 2049)], ids=str)


@given(T=st.integers(1, 40), D=st.integers(1, 5), seed=st.integers(0, 999))
def test_oracle_equals_closed_form(T: int, D: int, seed: int) -> None:
    torch.manual_seed(seed)
    u, v = torch.randn(2, 2, T, D, dtype=torch.float64)
    h0 = torch.randn(2, D, dtype=torch.float64)
    decay = 0.55 + (0.88 - 0.55) / (1 + torch.exp(-u))
    x = (1 - decay) * v.tanh()
    product = decay.cumprod(1)
    expected = product * (h0[:, None] + (x / product).cumsum(1))

    for h, final in (
        naive_recurrent_harmonic(u, v, (0.55, 0.88), h0, True),
        naive_linear_scan(decay.log(), x, h0, True),
    ):
        assert relative_error(h, expected) < 1e-12
        assert torch.equal(final, h[:, -1])


@pytest.mark.parametrize("oracle", [naive_linear_scan, lambda u, v, *rest: naive_recurrent_harmonic(u, v, (0.5, 0.9), *rest)],
                         ids=["linear", "harmonic"])
def test_oracle_keeps_documents_apart(oracle) -> None:
    first, second = -torch.rand(1, 9, 3), torch.randn(1, 9, 3)
    h0 = torch.randn(3, 3)
    h, final = oracle(first, second, h0, True, torch.tensor([0, 4, 4, 9]))
    for n, (i, j) in enumerate(((0, 4), (4, 4), (4, 9))):
        alone, state = oracle(first[:, i:j], second[:, i:j], h0[n:n + 1], True)
        assert torch.equal(h[:, i:j], alone)
        assert torch.equal(final[n:n + 1], state)


@backends
@scans
@lengths
def test_values_and_gradients_equal_oracle(name: str, backend: str, problem: Problem) -> None:
    assert_equals_oracle(SCANS[name], problem.inputs(SCANS[name]), FLOAT32_BOUND, backend=backend)


@backends
@scans
@widths
def test_any_width_equals_oracle(name: str, backend: str, problem: Problem) -> None:
    assert_equals_oracle(SCANS[name], problem.inputs(SCANS[name]), FLOAT32_BOUND, backend=backend)


@scans
@lengths
def test_double_precision_equals_oracle_to_the_last_bits(name: str, problem: Problem) -> None:
    assert_equals_oracle(SCANS[name], problem.inputs(SCANS[name]), 1e-12, torch.float64, backend="torch")


@backends
@scans
@given(problem=problems())
def test_any_shape_and_packing_equals_oracle(name: str, backend: str, problem: Problem) -> None:
    scan = SCANS[name]
    assert_equals_oracle(
        scan, problem.inputs(scan), FLOAT32_BOUND, cu_seqlens=problem.cu_seqlens, mask=problem.mask, backend=backend)


@scans
@given(problem=problems())
def test_any_shape_and_packing_in_double_precision(name: str, problem: Problem) -> None:
    scan = SCANS[name]
    assert_equals_oracle(scan, problem.inputs(scan), 1e-12, torch.float64, cu_seqlens=problem.cu_seqlens, mask=problem.mask)


@pytest.mark.parametrize("lengths", [None, (3, 0, 5, 1)], ids=["dense", "packed"])
@pytest.mark.parametrize("name", ["medium", "recurrent", "linear"])
def test_gradcheck(name: str, lengths: tuple[int, ...] | None) -> None:
    problem = Problem(1, 9, 2, lengths)
    inputs = [x.double().requires_grad_() for x in problem.inputs(SCANS[name])]

    def run(first: torch.Tensor, second: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return SCANS[name].run(
            first, second, initial_state=state, output_final_state=True, cu_seqlens=problem.cu_seqlens,
            mask=problem.mask, backend="torch")

    assert torch.autograd.gradcheck(run, inputs)


@backends
@scans
def test_no_token_leaves_the_state(name: str, backend: str) -> None:
    empty = torch.empty(2, 0, 5, requires_grad=True)
    state = torch.randn(2, 5, requires_grad=True)
    h, final = SCANS[name].run(empty, empty, initial_state=state, output_final_state=True, backend=backend)
    assert h.shape == (2, 0, 5)
    assert torch.equal(final, state)
    assert torch.equal(torch.autograd.grad(final.sum(), state)[0], torch.ones(2, 5))


@backends
def test_loss_on_final_state_alone(backend: str) -> None:
    g, x, h0 = -torch.rand(2, 70, 3), torch.randn(2, 70, 3), torch.randn(2, 3, requires_grad=True)
    _, final = linear_scan(g, x, h0, True, backend=backend)
    upstream = torch.randn(2, 3)
    gradient, = torch.autograd.grad(final, h0, upstream)
    assert relative_error(gradient, g.double().sum(1).exp() * upstream) < FLOAT32_BOUND


@backends
def test_gradients_of_one_token(backend: str) -> None:
    decay, h0 = torch.tensor([0.25, 0.5, 0.9]), torch.tensor([[1.0, -2.0, 3.0]], requires_grad=True)
    g, x = decay.log().view(1, 1, 3).requires_grad_(), torch.zeros(1, 1, 3, requires_grad=True)
    final = linear_scan(g, x, h0, True, backend=backend)[1]
    dg, dx, dh0 = torch.autograd.grad(final.sum(), (g, x, h0))
    torch.testing.assert_close(dh0[0], decay)
    assert torch.equal(dx, torch.ones_like(dx))
    torch.testing.assert_close(dg[0], decay * h0)

    u, v = torch.zeros(1, 1, 3, requires_grad=True), torch.full((1, 1, 3), 0.5, requires_grad=True)
    final = chunk_harmonic(u, v, (0.2, 0.6), h0, True, backend=backend)[1]
    du, dv, dh0 = torch.autograd.grad(final.sum(), (u, v, h0))
    torch.testing.assert_close(dh0, torch.full_like(dh0, 0.4))
    torch.testing.assert_close(du[0], 0.4 / 4 * (h0 - math.tanh(0.5)))
    torch.testing.assert_close(dv, torch.full_like(dv, 0.6 * (1 - math.tanh(0.5) ** 2)))


@backends
@scans
@given(cuts=st.lists(st.integers(0, 150), max_size=4).map(sorted))
def test_segments_chained_by_their_states_equal_one_run(name: str, backend: str, cuts: list[int]) -> None:
    inputs = Problem(2, 150, 5).inputs(SCANS[name])

    def chained(first: torch.Tensor, second: torch.Tensor, initial_state: torch.Tensor, **options: object):
        state, parts = initial_state, []
        for i, j in zip([0, *cuts], [*cuts, 150], strict=True):
            h, state = SCANS[name].run(first[:, i:j], second[:, i:j], initial_state=state, **options)
            parts.append(h)
        return torch.cat(parts, 1), state

    actual = outputs_and_gradients(chained, inputs, torch.float32, backend=backend)
    expected = outputs_and_gradients(SCANS[name].oracle, inputs, torch.float64)
    assert max(relative_error(actual[key], expected[key]) for key in expected) < FLOAT32_BOUND


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_slow_decay_does_not_vanish(backend: str, dtype: torch.dtype) -> None:
    # a logit of 100 is the end of the range: A = 0.9999, which bfloat16 would round to 1
    u, v = torch.full((1, 20000, 2), 100.0, dtype=dtype), torch.full((1, 20000, 2), 20.0, dtype=dtype)
    h, final = chunk_harmonic(u, v, (0.5, 0.9999), output_final_state=True, backend=backend)
    assert final.dtype == torch.float32
    torch.testing.assert_close(final, torch.full((1, 2), 1 - 0.9999**20000), rtol=0, atol=5e-5)
    assert h.dtype == dtype


@backends
def test_slow_log_decay_does_not_vanish(backend: str) -> None:
    g, x = torch.full((1, 20000, 2), math.log(0.9999)), torch.full((1, 20000, 2), 1 - 0.9999)
    final = linear_scan(g, x, output_final_state=True, backend=backend)[1]
    torch.testing.assert_close(final, torch.full((1, 2), 1 - 0.9999**20000), rtol=0, atol=1e-4)


@backends
@pytest.mark.parametrize("tau", [100, 1000, 10000])
def test_gradient_reaches_back_a_timescale(backend: str, tau: int) -> None:
    # one gradient, at the end of 2 tau tokens: A^t of it must arrive; 1 - A rounded into A would bend the exponent
    T = 2 * tau
    u, v = torch.full((1, T, 1), math.log(tau - 1)), torch.zeros(1, T, 1)
    inputs = [u, v, torch.ones(1, 1)]
    gradients = []
    for dtype in (torch.float32, torch.float64):
        state = inputs[2].to(dtype).requires_grad_()
        final = chunk_harmonic(u.to(dtype), v.to(dtype), (0.0, 1.0), state, True,
                               backend=backend if dtype == torch.float32 else "torch")[1]
        gradients.append(torch.autograd.grad(final.sum(), state)[0])
    assert relative_error(*gradients) < 1e-4


@backends
@pytest.mark.parametrize("decay_range", [(0.0, 1.0), (0.9, 0.975)], ids=["free", "medium"])
def test_extreme_logits_stay_finite(backend: str, decay_range: tuple[float, float]) -> None:
    extremes = torch.tensor([-math.inf, -1e4, -100, -30, 0, 30, 100, 1e4, math.inf])
    u, v = (x.reshape(1, 1, -1).repeat(1, 70, 1) for x in torch.meshgrid(extremes, extremes, indexing="ij"))
    u, v = u.clone().requires_grad_(), v.clone().requires_grad_()
    state = torch.full((1, 81), 0.5, requires_grad=True)
    h, final = chunk_harmonic(u, v, decay_range, state, True, backend=backend)
    # the oracle's own gradient of an infinite logit is not a number: its values are compared, at finite logits
    finite = [x.detach().double().clamp(-1e3, 1e3) for x in (u, v)]
    expected, _ = naive_recurrent_harmonic(finite[0], finite[1], decay_range, state.detach().double(), True)
    assert relative_error(h, expected) < FLOAT32_BOUND
    gradients = torch.autograd.grad(h.sum() + final.sum(), (u, v, state))
    assert all(x.isfinite().all() for x in gradients)
    # a saturated logit has no slope left
    assert gradients[0].abs().amax((0, 1)).view(9, 9)[[0, 1, 2, 6, 7, 8]].max() < 1e-30


@backends
def test_decay_of_one_holds_the_state_exactly(backend: str) -> None:
    u, v, state = torch.full((1, 100, 3), math.inf), torch.randn(1, 100, 3), torch.randn(1, 3)
    h, final = chunk_harmonic(u, v, (0.0, 1.0), state, True, backend=backend)
    assert torch.equal(h, state[:, None].expand_as(h))
    assert torch.equal(final, state)


@backends
def test_zero_log_decay_is_a_cumulative_sum(backend: str) -> None:
    # whole numbers, whose float32 sums are exact
    x = torch.randint(-9, 9, (2, 1000, 5)).float().requires_grad_()
    g = torch.zeros_like(x, requires_grad=True)
    h, _ = linear_scan(g, x, backend=backend)
    assert torch.equal(h, x.cumsum(1))
    dg, dx = torch.autograd.grad(h[:, -1].sum(), (g, x))
    assert torch.equal(dx, torch.ones_like(x))
    assert torch.equal(dg[:, 1:], h[:, :-1])


@backends
def test_infinite_decay_forgets_everything(backend: str) -> None:
    x, state = torch.randn(2, 130, 5, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    g = torch.full((2, 130, 5), -math.inf, requires_grad=True)
    h, final = linear_scan(g, x, state, True, backend=backend)
    assert torch.equal(h, x)
    assert torch.equal(final, x[:, -1])
    dg, dx, dstate = torch.autograd.grad(h.sum() + final.sum(), (g, x, state))
    assert not dg.any()
    assert not dstate.any()
    assert torch.equal(dx[:, :-1], torch.ones_like(x[:, :-1]))


@backends
@scans
def test_masked_token_leaves_the_state_and_gets_no_gradient(name: str, backend: str) -> None:
    scan = SCANS[name]
    problem = Problem(2, 70, 5, masked=True)
    first, second, state = (x.requires_grad_() for x in problem.inputs(scan))
    masked = ~problem.mask
    h, _ = scan.run(first, second, initial_state=state, mask=problem.mask, backend=backend)
    before = torch.cat([state[:, None], h], 1)[:, :-1]
    # not to the last bit: where a chunk begins, torch has carried the state on another way
    torch.testing.assert_close(h[masked], before[masked], rtol=0, atol=1e-6)
    for gradient in torch.autograd.grad(h.square().sum(), (first, second)):
        assert not gradient[masked].any()
        assert gradient[~masked].any()
    # what stands at a masked token does not matter
    for poison in (9, math.inf, math.nan):
        inputs = [x.detach().masked_fill(masked[..., None], poison).requires_grad_() for x in (first, second)]
        changed = scan.run(*inputs, initial_state=state, mask=problem.mask.int(), backend=backend)[0]
        assert torch.equal(h, changed)
        for gradient in torch.autograd.grad(changed.square().sum(), inputs):
            assert gradient.isfinite().all()
            assert not gradient[masked].any()
