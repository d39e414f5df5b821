from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoding import close
from small_models import config, model, tokens
from transformers import AutoModelForCausalLM

from fla_harmonic import HarmonicAttention, HarmonicConfig, HarmonicForCausalLM
from fla_harmonic.modules import Attention

ATTENTIONS: dict[str, Any] = {
    "last": {"layers": [1], "num_heads": 4},
    "first": {"layers": [0], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True},
    "window": {"layers": [1], "num_heads": 2, "window_size": 5, "rope_theta": 100.0},
    "two": [{"layers": [0], "num_heads": 2, "window_size": 3}, {"layers": [2], "num_heads": 1}],
}
hybrids = pytest.mark.parametrize("attn", ATTENTIONS)


def hybrid(attn: str, **kwargs: Any) -> HarmonicForCausalLM:
    return model("stack", attn=ATTENTIONS[attn], num_hidden_layers=3, eos_token_id=None, initializer_range=0.2, **kwargs)


@hybrids
def test_the_named_layers_are_attention(attn: str) -> None:
    specs = ATTENTIONS[attn] if isinstance(ATTENTIONS[attn], list) else [ATTENTIONS[attn]]
    lm = hybrid(attn)
    for index, layer in enumerate(lm.model.layers):
        spec = next((spec for spec in specs if index in spec["layers"]), None)
        assert type(layer.attn) is (HarmonicAttention if spec is None else Attention)
        if spec is not None:
            for name, value in spec.items():
                assert name == "layers" or getattr(layer.attn, name) == value
    # of a Harmonic layer: three levels and a convolution of width 4
    assert lm.state_size == (3 - len(specs)) * (3 + 4) * 16


@hybrids
def test_hybrid_is_causal(attn: str) -> None:
    lm, x = hybrid(attn), tokens(1, 20)
    embeddings = lm.model.embeddings(x).detach().requires_grad_()
    logits = lm(inputs_embeds=embeddings, use_cache=False).logits
    for split in range(1, 20):
        gradient, = torch.autograd.grad(logits[:, :split].sin().sum(), embeddings, retain_graph=True)
        assert not gradient[:, split:].any()
        assert gradient[:, split - 1].any()


@hybrids
@pytest.mark.parametrize("cuts", [[1], [3, 4, 11], list(range(1, 20))], ids=["one", "some", "tokens"])
def test_hybrid_in_pieces_equals_the_full_pass(attn: str, cuts: list[int]) -> None:
    lm, x, parts, cache = hybrid(attn), tokens(2, 20), [], None
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :2] = mask[0, 6:9] = mask[1, 4] = 0
    with torch.no_grad():
        for i, j in zip([0, *cuts], [*cuts, 20], strict=True):
            out = lm(x[:, i:j], attention_mask=mask[:, :j], past_key_values=cache, use_cache=True)
            cache = out.cache
            parts.append(out.logits)
            assert cache.get_seq_length() == j
        for row, kept in enumerate(mask.bool()):
            close(torch.cat(parts, 1)[row, kept], lm(x[row:row + 1, kept]).logits[0])


@hybrids
def test_hybrid_generates(attn: str) -> None:
    lm, prompts = hybrid(attn), [tokens(1, n) for n in (7, 4, 1)]
    x = torch.cat([F.pad(prompt, (7 - prompt.shape[1], 0)) for prompt in prompts])
    options = dict(max_new_tokens=8, do_sample=False)
    batch = lm.generate(x, attention_mask=(x != 0).long(), **options)
    for row, prompt in enumerate(prompts):
        alone = lm.generate(prompt, **options)
        assert torch.equal(batch[row, -8:], alone[0, -8:])
        assert torch.equal(alone, lm.generate(prompt, use_cache=False, **options))
    beams = dict(options, num_beams=3, attention_mask=(x != 0).long())
    assert torch.equal(lm.generate(x, **beams), lm.generate(x, use_cache=False, **beams))


@hybrids
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_hybrid_keeps_packed_documents_apart(attn: str, train: bool) -> None:
    lm, lengths = hybrid(attn).train(train), [5, 1, 9, 6]
    x = tokens(1, 21)
    documents = x.split(lengths, 1)
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    out = lm(x, labels=x, position_ids=position_ids)
    close(out.logits, torch.cat([lm(document).logits for document in documents], 1))
    total = sum(lm(d, labels=d).loss * (d.shape[1] - 1) for d in documents if d.shape[1] > 1)
    close(out.loss, total / 17)
    with pytest.raises(ValueError, match="keep no cache of packed documents"):
        lm(x, position_ids=position_ids, use_cache=True)


@hybrids
def test_nothing_in_a_pad_reaches_the_tokens(attn: str) -> None:
    lm, x, mask = hybrid(attn), torch.randn(2, 9, 16), torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = mask[1, 4:6] = False
    x = x.masked_fill(~mask.unsqueeze(-1), torch.nan).requires_grad_()
    out = lm(inputs_embeds=x, attention_mask=mask, labels=tokens(2, 9))
    leaves = [x, *(p for name, p in lm.named_parameters() if "embeddings" not in name)]
    gradients = torch.autograd.grad(out.loss, leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][~mask].any()


@hybrids
def test_hybrid_is_saved_and_loaded(attn: str, tmp_path: Path) -> None:
    lm, x = hybrid(attn), tokens(2, 9)
    lm.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.attn == lm.config.attn
    assert torch.equal(again(x).logits, lm(x).logits)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_hybrid_trains_with_gradient_checkpointing() -> None:
    lm, x = hybrid("last").train(), tokens(2, 12)
    lm(x, labels=x).loss.backward()
    expected = {name: p.grad for name, p in lm.named_parameters()}
    assert all(gradient.any() for gradient in expected.values())
    lm.zero_grad()
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    lm(x, labels=x).loss.backward()
    for name, p in lm.named_parameters():
        assert torch.equal(p.grad, expected[name]), name


@pytest.mark.parametrize(("attn", "message"), [
    ({"layers": [1], "num_heads": 3}, "a `num_heads` that divides `hidden_size` .* got 3 and 3 with hidden_size=16"),
    ({"layers": [1], "num_heads": 16}, "`num_heads` must give heads of an even size; got 16 with hidden_size=16"),
    ({"layers": [1], "num_heads": 4, "num_kv_heads": 3}, "a `num_kv_heads` that divides `num_heads`; got 4 and 3"),
    ({"layers": [7], "num_heads": 4}, "'layers' contains out-of-range layer 7"),
])
def test_impossible_attention_is_named(attn: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HarmonicForCausalLM(HarmonicConfig(**{**config("stack").to_dict(), "attn": attn}))
