import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchtitan.models.llama3.infra.parallelize import apply_fsdp
from torchtitan.protocols.train_spec import get_train_spec

import fla_harmonic.titan  # noqa: F401
from fla_harmonic.layers.harmonic import Timescale
from fla_harmonic.titan.components.init import clean_name, init_from_reference

FAMILIES = ["harmonic", "mamba", "llama"]


def build_empty(family: str, seed: int | None = 7) -> nn.Module:
    """A debug model on the meta device, as the trainer builds it."""
    spec = get_train_spec(family)
    args = copy.deepcopy(spec.model_args["debug"])
    args.seed = seed
    if family == "llama":
        args.max_seq_len = 64
    with torch.device("meta"):
        return spec.model_cls(args)


def initialize_from_nan(model: nn.Module) -> dict[str, torch.Tensor]:
    """All values after `to_empty`, NaN everywhere, and `init_weights`."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(torch.nan)
        model.init_weights()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {clean_name(name): t.full_tensor() if isinstance(t, DTensor) else t for name, t in named}


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_left_uninitialized(family: str) -> None:
    values = initialize_from_nan(build_empty(family))
    for name, value in values.items():
        assert torch.isfinite(torch.view_as_real(value) if value.is_complex() else value).all(), name


def test_special_values_are_those_of_the_model_itself() -> None:
    harmonic = build_empty("harmonic")
    initialize_from_nan(harmonic)
    timescales = [module for module in harmonic.modules() if isinstance(module, Timescale)]
    assert len(timescales) == 6
    for timescale in timescales:
        low, high = timescale.timescale
        a_min, a_max = timescale.decay_range
        tau = 1 / (1 - (a_min + (a_max - a_min) * torch.sigmoid(timescale.bias.double())))
        assert low < tau.min() < low * 1.1
        assert high / 1.1 < tau.max() < high
    mamba = build_empty("mamba")
    initialize_from_nan(mamba)
    for layer in mamba.layers.values():
        assert torch.equal(layer.mixer.A_log.exp().round(), torch.arange(1.0, 17).expand(256, 16))
        assert torch.equal(layer.mixer.D, torch.ones(256))
        step = nn.functional.softplus(layer.mixer.dt_proj.bias)
        assert step.min() > 0.9e-3
        assert step.max() < 0.11
    llama = build_empty("llama")
    initialize_from_nan(llama)
    assert torch.equal(llama.freqs_cis, llama._precompute_freqs_cis())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_follow_the_seed_and_leave_the_random_state_alone(family: str) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, same, other = (initialize_from_nan(build_empty(family, seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])
    # without a seed: the one that torchtitan has set
    unset = initialize_from_nan(build_empty(family, None))
    assert torch.equal(unset["output.weight"], initialize_from_nan(build_empty(family, 3))["output.weight"])


def test_a_name_without_counterpart_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"parameters.*bias.*Remedy"):
        init_from_reference(nn.Linear(2, 2), lambda: nn.Linear(2, 2, bias=False))
    with pytest.raises(RuntimeError, match=r"parameters.*weight"):
        init_from_reference(nn.Linear(2, 2), lambda: nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match=r"buffers.*running_mean"):
        init_from_reference(nn.BatchNorm1d(2), lambda: nn.BatchNorm1d(2, track_running_stats=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_a_pipeline_hold_the_bits_of_the_whole(family: str) -> None:
    whole = initialize_from_nan(build_empty(family))
    # as torchtitan cuts them
    first, last = build_empty(family), build_empty(family)
    first.norm = first.output = last.tok_embeddings = None
    for name in list(first.layers):
        del (last if name == "0" else first).layers[name]
    stages = [initialize_from_nan(stage) for stage in (first, last)]
    assert not stages[0].keys() & stages[1].keys() - {"freqs_cis"}
    assert stages[0].keys() | stages[1].keys() == whole.keys()
    for stage in stages:
        assert all(torch.equal(value, whole[name]) for name, value in stage.items())


@pytest.mark.processes
def test_two_shards_hold_the_bits_of_one_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d",
               "--rdzv_endpoint=localhost:0", __file__, str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(command, check=True, timeout=120, env=env)
    for family in FAMILIES:
        expected = initialize_from_nan(build_empty(family))
        sharded = torch.load(tmp_path / f"{family}.pt")
        assert expected.keys() == sharded.keys()
        for name, value in expected.items():
            assert torch.equal(value, sharded[name]), name


def shard_and_initialize(out: Path) -> None:
    """Two ranks: FSDP2 with activation checkpointing around the blocks, as `parallelize` nests them."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for family in FAMILIES:
        model = build_empty(family)
        for name, block in model.layers.named_children():
            model.layers.register_module(name, checkpoint_wrapper(block))
        apply_fsdp(model, mesh, torch.float32, torch.float32, pp_enabled=False)
        values = initialize_from_nan(model)
        if dist.get_rank() == 0:
            torch.save(values, out / f"{family}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    shard_and_initialize(Path(sys.argv[1]))
