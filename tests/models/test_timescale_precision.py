"""The biases that place timescales stay in float32, whatever the dtype of the model around them."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_models import config, model, tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fla_harmonic import HarmonicForCausalLM
from fla_harmonic.hallamonic.convert import convert_model, layer_options
from fla_harmonic.layers.harmonic import HarmonicLevel, Timescale

modes = pytest.mark.parametrize("timescale_mode", ["bounded", "init"])


def realised(lm: nn.Module) -> torch.Tensor:
    """`tau = 1 / (1 - A)` of every channel at zero input."""
    taus = []
    for level in (module for module in lm.modules() if isinstance(module, HarmonicLevel)):
        a_min, a_max = level.decay_range
        taus.append(1 / ((1 - a_max) + (a_max - a_min) * torch.sigmoid(-level.timescale.bias.detach().double())))
    return torch.cat(taus)


def trained(lm: HarmonicForCausalLM) -> HarmonicForCausalLM:
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return lm


def assert_narrow_but_for_timescales(lm: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    for name, parameter in lm.named_parameters():
        assert parameter.dtype == (torch.float32 if "timescale" in name else dtype), name


@modes
@pytest.mark.parametrize(("cast", "dtype"), [
    (lambda lm: lm.bfloat16(), torch.bfloat16), (lambda lm: lm.half(), torch.float16),
    (lambda lm: lm.to("cpu", torch.bfloat16), torch.bfloat16), (lambda lm: lm.double().to(torch.bfloat16), torch.bfloat16),
], ids=["bfloat16", "half", "to", "double and back"])
def test_casting_a_model_keeps_its_timescales(cast: Callable, dtype: torch.dtype, timescale_mode: str) -> None:
    lm = trained(model("stack", timescale_mode))
    narrow = cast(copy.deepcopy(lm))
    assert_narrow_but_for_timescales(narrow, dtype)
    assert torch.equal(realised(narrow), realised(lm))
    assert torch.equal(realised(copy.deepcopy(narrow).float()), realised(lm))


@modes
def test_a_model_loaded_or_saved_in_bfloat16_keeps_its_timescales(timescale_mode: str, tmp_path: Path) -> None:
    lm = trained(model("stack", timescale_mode))
    lm.save_pretrained(tmp_path / "wide")
    loaded = HarmonicForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.bfloat16)
    loaded.save_pretrained(tmp_path / "narrow")
    stored = load_file(tmp_path / "narrow" / "model.safetensors")
    assert {value.dtype for name, value in stored.items() if "timescale" in name} == {torch.float32}
    for narrow in (loaded, HarmonicForCausalLM.from_pretrained(tmp_path / "narrow", dtype="auto")):
        assert_narrow_but_for_timescales(narrow)
        assert torch.equal(realised(narrow), realised(lm))
    wide = HarmonicForCausalLM.from_pretrained(tmp_path / "narrow", dtype=torch.float32)
    assert torch.equal(realised(wide), realised(lm))


def test_a_new_model_in_bfloat16_has_the_timescales_of_one_in_float32() -> None:
    lm = AutoModelForCausalLM.from_config(config("stack", "init"), dtype=torch.bfloat16)
    assert_narrow_but_for_timescales(lm)
    assert torch.equal(realised(lm), realised(HarmonicForCausalLM(config("stack", "init"))))


@modes
def test_a_converted_model_in_bfloat16_has_the_timescales_of_one_in_float32(timescale_mode: str, tmp_path: Path) -> None:
    source = LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4))
    options = layer_options(source.config, timescale_mode=timescale_mode)
    expected = realised(convert_model(source, [0, 1], options=options).model)
    narrow = convert_model(source.bfloat16(), [0, 1], options=options).model
    narrow.save_pretrained(tmp_path)
    for lm in (narrow, type(narrow).from_pretrained(tmp_path, dtype="auto")):
        assert_narrow_but_for_timescales(lm)
        assert torch.equal(realised(lm), expected)
        assert lm(tokens(1, 9)).logits.dtype == torch.bfloat16
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_gradients_are_cast_with_their_bias() -> None:
    layer = Timescale(8, (2.0, 9.0), (0.0, 1.0))
    layer(torch.randn(8)).square().sum().backward()
    gradient = layer.bias.grad.clone()
    layer.bfloat16()
    assert torch.equal(layer.bias.grad, gradient)
    layer.double()
    assert layer.bias.dtype == layer.bias.grad.dtype == torch.float64


def test_a_bias_moves_and_is_emptied_as_any_parameter() -> None:
    with torch.device("meta"):
        layer = Timescale(8, (2.0, 9.0), (0.0, 1.0)).bfloat16()
    assert layer.bias.is_meta
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.equal(layer.bias, Timescale(8, (2.0, 9.0), (0.0, 1.0)).bias)
    assert layer.to("meta", torch.bfloat16).bias.is_meta
    assert layer.bias.dtype == torch.float32
