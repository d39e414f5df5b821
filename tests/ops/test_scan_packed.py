from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scans import BACKENDS, FLOAT32_BOUND, SCANS, Problem, outputs_and_gradients, relative_error

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
    inputs = problem.inputs(SCANS[name])
    edited = data.draw(st.integers(0, len(lengths) - 1))
    begin, end = (int(border) for border in problem.cu_seqlens[edited:edited + 2])
    other = [x.clone() for x in inputs]
    for x in other[:2]:
        x[:, begin:end] *= 3
    other[2][edited] += 1

    options = dict(cu_seqlens=problem.cu_seqlens, mask=problem.mask, backend=backend)
    before = outputs_and_gradients(SCANS[name].run, inputs, torch.float32, **options)
    after = outputs_and_gradients(SCANS[name].run, other, torch.float32, **options)
    for key in before:
        per_token = before[key].ndim == 3
        kept = torch.ones(problem.T if per_token else len(lengths), dtype=torch.bool)
        kept[slice(begin, end) if per_token else edited] = False
        x, y = (values[0] if per_token else values for values in (before[key], after[key]))
        assert torch.equal(x[kept], y[kept]), key


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
