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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from torch import nn

from benchmarks.parallel import GLOBAL_BATCH, SEQ_LEN, Layout, launch, trainers
from eval.tables import markdown
from fla_harmonic.models.harmonic import HarmonicConfig, HarmonicForCausalLM

# by then shapes are known, buckets are built and FSDP has set up
COUNTED_STEP = 3
SEGMENTS = 4
_SEGMENTS = (f"--harmonic.segment_len={SEQ_LEN // SEGMENTS}",)

LAYOUTS = (
    Layout("FSDP 2", fsdp=2),
    Layout("FSDP 2, recomputed", fsdp=2, overrides=("--activation_checkpoint.mode=full",)),
    Layout("FSDP 2, 2 accumulated", fsdp=2, accumulation=2),
    Layout("FSDP 2, 4 segments", fsdp=2, overrides=_SEGMENTS),
    Layout("FSDP 2, 4 segments, never reshard", fsdp=2, overrides=(
        *_SEGMENTS, "--parallelism.fsdp_reshard_after_forward=never")),
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
# fields of a config that the formulas take to have their defaults
DEFAULT_PARTS = ("gate_ratio", "gate_rank", "attn", "use_short_conv", "tie_word_embeddings", "use_prediction_error",
                 "use_output_gate", "use_output_proj", "gated_mlp")
# share of the bytes that a rank sends, in a ring of n ranks
_SENT = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "send": lambda n: 1.0,
    "receive": lambda n: 0.0,
}


class Call(NamedTuple):
    """Equal collectives of one step on one rank."""

    kind: str
    bytes: int
    ranks: int
    calls: int
    purpose: str

    @property
    def sent(self) -> float:
        """Bytes that the rank sends in all of them."""
        return self.calls * self.bytes * _SENT[self.kind](self.ranks)


@dataclass(frozen=True)
class Shapes:
    """
    What the communication of a Harmonic model depends on.

    Args:
        hidden, level, intermediate, vocab (int):
            Sizes of hidden states, of a level, within the MLP, and of the vocabulary.
        levels, blocks (int):
            Levels of a layer, and layers.
        embeddings, block, head (tuple[tuple[int, ...], ...]):
            Shapes of the parameters of each of FSDP's groups: the table, one block, last norm and output layer.
    """

    hidden: int
    level: int
    intermediate: int
    vocab: int
    levels: int
    blocks: int
    embeddings: tuple[tuple[int, ...], ...]
    block: tuple[tuple[int, ...], ...]
    head: tuple[tuple[int, ...], ...]

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
        return cls(
            config.hidden_size, block.attn.level_size, block.mlp.up_proj.out_features, config.vocab_size,
            len(config.timescales), config.num_hidden_layers, _shapes(model.model.embeddings), _shapes(block),
            (*_shapes(model.model.norm), *_shapes(model.lm_head)),
        )

    @property
    def parameters(self) -> int:
        """Numbers in all parameters."""
        return numbers_in(self.embeddings) + self.blocks * numbers_in(self.block) + numbers_in(self.head)


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(p.shape) for p in module.parameters())


def numbers_in(shapes: Iterable[tuple[int, ...]], shards: int = 1) -> int:
    """Numbers in the parameters, each padded along its first dimension to equal shards."""
    return sum(shards * -(-shape[0] // shards) * torch.Size(shape[1:]).numel() for shape in shapes)


@dataclass(frozen=True)
class Job:
    """
    A layout, and what else the communication of a job depends on.

    Args:
        layout (Layout):
            Degrees.
        rows, tokens (int):
            What a rank reads at a time: rows, and tokens of each; under TP and CP of its whole group.
        segments (int):
            Segments of a sequence. Default: 1.
        keeps (bool):
            Whether `parallelism.fsdp_reshard_after_forward = "never"`. Default: `False`.
        param, reduce, activation (int):
            Bytes of a number of gathered parameters, of reduced gradients, of activations. Default: 4.
        logged (bool):
            Whether the step is logged. Default: `True`.
    """

    layout: Layout
    rows: int
    tokens: int
    segments: int = 1
    keeps: bool = False
    param: int = 4
    reduce: int = 4
    activation: int = 4
    logged: bool = True


def designed(job: Job, shapes: Shapes) -> list[Call]:
    """
    The communication of one step on the first rank.

    Raises:
        ValueError: there is no formula for the combination.
    """
    layout = job.layout
    kinds = [layout.fsdp * layout.context * layout.replicas > 1, layout.tensor > 1, layout.pipeline > 1]
    if sum(kinds) > 1:
        raise ValueError(f"expected data and context, tensor, or pipeline parallelism alone; got {layout}")
    parts = (_data_parallel, _context, _tensor, _pipeline)
    # accumulated batches communicate each by itself
    calls = [call._replace(calls=call.calls * layout.accumulation) for part in parts for call in part(job, shapes)]
    return [call for call in (*calls, *_bookkeeping(job, shapes)) if call.calls]


def _data_parallel(job: Job, shapes: Shapes) -> Iterator[Call]:
    """DDP, FSDP, HSDP, and the parameters under context parallelism."""
    shards, replicas, segments = job.layout.fsdp * job.layout.context, job.layout.replicas, job.segments
    if shards == 1:
        if replicas > 1:
            # they fit in one of torchtitan's buckets of 100 MB
            yield Call("all-reduce", shapes.parameters * job.reduce, replicas, 1, "gradients")
        return
    # a block's parameters are freed after each use: the forward pass, and recomputation with its backward pass. The head
    # stays for the backward pass that follows at once. The table is not freed between backward passes: it has no input
    # whose gradient would tell that it is done
    groups = (
        ("table", shapes.embeddings, 1, 1 if job.keeps else segments + 1),
        ("blocks", shapes.block, shapes.blocks, segments if job.keeps else 2 * segments),
        ("head", shapes.head, 1, segments),
    )
    for name, parameters, count, gathered in groups:
        numbers = numbers_in(parameters, shards)
        yield Call("all-gather", numbers * job.param, shards, count * gathered, f"parameters: {name}")
        yield Call("reduce-scatter", numbers * job.reduce, shards, count, f"gradients: {name}")
        if replicas > 1:
            yield Call("all-reduce", numbers // shards * job.reduce, replicas, count, f"replicas: {name}")


def _context(job: Job, shapes: Shapes) -> Iterator[Call]:
    """The affine map of a piece, and a gradient, for each level: whatever the length."""
    ranks = job.layout.context
    if ranks > 1:
        numbers = ranks * job.rows * shapes.level
        # states are float32
        yield Call("all-gather", 2 * numbers * 4, ranks, shapes.blocks * shapes.levels, "maps of the pieces")
        yield Call("all-gather", numbers * 4, ranks, shapes.blocks * shapes.levels, "gradients of the states")


def _tensor(job: Job, shapes: Shapes) -> Iterator[Call]:
    ranks, blocks, levels = job.layout.tensor, shapes.blocks, shapes.levels
    if ranks == 1:
        return
    tokens = job.rows * job.tokens
    # what reads whole tokens (levels, output gate, MLP; the head) gathers, what writes them (two projections; the table)
    # scatters, and the other way round in the backward pass
    gathered, scattered = blocks * (levels + 2) + 1, blocks * 2 + 1
    size = tokens * shapes.hidden * job.activation
    yield Call("all-gather", size, ranks, gathered + scattered, "tokens")
    yield Call("reduce-scatter", size, ranks, gathered + scattered, "tokens")
    # norms of the levels, the output gate and what the output projection reads; forward and backward
    yield Call("all-to-all", tokens * shapes.level * job.activation, ranks, 2 * blocks * (levels + 2), "channels to tokens")
    yield Call("all-reduce", tokens * 4, ranks, 3, "loss over the vocabulary's shards")
    # every rank has the norms and the predictions P, each with the gradients of its own tokens
    yield Call("all-reduce", shapes.hidden * 4, ranks, 2 * blocks + 1, "gradients: norms")
    yield Call("all-reduce", shapes.level * 4, ranks, 2 * blocks * levels, "gradients: norms of levels")
    yield Call("all-reduce", shapes.hidden * shapes.level * 4, ranks, blocks * (levels - 1), "gradients: predictions")


def _pipeline(job: Job, shapes: Shapes) -> Iterator[Call]:
    if job.layout.pipeline > 1:
        size = job.tokens * shapes.hidden * job.activation
        yield Call("send", size, job.layout.pipeline, job.rows, "hidden states")
        yield Call("receive", size, job.layout.pipeline, job.rows, "gradients of hidden states")


def _bookkeeping(job: Job, shapes: Shapes) -> Iterator[Call]:
    """A few numbers per step, however large the model and the batch."""
    layout = job.layout
    data, shards = layout.fsdp * layout.replicas, layout.fsdp * layout.context
    tensors = len(shapes.embeddings) + shapes.blocks * len(shapes.block) + len(shapes.head)
    if data > 1:
        yield Call("all-reduce", 8, data, 1, "number of labels")
    if (ranks := shards * layout.tensor) > 1:
        yield Call("all-reduce", 4 * tensors, ranks, 1, "gradient norms")
    if layout.pipeline > 1:
        yield Call("all-reduce", 4, layout.pipeline, 1, "gradient norm over stages")
    if job.logged:
        if (ranks := data * layout.context) > 1:
            yield Call("all-reduce", 4, ranks, 2, "mean and largest loss")
            yield Call("all-reduce", 8, ranks, 1, "number of tokens")
        if layout.pipeline == 1:
            yield Call("all-reduce", 8 * 4 * shapes.levels, layout.ranks, 1, "states and timescales")


def job_of(layout: Layout) -> Job:
    """The job that `run` counts in this layout."""
    rows = GLOBAL_BATCH // (layout.fsdp * layout.replicas * layout.accumulation)
    return Job(layout, rows, SEQ_LEN, segments=SEGMENTS if set(_SEGMENTS) <= set(layout.overrides) else 1,
               keeps=any("never" in override for override in layout.overrides))


def on_gloo(calls: Iterable[Call]) -> Counter[tuple[str, int]]:
    """Calls by kind and bytes as gloo runs them."""
    counted: Counter[tuple[str, int]] = Counter()
    for call in calls:
        counted[_gloo_kind(call), call.bytes] += call.calls
    return counted


def _gloo_kind(call: Call) -> str:
    # DTensor has no all-to-all there: it gathers all and keeps a part
    return "all-gather" if call.kind == "all-to-all" else call.kind


def traced(events: Iterable[Any]) -> Counter[tuple[str, int]]:
    """
    Calls by kind and bytes in a profile with shapes.

    Raises:
        RuntimeError: an operation between ranks is none of the known ones.
    """
    counted: Counter[tuple[str, int]] = Counter()
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


def run(layouts: Iterable[Layout], out: Path) -> dict[str, Counter[tuple[str, int]]]:
    """
    Train in every layout, and count the calls of one step on the first rank.

    Raises:
        RuntimeError: a run failed.
    """
    layouts = list(layouts)
    launch(layouts, COUNTED_STEP, out, "benchmarks.communication")
    return {
        layout.name: Counter({
            (kind, size): calls for kind, size, calls in json.loads((out / layout.name / "calls.json").read_text())})
        for layout in layouts}


def work(jobs: Path) -> None:
    """One rank of a launch: train every job, and write down the calls of its last step."""
    from torch.profiler import ProfilerActivity, profile

    for trainer in trainers(jobs):
        batches = trainer.batch_generator(trainer.dataloader)
        while trainer.should_continue_training():
            trainer.step += 1
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
                trainer.train_step(batches)
        if torch.distributed.get_rank() == 0:
            calls = traced(trace.profiler.kineto_results.experimental_event_tree())
            rows = [(kind, size, number) for (kind, size), number in calls.items()]
            (Path(trainer.job_config.job.dump_folder) / "calls.json").write_text(json.dumps(rows))


def table(counted: dict[str, Counter[tuple[str, int]]], shapes: Shapes) -> str:
    """Designed beside counted calls, by kind, in Markdown."""
    rows = []
    for layout in (layout for layout in LAYOUTS if layout.name in counted):
        job = job_of(layout)
        calls = designed(job, shapes)
        tokens = job.rows * job.tokens * layout.accumulation // layout.context // layout.tensor
        both = on_gloo(calls), counted[layout.name]
        for kind in dict.fromkeys(kind for counts in both for kind, _ in counts):
            numbers = [sum(n for (k, _), n in counts.items() if k == kind) for counts in both]
            sizes = [f"{sum(n * size for (k, size), n in counts.items() if k == kind):,}" for counts in both]
            sent = sum(call.sent for call in calls if _gloo_kind(call) == kind)
            rows.append((layout.name, kind, *numbers, *sizes, f"{sent / tokens:,.0f}"))
    return markdown((
        "layout", "collective", "calls, designed", "counted", "bytes, designed", "counted", "sent per token, bytes"), rows)


def differences(counted: dict[str, Counter[tuple[str, int]]], shapes: Shapes) -> list[str]:
    """Every kind and size of call whose number is not the designed one, in words."""
    wrong = []
    for layout in (layout for layout in LAYOUTS if layout.name in counted):
        by_design, by_count = on_gloo(designed(job_of(layout), shapes)), counted[layout.name]
        wrong += [
            f"{layout.name}: {by_design[key]} calls of {key[0]} with {key[1]:,} bytes designed, {by_count[key]} counted"
            for key in sorted(by_design.keys() | by_count.keys()) if by_design[key] != by_count[key]
        ]
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
