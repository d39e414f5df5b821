"""
What the ranks of a job send one another: by design, and as counted.

    python -m benchmarks.communication

trains `titan_configs/harmonic_debug.toml`, made small, in several layouts on gloo, and counts every collective of one step
with torch's profiler, which sees what reaches a process group: of FSDP, of DDP's reducer, of DTensor, of our scans, of the
pipeline. Beside it stands what the model's shapes say. A step in the middle of a run is counted: the first ones negotiate
shapes and buckets. A difference ends the command with an error.

Bytes of a collective are those of its larger side: of what all ranks together gather, scatter or sum up.
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

from benchmarks.parallel import GLOBAL_BATCH, SEQ_LEN, Layout, launch
from fla_harmonic.models.harmonic import HarmonicConfig, HarmonicForCausalLM

# the step that is counted; by then shapes are known, buckets are built and FSDP has set up
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
# what a rank sends of the bytes, by a ring of n ranks
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
        odd = {name: value for name in ("gate_ratio", "gate_rank", "attn") if (value := getattr(config, name)) is not None}
        odd |= {name: True for name in ("use_short_conv", "tie_word_embeddings") if getattr(config, name)}
        odd |= {name: False for name in ("use_prediction_error", "use_output_gate", "use_output_proj", "gated_mlp")
                if not getattr(config, name)}
        if odd:
            raise ValueError(
                f"expected the stack of blocks with its default parts, for which the formulas are, but got {odd}. "
                "Remedy: the defaults of HarmonicConfig")
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
        return _numbers(self.embeddings) + self.blocks * _numbers(self.block) + _numbers(self.head)

    @property
    def tensors(self) -> int:
        """Number of parameters, as tensors."""
        return len(self.embeddings) + self.blocks * len(self.block) + len(self.head)


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(p.shape) for p in module.parameters())


def _numbers(shapes: Iterable[tuple[int, ...]], shards: int = 1) -> int:
    """Numbers in the parameters, each padded along its first dimension to as many equal shards."""
    return sum(shards * -(-shape[0] // shards) * torch.Size(shape[1:]).numel() for shape in shapes)


@dataclass(frozen=True)
class Job:
    """
    A layout, and what else of a job its communication depends on.

    Args:
        layout (Layout):
            Degrees.
        rows, tokens (int):
            What a rank reads at a time: rows, and tokens of each; under TP and CP those of the whole group.
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
        raise ValueError(f"expected data and context, tensor, or pipeline parallelism alone, but got {layout}")
    calls = [*_sharded(job, shapes), *_replicated(job, shapes), *_context(job, shapes), *_tensor(job, shapes),
             *_pipeline(job, shapes)]
    # a batch after another, each with its own
    calls = [call._replace(calls=call.calls * layout.accumulation) for call in calls]
    return [call for call in (*calls, *_bookkeeping(job, shapes)) if call.calls]


def _sharded(job: Job, shapes: Shapes) -> Iterator[Call]:
    """FSDP, HSDP, and the parameters under context parallelism."""
    shards, segments = job.layout.fsdp * job.layout.context, job.segments
    if shards == 1:
        return
    # a block's parameters go after each use, of which the last two are one: computed anew, and its backward pass. The head
    # stays for the backward pass that follows at once. The table is not freed between backward passes: it has no input
    # whose gradient would say that it is done
    groups = (
        ("table", shapes.embeddings, 1, 1 if job.keeps else segments + 1),
        ("blocks", shapes.block, shapes.blocks, segments if job.keeps else 2 * segments),
        ("head", shapes.head, 1, segments),
    )
    for name, parameters, count, gathered in groups:
        numbers = _numbers(parameters, shards)
        yield Call("all-gather", numbers * job.param, shards, count * gathered, f"parameters: {name}")
        yield Call("reduce-scatter", numbers * job.reduce, shards, count, f"gradients: {name}")
        if job.layout.replicas > 1:
            yield Call("all-reduce", numbers // shards * job.reduce, job.layout.replicas, count, f"replicas: {name}")


def _replicated(job: Job, shapes: Shapes) -> Iterator[Call]:
    """DDP, whose gradients fit in one of torchtitan's buckets of 100 MB."""
    if job.layout.replicas > 1 and job.layout.fsdp * job.layout.context == 1:
        yield Call("all-reduce", shapes.parameters * job.reduce, job.layout.replicas, 1, "gradients")


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
    # what reads whole tokens (levels, output gate, MLP; the head) gathers; what writes them (two projections; the table)
    # scatters; and the other way round in the backward pass
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
    """A few numbers a step, however large the model and the batch."""
    layout = job.layout
    data, shards = layout.fsdp * layout.replicas, layout.fsdp * layout.context
    if data > 1:
        yield Call("all-reduce", 8, data, 1, "number of labels")
    if (ranks := shards * layout.tensor) > 1:
        yield Call("all-reduce", 4 * shapes.tensors, ranks, 1, "gradient norms")
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
    """Calls by kind and bytes as gloo runs them: DTensor has no all-to-all there, but gathers all and keeps a part."""
    counted: Counter[tuple[str, int]] = Counter()
    for call in calls:
        counted["all-gather" if call.kind == "all-to-all" else call.kind, call.bytes] += call.calls
    return counted


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
    return {layout.name: _read(out / layout.name / "calls.json") for layout in layouts}


def _read(file: Path) -> Counter[tuple[str, int]]:
    return Counter({(kind, size): calls for kind, size, calls in json.loads(file.read_text())})


def work(jobs: Path) -> None:
    """One rank of a launch: train every job, and write down the calls of its last step."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    init_logger()
    for arguments in json.loads(jobs.read_text()):
        config = ConfigManager().parse_args(arguments)
        trainer = Trainer(config)
        batches = trainer.batch_generator(trainer.dataloader)
        while trainer.step < config.training.steps - 1:
            trainer.step += 1
            trainer.train_step(batches)
        trainer.step += 1
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
            trainer.train_step(batches)
        if dist.get_rank() == 0:
            calls = traced(trace.profiler.kineto_results.experimental_event_tree())
            rows = [(kind, size, number) for (kind, size), number in calls.items()]
            (Path(config.job.dump_folder) / "calls.json").write_text(json.dumps(rows))
        trainer.close()
        dist.barrier()
    dist.destroy_process_group()


def table(counted: dict[str, Counter[tuple[str, int]]], shapes: Shapes) -> str:
    """Designed beside counted calls, by kind, in Markdown."""
    lines = ["| layout | collective | calls, designed | counted | bytes, designed | counted | sent a token, bytes |",
             "|---|---|---|---|---|---|---|"]
    for layout in LAYOUTS:
        if layout.name not in counted:
            continue
        job = job_of(layout)
        calls = designed(job, shapes)
        tokens = job.rows * job.tokens * layout.accumulation // layout.context // layout.tensor
        by_design, by_count = on_gloo(calls), counted[layout.name]
        for kind in dict.fromkeys(kind for kind, _ in (*by_design, *by_count)):
            numbers = [
                (sum(n for (k, _), n in counts.items() if k == kind), sum(n * b for (k, b), n in counts.items() if k == kind))
                for counts in (by_design, by_count)
            ]
            (calls_designed, bytes_designed), (calls_counted, bytes_counted) = numbers
            sent = sum(call.sent for call in calls if kind == ("all-gather" if call.kind == "all-to-all" else call.kind))
            lines.append(f"| {layout.name} | {kind} | {calls_designed} | {calls_counted} | {bytes_designed:,} | "
                         f"{bytes_counted:,} | {sent / tokens:,.0f} |")
    return "\n".join(lines)


def differences(counted: dict[str, Counter[tuple[str, int]]], shapes: Shapes) -> list[str]:
    """Every kind and size of call whose number is not the designed one, in words."""
    wrong = []
    for layout in LAYOUTS:
        if layout.name in counted:
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
