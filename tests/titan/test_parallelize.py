"""What parallelism is accepted, and what is refused at start-up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import arguments, job
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.models.llama3.infra.parallelize import apply_fsdp

import fla_harmonic.titan  # noqa: F401  (registers the specs)
from fla_harmonic.layers.harmonic import Timescale
from fla_harmonic.models.harmonic import HarmonicConfig
from fla_harmonic.titan.distributed.gradient_scale import scale_gradient
from fla_harmonic.titan.distributed.parallelize import _keep_timescales_wide, _reduce_on_gloo
from fla_harmonic.titan.distributed.tensor_parallel import apply_tensor_parallel
from fla_harmonic.titan.models.hf_model import HFModel, HFModelArgs

FAMILIES = ["harmonic", "mamba", "llama"]
HYBRID = {"layers": [1], "num_heads": 2, "window_size": None}


def degrees(**by_kind: int) -> list[str]:
    return [f"--parallelism.{kind}={degree}" for kind, degree in by_kind.items()]


@pytest.fixture(autouse=True)
def _four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.mark.parametrize("family", FAMILIES)
def test_data_and_pipeline_parallelism_are_for_all(family: str) -> None:
    arguments(job(family))
    arguments(job(family, *degrees(data_parallel_replicate_degree=2)))
    arguments(job(family, *degrees(data_parallel_replicate_degree=4)))
    arguments(job(family, *degrees(pipeline_parallel_degree=2)))


@pytest.mark.parametrize(("family", "kinds"), [
    ("harmonic", ["tensor", "context"]), ("mamba", []), ("llama", ["tensor"]),
])
def test_other_kinds_are_accepted_where_they_are_right(family: str, kinds: list[str]) -> None:
    for kind in ("tensor", "context", "expert"):
        config = job(family, *degrees(**{f"{kind}_parallel_degree": 2}))
        if kind in kinds:
            arguments(config)
        else:
            message = rf"{family}: {kind} parallelism is not supported \(.*{kind}_parallel_degree = 2\. Remedy"
            with pytest.raises(ValueError, match=message):
                arguments(config)


def test_the_order_of_the_sequence_is_kept() -> None:
    config = job("harmonic", *degrees(context_parallel_degree=2))
    assert config.parallelism.context_parallel_load_balancer is not None
    arguments(config)
    assert config.parallelism.context_parallel_load_balancer is None
    with pytest.raises(ValueError, match=r"contiguous pieces.*ptrr.*Remedy"):
        arguments(job("harmonic", *degrees(context_parallel_degree=2), "--parallelism.context_parallel_load_balancer=ptrr"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("overrides", "message"), [
    (degrees(data_parallel_replicate_degree=2, data_parallel_shard_degree=1, pipeline_parallel_degree=2),
     r"DDP.*replicate_degree = 2, .*pipeline_parallel_degree = 2"),
    (degrees(expert_tensor_parallel_degree=2), r"expert_tensor_parallel_degree = 2"),
    ([*degrees(pipeline_parallel_degree=4), "--training.mixed_precision_param=bfloat16"],
     r"mixed_precision_param = \"bfloat16\""),
    (["--training.enable_cpu_offload"], r"enable_cpu_offload = true, device = \"cpu\""),
    (["--checkpoint.enable", "--checkpoint.async_mode=async_with_pinned_mem"],
     r"async_mode = \"async_with_pinned_mem\", device = \"cpu\""),
    ([*degrees(pipeline_parallel_degree=2), "--parallelism.pipeline_parallel_schedule=DualPipeV"], r"DualPipeV"),
    (degrees(pipeline_parallel_degree=6), r"a block for each stage.* = 6, .*stages = 6"),
    ([*degrees(pipeline_parallel_degree=3), "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"], "stages = 6"),
])
def test_what_would_be_wrong_is_refused(family: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=rf"{family}: .*{message}.*Remedy"):
        arguments(job(family, *overrides))


@pytest.mark.parametrize(("overrides", "message"), [
    ([*degrees(tensor_parallel_degree=2), "--compile.enable"], r"sharded logits must not be compiled.*components"),
    ([*degrees(tensor_parallel_degree=2), "--parallelism.enable_async_tensor_parallel"],
     r"enable_async_tensor_parallel = true"),
    ([*degrees(pipeline_parallel_degree=2), "--data.reset_documents"], r"reset_documents = true"),
    ([*degrees(context_parallel_degree=4), "--training.seq_len=1022"], r"seq_len = 1022, .*context_parallel_degree = 4"),
    ([*degrees(tensor_parallel_degree=2, context_parallel_degree=2), "--training.seq_len=1022"],
     r"1022, .*tensor_parallel_degree = 2, .*context_parallel_degree = 2"),
    (degrees(data_parallel_replicate_degree=2, data_parallel_shard_degree=1, tensor_parallel_degree=2), r"DDP"),
    (["--training.dtype=bfloat16"], r"training\.dtype = \"bfloat16\""),
])
def test_what_would_be_wrong_in_harmonic_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=rf"harmonic: .*{message}.*Remedy"):
        arguments(job("harmonic", *overrides))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class _Degree:
    """As much of a mesh as is looked at before anything is sharded."""

    def size(self) -> int:
        return 3


@pytest.mark.parametrize(("options", "message"), [
    ({"intermediate_size": 96}, r"channels of a level = 64"),
    ({"intermediate_size": 64, "hidden_size": 96}, r"`intermediate_size` = 64"),
    ({"intermediate_size": 96, "hidden_size": 96, "gate_rank": 8}, r"inner size of a gate = 8"),
])
def test_a_tensor_parallel_degree_that_does_not_fit_is_refused(options: dict[str, int | bool], message: str) -> None:
    config = HarmonicConfig(**{"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 256, **options})
    with torch.device("meta"):
        model = HFModel(HFModelArgs.of(config))
    with pytest.raises(ValueError, match=r"harmonic: .*tensor_parallel_degree = 3.*Remedy") as error:
        apply_tensor_parallel(model, _Degree(), loss_parallel=True)
    error.match(message)


@pytest.mark.parametrize(("kind", "options", "overrides", "message"), [
    ("tensor", {"use_short_conv": True}, [], r"conv_size = 4"),
    ("tensor", {"attn": HYBRID}, [], r"attention_layers = true"),
    ("context", {"attn": HYBRID}, [], r"attention_layers = true"),
    ("context", {"attn_mode": "fused_recurrent"}, [], r"attn_mode = \"fused_recurrent\""),
    ("context", {"use_short_conv": True}, ["--data.reset_documents"], r"conv_size = 4, data.reset_documents = true"),
    ("context", {"use_short_conv": True}, ["--training.seq_len=4"], r"seq_len = 4, conv_size = 4"),
])
def test_a_block_that_cannot_be_split_is_refused(
    kind: str, options: dict[str, Any], overrides: list[str], message: str,
) -> None:
    args = HFModelArgs.of(HarmonicConfig(hidden_size=64, num_hidden_layers=2, vocab_size=256, **options))
    with pytest.raises(ValueError, match=rf"harmonic: .*{kind}_parallel_degree = 2.*{message}.*Remedy"):
        args.update_from_config(job("harmonic", *degrees(**{f"{kind}_parallel_degree": 2}), *overrides))
    args.update_from_config(job("harmonic"))


def test_timescales_stay_in_float32_under_mixed_precision(alone: DeviceMesh) -> None:
    args = HFModelArgs.of(HarmonicConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, vocab_size=256))
    model = HFModel(args)
    _keep_timescales_wide(model, alone, cpu_offload=False)
    apply_fsdp(model, alone, torch.bfloat16, torch.float32, pp_enabled=False)
    _reduce_on_gloo(model)
    seen = []

    def look(timescale: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        seen.append((timescale.bias.dtype, inputs[0].dtype, output.dtype))

    for timescale in (m for m in model.modules() if isinstance(m, Timescale)):
        # before FSDP's own hook puts the shards back
        timescale.register_forward_hook(look, prepend=True)
    model(torch.zeros(1, 8, dtype=torch.long)).float().square().sum().backward()
    assert seen == [(torch.float32, torch.bfloat16, torch.bfloat16)] * 3
    assert all(p.grad is not None and p.grad.full_tensor().abs().sum() > 0 for p in model.parameters())


def test_a_scaled_gradient_leaves_the_loss_alone() -> None:
    x, labels = torch.randn(2, 5, requires_grad=True)
    plain = nn.functional.mse_loss
    assert scale_gradient(plain, 1) is plain
    loss = scale_gradient(plain, 3)(x, labels)
    assert torch.equal(loss, plain(x, labels))
    assert not loss._is_view()
    (scaled,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(scaled, 3 * torch.autograd.grad(plain(x, labels), x)[0])
