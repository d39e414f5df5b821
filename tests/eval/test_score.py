import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eval.models import load
from eval.score import check_causal, score
from fla_harmonic import HarmonicConfig, HarmonicForCausalLM
from fla_harmonic.titan.data import TokenSplit


class Table(nn.Module):
    """Logits of a token by a table, after a mixing of the sequence that may look ahead."""

    def __init__(self, vocab_size: int = 256, mix: str = "none", scale: float = 1.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.table = nn.Embedding(vocab_size, vocab_size)
        nn.init.normal_(self.table.weight, std=scale)
        self.mix = mix

    def forward(self, tokens: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        x = self.table(tokens)
        if self.mix == "shift":
            x = F.pad(x, (0, 0, 0, 1))[:, 1:]
        elif self.mix == "pool 4":
            pooled = x[:, : x.shape[1] // 4 * 4].unflatten(1, (-1, 4)).mean(2, keepdim=True)
            x = torch.cat([pooled.expand(-1, -1, 4, -1).flatten(1, 2), x[:, pooled.shape[1] * 4:]], 1)
        elif self.mix == "late" and x.shape[1] > 127:
            x = x + F.pad(x[:, 127:128].expand(-1, 127, -1), (0, 0, 0, x.shape[1] - 127))
        elif self.mix == "norm over time":
            x = x / x.std(1, keepdim=True)
        return SimpleNamespace(logits=x)


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
    with pytest.raises(RuntimeError, match="not scored"):
        score(model, split_of(np.arange(100)), 32, 2)


@pytest.mark.parametrize("mix", ["shift", "pool 4", "norm over time", "late"])
def test_model_that_reads_the_future_gets_no_score(mix: str) -> None:
    with pytest.raises(RuntimeError, match="reads the future: not scored"):
        score(Table(mix=mix), split_of(np.arange(100) % 256), 32, 2)


def test_causal_models_pass() -> None:
    check_causal(Table())
    check_causal(HarmonicForCausalLM(HarmonicConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64)).eval())


@pytest.mark.parametrize("seq_len", [7, 32, 1000])
def test_every_token_but_the_first_counts_once_whatever_the_window(seq_len: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 500)
    model = Table()
    result = score(model, split_of(tokens), seq_len, 3)
    ids = torch.from_numpy(tokens)
    # the table sees one token, so that windows do not matter
    expected = F.cross_entropy(model.table(ids[:-1]).double(), ids[1:], reduction="sum").item() / math.log(2)
    assert result.targets == 499
    assert result.bits_per_token == pytest.approx(expected / 499, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(expected / 500, rel=1e-6)


def test_zero_logits_give_the_bits_of_the_vocabulary() -> None:
    result = score(Table(vocab_size=32000, scale=0.0), split_of(np.arange(100)), 64, 1)
    assert result.bits_per_token == pytest.approx(math.log2(32000), abs=1e-4)
    assert round(result.bits_per_token, 4) == 14.9658


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path / "nothing")
