"""The scans under test, each beside its float64 oracle, and how to compare the two."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from fla_harmonic.ops.harmonic import (
    chunk_harmonic,
    fused_recurrent_harmonic,
    linear_scan,
    naive_linear_scan,
    naive_recurrent_harmonic,
)

# around powers of two, where chunks begin and end
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 257, 1000)
BACKENDS = ("torch", "numba")
# the largest error over the largest reference value; float32 has 6e-8, and a state sums up to 1000 of them
FLOAT32_BOUND = 2e-6


@dataclass(frozen=True)
class Scan:
    """`run` and `oracle` take `(first, second, initial_state=, output_final_state=, cu_seqlens=, mask=)`."""
    run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    oracle: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    make: Callable[[tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]]


def _logits(shift: float, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return 2 * torch.randn(shape) + shift, 2 * torch.randn(shape)


def _log_decays(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return F.logsigmoid(2 * torch.randn(shape) + 2), torch.randn(shape)


def _harmonic(op: Callable, decay_range: tuple[float, float], shift: float = 0) -> Scan:
    return Scan(
        run=lambda u, v, **options: op(u, v, decay_range, **options),
        oracle=lambda u, v, **options: naive_recurrent_harmonic(u, v, decay_range, **options),
        make=partial(_logits, shift))


SCANS = {
    "medium": _harmonic(chunk_harmonic, (0.9, 0.975)),
    "slow": _harmonic(chunk_harmonic, (0.992, 0.999)),
    # logits that mean a thousand tokens: the slope of a saturated gate must keep its bits
    "free": _harmonic(chunk_harmonic, (0.0, 1.0), shift=7),
    "recurrent": _harmonic(fused_recurrent_harmonic, (0.55, 0.88)),
    "linear": Scan(linear_scan, naive_linear_scan, _log_decays),
}


@dataclass(frozen=True)
class Problem:
    """Inputs of one scan: `B` rows of `T` tokens, or one row of documents of the given lengths."""
    B: int
    T: int
    D: int
    lengths: tuple[int, ...] | None = None
    with_state: bool = True
    masked: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return f"B{self.B}-T{self.T}-D{self.D}"

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        return None if self.lengths is None else torch.tensor([0, *self.lengths]).cumsum(0)

    @property
    def mask(self) -> torch.Tensor | None:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.rand(self.B, self.T, generator=generator) < 0.6 if self.masked else None

    def inputs(self, scan: Scan) -> list[torch.Tensor | None]:
        torch.manual_seed(self.seed)
        first, second = scan.make((self.B, self.T, self.D))
        sequences = self.B if self.lengths is None else len(self.lengths)
        return [first, second, torch.randn(sequences, self.D) if self.with_state else None]


@st.composite
def problems(draw: st.DrawFn, max_tokens: int = 300) -> Problem:
    D = draw(st.sampled_from((1, 7, 16, 17, 33, 40)))
    common = dict(D=D, with_state=draw(st.booleans()), masked=draw(st.booleans()), seed=draw(st.integers(0, 2**16)))
    if draw(st.booleans()):
        length = st.one_of(st.just(0), st.sampled_from((1, 63, 64, 65)), st.integers(0, max_tokens // 4))
        lengths = tuple(draw(st.lists(length, min_size=1, max_size=7)))
        return Problem(B=1, T=sum(lengths), lengths=lengths, **common)
    T = draw(st.one_of(st.sampled_from((0, 1, 2, 63, 64, 65, 127, 128, 129, 257)), st.integers(0, max_tokens)))
    return Problem(B=draw(st.integers(0, 3)), T=T, **common)


def outputs_and_gradients(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    inputs: list[torch.Tensor | None],
    dtype: torch.dtype,
    **options: object,
) -> dict[str, torch.Tensor]:
    """Outputs, and every gradient of one loss through the outputs and the final state."""
    first, second, state = (None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs)
    h, final = run(first, second, initial_state=state, output_final_state=True, **options)
    # float32 values, so that the reference's loss has the same weights
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (h, final)]
    loss = (h * weights[0]).sum() + (final * weights[1]).sum()
    given = {name: x for name, x in (("first", first), ("second", second), ("state", state)) if x is not None}
    # with no token the oracle does not touch its inputs
    gradients = torch.autograd.grad(loss, list(given.values()), materialize_grads=True)
    assert final is not None
    return {"h": h, "final": final, **{f"d_{name}": x for name, x in zip(given, gradients, strict=True)}}


def relative_error(actual: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> float:
    """Largest error over the largest expected value, or `scale`; infinite for another shape or anything not finite."""
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(max(scale, 1e-30))
    return error.item()


def assert_equals_oracle(
    scan: Scan,
    inputs: list[torch.Tensor | None],
    bound: float,
    dtype: torch.dtype = torch.float32,
    cu_seqlens: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    **options: object,
) -> None:
    """Compares with the oracle in float64 on the same (float32) numbers: the rounding of inputs does not count."""
    actual = outputs_and_gradients(scan.run, inputs, dtype, cu_seqlens=cu_seqlens, mask=mask, **options)
    expected = outputs_and_gradients(scan.oracle, inputs, torch.float64, cu_seqlens=cu_seqlens, mask=mask)
    # a final state is one of h, and may be small by chance where it is alone
    scales = {"final": expected["h"].abs().max().item() if expected["h"].numel() else 0.0}
    errors = {name: relative_error(actual[name], expected[name], scales.get(name, 0.0)) for name in expected}
    assert all(x.dtype == dtype for x in actual.values())
    assert max(errors.values()) <= bound, errors


def assert_document_stays_alone(
    scan: Scan, problem: Problem, n: int, others: Iterable[list[torch.Tensor]], **options: object,
) -> None:
    """Inputs `others` that differ in document n leave outputs and gradients of all other documents equal to the last bit."""
    options = dict(options, cu_seqlens=problem.cu_seqlens, mask=problem.mask)
    before = outputs_and_gradients(scan.run, problem.inputs(scan), torch.float32, **options)
    begin, end = problem.cu_seqlens[n:n + 2].tolist()
    for other in others:
        after = outputs_and_gradients(scan.run, other, torch.float32, **options)
        for key in before:
            per_token = before[key].ndim == 3
            kept = torch.ones(problem.T if per_token else len(problem.lengths), dtype=torch.bool)
            kept[slice(begin, end) if per_token else n] = False
            x, y = (values[0] if per_token else values for values in (before[key], after[key]))
            assert torch.equal(x[kept], y[kept]), key


def poisoned(scan: Scan, problem: Problem, n: int, value: float) -> Iterator[list[torch.Tensor]]:
    """The inputs with the value in document n: in its logits, each on its own, and in its initial state."""
    begin, end = problem.cu_seqlens[n:n + 2].tolist()
    for which in range(3):
        inputs = [x.clone() for x in problem.inputs(scan)]
        if which < 2:
            inputs[which][:, (begin + end) // 2:end] = value
        else:
            inputs[2][n] = value
        yield inputs
