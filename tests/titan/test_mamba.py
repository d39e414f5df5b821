import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import MambaConfig, MambaForCausalLM

from fla_harmonic.models.mamba.modeling_mamba import LinearScanMambaMixer, build_mamba, use_linear_scan


def tiny_config(**kwargs: object) -> MambaConfig:
    return MambaConfig(
        **{"vocab_size": 61, "hidden_size": 24, "state_size": 5, "num_hidden_layers": 2, "tie_word_embeddings": False} | kwargs
    )


def pair(**kwargs: object) -> tuple[MambaForCausalLM, MambaForCausalLM]:
    """transformers' model and ours with the same weights, none of them special (biases are zero at initialisation)."""
    torch.manual_seed(0)
    reference = MambaForCausalLM(tiny_config(**kwargs))
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ours = build_mamba(reference.config)
    ours.load_state_dict(reference.state_dict())
    return reference, ours


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
@pytest.mark.parametrize("T", [1, 3, 63, 65, 257], ids=lambda T: f"T{T}")
def test_values_and_gradients_equal_transformers(T: int, masked: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fla_harmonic.ops.mamba.selective_scan"], "HAS_LOOPS", backend == "numba")
    reference, ours = pair()
    tokens = torch.randint(61, (2, T))
    mask = None
    if masked:
        # left pads in one row, right and interior pads in the other
        mask = torch.ones(2, T, dtype=torch.long)
        mask[0, :T // 3] = 0
        mask[1, T // 2:T // 2 + 2] = 0
        mask[1, T - T // 4:] = 0
    weight = torch.randn(2, T, 61)
    grads = []
    for model in (reference, ours):
        logits = model(tokens, attention_mask=mask, use_cache=False).logits
        (logits * weight).sum().backward()
        grads.append((logits, {name: p.grad for name, p in model.named_parameters()}))
    (logits, expected), (ours_logits, actual) = grads
    torch.testing.assert_close(ours_logits, logits, atol=1e-5, rtol=1e-5)
    assert expected.keys() == actual.keys()
    for name, grad in expected.items():
        scale = grad.abs().max()
        assert scale > 0 or masked or T == 1, name
        assert (actual[name] - grad).abs().max() <= 2e-5 * scale + 1e-7, name


def test_a_cache_takes_the_parents_path() -> None:
    reference, ours = pair()
    tokens = torch.randint(61, (2, 9))
    expected = reference.eval().generate(tokens, max_new_tokens=4, do_sample=False)
    assert torch.equal(ours.eval().generate(tokens, max_new_tokens=4, do_sample=False), expected)


def test_only_the_given_model_is_changed() -> None:
    reference, ours = pair()
    assert not any(isinstance(m, LinearScanMambaMixer) for m in reference.modules())
    assert sum(isinstance(m, LinearScanMambaMixer) for m in ours.modules()) == 2
    assert sum(isinstance(m, LinearScanMambaMixer) for m in use_linear_scan(reference).modules()) == 2


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_low_precision_inputs_keep_an_fp32_state(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fla_harmonic.ops.mamba.selective_scan"], "HAS_LOOPS", backend == "numba")
    reference, ours = pair()
    tokens = torch.randint(61, (2, 65))
    expected = reference(tokens, use_cache=False).logits
    low = ours.bfloat16()(tokens, use_cache=False).logits
    assert (low - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.parametrize("kwargs", [{"use_conv_bias": False}, {"hidden_act": "relu"}, {"conv_kernel": 2}], ids=str)
def test_other_convolutions_equal_transformers(kwargs: dict[str, object]) -> None:
    reference, ours = pair(**kwargs)
    tokens = torch.randint(61, (2, 40))
    expected, actual = (model(tokens, use_cache=False).logits for model in (reference, ours))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_checkpointed_and_compiled_layers_keep_every_bit() -> None:
    _, ours = pair()
    hidden = torch.randn(2, 70, 24, requires_grad=True)
    weight = torch.randn(2, 70, 24)
    mixer = ours.backbone.layers[0].mixer
    leaves = [hidden, *mixer.parameters()]
    expected = mixer(hidden)
    grads = torch.autograd.grad((expected * weight).sum(), leaves)
    for other in (
        lambda x: checkpoint(mixer, x, use_reentrant=False),
        torch.compile(mixer, backend="aot_eager", fullgraph=True),
    ):
        y = other(hidden)
        assert torch.equal(y, expected)
        for a, b in zip(torch.autograd.grad((y * weight).sum(), leaves), grads, strict=True):
            assert torch.equal(a, b)


def test_weights_do_not_see_the_future() -> None:
    _, ours = pair()
    tokens = torch.randint(61, (1, 40))
    changed = tokens.clone()
    changed[:, 17:] = torch.randint(61, (1, 23))
    before, after = (ours(x, use_cache=False).logits[:, :17] for x in (tokens, changed))
    assert torch.equal(before, after)
