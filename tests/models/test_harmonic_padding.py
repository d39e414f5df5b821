import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from decoding import close
from fla.models.utils import Cache
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import assert_same_cache, model, nets, tokens
from test_harmonic_packing import gradients

from fla_harmonic import HarmonicForCausalLM

Net = Callable[..., HarmonicForCausalLM]
every_net = nets(initializer_range=0.2)
presets = pytest.mark.parametrize("preset", ["paper", "stack"])
# left, right, interior, all at once, none, and nothing but pads
MASK = torch.tensor([
    [0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
    [1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 1, 0, 1, 1, 1],
    [0, 1, 1, 0, 1, 0, 1, 1, 1, 0],
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
])


@every_net
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_state_passes_pads_unchanged(net: Net, warm: bool) -> None:
    lm, x, before = net(), tokens(*MASK.shape), tokens(len(MASK), 4)
    with torch.no_grad():
        cache = lm(before, use_cache=True).cache if warm else None
        mask = torch.cat([torch.ones_like(before), MASK], 1) if warm else MASK
        out = lm(x, attention_mask=mask, past_key_values=cache, use_cache=True)
        for row, kept in enumerate(MASK.bool()):
            alone = lm(before[row:row + 1], use_cache=True).cache if warm else None
            expected = lm(x[row:row + 1, kept], past_key_values=alone, use_cache=True)
            close(out.logits[row, kept], expected.logits[0])
            ours = Cache.from_legacy_cache(out.cache.to_legacy_cache(), expected.cache.get_seq_length())
            ours.batch_select_indices(torch.tensor([row]))
            assert_same_cache(ours, expected.cache)
    assert out.cache.get_seq_length() == x.shape[1] + (4 if warm else 0)


@settings(max_examples=15)
@given(data=st.data())
def test_any_pads_in_any_pieces_equal_the_tokens_alone(data: st.DataObject) -> None:
    lm = model(data.draw(st.sampled_from(["paper", "stack"])), data.draw(st.sampled_from(["bounded", "init"])),
               use_short_conv=data.draw(st.booleans()), initializer_range=0.2)
    S, cut = 12, data.draw(st.integers(0, 12))
    mask = torch.tensor([data.draw(st.lists(st.integers(0, 1), min_size=S, max_size=S)) for _ in range(3)])
    x = tokens(3, S)
    with torch.no_grad():
        first = lm(x[:, :cut], attention_mask=mask[:, :cut], use_cache=True)
        # the mask of the new tokens alone, or of the past too
        begin = data.draw(st.sampled_from([0, cut]))
        second = lm(x[:, cut:], attention_mask=mask[:, begin:], past_key_values=first.cache)
        logits = torch.cat([first.logits, second.logits], 1)
        for row, kept in enumerate(mask.bool()):
            close(logits[row, kept], lm(x[row:row + 1, kept]).logits[0])


@every_net
def test_pads_get_no_gradient(net: Net) -> None:
    lm = net()
    embeddings = torch.randn(*MASK.shape, 16, requires_grad=True)
    logits = lm(inputs_embeds=embeddings, attention_mask=MASK).logits
    gradient, = torch.autograd.grad(logits.sin().sum() + logits.square().sum(), embeddings)
    assert not gradient[MASK == 0].any()
    assert gradient[MASK == 1].abs().amax(-1).min() > 0


@every_net
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_what_is_in_a_pad_reaches_nothing(net: Net, poison: float) -> None:
    lm, labels = net(), tokens(*MASK.shape)
    clean = torch.randn(*MASK.shape, 16)
    results = []
    for embeddings in (clean, clean.masked_fill(MASK.unsqueeze(-1) == 0, poison)):
        embeddings.requires_grad_()
        out = lm(inputs_embeds=embeddings, attention_mask=MASK, labels=labels, use_cache=True)
        leaves = [embeddings, *(p for name, p in lm.named_parameters() if "embeddings" not in name)]
        results.append([out.loss, out.logits, *out.cache[0]["recurrent_state"], *torch.autograd.grad(out.loss, leaves)])
    for actual, expected in zip(*results, strict=True):
        assert expected.isfinite().all()
        assert torch.equal(actual, expected)


@every_net
def test_padded_loss_is_that_of_the_tokens_alone(net: Net) -> None:
    lm, x = net(), tokens(*MASK.shape)
    # labels at pads too, as a user has them who passes the inputs
    results = [[lm(x, attention_mask=MASK, labels=x).loss]]
    losses, count = [], 0
    for row, kept in enumerate(MASK.bool()):
        alone = x[row, kept]
        if len(alone) > 1:
            losses.append(F.cross_entropy(lm(alone[None]).logits[0, :-1], alone[1:], reduction="sum"))
            count += len(alone) - 1
    results.append([sum(losses) / count])
    for result in results:
        result.extend(gradients(result[0], lm))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected)
    torch.testing.assert_close(lm(x, attention_mask=MASK, labels=x, num_items_in_batch=7).loss, results[1][0] * count / 7)


@presets
def test_a_mask_of_ones_and_masked_labels_change_no_loss(preset: str) -> None:
    lm, x = model(preset), tokens(2, 9)
    labels = x.clone()
    labels[0, :4] = labels[1, 7:] = -100
    expected = F.cross_entropy(lm(x).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    for mask in (None, torch.ones(2, 9, dtype=torch.long), torch.ones(2, 9, dtype=torch.bool)):
        torch.testing.assert_close(lm(x, attention_mask=mask, labels=labels).loss, expected)
    # what a Trainer's collator gives: right pads, whose labels are -100 already
    padded, mask = F.pad(x, (0, 3)), F.pad(torch.ones_like(x), (0, 3))
    torch.testing.assert_close(lm(padded, attention_mask=mask, labels=F.pad(labels, (0, 3), value=-100)).loss, expected)


def test_an_assigned_criterion_ignores_pads_by_its_own_label() -> None:
    lm, x = model("paper"), tokens(2, 9)
    mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 7 + [0] * 2])
    expected = lm(x, attention_mask=mask, labels=x).loss
    lm.criterion = torch.nn.CrossEntropyLoss(ignore_index=-7)
    assert torch.equal(lm(x, attention_mask=mask, labels=x).loss, expected)


@pytest.mark.parametrize(("mask", "message"), [
    (torch.ones(2, 1, 5, 5, dtype=torch.long), r"of shape \[2, S\] with S >= 5; got \(2, 1, 5, 5\)"),
    (torch.ones(2, 5, 5, dtype=torch.long), r"of shape \[2, S\] with S >= 5; got \(2, 5, 5\)"),
    (torch.ones(2, 4, dtype=torch.long), r"of shape \[2, S\] with S >= 5; got \(2, 4\)"),
    (torch.ones(3, 5, dtype=torch.long), r"of shape \[2, S\] with S >= 5; got \(3, 5\)"),
    (torch.zeros(2, 5), "additive mask"),
    (torch.tensor([[1, 1, 2, 2, 2]] * 2), "must hold 0 and 1 alone; got values from 1 to 2"),
    (torch.tensor([[1, 1, -1, 0, 1]] * 2), "must hold 0 and 1 alone; got values from -1 to 1"),
    ({"full_attention": None}, "a tensor; got dict"),
], ids=["4d", "3d", "short", "rows", "additive", "documents", "negative", "dict"])
def test_masks_of_attention_are_refused(mask: torch.Tensor, message: str) -> None:
    x = tokens(2, 5)
    for run in (model("stack"), model("stack").model):
        with pytest.raises(ValueError, match=message):
            run(x, attention_mask=mask)
