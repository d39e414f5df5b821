import json
import math
from pathlib import Path

import pytest
import torch
import tyro
from torch import nn

from eval import audit as command
from eval import audit_all
from eval.scoring.audit import audit, check_causal, splits
from eval.scoring.models import FAMILIES, build
from eval.scoring.planted_leaks import MIXES, Table

FLAVORS = [f"{family}/{size}" for family, sizes in FAMILIES.items() for size in sizes if size.startswith("debug")]


@pytest.mark.parametrize("mix", MIXES)
def test_planted_leak_is_caught(mix: str) -> None:
    verdict = audit(Table(mix=mix))
    assert not verdict.causal
    with pytest.raises(RuntimeError, match="not scored"):
        check_causal(Table(mix=mix))


def test_first_offending_position_is_named() -> None:
    # position 0 reads token 1
    assert "logits at position 0" in audit(Table(mix="shift")).failure
    # positions below 127 read token 127, which every split up to there changes
    assert "when tokens from 1 on do" in audit(Table(mix="late")).failure


@pytest.mark.parametrize("flavor", FLAVORS)
def test_every_family_is_causal(flavor: str) -> None:
    torch.manual_seed(0)
    model = build(flavor).train()
    verdict = audit(model, length=136)
    assert verdict.causal, verdict
    assert verdict.largest_effect > 0
    assert verdict.packing == ("exact" if flavor.startswith("harmonic") else "not supported")
    assert verdict.random_bits_per_token > math.log2(256) - 0.01
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_documents_that_see_one_another_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build("harmonic/debug")
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, cu_seqlens=None, **options: forward(*args, **options))
    assert audit(model, length=136).packing == "leaks"


def test_gradient_alone_gives_a_leak_away() -> None:
    class Faint(Table):
        """Reads the next token below the bound of the first check."""

        def forward(self, tokens: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
            x = self.table(tokens)
            return x + 1e-8 * torch.roll(x, -1, 1)

    assert "gradient" in audit(Faint()).failure


def test_random_tokens_give_a_leak_away() -> None:
    class Peeking(Table):
        """Perfect at positions that no split and no gradient is tried at."""

        def forward(self, tokens: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
            x = self.table(tokens)
            if len(tokens) == 16 and not torch.equal(tokens[0], tokens[1]) and tokens[0, 0] != tokens[1, 0]:
                x = x + 9 * torch.nn.functional.one_hot(torch.roll(tokens, -1, 1), x.shape[-1])
            return x

    assert "uniformly random tokens" in audit(Peeking()).failure


def test_logits_that_are_no_numbers_fail() -> None:
    model = Table()
    nn.init.constant_(model.table.weight, math.nan)
    assert not audit(model).causal


def test_splits_cover_the_borders() -> None:
    assert splits(264) == [*range(1, 66), 127, 128, 129, 191, 192, 193, 255, 256, 257]
    assert splits(3) == [1, 2]


def test_command_exits_with_1_for_a_leak(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "audit.json"
    command.main(tyro.cli(command.Options, args=["--flavor", "harmonic/debug", "--length", "40", "--out", str(out)]))
    assert json.loads(out.read_text())["causal"] is True
    monkeypatch.setattr(command, "build", lambda flavor: Table(mix="pool 4"))
    with pytest.raises(SystemExit) as exit_:
        command.main(command.Options(flavor="harmonic/debug"))
    assert exit_.value.code == 1
    assert "position 0" in capsys.readouterr().out


@pytest.mark.parametrize("args", [{}, {"flavor": "harmonic/debug", "model": Path("x")}])
def test_one_model_is_asked_for(args: dict) -> None:
    with pytest.raises(ValueError, match="one of `model` and `flavor`"):
        command.main(command.Options(**args))


def test_unknown_flavor_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="harmonic/debug"):
        build("harmonic/huge")


def test_audit_of_all_fails_for_a_flavor_that_leaks_and_for_a_leak_that_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    options = audit_all.Options(("harmonic/debug",), 136, tmp_path / "right")
    audit_all.main(options)
    assert "| harmonic/debug | yes |" in capsys.readouterr().out
    assert len(list((tmp_path / "right" / "verdicts").iterdir())) == 1 + len(MIXES)
    # what is done is not audited again
    with monkeypatch.context() as patch:
        patch.setattr(audit_all, "audit", None)
        audit_all.main(options)
    monkeypatch.setattr(audit_all, "build", lambda flavor: Table(mix="shift"))
    with pytest.raises(SystemExit, match="harmonic/debug"):
        audit_all.main(audit_all.Options(("harmonic/debug",), 136, tmp_path / "leaks"))
    monkeypatch.setattr(audit_all, "MIXES", ("none",))
    with pytest.raises(SystemExit, match="planted: none"):
        audit_all.main(audit_all.Options((), 136, tmp_path / "missed"))
