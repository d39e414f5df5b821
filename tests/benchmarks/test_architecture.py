from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.architecture import OPTIONS, cost, main, saved_bytes
from fla_harmonic import HarmonicAttention, HarmonicConfig

PAGE = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8")


def test_the_page_has_what_the_command_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(png=tmp_path / "figure.png")
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert len(tables) == 2
    for table in tables:
        assert table in PAGE
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_explains_every_option_of_the_layer() -> None:
    ours = HarmonicConfig(hidden_size=8)
    for name in ("timescales", "timescale_mode", "use_prediction_error", "gate_ratio", "gate_rank", "expand_ratio",
                 "use_output_gate", "use_output_proj", "use_short_conv", "conv_size"):
        assert hasattr(ours, name)
        assert f"`{name}`" in PAGE


def test_saved_bytes_of_a_layer_that_is_known() -> None:
    # the input of the linear map and the output of the sigmoid; of the view nothing
    layer = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Flatten(0, 1))
    assert saved_bytes(layer, torch.randn(1, 10, 4)) == 4 * (4 + 6)


@pytest.mark.parametrize("options", [options for _, options in OPTIONS], ids=[name for name, _ in OPTIONS])
def test_cost_does_not_depend_on_the_length(options: dict) -> None:
    layer = HarmonicAttention(hidden_size=32, **options)
    short, long = (cost(layer, torch.randn(1, length, 32, requires_grad=True)) for length in (64, 512))
    # what is saved once a call, as initial states and borders are, is spread over fewer tokens in the short one
    assert (short.parameters, short.state, short.flops) == (long.parameters, long.state, long.flops)
    assert long.saved == pytest.approx(short.saved, rel=0.02)


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("gates", [{}, {"gate_ratio": 2}, {"gate_rank": 5}], ids=str)
def test_parameters_are_those_of_the_pages_formula(levels: int, gates: dict) -> None:
    H, r = 24, next(iter(gates.values()), 0)
    layer = HarmonicAttention(hidden_size=H, timescales=[(2, 8)] * levels, **gates)
    maps = {"gate_ratio": 2 * 2 * r * H * H + 2 * r * H + H, "gate_rank": 4 * r * H}.get(next(iter(gates), ""), 2 * H * H)
    expected = levels * (maps + 3 * H) + (levels - 1) * H * H + 2 * H * H
    assert sum(p.numel() for p in layer.parameters()) == expected
