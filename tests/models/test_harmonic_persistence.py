"""Saved models in a new process, which imports transformers and `fla_harmonic`: what is loaded is what was saved."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import config, tokens

from fla_harmonic import HarmonicConfig, HarmonicForCausalLM, HarmonicModel

VARIANTS = list(product(("paper", "stack"), ("bounded", "init"), (False, True)))
IDS = [f"{preset}-{mode}-{'tied' if tied else 'untied'}" for preset, mode, tied in VARIANTS]
DEVICE_MAPS = {"device": "cpu", "map": {"": "cpu"}, "auto": "auto"}

# memory that nobody writes is filled with NaN, so that a forgotten tensor shows
LOADING = """
import sys, torch
import fla_harmonic
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
assert torch.empty(3).isnan().all()
for folder in sys.argv[1:]:
    x = torch.load(f"{folder}/x.pt")
    loaded = {}
    def keep(name, path=folder, auto=AutoModelForCausalLM, **kwargs):
        lm = auto.from_pretrained(path, **kwargs)
        assert not lm.training
        with torch.no_grad():
            loaded[name] = dict(
                type=type(lm).__name__, out=lm(x)[0], state=lm.state_dict(), config=lm.config.to_dict(),
                devices={str(p.device) for p in lm.parameters()})
    keep("plain")
    keep("narrow", dtype=torch.bfloat16)
    keep("saved narrow", f"{folder}/narrow")
    keep("shards", f"{folder}/shards")
    keep("base", auto=AutoModel)
    keep("base of base", f"{folder}/base", auto=AutoModel)
    for name, device_map in DEVICE_MAPS.items():
        keep(name, f"{folder}/shards", device_map=device_map)
    loaded["config"] = AutoConfig.from_pretrained(folder)
    torch.save(loaded, f"{folder}/loaded.pt")
""".replace("DEVICE_MAPS", repr(DEVICE_MAPS))


@dataclass
class Saved:
    lm: HarmonicForCausalLM
    x: torch.Tensor
    folder: Path
    loaded: dict[str, Any]


def trained(preset: str, timescale_mode: str = "bounded", **options: Any) -> HarmonicForCausalLM:
    """No parameter is as it was initialised."""
    lm = HarmonicForCausalLM(config(preset, timescale_mode, **options)).eval()
    with torch.no_grad():
        for p in lm.parameters():
            p += 0.1 * torch.randn_like(p)
    return lm


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, bool], Saved]:
    saved = {}
    for variant in VARIANTS:
        preset, mode, tied = variant
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("model")
        lm, x = trained(preset, mode, tie_word_embeddings=tied, conv_bias=True), tokens(2, 70)
        lm.model.save_pretrained(folder / "base")
        lm.save_pretrained(folder)
        lm.save_pretrained(folder / "shards", max_shard_size="5KB")
        HarmonicForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder / "narrow")
        torch.save(x, folder / "x.pt")
        saved[variant] = Saved(lm, x, folder, {})
    command = [sys.executable, "-c", LOADING, *(str(model.folder) for model in saved.values())]
    result = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    for model in saved.values():
        model.loaded = torch.load(model.folder / "loaded.pt", weights_only=False)
    return saved


@pytest.fixture(params=VARIANTS, ids=IDS)
def saved(request: pytest.FixtureRequest, saved_models: dict[tuple[str, str, bool], Saved]) -> Saved:
    return saved_models[request.param]


def assert_same(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name], value), name


@pytest.mark.processes
@pytest.mark.parametrize("way", ["plain", "shards", *DEVICE_MAPS])
def test_a_new_process_gives_the_same_bits(saved: Saved, way: str) -> None:
    loaded = saved.loaded[way]
    assert loaded["type"] == "HarmonicForCausalLM"
    assert loaded["devices"] == {"cpu"}
    assert_same(loaded["state"], saved.lm.state_dict())
    with torch.no_grad():
        assert torch.equal(loaded["out"], saved.lm(saved.x).logits)


@pytest.mark.processes
def test_the_base_model_of_a_new_process_gives_the_same_bits(saved: Saved) -> None:
    for way in ("base", "base of base"):
        loaded = saved.loaded[way]
        assert loaded["type"] == "HarmonicModel"
        assert_same(loaded["state"], saved.lm.model.state_dict())
        with torch.no_grad():
            assert torch.equal(loaded["out"], saved.lm.model(saved.x)[0])


@pytest.mark.processes
def test_narrow_weights_load_in_a_new_process(saved: Saved) -> None:
    narrow = HarmonicForCausalLM(saved.lm.config)
    narrow.load_state_dict(saved.lm.state_dict())
    narrow = narrow.eval().bfloat16()
    for way in ("narrow", "saved narrow"):
        loaded = saved.loaded[way]
        assert loaded["config"]["dtype"] == "bfloat16"
        assert_same(loaded["state"], narrow.state_dict())
        with torch.no_grad():
            assert torch.equal(loaded["out"], narrow(saved.x).logits)


@pytest.mark.processes
def test_the_configuration_of_a_new_process_is_equal(saved: Saved) -> None:
    assert type(saved.loaded["config"]) is HarmonicConfig
    assert saved.loaded["config"] == saved.lm.config


@pytest.mark.processes
def test_a_tied_table_is_saved_once(saved: Saved) -> None:
    with safe_open(saved.folder / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != saved.lm.config.tie_word_embeddings  # noqa: SIM118
    again = HarmonicForCausalLM.from_pretrained(saved.folder)
    assert (again.lm_head.weight is again.model.embeddings.weight) == saved.lm.config.tie_word_embeddings


@pytest.mark.processes
def test_shards_are_several(saved: Saved) -> None:
    assert len(list((saved.folder / "shards").glob("*.safetensors"))) > 3


@pytest.fixture
def reports() -> Iterator[list[str]]:
    """What transformers warns of."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, listener = logging.getLogger("transformers"), Listener(logging.WARNING)
    logger.addHandler(listener)
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    yield said
    transformers.logging.set_verbosity(before)
    logger.removeHandler(listener)


@pytest.mark.parametrize("name", [
    "model.embeddings.weight", "lm_head.weight", "model.layers.0.attn.levels.1.timescale.bias",
    "model.layers.0.attn.levels.2.gate_proj.0.weight", "model.layers.0.attn.levels.0.norm.weight",
    "model.layers.0.mlp.down_proj.weight",
])
def test_a_missing_tensor_is_reported_and_initialised(name: str, tmp_path: Path, reports: list[str]) -> None:
    lm = trained("paper")
    lm.save_pretrained(tmp_path)
    HarmonicForCausalLM.from_pretrained(tmp_path)
    assert not any("MISSING" in text for text in reports)

    state = load_file(tmp_path / "model.safetensors")
    missing = state.pop(name)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, info = HarmonicForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {name}
    # one line for all levels or layers, with their numbers in braces
    stem = name.rsplit(".", 2)[-2]
    assert any("MISSING" in text and stem in text for text in reports)
    filled = again.state_dict().pop(name)
    assert filled.isfinite().all()
    assert not torch.equal(filled, missing)
    assert_same({k: v for k, v in again.state_dict().items() if k != name}, state)


def test_a_tensor_of_another_shape_is_an_error(tmp_path: Path) -> None:
    trained("paper").save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        HarmonicForCausalLM.from_pretrained(tmp_path, hidden_size=32)


def test_a_tensor_that_the_model_lacks_is_reported(tmp_path: Path, reports: list[str]) -> None:
    trained("stack").save_pretrained(tmp_path)
    _, info = HarmonicForCausalLM.from_pretrained(tmp_path, use_output_gate=False, output_loading_info=True)
    assert set(info["unexpected_keys"]) == {f"model.layers.{i}.attn.g_proj.weight" for i in range(2)}
    assert any("UNEXPECTED" in text and "g_proj" in text for text in reports)


@pytest.mark.processes
def test_a_loaded_model_is_saved_as_it_was(saved: Saved, tmp_path: Path) -> None:
    HarmonicForCausalLM.from_pretrained(saved.folder).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (saved.folder / "model.safetensors").read_bytes()
    assert (tmp_path / "config.json").read_text() == (saved.folder / "config.json").read_text()


@pytest.mark.processes
def test_the_base_of_a_causal_model_loads_into_one_with_a_new_head(saved: Saved) -> None:
    again, info = HarmonicForCausalLM.from_pretrained(saved.folder / "base", output_loading_info=True)
    assert set(info["missing_keys"]) == (set() if saved.lm.config.tie_word_embeddings else {"lm_head.weight"})
    assert_same(again.model.state_dict(), saved.lm.model.state_dict())
    assert isinstance(again.model, HarmonicModel)
