from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoding import close
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VOCAB, model, nets, tokens
from transformers import DataCollatorWithFlattening

from fla_harmonic import HarmonicForCausalLM

Net = Callable[..., HarmonicForCausalLM]
every_net = nets(initializer_range=0.2)
LENGTHS = [5, 1, 66, 8]


def gradients(loss: torch.Tensor, lm: torch.nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(lm.parameters()), materialize_grads=True))


def borders(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def collate(documents: list[torch.Tensor], **options: bool) -> dict[str, Any]:
    return DataCollatorWithFlattening(**options)([{"input_ids": document.tolist()} for document in documents])


COLLATORS = {
    "positions": {},
    "flash": {"return_position_ids": False, "return_flash_attn_kwargs": True},
    "both": {"return_flash_attn_kwargs": True},
    "numbers": {"return_position_ids": False, "return_seq_idx": True},
    "all": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
}


@every_net
@pytest.mark.parametrize("collator", COLLATORS)
def test_flattened_batch_equals_its_documents(net: Net, collator: str) -> None:
    lm, documents = net(), list(tokens(sum(LENGTHS)).split(LENGTHS))
    batch = collate(documents, **COLLATORS[collator])
    out = lm(**batch)
    alone = [lm(document[None]).logits[0] for document in documents]
    close(out.logits[0], torch.cat(alone))
    total = sum(F.cross_entropy(logits[:-1], d[1:], reduction="sum") for logits, d in zip(alone, documents, strict=True))
    results = [[out.loss], [total / sum(n - 1 for n in LENGTHS)]]
    for result in results:
        result.extend(gradients(result[0], lm))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected)


@every_net
def test_packed_loss_with_plain_labels_scores_no_first_token(net: Net) -> None:
    lm, x = net(), tokens(1, sum(LENGTHS))
    losses = [lm(document, labels=document).loss * (document.shape[1] - 1) for document in x.split(LENGTHS, 1)
              if document.shape[1] > 1]
    expected = sum(losses) / sum(n - 1 for n in LENGTHS)
    for packing in (borders(LENGTHS), borders([0, *LENGTHS, 0]).int()):
        close(lm(x, labels=x, cu_seqlens=packing).loss, expected)


@every_net
@pytest.mark.parametrize("name", ["cu_seqlens", "position_ids"])
def test_no_gradient_crosses_a_border(net: Net, name: str) -> None:
    lm = net()
    packing = {"cu_seqlens": borders(LENGTHS), "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    embeddings = torch.randn(1, sum(LENGTHS), 16, requires_grad=True)
    out = lm(inputs_embeds=embeddings, **{name: packing[name]}).logits[0]
    for begin, end in zip(borders(LENGTHS), borders(LENGTHS)[1:], strict=False):
        gradient, = torch.autograd.grad(out[begin:end].sin().sum(), embeddings, retain_graph=True)
        assert gradient[0, begin:end].abs().amax(-1).min() > 0
        assert not gradient[0, :begin].any()
        assert not gradient[0, end:].any()


@every_net
def test_editing_a_document_changes_no_other(net: Net) -> None:
    lm, x = net(), tokens(1, sum(LENGTHS))
    packing = {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    with torch.no_grad():
        logits, edited = lm(x, **packing).logits, x.clone()
        edited[:, 5:72] = (edited[:, 5:72] + 7) % VOCAB
        changed = lm(edited, **packing).logits
    assert torch.equal(changed[:, :5], logits[:, :5])
    assert torch.equal(changed[:, 72:], logits[:, 72:])
    assert not torch.equal(changed[:, 5:72], logits[:, 5:72])


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5), start=st.integers(0, 3), first=st.integers(0, 40))
def test_positions_tell_borders(lengths: list[int], start: int, first: int) -> None:
    lm, x = model("stack", initializer_range=0.2), tokens(1, sum(lengths))
    # the first document may be the rest of one that began in an earlier row
    position_ids = torch.cat([torch.arange(n) + start for n in lengths])
    position_ids[:lengths[0]] += first
    with torch.no_grad():
        actual = lm(x, position_ids=position_ids[None]).logits
        expected = torch.cat([lm(document).logits for document in x.split(lengths, 1)], 1)
    close(actual, expected)


@pytest.mark.parametrize("packing", [
    dict(position_ids=torch.arange(9)[None]),
    dict(position_ids=torch.arange(9).expand(3, 9)),
    dict(position_ids=torch.arange(9)[None] + 30),
    dict(position_ids=torch.tensor([[1, 1, 1, 0, 1, 2, 3, 4, 5]] + [list(range(9))] * 2), attention_mask="left"),
    dict(position_ids=torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5]] + [list(range(9))] * 2), attention_mask="left"),
    dict(position_ids=torch.arange(9)[None], attention_mask="left"),
    dict(position_ids=torch.arange(9)[None], attention_mask="inside"),
    dict(position_ids=torch.tensor([[0, 1, 2, 2, 2, 3, 4, 5, 6]] + [list(range(9))] * 2), attention_mask="inside"),
], ids=["one", "rows", "offset", "left-ones", "left-zeros", "left-arange", "inside-arange", "inside"])
def test_positions_of_unpacked_rows_change_nothing(packing: dict[str, Any]) -> None:
    lm, x, mask = model("stack"), tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    where = packing.get("attention_mask")
    if where is not None:
        mask[0, slice(0, 3) if where == "left" else slice(3, 5)] = 0
        packing = {**packing, "attention_mask": mask}
    expected = lm(x, attention_mask=packing.get("attention_mask")).logits
    assert torch.equal(lm(x, **packing).logits, expected)


@pytest.mark.parametrize(("packing", "message"), [
    (dict(cu_seqlens=torch.tensor([0, 4])), r"`cu_seqlens` must rise from 0 to the number of tokens \(9\); got \[0, 4\]"),
    (dict(cu_seqlens=torch.tensor([1, 9])), "`cu_seqlens` must rise from 0"),
    (dict(cu_seqlens=torch.tensor([0, 5, 3, 9])), "`cu_seqlens` must rise from 0"),
    (dict(cu_seqlens=torch.tensor([0, 10])), "`cu_seqlens` must rise from 0"),
    (dict(cu_seqlens=torch.tensor([0.0, 9.0])), r"`cu_seqlens` must be int32 or int64 of shape \[N \+ 1\]; got torch.float32"),
    (dict(cu_seqlens=torch.tensor([[0, 9]])), r"`cu_seqlens` must be int32 or int64 of shape \[N \+ 1\]"),
    (dict(cu_seq_lens_q=torch.tensor([0, 4])), "must rise from 0"),
    (dict(cu_seq_lens_q=torch.tensor([0, 4, 9]), cu_seq_lens_k=torch.tensor([0, 5, 9])),
     r"`cu_seq_lens_q` and `cu_seq_lens_k` must give the same documents; they begin at \[0, 4\] and \[0, 5\]"),
    (dict(cu_seqlens=torch.tensor([0, 3, 9]), position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])),
     "`cu_seqlens` and `position_ids` must give the same documents"),
    (dict(seq_idx=torch.zeros(2, 9)), r"`seq_idx` must number the documents of one row, \[1, 9\]"),
    (dict(position_ids=torch.arange(8)[None]), r"`position_ids` must have shape \[1, 9\] or \[1, 9\]; got \(1, 8\)"),
    (dict(position_ids=torch.arange(9)), r"`position_ids` must have shape"),
    (dict(position_ids=torch.tensor([[0, 1, 2, 5, 6, 7, 8, 9, 10]])), "must rise by 1 within a document; got a step of 3"),
    (dict(position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), attention_mask=torch.tensor([[1] * 8 + [0]])),
     "in one row without pads and without a past; got 1 rows, pads and 0 tokens"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_wrong_borders_are_refused(packing: dict[str, Any], message: str) -> None:
    x = tokens(1, 9)
    for run in (lambda **kwargs: model("stack")(x, labels=x, **kwargs), lambda **kwargs: model("stack").model(x, **kwargs)):
        with pytest.raises(ValueError, match=message):
            run(**dict(packing))


def test_packing_more_than_one_row_is_refused() -> None:
    lm, x = model("stack"), tokens(2, 9)
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        with pytest.raises(ValueError, match=f"`{name}` needs a batch of 1; got 2"):
            lm(x, **{name: torch.tensor([0, 4, 9])})
    with pytest.raises(ValueError, match=r"begin again mean packed documents, .* got 2 rows, no pads and 0 tokens"):
        lm(x, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))


@every_net
def test_packed_cache_has_a_row_a_document_and_continues_as_rows(net: Net) -> None:
    lm, lengths = net(), [4, 1, 7]
    x, more = tokens(1, 12), tokens(3, 2)
    cache = lm(x, cu_seqlens=borders(lengths), use_cache=True).cache
    logits = lm(more, past_key_values=cache).logits
    for row, document in enumerate(x.split(lengths, 1)):
        close(logits[row], lm(torch.cat([document, more[row:row + 1]], 1)).logits[0, -2:])
    # a past of another number of sequences, and positions that would start anew behind one
    cache = lm(x, use_cache=True).cache
    with pytest.raises(ValueError, match="must hold 3 states of shape"):
        lm(x, cu_seqlens=borders(lengths), past_key_values=cache)
    with pytest.raises(ValueError, match="no pads and 12 tokens in the cache"):
        lm(x, position_ids=torch.cat([torch.arange(n) for n in lengths])[None], past_key_values=cache)
    position_ids = torch.arange(12, 24)[None]
    close(lm(x, position_ids=position_ids, past_key_values=cache).logits, lm(torch.cat([x, x], 1)).logits[:, 12:])
