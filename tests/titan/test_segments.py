import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import initialised, job, moved
from test_model import one_rank
from torch import nn
from torchtitan.protocols.train_spec import get_train_spec

from fla_harmonic.models.harmonic import HarmonicConfig
from fla_harmonic.titan.components.states import state_layout, zero_states
from fla_harmonic.titan.distributed.parallelize import parallelize
from fla_harmonic.titan.distributed.segments import run_segments
from fla_harmonic.titan.models.hf_model import HFModel, HFModelArgs

PRESETS: dict[str, Any] = {
    "stack": lambda **options: HarmonicConfig(num_hidden_layers=2, **options),
    "paper": HarmonicConfig.paper,
}


def build(config: HarmonicConfig, segment_len: int, chunk: int = 0) -> HFModel:
    args = HFModelArgs.of(config)
    args.seed, args.segment_len, args.loss_chunk_tokens = 0, segment_len, chunk
    return moved(initialised(HFModel(args)), 1)


def gradients(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor | None) -> list[torch.Tensor]:
    loss = model(tokens, labels=labels, document_ids=ids)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def check_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).norm() <= 1e-5 * e.norm()


@settings(max_examples=25)
@given(
    preset=st.sampled_from(list(PRESETS)), mode=st.sampled_from(["bounded", "init"]), conv=st.booleans(),
    length=st.integers(2, 90), segment_len=st.integers(1, 95), chunk=st.sampled_from([0, 8]),
    resets=st.sampled_from([None, 0.05, 0.9]),
)
def test_segments_give_the_gradients_of_the_whole_sequence(
    preset: str, mode: str, conv: bool, length: int, segment_len: int, chunk: int, resets: float | None,
) -> None:
    config = PRESETS[preset](hidden_size=16, vocab_size=50, timescale_mode=mode, use_short_conv=conv)
    tokens, labels = torch.randint(50, (2, 2, length))
    labels[torch.rand(2, length) < 0.1] = -100
    labels[0, 0] = 1
    ids = None if resets is None else (torch.rand(2, length) < resets).cumsum(1).int()
    expected = gradients(build(config, 0), tokens, labels, ids)
    check_equal(gradients(build(config, segment_len, chunk), tokens, labels, ids), expected)


def test_a_lost_state_would_show() -> None:
    config = PRESETS["stack"](hidden_size=16, vocab_size=50)
    tokens, labels = torch.randint(50, (2, 2, 90))
    borders = (torch.arange(90) // 30).expand(2, -1).int()
    whole, cut = (gradients(build(config, 0), tokens, labels, ids) for ids in (None, borders))
    assert any((a - e).norm() > 1e-3 * e.norm() for a, e in zip(cut, whole, strict=True))


@pytest.mark.parametrize("options", [["full"], ["selective", "op"], ["selective", "1"]], ids=" ".join)
def test_segments_of_checkpointed_blocks(options: list[str]) -> None:
    config = PRESETS["stack"](hidden_size=16, vocab_size=50, use_short_conv=True)
    tokens, labels = torch.randint(50, (2, 2, 70))
    ids = (torch.rand(2, 70) < 0.05).cumsum(1).int()
    overrides = [f"--activation_checkpoint.mode={options[0]}"]
    overrides += [f"--activation_checkpoint.selective_ac_option={option}" for option in options[1:]]
    expected = gradients(build(config, 0), tokens, labels, ids)
    model = parallelize(build(config, 20), one_rank(), job("harmonic", *overrides))
    assert all("_checkpoint_wrapped_module" in name for name, _ in model.layers.named_parameters())
    check_equal(gradients(model, tokens, labels, ids), expected)


@pytest.mark.slow
def test_segments_of_compiled_blocks() -> None:
    config = PRESETS["paper"](hidden_size=16, vocab_size=50)
    tokens, labels = torch.randint(50, (2, 2, 60))
    expected = gradients(build(config, 0), tokens, labels, None)
    model = parallelize(build(config, 20), one_rank(), job("harmonic", "--compile.enable", "--compile.backend=aot_eager"))
    check_equal(gradients(model, tokens, labels, None), expected)


@pytest.mark.slow
def test_more_compiled_blocks_than_torch_keeps_graphs_of_one_function() -> None:
    config = HarmonicConfig(hidden_size=8, vocab_size=50, num_hidden_layers=torch._dynamo.config.recompile_limit + 1)
    tokens, labels = torch.randint(50, (2, 1, 20))
    expected = gradients(build(config, 0), tokens, labels, None)
    model = parallelize(build(config, 10), one_rank(), job("harmonic", "--compile.enable", "--compile.backend=aot_eager"))
    check_equal(gradients(model, tokens, labels, None), expected)


@pytest.mark.parametrize("ids", [None, torch.zeros(2, 60, dtype=torch.int32)], ids=["rows", "packed"])
def test_rows_begin_with_the_states_they_are_given(ids: torch.Tensor | None) -> None:
    model = build(PRESETS["stack"](hidden_size=16, vocab_size=50, use_short_conv=True), 0)
    layout = model.model_args.state_layout()
    tokens, labels = torch.randint(50, (2, 2, 60))

    def run(first: int, last: int, states: Any, continues: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        piece = None if ids is None else ids[:, first:last]
        return run_segments(
            model._hidden, model.output, states, tokens[:, first:last], labels[:, first:last], piece, continues, 9)

    whole, final = run(0, 60, zero_states(layout, 2))
    head, middle = run(0, 25, zero_states(layout, 2))
    tail, end = run(25, 60, middle)
    torch.testing.assert_close(head + tail, whole, atol=1e-4, rtol=1e-5)
    for a, e in zip(end, final, strict=True):
        torch.testing.assert_close([*a.levels, a.conv], [*e.levels, e.conv], atol=1e-5, rtol=1e-5)
    # a row that does not continue ignores them, the other one does not
    mixed, _ = run(25, 60, middle, torch.tensor([True, False]))
    fresh, _ = run(25, 60, zero_states(layout, 2))
    assert fresh != mixed != tail


def peak_of_saved(model: HFModel, length: int) -> int:
    """Most elements of the distinct tensors that the graph holds after the forward pass, without the parameters."""
    tokens, labels = torch.randint(50, (2, 1, length))
    parameters = {p.data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in parameters:
            saved[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(tokens, labels=labels)
    held = sum(saved.values())
    loss.backward()
    return held


def test_a_longer_sequence_keeps_states_and_nothing_else() -> None:
    config = PRESETS["stack"](hidden_size=16, vocab_size=50)
    layout = build(config, 0).model_args.state_layout()
    state = sum(sum(layer.levels) for layer in layout)
    whole = [peak_of_saved(build(config, 0), length) for length in (400, 800)]
    segments = [peak_of_saved(build(config, 100), length) for length in (400, 800)]
    assert whole[1] - whole[0] > 400 * 16 * 10
    # of each of the four more segments: its states, and what hands them on
    assert segments[1] - segments[0] <= 4 * 10 * state


def test_layers_without_a_state_are_refused() -> None:
    hybrid = nn.Module()
    hybrid.attn = nn.MultiheadAttention(8, 2)
    blocks = build(PRESETS["stack"](hidden_size=16, vocab_size=50), 0).layers.values()
    assert state_layout(blocks) == (((16, 16, 16), None),) * 2
    with pytest.raises(ValueError, match=r"HarmonicAttention in every block, but block 2 has MultiheadAttention.*Remedy"):
        state_layout([*blocks, hybrid])


@pytest.mark.parametrize(("family", "overrides", "message"), [
    ("llama", ["--harmonic.segment_len=8"], "llama: Harmonic alone .*harmonic.segment_len = 8.*Remedy"),
    ("mamba", ["--harmonic.stateful"], "mamba: Harmonic alone .*harmonic.stateful = true.*Remedy"),
    ("harmonic", ["--harmonic.segment_len=-1"], "harmonic.segment_len = -1.*Remedy"),
    ("llama", ["--harmonic.loss_chunk_tokens=-1"], "harmonic.loss_chunk_tokens = -1.*Remedy"),
    ("harmonic", ["--harmonic.segment_len=8", "--compile.enable", "--activation_checkpoint.mode=full"],
     "cannot be checkpointed, .*activation_checkpoint.mode = .full.*Remedy"),
    *((family, [f"--harmonic.{option}", f"--parallelism.{kind}_parallel_degree=2"],
       f"{family}: .*harmonic.{option.partition('=')[0]} = .*parallelism.{kind}_parallel_degree = 2. Remedy")
      for family, option in (("harmonic", "segment_len=8"), ("harmonic", "stateful"), ("llama", "loss_chunk_tokens=8"))
      # Llama has no context parallelism on the CPU
      for kind in ("context", "tensor", "pipeline")[family == "llama":]),
    ("harmonic", ["--harmonic.loss_chunk_tokens=8", "--parallelism.tensor_parallel_degree=2",
                  "--parallelism.disable_loss_parallel"], "disable_loss_parallel = true. Remedy"),
    ("harmonic", ["--harmonic.loss_chunk_tokens=8", "--parallelism.pipeline_parallel_degree=2"],
     "harmonic: .*loss_chunk_tokens = 8, parallelism.pipeline_parallel_degree = 2. Remedy"),
])
def test_what_excludes_one_another_is_refused(family: str, overrides: list[str], message: str) -> None:
    args = copy.deepcopy(get_train_spec(family).model_args["debug"])
    with pytest.raises(ValueError, match=message):
        args.update_from_config(job(family, *overrides))
    args.update_from_config(job(family))
