import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from eval.scoring.models import load
from eval.scoring.planted_leaks import Table
from eval.scoring.score import score
from fla_harmonic.text import TokenSplit


def split_of(tokens: np.ndarray) -> TokenSplit:
    return TokenSplit(tokens.astype(np.uint8), np.zeros(1, np.int64), len(tokens))


def test_score_beyond_the_trained_length_says_so() -> None:
    model = Table()
    model.config.max_position_embeddings = 64
    tokens = split_of(np.arange(200) % 256)
    assert not score(model, tokens, 64, 1).beyond_trained_length
    assert score(model, tokens, 65, 1).beyond_trained_length


def test_model_with_nan_logits_gets_no_score() -> None:
    model = Table()
    with torch.no_grad():
        model.table.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="NaN"):
        score(model, split_of(np.arange(100)), 32, 2)


def test_model_that_reads_the_future_gets_no_score() -> None:
    with pytest.raises(RuntimeError, match="gets no score"):
        score(Table(mix="shift"), split_of(np.arange(100) % 256), 32, 2)


@pytest.mark.parametrize("seq_len", [7, 32, 1000])
def test_every_token_but_the_first_counts_once_whatever_the_window(seq_len: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 500)
    model = Table()
    result = score(model, split_of(tokens), seq_len, 3)
    ids = torch.from_numpy(tokens)
    # the table sees one token, so that windows do not matter
    expected = F.cross_entropy(model.table(ids[:-1]).double(), ids[1:], reduction="sum").item() / math.log(2)
    assert result.targets == 499
    assert result.audit.causal
    assert result.bits_per_token == pytest.approx(expected / 499, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(expected / 500, rel=1e-6)


def test_zero_logits_give_the_bits_of_the_vocabulary() -> None:
    result = score(Table(vocab_size=32000, scale=0.0), split_of(np.arange(100)), 64, 1)
    assert result.bits_per_token == pytest.approx(math.log2(32000), abs=1e-4)
    assert round(result.bits_per_token, 4) == 14.9658


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path / "nothing")
