from typing import Any

import pytest
import torch

from fla_harmonic.ops.harmonic import backends, chunk_harmonic, fused_recurrent_harmonic, linear_scan
from fla_harmonic.ops.harmonic.naive import naive_linear_scan, naive_recurrent_harmonic


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape or (1, 4, 2), dtype=dtype)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "dimensions": (dict(u=logits(4, 2), v=logits(4, 2)), r"`u` must have shape \[B, T, D\]; got \(4, 2\)"),
    "integers": (dict(u=logits(dtype=torch.int64), v=logits(dtype=torch.int64)), "must be float32, .* got torch.int64"),
    "shapes": (dict(v=logits(1, 4, 3)), r"`v` must match `u` .*\(1, 4, 2\).*got \(1, 4, 3\)"),
    "dtypes": (dict(v=logits(dtype=torch.float64)), r"`v` must match `u` .*float32.*got .*float64"),
    "devices": (dict(v=torch.empty(1, 4, 2, device="meta")), r"`v` must match `u` .*cpu; got .*meta"),
    "packed batch": (dict(u=logits(2, 4, 2), v=logits(2, 4, 2), cu_seqlens=torch.tensor([0, 4])), "batch of 1; got 2"),
    "border dimensions": (dict(cu_seqlens=torch.tensor([[0, 4]])), r"shape \[N \+ 1\]; got torch.int64 of shape \(1, 2\)"),
    "no document": (dict(cu_seqlens=torch.tensor([0])), r"must rise from 0 to the number of tokens"),
    "border dtype": (dict(cu_seqlens=torch.tensor([0.0, 4.0])), "int32 or int64 .* got torch.float32"),
    "first border": (dict(cu_seqlens=torch.tensor([1, 4])), r"from 0 to the number of tokens \(4\); got \[1, 4\]"),
    "last border": (dict(cu_seqlens=torch.tensor([0, 3])), r"from 0 to the number of tokens \(4\); got \[0, 3\]"),
    "falling borders": (dict(cu_seqlens=torch.tensor([0, 3, 2, 4])), r"must rise .* got \[0, 3, 2, 4\]"),
    "state shape": (dict(initial_state=torch.zeros(2, 2)), r"shape \[N, D\] = \(1, 2\).* got \(2, 2\)"),
    "state of documents": (
        dict(initial_state=torch.zeros(1, 2), cu_seqlens=torch.tensor([0, 2, 4])), r"= \(2, 2\).* got \(1, 2\)"),
    "state dtype": (dict(initial_state=torch.zeros(1, 2, dtype=torch.int64)), "floating point on cpu; got torch.int64"),
    "state device": (dict(initial_state=torch.zeros(1, 2, device="meta")), "floating point on cpu; got .* on meta"),
    "documents as a mask": (
        dict(mask=torch.tensor([[0, 1, 1, 2]])), "`mask` must hold 0 and 1 alone; got values from 0 to 2.*cu_seqlens"),
    "unknown backend": (dict(backend="cuda"), "one of .*'torch'.*; got 'cuda'"),
    "kernels on the CPU": (dict(backend="fla"), "'fla' cannot scan torch.float32 on cpu"),
    "double in float32 kernels": (
        dict(u=logits(dtype=torch.float64), v=logits(dtype=torch.float64), backend="numba"),
        "'numba' cannot scan torch.float64"),
}


@pytest.mark.parametrize("op", [chunk_harmonic, fused_recurrent_harmonic, linear_scan], ids=lambda op: op.__name__)
@pytest.mark.parametrize("case", CASES)
def test_bad_input_names_what_was_expected_and_what_came(op, case: str) -> None:
    arguments, message = CASES[case]
    arguments = dict(dict(u=logits(), v=logits()), **arguments)
    if op is linear_scan:
        arguments["g"], arguments["x"] = arguments.pop("u"), arguments.pop("v")
        message = message.replace("`u`", "`g`").replace("`v`", "`x`")
    else:
        arguments["decay_range"] = (0.5, 0.9)
    with pytest.raises(ValueError, match=message):
        op(**arguments)


@pytest.mark.parametrize("decay_range", [(0.9, 0.5), (0.5, 0.5), (-0.1, 0.5), (0.5, 1.1), (0.5,), (0.1, 0.2, 0.3), 0.5, None,
                                         ("a", "b"), (float("nan"), 1)], ids=str)
def test_impossible_decay_range(decay_range: Any) -> None:
    with pytest.raises(ValueError, match=r"pair \(a_min, a_max\) with 0 <= a_min < a_max <= 1; got"):
        chunk_harmonic(logits(), logits(), decay_range)


def test_missing_numba_is_named_and_the_default_runs_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(backends, "NO_NUMBA", "No module named 'numba'")
    backends.warn_slow_path.cache_clear()
    u, v = torch.randn(2, 1, 4, 2)
    with pytest.raises(ValueError, match="'numba' cannot scan"):
        linear_scan(u, v, backend="numba")
    h, _ = chunk_harmonic(u, v, (0.5, 0.9))
    assert torch.equal(h, chunk_harmonic(u, v, (0.5, 0.9), backend="torch")[0])
    assert "No module named 'numba'" in caplog.text
    assert "plain torch" in caplog.text

    def compiled(u, v):
        return chunk_harmonic(u, v, (0.5, 0.9))[0]

    assert torch.equal(torch.compile(compiled, fullgraph=True, backend="aot_eager")(u, v), h)


@pytest.mark.parametrize("borders", [[0, 5], [2, 10], [0, 7, 3, 10]])
def test_wrong_borders_are_refused_in_a_compiled_block_too(borders: list[int]) -> None:
    def block(u, v, cu_seqlens):
        return chunk_harmonic(u, v, (0.5, 0.9), cu_seqlens=cu_seqlens, backend="torch")[0]

    u, v = torch.randn(2, 1, 10, 2)
    with pytest.raises(ValueError, match="must rise from 0"):
        torch.compile(block, fullgraph=True, backend="aot_eager")(u, v, torch.tensor(borders))


def chunk(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return chunk_harmonic(u, v, (0.1, 0.9))[0]


def fused(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fused_recurrent_harmonic(u, v, (0.1, 0.9))[0]


def bare(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return linear_scan(-u.square(), v)[0]


def naive(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return naive_recurrent_harmonic(u, v, (0.1, 0.9))[0]


def naive_bare(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return naive_linear_scan(-u.square(), v)[0]


def dual(scan: Any, u: torch.Tensor, v: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        h = scan(torch.autograd.forward_ad.make_dual(u, torch.ones_like(u)), v)
        return torch.autograd.forward_ad.unpack_dual(h).tangent


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda scan, u, v: torch.func.vmap(scan)(u[None], v[None]),
    "grad": lambda scan, u, v: torch.func.grad(lambda u: scan(u, v).square().sum())(u),
    "jvp": lambda scan, u, v: torch.func.jvp(lambda u: scan(u, v), (u,), (torch.ones_like(u),))[1],
    "jacrev": lambda scan, u, v: torch.func.jacrev(scan)(u, v),
    "forward_ad": dual,
}
SCANS = [chunk, fused, bare]


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused(transform: str, scan: Any) -> None:
    u, v = torch.randn(2, 1, 4, 2)
    kind = "forward-mode" if transform == "forward_ad" else "torch.func transforms"
    with pytest.raises(RuntimeError, match=rf"{kind}.*not supported by the scans.*naive_recurrent_harmonic"):
        TRANSFORMS[transform](scan, u, v)


@pytest.mark.parametrize("scan", SCANS)
def test_gradients_of_gradients_are_refused(scan: Any) -> None:
    u, v = torch.randn(2, 1, 4, 2).requires_grad_().unbind()
    grad, = torch.autograd.grad(scan(u, v).square().sum(), u, create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated again .*create_graph.*naive_recurrent_harmonic"):
        torch.autograd.grad(grad.square().sum(), u)
    # the first ones are right
    torch.testing.assert_close(grad, torch.autograd.grad(scan(u, v).square().sum(), u)[0])


@pytest.mark.parametrize("scan", [naive, naive_bare])
def test_what_errors_name_supports_all_of_it(scan: Any) -> None:
    u, v = torch.randn(2, 1, 4, 2, dtype=torch.float64)
    for transform in TRANSFORMS.values():
        assert transform(scan, u, v).abs().sum() > 0
    u, v = u.requires_grad_(), v.requires_grad_()
    assert torch.autograd.gradcheck(scan, (u, v))
    assert torch.autograd.gradgradcheck(scan, (u, v))


def test_functional_call_is_no_transform() -> None:
    u, v = torch.randn(2, 1, 4, 2)
    layer = torch.nn.Module()
    layer.forward = chunk  # type: ignore[method-assign]
    assert torch.equal(torch.func.functional_call(layer, {}, (u, v)), chunk(u, v))
