import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import build, job, moved
from runs import ROOT
from torchtitan.protocols import ModelProtocol
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fla_harmonic.titan  # noqa: F401
from fla_harmonic.models.mamba.modeling_mamba import load_mamba
from fla_harmonic.titan.export import export, find_checkpoint, load_model

FAMILIES = ["harmonic", "mamba", "llama"]


def trained(family: str, folder: Path, *overrides: str) -> ModelProtocol:
    """A model at weights that no initialisation gives, and its checkpoint step-12 beside an older step-3."""
    model = build(job(family, *overrides))
    dcp.save(model.state_dict(), checkpoint_id=folder / "step-3")
    moved(model, 5)
    dcp.save(model.state_dict(), checkpoint_id=folder / "step-12")
    return model.eval()


@pytest.mark.parametrize(("family", "flavor"), [
    ("harmonic", "debug"), ("harmonic", "debug-paper"), ("mamba", "debug"), ("llama", "debug"),
])
def test_the_exported_model_gives_the_trained_logits(family: str, flavor: str, tmp_path: Path) -> None:
    overrides = [f"--model.flavor={flavor}", "--training.seq_len=200"]
    model = trained(family, tmp_path / "checkpoint", *overrides)
    export(job(family, *overrides), tmp_path / "checkpoint", tmp_path / "hf")
    hf_model = (load_mamba if family == "mamba" else AutoModelForCausalLM.from_pretrained)(tmp_path / "hf")
    tokens = torch.randint(256, (2, 200))
    with torch.no_grad():
        expected, actual = model(tokens), hf_model(tokens, use_cache=False).logits
    assert expected.abs().max() > 0.5
    # Llama's rotary embedding pairs other channels in transformers; the others run the same classes
    tolerance = 1e-5 if family == "llama" else 0
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)

    config = AutoConfig.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (config.eos_token_id, config.bos_token_id) == (tokenizer.eos_token_id, tokenizer.bos_token_id)
    assert getattr(config, "max_position_embeddings", 200) == 200
    assert tokenizer("abc")["input_ids"] == [97, 98, 99]


@pytest.mark.processes
def test_export_runs_and_loads_in_new_processes(tmp_path: Path) -> None:
    model = trained("harmonic", tmp_path / "checkpoint")
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "fla_harmonic.titan.export", "--checkpoint", tmp_path / "checkpoint/step-12", "--config_file",
         ROOT / "titan_configs/harmonic_debug.toml", "--out", tmp_path / "hf", "--training.seq_len=96"],
        check=True, env=env, timeout=120,
    )
    code = (
        "import sys, torch, fla_harmonic\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
        "assert model.config.max_position_embeddings == 96\n"
        "with torch.no_grad(): torch.save(model(torch.arange(200)[None], use_cache=False).logits, sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "hf", tmp_path / "logits.pt"], check=True, env=env, timeout=120)
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits.pt"), model(torch.arange(200)[None]))


def test_how_a_job_was_spread_over_devices_does_not_matter(tmp_path: Path) -> None:
    model = trained("harmonic", tmp_path)
    spread = ["--training.enable_cpu_offload", "--compile.enable", "--parallelism.tensor_parallel_degree=2"]
    loaded = load_model(job("harmonic", *spread), find_checkpoint(tmp_path))
    tokens = torch.randint(256, (1, 20))
    with torch.no_grad():
        assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_loads_with_all_its_weights_and_buffers(family: str, tmp_path: Path) -> None:
    model = trained(family, tmp_path)
    loaded = load_model(job(family), find_checkpoint(tmp_path))
    assert not loaded.training
    for kind in ("named_parameters", "named_buffers"):
        expected, actual = dict(getattr(model, kind)()), dict(getattr(loaded, kind)())
        assert expected.keys() == actual.keys()
        assert all(torch.equal(value, actual[name]) for name, value in expected.items())


def test_the_latest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    for step in (3, 12, 100):
        dcp.save({"weight": torch.zeros(3)}, checkpoint_id=tmp_path / f"step-{step}")
    # a save that was never finished
    (tmp_path / "step-100/.metadata").unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "step-12"
    assert find_checkpoint(tmp_path / "step-3") == tmp_path / "step-3"
    for missing in (tmp_path / "step-100", tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"found none in .*Remedy"):
            find_checkpoint(missing)
