import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fla_harmonic.modules import MLP, GatedMLP, RMSNorm, ShortConvolution


def compare(actual: list[torch.Tensor], expected: list[torch.Tensor], bound: float = 1e-12) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=0, atol=bound)


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    for p in module.parameters():
        torch.nn.init.normal_(p)
    return module


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("shape", [(2, 5, 12), (1, 0, 12), (12,)], ids=str)
def test_norm_divides_by_the_root_mean_square(shape: tuple[int, ...], bias: bool) -> None:
    norm = randomised(RMSNorm(12, bias=bias, eps=1e-3)).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight + (norm.bias if bias else 0)
    leaves = [x, *norm.parameters()]
    results = [[y, *torch.autograd.grad(y.sin().sum(), leaves, materialize_grads=True)] for y in (norm(x), expected)]
    compare(*results)


def test_norm_adds_the_residual_and_returns_the_sum() -> None:
    norm = RMSNorm(12).double()
    x, residual = torch.randn(2, 3, 5, 12, dtype=torch.float64)
    y, total = norm(x, residual, prenorm=True)
    compare([total, y], [x + residual, norm(x + residual)])
    assert torch.equal(norm(x, residual), y)


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_norm_keeps_the_dtypes_of_its_inputs(residual_dtype: torch.dtype) -> None:
    norm = RMSNorm(12)
    x, residual = torch.randn(3, 12).bfloat16(), torch.randn(3, 12).to(residual_dtype)
    y, total = norm(x, residual, prenorm=True)
    assert (y.dtype, total.dtype) == (torch.bfloat16, residual_dtype)
    # the sum is rounded in what is returned, not in what is normalised
    compare([y.double()], [norm.double()(x.double() + residual.double()).bfloat16().double()], 1e-2)
    assert norm.float()(x, prenorm=True, residual_in_fp32=True)[1].dtype == torch.float32


@pytest.mark.parametrize("hidden_act", ["swish", "powlu"])
@pytest.mark.parametrize("T", [0, 7])
def test_gated_mlp(hidden_act: str, T: int) -> None:
    mlp = GatedMLP(6, intermediate_size=10, hidden_act=hidden_act).double()
    x = (4 * torch.randn(2, T, 6, dtype=torch.float64)).requires_grad_()
    gate = x @ mlp.gate_proj.weight.T
    if hidden_act == "powlu":
        root = gate.clamp_min(1e-12).sqrt()
        act = torch.where(gate > 0, torch.exp(3 * 2 * root.log() / (root + 1)), gate) * gate.sigmoid()
    else:
        act = gate * gate.sigmoid()
    expected = (act * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    leaves = [x, *mlp.parameters()]
    compare(*[[y, *torch.autograd.grad(y.sin().sum(), leaves)] for y in (mlp(x), expected)], bound=1e-10)


def test_plain_mlp() -> None:
    mlp = MLP(6, 10).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    compare([mlp(x)], [F.silu(x @ mlp.up_proj.weight.T) @ mlp.down_proj.weight.T])


def convolve(conv: ShortConvolution, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence `[T, D]` after its last W inputs `[D, W]`, token by token."""
    W = conv.kernel_size[0]
    window, outputs = [cache[:, i] for i in range(W)], []
    for token in x:
        window = [*window[1:], token]
        y = sum(conv.weight[:, 0, i] * window[i] for i in range(W))
        y = y if conv.bias is None else y + conv.bias
        outputs.append(y if conv.activation is None else y * y.sigmoid())
    return torch.stack(outputs) if outputs else x, torch.stack(window, -1)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), packed=st.booleans(), bias=st.booleans(),
    activation=st.sampled_from(["silu", None]), kernel=st.integers(1, 5), warm=st.booleans())
def test_convolution_equals_a_loop_over_tokens(
    lengths: list[int], packed: bool, bias: bool, activation: str | None, kernel: int, warm: bool,
) -> None:
    conv = randomised(ShortConvolution(3, kernel, bias=bias, activation=activation)).double()
    if packed:
        x, cu_seqlens = torch.randn(1, sum(lengths), 3, dtype=torch.float64), torch.tensor([0, *lengths]).cumsum(0)
    else:
        x, cu_seqlens = torch.randn(len(lengths), lengths[0], 3, dtype=torch.float64), None
    cache = torch.randn(len(lengths), 3, kernel, dtype=torch.float64)
    leaves = [x.requires_grad_(), *conv.parameters(), *([cache.requires_grad_()] if warm else [])]
    cache = cache if warm else torch.zeros_like(cache)

    results = [list(conv(x, cache=cache if warm else None, output_final_state=True, cu_seqlens=cu_seqlens))]
    rows = x[0].split(lengths) if packed else list(x)
    pairs = [convolve(conv, row, state) for row, state in zip(rows, cache, strict=True)]
    results.append([torch.cat([y for y, _ in pairs]).view(x.shape), torch.stack([state for _, state in pairs])])
    for result in results:
        loss = result[0].sin().sum() + result[1].cos().sum()
        result.extend(torch.autograd.grad(loss, leaves, materialize_grads=True))
    compare(*results)


@given(cuts=st.lists(st.integers(0, 20), max_size=4).map(sorted), kernel=st.integers(1, 5))
def test_convolution_continues_at_any_split(cuts: list[int], kernel: int) -> None:
    conv = ShortConvolution(3, kernel, bias=True).double()
    x = torch.randn(2, 20, 3, dtype=torch.float64)
    expected, last = conv(x, output_final_state=True)
    cache: torch.Tensor | None = None
    parts = []
    for i, j in zip([0, *cuts], [*cuts, 20], strict=True):
        before = None if cache is None else cache.clone()
        y, new = conv(x[:, i:j], cache=cache, output_final_state=True)
        assert before is None or torch.equal(cache, before)
        parts.append(y)
        cache = new
    assert cache is not None
    compare([torch.cat(parts, 1), cache], [expected, last])


def test_convolution_masks_adds_the_residual_and_keeps_the_input() -> None:
    conv = ShortConvolution(3, 4).double()
    x, residual = torch.randn(2, 2, 7, 3, dtype=torch.float64)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1]])
    before = x.clone()
    compare([conv(x, residual, mask)[0]], [conv(x * mask[..., None])[0] + residual])
    assert torch.equal(x, before)
    assert conv(x)[1] is None
    with pytest.raises(ValueError, match="exclude one another"):
        conv(x[:1], mask=mask[:1], cu_seqlens=torch.tensor([0, 7]))


def test_convolution_keeps_documents_apart() -> None:
    conv = ShortConvolution(3, 4, bias=True)
    x, borders = torch.randn(1, 9, 3, requires_grad=True), torch.tensor([0, 2, 2, 3, 9])
    gradient, = torch.autograd.grad(conv(x, cu_seqlens=borders)[0][:, 3:].sum(), x)
    assert not gradient[:, :3].any()
    poisoned = x.detach().clone()
    poisoned[:, :3] = torch.nan
    assert torch.equal(conv(poisoned, cu_seqlens=borders)[0][:, 3:], conv(x, cu_seqlens=borders)[0][:, 3:])
