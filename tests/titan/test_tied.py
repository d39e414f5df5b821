import copy
import math
from pathlib import Path

import pytest
import test_train
import tied_flavors  # noqa: F401  (the flavor "tied")
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import torchtitan.tools.utils
from jobs import build_as_trainer, job, moved
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import get_train_spec
from transformers import AutoConfig, AutoModelForCausalLM

from fla_harmonic.models.harmonic import HarmonicConfig
from fla_harmonic.models.mamba.modeling_mamba import load_mamba
from fla_harmonic.titan.components.optimizer import build_optimizers
from fla_harmonic.titan.export import export, to_hf
from fla_harmonic.titan.models.hf_model import HFModel, HFModelArgs

FAMILIES = ["harmonic", "mamba", "llama"]
CONFIGS = Path(__file__).parents[2] / "titan_configs"
TABLE = "tok_embeddings.weight"


def tied_job(family: str, *overrides: str) -> JobConfig:
    return job(family, "--model.flavor=tied", "--training.seq_len=64", *overrides)


@pytest.mark.parametrize(("hidden_size", "expected"), [(128, 6_993_024), (256, 15_100_160), (512, 34_656_768)])
def test_tied_counts_are_the_papers(hidden_size: int, expected: int) -> None:
    args = HFModelArgs.of(HarmonicConfig.paper(hidden_size=hidden_size, vocab_size=50257, tie_word_embeddings=True))
    with torch.device("meta"):
        count, flops = args.get_nparams_and_flops(HFModel(args), 1024)
    assert count == expected
    # the table is multiplied with once, as the head
    assert flops == 6 * (50257 * hidden_size + 34 * hidden_size**2) + 3 * 2 * 3 * hidden_size


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_one_table_and_nothing_in_it_is_left_uninitialized(family: str) -> None:
    model = build_as_trainer(tied_job(family))
    named = dict(model.named_parameters(remove_duplicate=False))
    assert [name for name, p in named.items() if p.shape == model.tok_embeddings.weight.shape] == [TABLE]
    assert model.output.weight is model.tok_embeddings.weight
    for name, value in [*named.items(), *model.named_buffers()]:
        assert torch.isfinite(torch.view_as_real(value) if value.is_complex() else value).all(), name
    # as large at the start as the head of an untied model: logits near the uniform distribution
    assert 0.01 < model.tok_embeddings.weight.std() < 0.2
    assert get_model_state_dict(model).keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_tied_hf_model(family: str) -> None:
    model = moved(build_as_trainer(tied_job(family)))
    hf_model = to_hf(tied_job(family), model)
    assert hf_model.get_output_embeddings().weight is hf_model.get_input_embeddings().weight
    tokens, labels = torch.randint(256, (2, 2, 64))
    logits, hf_logits = model(tokens), hf_model(tokens, use_cache=False).logits
    # Llama's rotary embedding pairs other channels in transformers; the others run the same classes
    tolerance = dict(atol=1e-5, rtol=1e-5) if family == "llama" else dict(atol=0, rtol=0)
    torch.testing.assert_close(logits, hf_logits, **tolerance)
    for x in (logits, hf_logits):
        F.cross_entropy(x.flatten(0, 1), labels.flatten()).backward()
    grad, hf_grad = model.tok_embeddings.weight.grad, hf_model.get_input_embeddings().weight.grad
    assert grad.abs().max() > 1e-3
    torch.testing.assert_close(grad, hf_grad, **tolerance)


def test_optimizer_has_the_table_once_and_decays_it() -> None:
    model = build_as_trainer(tied_job("harmonic"))
    optimizer = build_optimizers([model], tied_job("harmonic").optimizer, None).optimizers[0]
    decayed, undecayed = (group["params"] for group in optimizer.param_groups)
    assert sum(p is model.output.weight for p in decayed) == 1
    assert all(p is not model.output.weight for p in undecayed)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_model_is_tied_and_gives_the_trained_logits(family: str, tmp_path: Path) -> None:
    model = moved(build_as_trainer(tied_job(family)))
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "step-1")
    export(tied_job(family), tmp_path, tmp_path / "hf")
    assert AutoConfig.from_pretrained(tmp_path / "hf").tie_word_embeddings
    hf_model = (load_mamba if family == "mamba" else AutoModelForCausalLM.from_pretrained)(tmp_path / "hf").eval()
    assert hf_model.get_output_embeddings().weight is hf_model.get_input_embeddings().weight
    tokens = torch.randint(256, (2, 64))
    with torch.no_grad():
        expected, actual = model(tokens), hf_model(tokens, use_cache=False).logits
    tolerance = 1e-5 if family == "llama" else 0
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_table_is_refused(family: str) -> None:
    args = copy.deepcopy(get_train_spec(family).model_args["tied"])
    for kind in ("tensor", "pipeline"):
        # Mamba has no tensor parallelism at all
        tied = "" if (family, kind) == ("mamba", "tensor") else "tied_tables = true, "
        with pytest.raises(ValueError, match=rf"{family}: .*{tied}.*{kind}_parallel_degree = 2.*Remedy"):
            args.update_from_config(tied_job(family, f"--parallelism.{kind}_parallel_degree=2"))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), [
    ("harmonic", []), ("harmonic", ["--parallelism.fsdp_reshard_after_forward=always", "--activation_checkpoint.mode=full"]),
    ("mamba", []), ("llama", []),
])
def test_two_shards_train_like_one_rank(family: str, options: list[str], tmp_path: Path) -> None:
    tied = ["--experimental.custom_import=tests.titan.tied_flavors", "--model.flavor=tied", "--checkpoint.no_enable"]
    single = test_train.train(family, tmp_path / "single", 1, 5, *tied)
    test_train.check_falls(single, 5)
    test_train.check_same(test_train.train(family, tmp_path / "shards", 2, 5, *tied, *options), single, rel=1e-6)


@pytest.mark.processes
def test_flops_of_an_unknown_device_are_not_those_of_an_a100(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = torchtitan.tools.utils.get_peak_flops
    monkeypatch.setattr(torchtitan.tools.utils, "device_type", "cuda")
    assert math.isnan(peak("NVIDIA GeForce RTX 4090"))
    assert peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak("NVIDIA H200") == 989e12
