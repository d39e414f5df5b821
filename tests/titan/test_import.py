import json
from pathlib import Path

import pytest
import tied_flavors
import torch
import torch.distributed.checkpoint as dcp
from jobs import build, job, moved
from runs import LOSS, options, run, steps
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import get_train_spec

from fla_harmonic.models.harmonic import HarmonicConfig
from fla_harmonic.titan.components.optimizer import build_optimizers
from fla_harmonic.titan.export import export
from fla_harmonic.titan.models.hf_model import HFModelArgs

MODELS = [(family, flavor) for family in ("harmonic", "mamba", "llama") for flavor in ("debug", "tied")]


def of_flavor(family: str, flavor: str, *overrides: str) -> JobConfig:
    return job(family, f"--model.flavor={flavor}", "--training.seq_len=32", *overrides)


def exported(family: str, flavor: str, folder: Path) -> nn.Module:
    """A model at weights that no initialisation gives, and its Hugging Face directory."""
    config = of_flavor(family, flavor)
    model = moved(build(config))
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / "checkpoint/step-1")
    export(config, folder / "checkpoint", folder / "hf")
    return model


def load(config: JobConfig) -> nn.Module:
    """A model whose initial weights the job takes from elsewhere, by torchtitan's own manager."""
    model, spec = build(config), get_train_spec(config.model.name)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    optimizers = build_optimizers([model], config.optimizer, None)
    manager = CheckpointManager(
        dataloader=None, model_parts=[model], optimizers=optimizers,
        lr_schedulers=build_lr_schedulers(optimizers, config.lr_scheduler, config.training.steps), states={},
        checkpoint_config=config.checkpoint, sd_adapter=spec.state_dict_adapter(model.model_args, None),
        base_folder=config.job.dump_folder,
    )
    assert manager.load()
    manager.close()
    return model


def from_directory(folder: Path) -> list[str]:
    return [f"--job.dump_folder={folder / 'run'}", f"--checkpoint.initial_load_path={folder / 'hf'}",
            "--checkpoint.initial_load_in_hf"]


@pytest.mark.parametrize(("family", "flavor"), MODELS)
def test_training_starts_from_an_exported_model_bit_for_bit(family: str, flavor: str, tmp_path: Path) -> None:
    expected = exported(family, flavor, tmp_path).state_dict()
    actual = load(of_flavor(family, flavor, *from_directory(tmp_path))).state_dict()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_another_model_of_the_same_shapes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported("harmonic", "tied", tmp_path)
    flat = HarmonicConfig.paper(hidden_size=32, vocab_size=256, tie_word_embeddings=True, timescales=[(10, 40)] * 3)
    monkeypatch.setitem(tied_flavors.HARMONIC, "flat", HFModelArgs.of(flat))
    with pytest.raises(ValueError, match=r"timescales = \[\[2\.2, 8\.3\], .*, not \[\[10\.0, 40\.0\], .*Remedy"):
        load(of_flavor("harmonic", "flat", *from_directory(tmp_path)))


def test_another_family_is_refused(tmp_path: Path) -> None:
    exported("llama", "tied", tmp_path)
    with pytest.raises(ValueError, match=r"model_type = 'llama', not 'mamba'"):
        load(of_flavor("mamba", "tied", *from_directory(tmp_path)))


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    with pytest.raises(ValueError, match=r"with a config\.json in checkpoint\.initial_load_path, .*Remedy"):
        load(of_flavor("harmonic", "tied", *from_directory(tmp_path)))


def test_weights_that_are_stored_in_bf16_are_trained_in_fp32(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    expected = exported("harmonic", "tied", tmp_path).state_dict()
    file = tmp_path / "hf/model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(file).items()}, file, {"format": "pt"})
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    for name, value in load(of_flavor("harmonic", "tied", *from_directory(tmp_path))).state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name].bfloat16().float()), name


@pytest.mark.processes
@pytest.mark.slow
def test_two_shards_start_from_a_directory_like_one_rank(tmp_path: Path) -> None:
    exported("harmonic", "debug", tmp_path)
    single, shards, own = (tmp_path / name for name in ("single", "shards", "own"))
    start = [f"--checkpoint.initial_load_path={tmp_path / 'hf'}", "--checkpoint.initial_load_in_hf"]
    run(1, options(single, 1, 2, *start), options(own, 1, 2))
    run(2, options(shards, 2, 2, *start))
    expected, actual = ([record[LOSS] for record in steps(out)] for out in (single, shards))
    assert actual == pytest.approx(expected, rel=1e-6)
    # not what the job's own initial weights give
    assert abs(expected[0] - steps(own)[0][LOSS]) > 1e-3
