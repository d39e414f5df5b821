import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.scoring.planted_leaks import Table
from eval.scoring.targets import target_losses, windows
from fla_harmonic import HarmonicConfig, HarmonicForCausalLM


@given(first=st.integers(1, 50), number=st.integers(1, 200), seq_len=st.integers(1, 40), data=st.data())
def test_every_target_is_predicted_once_from_enough_tokens(first: int, number: int, seq_len: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, seq_len))
    targets: list[int] = []
    for window in windows(first, first + number, seq_len, stride):
        assert 0 <= window.begin < window.end <= window.begin + seq_len
        mine = range(window.end - window.scored + 1, window.end + 1)
        # what a target is predicted from: the tokens of its window before it
        assert all(target - window.begin >= min(target, seq_len - stride + 1) for target in mine)
        targets += mine
    assert targets == list(range(first, first + number))


@pytest.mark.parametrize(("first", "stop", "seq_len", "stride"), [(0, 5, 4, 2), (5, 5, 4, 2), (1, 5, 4, 5), (1, 5, 4, 0)])
def test_impossible_windows_are_refused(first: int, stop: int, seq_len: int, stride: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        list(windows(first, stop, seq_len, stride))


def test_text_that_ends_before_its_targets_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 9 tokens"):
        target_losses(Table(), np.zeros(8, np.uint8), 1, 9, 4, 2)


@settings(deadline=None, max_examples=15)
@given(seq_len=st.integers(1, 30), batch=st.integers(1, 4), data=st.data())
def test_losses_are_those_of_each_target_from_its_own_window(seq_len: int, batch: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, seq_len))
    torch.manual_seed(0)
    model = HarmonicForCausalLM(HarmonicConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50)).eval()
    tokens = np.random.default_rng(0).integers(0, 50, 80)
    done: list[int] = []
    losses = target_losses(model, tokens, 3, 77, seq_len, stride, batch, done.append)
    assert sum(done) == 74
    assert losses.dtype == torch.float64
    expected = []
    with torch.no_grad():
        for window in windows(3, 77, seq_len, stride):
            ids = torch.from_numpy(tokens[window.begin:window.end + 1])
            logits = model(ids[None, :-1], use_cache=False).logits[0].double()
            expected.append(F.cross_entropy(logits, ids[1:], reduction="none")[-window.scored:])
    torch.testing.assert_close(losses, torch.cat(expected), atol=2e-6, rtol=0)


def test_zero_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    losses = target_losses(Table(vocab_size=300, scale=0.0), np.arange(100), 1, 100, 10, 5, 3)
    assert losses.sum().item() == pytest.approx(99 * math.log(300), rel=1e-6)
