"""
What the ranks of a job send one another: by design, and as counted.

    python -m benchmarks.communication

trains `titan_configs/harmonic_debug.toml`, made small, in several layouts on gloo, and counts every collective of one step
with torch's profiler, which sees everything that reaches a process group: FSDP, DDP's reducer, DTensor, our scans, the
pipeline. Beside it stands what the model's shapes say; a difference is an error. The step is in the middle of a run: the
first ones negotiate shapes and buckets.

Bytes of a collective are those of its larger side: what all ranks together gather, scatter or sum.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from torch import nn

from benchmarks.parallel import SEQ_LEN, Layout, launch, steps_of
from eval.tables import markdown
from fla_harmonic.models.harmonic import HarmonicConfig, HarmonicForCausalLM

# by then shapes are known, buckets are built and FSDP has set up
COUNTED_STEP = 3

LAYOUTS = (
    Layout("FSDP 2", fsdp=2),
    Layout("FSDP 2, recomputed", fsdp=2, recomputes=True),
    Layout("FSDP 2, 2 accumulated", fsdp=2, accumulation=2),
    Layout("FSDP 2, 4 segments", fsdp=2, segment_len=SEQ_LEN // 4),
    Layout("FSDP 2, 4 segments, never reshard", fsdp=2, segment_len=SEQ_LEN // 4, keeps=True),
    Layout("DDP 2", replicas=2),
    Layout("TP 2", tensor=2),
    Layout("CP 2", context=2),
    Layout("PP 2", pipeline=2),
    Layout("HSDP 2x2", fsdp=2, replicas=2),
    Layout("FSDP 2 x CP 2", fsdp=2, context=2),
)

# operations of torch's process groups, and which of their arguments is the larger side
_KINDS = {
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("receive", 0),
}
# share of the bytes that a rank sends, in a ring of n ranks
_SENT = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "send": lambda n: 1.0,
    "receive": lambda n: 0.0,
}
# fields of a config that the formulas take to have their defaults
DEFAULT_PARTS = ("gate_ratio", "gate_rank", "attn", "use_short_conv", "tie_word_embeddings", "use_prediction_error",
                 "use_output_gate", "use_output_proj", "gated_mlp")

# calls of one step on one rank, by kind and bytes
Calls = Counter[tuple[str, int]]


class Call(NamedTuple):
    """Equal collectives of one step on one rank."""

    kind: str
    bytes: int
    ranks: int
    calls: int
    purpose: str

    @property
    def on_gloo(self) -> str:
        """The kind on gloo, where DTensor has no all-to-all: it gathers all and keeps a part."""
        return "all-gather" if self.kind == "all-to-all" else self.kind

    @property
    def sent(self) -> float:
        """Bytes that the rank sends in all of them."""
        return self.calls * self.bytes * _SENT[self.kind](self.ranks)


@dataclass(frozen=True)
class Shapes:
    """
    What the communication of a Harmonic model depends on: sizes of hidden states, of a level, within the MLP and of the
    vocabulary; levels of a layer, and layers; shapes of the parameters of each of FSDP's groups.
    """

    hidden: int
    level: int
    intermediate: int
    vocab: int
    levels: int
    blocks: int
    embeddings: list[torch.Size]
    block: list[torch.Size]
    head: list[torch.Size]

    @classmethod
    def of(cls, config: HarmonicConfig) -> "Shapes":
        """
        Raises:
            ValueError: the formulas do not hold for the model.
        """
        default = HarmonicConfig()
        odd = {name: value for name in DEFAULT_PARTS if (value := getattr(config, name)) != getattr(default, name)}
        if odd:
            raise ValueError(
                f"expected a stack of blocks with HarmonicConfig's default parts, for which the formulas are; got {odd}. "
                "Leave these out.")
        with torch.device("meta"):
            model: Any = HarmonicForCausalLM(config)
        block = model.model.layers[0]
        groups = (model.model.embeddings, block, nn.ModuleList([model.model.norm, model.lm_head]))
        return cls(
            config.hidden_size, block.attn.level_size, block.mlp.up_proj.out_features, config.vocab_size,
            len(config.timescales), config.num_hidden_layers, *([p.shape for p in group.parameters()] for group in groups))

    @property
    def parameters(self) -> int:
        """Numbers in all parameters."""
        return numbers_in(self.embeddings) + self.blocks * numbers_in(self.block) + numbers_in(self.head)


def numbers_in(shapes: Iterable[torch.Size], shards: int = 1) -> int:
    """Numbers in the parameters, each padded along its first dimension to equal shards."""
    return sum(shards * -(-shape[0] // shards) * shape[1:].numel() for shape in shapes)


def designed(
    layout: Layout,
    shapes: Shapes,
    rows: int,
    tokens: int,
    *,
    param: int = 4,
    reduce: int = 4,
    activation: int = 4,
    logged: bool = True,
) -> list[Call]:
    """
    The communication of one step on the first rank.

    Args:
        rows, tokens (int):
            What a rank reads at a time: rows, and tokens of each; under TP and CP of its whole group.
        param, reduce, activation (int):
            Bytes of a number of gathered parameters, of reduced gradients, of activations. Default: 4.
        logged (bool):
            Whether the step is logged. Default: `True`.

    Raises:
        ValueError: there is no formula for the combination.
    """
    data, shards = layout.fsdp * layout.replicas, layout.fsdp * layout.context
    replicas, tensor, context, pipeline = layout.replicas, layout.tensor, layout.context, layout.pipeline
    if sum([data * context > 1, tensor > 1, pipeline > 1]) > 1:
        raise ValueError(f"expected data and context, tensor, or pipeline parallelism alone; got {layout}")
    blocks, levels, segments = shapes.blocks, shapes.levels, layout.segments(tokens)

    # a block's parameters are freed after each use: the forward pass, and recomputation with its backward pass. The head
    # stays for the backward pass that follows at once. The table is not freed between backward passes: it has no input
    # whose gradient would tell that it is done
    groups = (
        ("table", shapes.embeddings, 1, 1 if layout.keeps else segments + 1),
        ("blocks", shapes.block, blocks, segments if layout.keeps else 2 * segments),
        ("head", shapes.head, 1, segments),
    )
    # without shards, all gradients fit in one of torchtitan's buckets of 100 MB
    calls = [Call("all-reduce", shapes.parameters * reduce, replicas, int(shards == 1), "gradients")]
    for name, parameters, count, gathered in groups:
        numbers = numbers_in(parameters, shards)
        calls += [
            Call("all-gather", numbers * param, shards, count * gathered, f"parameters: {name}"),
            Call("reduce-scatter", numbers * reduce, shards, count, f"gradients: {name}"),
            Call("all-reduce", numbers // shards * reduce, replicas, count * int(shards > 1), f"replicas: {name}"),
        ]

    # the affine map of a piece, and a gradient, for each level, in float32: whatever the length
    states = 4 * context * rows * shapes.level
    # what reads whole tokens (levels, output gate, MLP; the head) gathers, what writes them (two projections; the table)
    # scatters, and the other way round in the backward pass
    sequences, size = blocks * (levels + 4) + 2, rows * tokens * activation
    calls += [
        Call("all-gather", 2 * states, context, blocks * levels, "maps of the pieces"),
        Call("all-gather", states, context, blocks * levels, "gradients of the states"),
        Call("all-gather", size * shapes.hidden, tensor, sequences, "tokens"),
        Call("reduce-scatter", size * shapes.hidden, tensor, sequences, "tokens"),
        # norms of the levels, the output gate and what the output projection reads; forward and backward
        Call("all-to-all", size * shapes.level, tensor, 2 * blocks * (levels + 2), "channels to tokens"),
        Call("all-reduce", rows * tokens * 4, tensor, 3, "loss over the vocabulary's shards"),
        # every rank has the norms and the predictions P, each with the gradients of its own tokens
        Call("all-reduce", shapes.hidden * 4, tensor, 2 * blocks + 1, "gradients: norms"),
        Call("all-reduce", shapes.level * 4, tensor, 2 * blocks * levels, "gradients: norms of levels"),
        Call("all-reduce", shapes.hidden * shapes.level * 4, tensor, blocks * (levels - 1), "gradients: predictions"),
        Call("send", tokens * shapes.hidden * activation, pipeline, rows, "hidden states"),
        Call("receive", tokens * shapes.hidden * activation, pipeline, rows, "gradients of hidden states"),
    ]
    # accumulated batches communicate each by itself
    calls = [call._replace(calls=call.calls * layout.accumulation) for call in calls]
    # a few numbers per step, however large the model and the batch
    tensors = len(shapes.embeddings) + blocks * len(shapes.block) + len(shapes.head)
    calls += [
        Call("all-reduce", 8, data, 1, "number of labels"),
        Call("all-reduce", 4 * tensors, shards * tensor, 1, "gradient norms"),
        Call("all-reduce", 4, pipeline, 1, "gradient norm over stages"),
        Call("all-reduce", 4, data * context, 2 * logged, "mean and largest loss"),
        Call("all-reduce", 8, data * context, int(logged), "number of tokens"),
        Call("all-reduce", 8 * 4 * levels, layout.ranks, int(logged and pipeline == 1), "states and timescales"),
    ]
    return [call for call in calls if call.calls and call.ranks > 1]


def expected(layout: Layout, shapes: Shapes) -> tuple[list[Call], Calls]:
    """What is designed for a layout that `run` counts, and its calls as gloo runs them."""
    calls, counted = designed(layout, shapes, layout.rows, SEQ_LEN), Calls()
    for call in calls:
        counted[call.on_gloo, call.bytes] += call.calls
    return calls, counted


def traced(events: Iterable[Any]) -> Calls:
    """
    The calls in a profile with shapes.

    Raises:
        RuntimeError: an operation between ranks is none of the known ones.
    """
    counted = Calls()
    for event in events:
        if event.name.startswith("c10d::"):
            if event.name not in _KINDS:
                raise RuntimeError(f"expected the operations {sorted(_KINDS)}, but the trace has {event.name}")
            kind, argument = _KINDS[event.name]
            counted[kind, _nbytes(event.extra_fields.inputs[argument])] += 1
        counted += traced(event.children)
    return counted


def _nbytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    return torch.Size(value.sizes).numel() * value.dtype.itemsize


def run(layouts: Iterable[Layout], out: Path) -> dict[Layout, Calls]:
    """
    Train in every layout, and count the calls of one step on the first rank.

    Raises:
        RuntimeError: a run failed.
    """
    layouts = list(layouts)
    launch(layouts, COUNTED_STEP, out, "benchmarks.communication")
    files = {layout: out / layout.name / "calls.json" for layout in layouts}
    return {layout: Calls({(kind, size): calls for kind, size, calls in json.loads(file.read_text())})
            for layout, file in files.items()}


def work(jobs: Path) -> None:
    """One rank of a launch: train every job, and write down the calls of its last step."""
    from torch.profiler import ProfilerActivity, profile

    for trainer, step in steps_of(jobs):
        if trainer.step < COUNTED_STEP:
            step()
            continue
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
            step()
        if torch.distributed.get_rank() == 0:
            calls = traced(trace.profiler.kineto_results.experimental_event_tree())
            rows = [(*key, number) for key, number in calls.items()]
            (Path(trainer.job_config.job.dump_folder) / "calls.json").write_text(json.dumps(rows))


def table(counted: dict[Layout, Calls], shapes: Shapes) -> str:
    """Designed beside counted calls, by kind, in Markdown."""
    rows = []
    for layout, found in counted.items():
        calls, design = expected(layout, shapes)
        tokens = layout.rows * SEQ_LEN * layout.accumulation // layout.context // layout.tensor
        for kind in dict.fromkeys(kind for kind, _ in (*design, *found)):
            pairs = [[(n, size) for (k, size), n in counts.items() if k == kind] for counts in (design, found)]
            sent = sum(call.sent for call in calls if call.on_gloo == kind)
            rows.append((layout.name, kind, *(sum(n for n, _ in each) for each in pairs),
                         *(f"{sum(n * size for n, size in each):,}" for each in pairs), f"{sent / tokens:,.0f}"))
    return markdown((
        "layout", "collective", "calls, designed", "counted", "bytes, designed", "counted", "sent per token, bytes"), rows)


def differences(counted: dict[Layout, Calls], shapes: Shapes) -> list[str]:
    """Every kind and size of call whose number is not the designed one, in words."""
    wrong = []
    for layout, found in counted.items():
        _, design = expected(layout, shapes)
        wrong += [f"{layout.name}: {design[key]} calls of {key[0]} with {key[1]:,} bytes designed, {found[key]} counted"
                  for key in sorted(design.keys() | found.keys()) if design[key] != found[key]]
    return wrong


def debug_shapes() -> Shapes:
    """Shapes of the model that is counted."""
    from fla_harmonic.titan.models.flavors import HARMONIC

    return Shapes.of(HARMONIC["debug"].hf_config())  # type: ignore[arg-type]


def main() -> None:
    shapes = debug_shapes()
    with tempfile.TemporaryDirectory() as scratch:
        counted = run(LAYOUTS, Path(scratch))
    print(table(counted, shapes))
    if wrong := differences(counted, shapes):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(Path(sys.argv[2]))
    else:
        tyro.cli(main, description=__doc__)
