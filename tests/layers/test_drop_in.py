"""`HarmonicAttention` in the place of the mixer of a model of fla."""

import pytest
import torch
from fla.models import GLAConfig, GLAForCausalLM

from fla_harmonic import HarmonicAttention
from fla_harmonic.modules import GatedMLP

VOCAB = 61


@pytest.fixture(params=[{}, {"use_short_conv": True}, {"timescale_mode": "init", "expand_ratio": 2}], ids=str)
def gla(request: pytest.FixtureRequest) -> GLAForCausalLM:
    """A GLA of two blocks, all of them with Harmonic for their attention, and MLPs that run on the CPU."""
    model = GLAForCausalLM(GLAConfig(
        hidden_size=16, num_heads=2, num_hidden_layers=2, intermediate_size=24, vocab_size=VOCAB, initializer_range=0.3,
        fuse_norm=False, fuse_cross_entropy=False, eos_token_id=None, pad_token_id=None))
    for index, block in enumerate(model.model.layers):
        block.attn = HarmonicAttention(hidden_size=16, layer_idx=index, **request.param)
        mlp = GatedMLP(16, intermediate_size=24, hidden_act=model.config.hidden_act)
        mlp.load_state_dict(block.mlp.state_dict())
        block.mlp = mlp
    return model.eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(VOCAB, shape)


def test_every_new_parameter_trains(gla: GLAForCausalLM) -> None:
    x = tokens(2, 40)
    gla(x, labels=x).loss.backward()
    for name, p in gla.named_parameters():
        assert p.grad is not None, name
        assert p.grad.any(), name


def test_greedy_decoding_by_the_cache_equals_generation_without(gla: GLAForCausalLM) -> None:
    # `generate` without: transformers 5.24 hands the cache over under a name that models of fla 0.6 do not read
    x = tokens(2, 7)
    expected = gla.generate(x, max_new_tokens=10, do_sample=False, use_cache=False)
    output = gla(x, use_cache=True)
    for _ in range(10):
        following = output.logits[:, -1:].argmax(-1)
        x = torch.cat([x, following], 1)
        output = gla(following, past_key_values=output.past_key_values, use_cache=True)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("cut", [1, 5, 19])
def test_continued_cache_equals_the_full_logits(gla: GLAForCausalLM, cut: int) -> None:
    x = tokens(2, 20)
    first = gla(x[:, :cut], use_cache=True)
    second = gla(x[:, cut:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), gla(x).logits, rtol=0, atol=1e-4)


def test_padding_and_packing_equal_each_document_alone(gla: GLAForCausalLM) -> None:
    long, short = tokens(1, 20), tokens(1, 8)
    expected = [gla(long).logits, gla(short).logits]
    packed = gla(torch.cat([long, short], 1), cu_seqlens=torch.tensor([0, 20, 28])).logits
    torch.testing.assert_close(packed, torch.cat(expected, 1), rtol=0, atol=1e-4)
    mask = torch.tensor([[1] * 20, [0] * 12 + [1] * 8])
    padded = gla(torch.cat([long, torch.cat([tokens(1, 12), short], 1)]), attention_mask=mask).logits
    torch.testing.assert_close(padded[:1], expected[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(padded[1:, 12:], expected[1], rtol=0, atol=1e-4)
