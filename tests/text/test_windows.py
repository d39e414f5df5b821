import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_harmonic.text import TokenSplit, TokenWindows, evaluation_batches
from fla_harmonic.text.windows import IGNORE_INDEX


def numbered(length: int, starts: tuple[int, ...] = (0,)) -> TokenSplit:
    """Tokens that are their own positions."""
    return TokenSplit(np.arange(length, dtype=np.uint16), np.asarray(starts, dtype=np.int64), length)


@settings(deadline=None)
@given(st.integers(2, 200), st.integers(1, 20), st.booleans())
def test_every_token_but_the_first_is_a_label_once(length: int, seq_len: int, tail: bool) -> None:
    if length - 1 < (1 if tail else seq_len):
        return
    windows = TokenWindows(numbered(length), seq_len, tail=tail)
    inputs, labels = windows.batch(np.arange(len(windows)), False)
    assert list(inputs) == ["input"]
    assert inputs["input"].dtype == labels.dtype == torch.int64
    assert inputs["input"].shape == labels.shape == (len(windows), seq_len)
    assert inputs["input"].is_contiguous()
    assert labels.is_contiguous()
    counted = labels != IGNORE_INDEX
    last = length if tail else 1 + seq_len * len(windows)
    assert labels[counted].tolist() == list(range(1, last))
    assert length - last < seq_len
    assert (inputs["input"][counted] == labels[counted] - 1).all()


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 20), st.booleans())
def test_document_ids_count_the_documents_of_each_window(lengths: list[int], seq_len: int, tail: bool) -> None:
    of_token = np.repeat(np.arange(len(lengths)), lengths)
    if len(of_token) - 1 < (1 if tail else seq_len):
        return
    starts = tuple(np.cumsum([0, *lengths[:-1]]).tolist())
    windows = TokenWindows(numbered(len(of_token), starts), seq_len, tail=tail)
    inputs, labels = windows.batch(np.arange(len(windows)), True)
    ids = inputs["document_ids"]
    assert ids.dtype == torch.int32
    assert ids.shape == labels.shape
    for first, row_ids in zip(range(0, len(of_token), seq_len), ids, strict=False):
        expected = of_token[first : first + seq_len]
        # what is missing opens no document
        expected = np.pad(expected - expected[0], (0, seq_len - len(expected)), mode="edge")
        assert row_ids.tolist() == expected.tolist()


@pytest.mark.parametrize(("length", "tail", "needed"), [(8, False, 9), (0, False, 9), (1, True, 2)])
def test_text_shorter_than_a_window_is_refused_with_the_numbers(length: int, tail: bool, needed: int) -> None:
    with pytest.raises(ValueError, match=rf"{length} tokens.*seq_len 8 needs {needed}.*longer text"):
        TokenWindows(numbered(length), 8, tail=tail)


@settings(deadline=None)
@given(st.integers(2, 100), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_evaluation_labels_each_token_once_over_all_ranks(
    length: int, seq_len: int, batch: int, world: int, ids: bool
) -> None:
    of_rank = [
        list(evaluation_batches(numbered(length), seq_len, batch, dp_world_size=world, dp_rank=rank, document_ids=ids))
        for rank in range(world)
    ]
    # ranks that ran another number of batches would wait for each other
    assert len({len(batches) for batches in of_rank}) == 1
    labels = torch.stack([labels for batches in of_rank for _, labels in batches])
    assert labels.shape[1:] == (batch, seq_len)
    assert sorted(labels[labels != IGNORE_INDEX].tolist()) == list(range(1, length))
    for batches in of_rank:
        for inputs, batch_labels in batches:
            counted = batch_labels != IGNORE_INDEX
            assert (inputs["input"][counted] == batch_labels[counted] - 1).all()
            assert set(inputs) == ({"input", "document_ids"} if ids else {"input"})
