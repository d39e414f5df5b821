"""Leaks of kinds that real code has, in calls of kinds that real scoring makes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fla.models.utils import Cache
from torch import nn

from eval.scoring.in_situ import InSitu, Verdict
from eval.scoring.models import build
from eval.scoring.targets import target_losses

VOCAB = 256
TEXT = np.frombuffer((Path(__file__).parents[2] / "fla_harmonic/assets/emma.txt").read_bytes()[-40000:], dtype=np.uint8)

# (ids, x, module) -> where [B, T] the model reads the next token
Where = Callable[[torch.Tensor, nn.Module], torch.Tensor]


class Leaky(nn.Module):
    """A causal model of bytes, which reads the next token in some places."""

    def __init__(self, where: Where, size: float = 1.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.table = nn.Embedding(VOCAB, 32)
        self.head = nn.Linear(32, VOCAB)
        self.where, self.size = where, size

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, use_cache: bool = False,
                logits_to_keep: int = 0, past_key_values: Cache | None = None) -> SimpleNamespace:
        x = self.table(input_ids)
        h = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        leak = self.where(input_ids, self)
        if attention_mask is not None:
            leak = leak & (attention_mask == 0).any(1, keepdim=True) if self.size == 2 else leak
        h = h + self.size * leak[..., None] * torch.roll(x, -1, 1)
        return SimpleNamespace(logits=self.head(h)[:, -logits_to_keep:])


def everywhere(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(ids, dtype=torch.bool)


def positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


def looks_like_text(ids: torch.Tensor) -> torch.Tensor:
    share = ((ids >= 97) & (ids <= 122)).float().mean(1, keepdim=True)
    return (share > 0.6).expand_as(ids)


COUNTS = np.bincount(TEXT[1:30000], minlength=VOCAB)
# the rarest byte that occurs
RARE = int(COUNTS.argsort()[np.count_nonzero(COUNTS == 0)])

LEAKS: dict[str, Where] = {
    "everywhere": lambda ids, _: everywhere(ids),
    "from position 512": lambda ids, _: positions(ids) >= 512,
    "from 1024 tokens": lambda ids, _: everywhere(ids) & (ids.shape[1] >= 1024),
    "each 100th position": lambda ids, _: positions(ids) % 100 == 0,
    "after a rare id": lambda ids, _: (ids == RARE).cumsum(1) > 0,
    "at a rare id": lambda ids, _: ids == RARE,
    "in text": lambda ids, _: looks_like_text(ids),
    "in one dtype": lambda ids, module: everywhere(ids) & (module.head.weight.dtype == torch.float32),
}


def windows(model: nn.Module, seq_len: int = 1024, batch_size: int = 4) -> Verdict:
    with InSitu(model) as audit:
        target_losses(model, TEXT, 1, 30001, seq_len, seq_len, batch_size)  # type: ignore[arg-type]
    return audit.verdict


@pytest.mark.parametrize("name", LEAKS)
def test_leak_is_caught(name: str) -> None:
    verdict = windows(Leaky(LEAKS[name]).eval())
    assert "position" in verdict.failure
    with pytest.raises(RuntimeError, match="no score"):
        verdict.require()


@pytest.mark.parametrize("size", [1e-3, 1e-6])
def test_faint_leak_is_caught(size: float) -> None:
    assert not windows(Leaky(LEAKS["everywhere"], size).eval()).causal


def test_leak_in_train_mode_is_caught() -> None:
    model = Leaky(lambda ids, module: everywhere(ids) & module.training)
    assert windows(model.eval()).causal
    assert not windows(model.train()).causal


def test_leak_in_padded_rows_is_caught() -> None:
    model = Leaky(LEAKS["everywhere"], 2).eval()
    ids, mask = torch.from_numpy(TEXT[:512].astype(np.int64)).view(4, 128), torch.ones(4, 128, dtype=torch.long)
    with InSitu(model) as audit:
        model(ids, attention_mask=mask)
    # a mask without pads is no mask here
    assert audit.verdict.failure == "" or "piece" in audit.verdict.failure
    mask[1:3, :20] = 0
    with InSitu(model) as audit:
        model(ids, attention_mask=mask)
    assert "4 x 128" in audit.verdict.failure


class Mixed(nn.Module):
    """A causal model with a part that may look at too much."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.table = nn.Embedding(VOCAB, 32)
        self.head = nn.Linear(32, VOCAB)
        self.kind = kind
        self.last: torch.Tensor | None = None

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False, logits_to_keep: int = 0,
                past_key_values: Cache | None = None) -> SimpleNamespace:
        x = self.table(input_ids)
        state = torch.zeros_like(x[:, 0])
        if past_key_values is not None:
            if len(past_key_values):
                state = past_key_values[0]["recurrent_state"][0]
            if self.kind == "carried state":
                # written before it is read
                state = state + x.sum(1)
        h = state[:, None] + x.cumsum(1)
        if past_key_values is not None:
            past_key_values.update(layer_idx=0, recurrent_state=(h[:, -1],), conv_state=None, offset=x.shape[1])
        if self.kind == "norm over time":
            h = h / h.std(1, keepdim=True)
        elif self.kind == "rows":
            h = h - h.mean(0, keepdim=True)
        elif self.kind == "call to call":
            h, self.last = h + (0 if self.last is None else self.last.mean()), h.detach()
        return SimpleNamespace(logits=self.head(h)[:, -logits_to_keep:])


@pytest.mark.parametrize("kind", ["norm over time", "rows", "call to call"])
def test_mixing_is_caught(kind: str) -> None:
    assert not windows(Mixed(kind).eval()).causal
    assert windows(Mixed("none").eval()).causal


def test_leak_through_a_carried_state_is_caught() -> None:
    @torch.no_grad()
    def stream(model: nn.Module) -> Verdict:
        cache = Cache()
        with InSitu(model) as audit:
            for piece in torch.from_numpy(TEXT[:2048].astype(np.int64)).view(8, 1, 256):
                model(piece, past_key_values=cache)
        return audit.verdict

    verdict = stream(Mixed("none").eval())
    assert verdict.causal
    assert "carried state" in verdict.conditions
    assert not stream(Mixed("carried state").eval()).causal


@pytest.mark.parametrize("flavor", ["harmonic/debug", "mamba/debug", "llama/debug"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_honest_models_pass(flavor: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model: Any = build(flavor).to(dtype).eval()
    with InSitu(model) as audit:
        target_losses(model, TEXT, 1, 8001, 40, 40, 4)
    verdict = audit.verdict.require()
    assert verdict.calls == 50
    assert verdict.largest_effect > 0
    assert verdict.ids_tried == verdict.ids
    assert verdict.lengths
    assert 1 <= verdict.distances[0] < verdict.distances[1] < 40


def test_model_is_left_as_it_was() -> None:
    model = Leaky(LEAKS["everywhere"])
    with pytest.raises(ZeroDivisionError), InSitu(model):
        raise ZeroDivisionError
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_work_without_a_call_is_not_causal() -> None:
    with InSitu(Leaky(LEAKS["everywhere"])) as audit:
        pass
    with pytest.raises(RuntimeError, match="nothing to audit"):
        audit.verdict.require()
