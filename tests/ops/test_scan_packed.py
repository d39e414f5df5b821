import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scans import (
    BACKENDS,
    FLOAT32_BOUND,
    SCANS,
    Problem,
    assert_document_stays_alone,
    poisoned,
    relative_error,
)

backends = pytest.mark.parametrize("backend", BACKENDS)
scans = pytest.mark.parametrize("name", SCANS)
document_lengths = st.lists(st.integers(0, 70), min_size=2, max_size=6).filter(lambda lengths: sum(lengths) > 0)


@backends
@scans
@given(lengths=document_lengths, seed=st.integers(0, 99), data=st.data())
def test_editing_one_document_leaves_the_others_bit_equal(
    name: str, backend: str, lengths: list[int], seed: int, data: st.DataObject,
) -> None:
    problem = Problem(1, sum(lengths), 7, tuple(lengths), seed=seed)
    edited = data.draw(st.integers(0, len(lengths) - 1))
    begin, end = (int(border) for border in problem.cu_seqlens[edited:edited + 2])
    other = [x.clone() for x in problem.inputs(SCANS[name])]
    for x in other[:2]:
        x[:, begin:end] *= 3
    other[2][edited] += 1
    assert_document_stays_alone(SCANS[name], problem, edited, [other], backend=backend)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@backends
@scans
def test_one_document_that_is_not_finite_leaves_the_others_bit_equal(name: str, backend: str, value: float) -> None:
    # chunks of 8 tokens: borders within one, between two, several in one, and documents over several
    problem = Problem(1, 101, 5, (3, 0, 40, 8, 5, 1, 30, 14))
    for n, length in enumerate(problem.lengths):
        if length:
            assert_document_stays_alone(SCANS[name], problem, n, poisoned(SCANS[name], problem, n, value), backend=backend)


@backends
@scans
@given(lengths=document_lengths, data=st.data())
def test_gradient_between_documents_is_exactly_zero(
    name: str, backend: str, lengths: list[int], data: st.DataObject,
) -> None:
    problem = Problem(1, sum(lengths), 3, tuple(lengths))
    first, second, state = (x.requires_grad_() for x in problem.inputs(SCANS[name]))
    read = data.draw(st.integers(0, len(lengths) - 1))
    begin, end = (int(border) for border in problem.cu_seqlens[read:read + 2])
    h, final = SCANS[name].run(first, second, initial_state=state, output_final_state=True,
                               cu_seqlens=problem.cu_seqlens, mask=problem.mask, backend=backend)
    gradients = torch.autograd.grad(h[:, begin:end].square().sum() + final[read].square().sum(), (first, second, state))
    for gradient in gradients[:2]:
        assert not gradient[:, :begin].any()
        assert not gradient[:, end:].any()
    assert not torch.cat([gradients[2][:read], gradients[2][read + 1:]]).any()


@backends
@scans
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_packed_documents_equal_separate_runs(name: str, backend: str, dtype: torch.dtype) -> None:
    problem = Problem(1, 270, 33, (65, 1, 0, 129, 75))
    first, second, state = problem.inputs(SCANS[name])
    options = dict(output_final_state=True, backend=backend)
    h, final = SCANS[name].run(first, second, initial_state=state, cu_seqlens=problem.cu_seqlens.to(dtype), **options)
    borders = problem.cu_seqlens.tolist()
    for n, (i, j) in enumerate(pairwise(borders)):
        alone, last = SCANS[name].run(first[:, i:j], second[:, i:j], initial_state=state[n:n + 1], **options)
        assert relative_error(h[:, i:j], alone) < FLOAT32_BOUND
        assert relative_error(final[n:n + 1], last) < FLOAT32_BOUND


@backends
@scans
def test_state_of_an_empty_document_passes_unchanged(name: str, backend: str) -> None:
    problem = Problem(1, 5, 4, (0, 5, 0))
    first, second, state = (x.requires_grad_() for x in problem.inputs(SCANS[name]))
    final = SCANS[name].run(first, second, initial_state=state, output_final_state=True,
                            cu_seqlens=problem.cu_seqlens, mask=problem.mask, backend=backend)[1]
    assert torch.equal(final[[0, 2]], state[[0, 2]])
    gradient, = torch.autograd.grad(final[[0, 2]].sum(), state)
    assert torch.equal(gradient, torch.tensor([1.0, 0.0, 1.0])[:, None].expand(3, 4))
