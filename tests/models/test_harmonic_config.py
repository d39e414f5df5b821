import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import config
from transformers import AutoConfig

from fla_harmonic import HarmonicConfig, HarmonicForCausalLM


def count(net: torch.nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def build(**kwargs: Any) -> HarmonicForCausalLM:
    with torch.device("meta"):
        return HarmonicForCausalLM(HarmonicConfig.paper(**kwargs))


@pytest.mark.parametrize(("kwargs", "parameters"), [
    (dict(hidden_size=128, tie_word_embeddings=True), 6_993_024),
    (dict(hidden_size=256, tie_word_embeddings=True), 15_100_160),
    (dict(hidden_size=512, tie_word_embeddings=True), 34_656_768),
    (dict(hidden_size=256), 27_965_952),
    (dict(hidden_size=256, use_prediction_error=False), 27_834_880),
], ids=["H128-tied", "H256-tied", "H512-tied", "H256", "H256-no-error"])
def test_paper_preset_has_the_published_number_of_parameters(kwargs: dict[str, Any], parameters: int) -> None:
    assert count(build(vocab_size=50257, **kwargs)) == parameters
    assert count(build(vocab_size=50257, timescale_mode="init", **kwargs)) == parameters


def test_paper_preset_off_the_meta_device() -> None:
    model = HarmonicForCausalLM(HarmonicConfig.paper(hidden_size=256, vocab_size=50257))
    assert sum(p.numel() for p in model.parameters()) == 27965952


@pytest.mark.parametrize("hidden_size", [1, 16, 48])
def test_paper_preset_body_follows_the_formula(hidden_size: int) -> None:
    lm = build(hidden_size=hidden_size, vocab_size=11)
    assert count(lm) == 34 * hidden_size**2 + 24 * hidden_size + 2 * 11 * hidden_size


def test_preset_fields_can_be_replaced() -> None:
    given = HarmonicConfig.paper(hidden_size=16, vocab_size=9, num_hidden_layers=3, gate_ratio=None, gated_mlp=True)
    assert (given.num_hidden_layers, given.gate_ratio, given.gated_mlp, given.intermediate_size) == (3, None, True, 64)


@pytest.mark.parametrize("preset", ["paper", "stack"])
@pytest.mark.parametrize("timescales", [[[2.2, 8.3]], [[2, 4], [8, 16], [32, 64], [128, 256]]], ids=["one", "four"])
def test_config_survives_json(preset: str, timescales: list[list[float]], tmp_path: Path) -> None:
    given = config(preset, "init", timescales=timescales, gate_ratio=None, gate_rank=4, tie_word_embeddings=True)
    assert HarmonicConfig(**json.loads(given.to_json_string())).to_dict() == given.to_dict()
    given.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is HarmonicConfig
    assert {**loaded.to_dict(), "_name_or_path": ""} == given.to_dict()
    assert loaded.timescales == timescales


@pytest.mark.parametrize(("field", "value"), [
    *product(("hidden_size", "num_hidden_layers", "vocab_size", "conv_size"), (0, -1, 1.5, None, True)),
    *product(("hidden_ratio", "intermediate_size", "gate_ratio", "gate_rank"), (0, 1.5, True)),
    *product(("timescales",), ([], [(4, 2)])),
    ("attn_mode", "parallel"), ("timescale_mode", "free"), ("hidden_act", "gelu"), ("expand_ratio", 0),
])
def test_impossible_field_is_named_by_the_config(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{field}` must"):
        HarmonicConfig(**{field: value})


def test_fields_that_exclude_one_another() -> None:
    with pytest.raises(ValueError, match="`gate_ratio` and `gate_rank` exclude one another"):
        HarmonicConfig(gate_ratio=2, gate_rank=2)
    with pytest.raises(ValueError, match="`expand_ratio` must"):
        HarmonicConfig(expand_ratio=2, use_output_proj=False)
    with pytest.raises(ValueError, match=r"`hidden_act` must be one of \('swish',\); got 'powlu'"):
        HarmonicConfig(gated_mlp=False, hidden_act="powlu")
    with pytest.raises(ValueError, match="fuse_linear_cross_entropy"):
        HarmonicConfig(fuse_cross_entropy=True, fuse_linear_cross_entropy=True)
    with pytest.raises(ValueError, match="out-of-range layer 9"):
        HarmonicConfig(num_hidden_layers=2, attn={"layers": [9], "num_heads": 2})
