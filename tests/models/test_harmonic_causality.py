import math

import pytest
import torch
import torch.nn.functional as F
from small_models import VOCAB, model, tokens

from fla_harmonic import HarmonicForCausalLM

models = pytest.mark.parametrize("net", [
    pytest.param((preset, mode), id=f"{preset}-{mode}") for preset in ("paper", "stack") for mode in ("bounded", "init")])
SPLITS = [*range(64), 126, 127, 128, 129, 130]
T = 140


@models
def test_no_suffix_changes_the_logits_before_it(net: tuple[str, str]) -> None:
    lm, x = model(*net), tokens(1, T)
    with torch.no_grad():
        logits = lm(x).logits
        # one row for each split: another suffix from there on
        suffixes = torch.where(torch.arange(T) >= torch.tensor(SPLITS)[:, None], (x + 7) % VOCAB, x)
        changed = lm(suffixes).logits
    for row, split in enumerate(SPLITS):
        torch.testing.assert_close(changed[row, :split], logits[0, :split], rtol=0, atol=1e-6)
        assert (changed[row, split:] - logits[0, split:]).abs().amax(-1).min() > 1e-3


@models
def test_early_logits_have_no_gradient_to_later_tokens(net: tuple[str, str]) -> None:
    lm = model(*net)
    embeddings = lm.model.embeddings(tokens(1, T)).detach().requires_grad_()
    logits = lm(inputs_embeds=embeddings).logits
    for split in SPLITS[1::6]:
        gradient, = torch.autograd.grad(logits[:, :split].sin().sum(), embeddings, retain_graph=True)
        assert not gradient[:, split:].any()
        assert gradient[:, split - 1].any()


@models
def test_length_of_the_input_does_not_change_a_prefix(net: tuple[str, str]) -> None:
    lm, x = model(*net), tokens(2, T)
    with torch.no_grad():
        logits = lm(x).logits
        for length in (1, 63, 64, 65, 127, 128, 129):
            torch.testing.assert_close(lm(x[:, :length]).logits, logits[:, :length], rtol=0, atol=1e-5)


@models
def test_random_tokens_cannot_be_predicted(net: tuple[str, str]) -> None:
    # trained on some random tokens, then asked about others: whoever does better than chance has seen the target
    lm = model(*net).train()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    for _ in range(15):
        loss = lm(x := torch.randint(0, VOCAB, (8, 64)), labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        held_out = lm.eval()(x := torch.randint(0, VOCAB, (32, 64)), labels=x).loss
    assert held_out.item() > math.log(VOCAB)


def test_documents_of_a_packed_row_do_not_see_one_another() -> None:
    lm, x = model("stack"), tokens(1, 130)
    borders = torch.tensor([0, 65, 66, 130])
    with torch.no_grad():
        logits = lm(x, cu_seqlens=borders).logits
        edited = x.clone()
        edited[:, :65] = (edited[:, :65] + 7) % VOCAB
        changed = lm(edited, cu_seqlens=borders).logits
        alone = lm(x[:, 66:]).logits
    assert torch.equal(changed[:, 65:], logits[:, 65:])
    torch.testing.assert_close(alone, logits[:, 66:], rtol=0, atol=1e-5)


def test_flat_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    lm: HarmonicForCausalLM = model("paper", vocab_size=32000)
    torch.nn.init.zeros_(lm.lm_head.weight)
    x = torch.randint(0, 32000, (1, 20))
    out = lm(x, labels=x)
    assert not out.logits.any()
    assert round(out.loss.item() / math.log(2), 4) == 14.9658
    assert round(F.cross_entropy(out.logits[0, :-1], x[0, 1:]).item() / math.log(2), 4) == 14.9658
