import copy
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec

import fla_harmonic.titan  # noqa: F401  (registers the specs)
from fla_harmonic.titan.components.loss import LossHead, build_loss, linear_cross_entropy


def problem(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(tokens, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(300, 16, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(300, (tokens,))


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # not by one: the gradient that comes in counts
    return torch.autograd.grad(loss * 0.37, leaves)


@given(
    tokens=st.integers(1, 70), chunk=st.integers(1, 80), recomputed=st.booleans(), autocast=st.booleans(),
    ignored=st.sampled_from([0, 0.3, 1]),
)
def test_chunks_equal_torchtitans_loss(tokens: int, chunk: int, recomputed: bool, autocast: bool, ignored: float) -> None:
    hidden, weight, labels = problem(tokens)
    labels[torch.rand(tokens) < ignored] = -100
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = cross_entropy_loss(F.linear(hidden, weight)[None], labels[None])
        actual = linear_cross_entropy(hidden.view(1, tokens, 16), weight, labels.view(1, tokens), chunk, recomputed)
    assert actual.dtype == torch.float32
    assert actual.shape == ()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for a, e in zip(gradients(actual, hidden, weight), gradients(expected, hidden, weight), strict=True):
        # autocast rounds every chunk's gradient of the weight to bfloat16
        torch.testing.assert_close(a, e, **({"atol": 0.02, "rtol": 0.02} if autocast else {"atol": 1e-5, "rtol": 1e-5}))


def test_half_precision_is_added_up_in_float32() -> None:
    hidden, weight, labels = problem(4096, torch.bfloat16)
    exact = F.cross_entropy(F.linear(hidden, weight).double(), labels, reduction="sum")
    chunked = linear_cross_entropy(hidden, weight, labels, 16)
    torch.testing.assert_close(chunked.double(), exact, atol=0, rtol=1e-6)
    expected = gradients(exact, hidden, weight)[1].double()
    error = (gradients(chunked, hidden, weight)[1].double() - expected).norm() / expected.norm()
    # 256 sums in bfloat16 would be off by more than the one rounding of the result
    assert error < 2**-8


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that a tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_never_exist_as_a_whole(dtype: torch.dtype, recomputed: bool) -> None:
    hidden, weight, labels = problem(1000, dtype)
    seen = {}
    for chunk in (0, 10):
        with LargestTensor() as largest:
            linear_cross_entropy(hidden, weight, labels, chunk, recomputed).backward()
        seen[chunk] = largest.elements
    assert seen[0] == 1000 * 300
    assert seen[10] == 1000 * 16


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_repeated_function_keeps_no_gradient_of_the_weight(recomputed: bool) -> None:
    hidden, weight, labels = problem(20)
    loss = checkpoint(linear_cross_entropy, hidden, weight, labels, 5, recomputed, use_reentrant=False)
    with warnings.catch_warnings(action="ignore"):
        alive = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == weight.shape and x is not weight]
    assert bool(alive) != recomputed
    del alive
    gradients(loss, hidden, weight)


@pytest.mark.parametrize("family", ["harmonic", "mamba", "llama"])
def test_the_models_chunked_loss_is_that_of_their_logits(family: str) -> None:
    spec = get_train_spec(family)
    args = copy.deepcopy(spec.model_args["debug"])
    args.seed = 0
    tokens, labels = torch.randint(256, (2, 2, 12))
    labels[:, 5:9] = -100
    results = []
    for chunk in (None, 0, 7):
        args.loss_chunk_tokens = chunk or 0
        model = spec.model_cls(args)
        with torch.no_grad():
            model.init_weights()
        loss = model(tokens, labels=labels) if chunk is not None else cross_entropy_loss(model(tokens), labels)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for result in results[1:]:
        for a, e in zip(result, results[0], strict=True):
            torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)


def test_the_loss_function_takes_logits_and_sums() -> None:
    loss = build_loss(ConfigManager().parse_args([]))
    logits, labels = torch.randn(2, 3, 10), torch.randint(10, (2, 3))
    assert torch.equal(loss(logits, labels), cross_entropy_loss(logits, labels))
    assert loss(torch.tensor(5.0), labels) == 5


def test_a_head_with_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="without bias"):
        LossHead(nn.Linear(3, 4), 0)
