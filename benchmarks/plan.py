"""
What a model of a billion parameters needs at a million tokens on 8, 64 and 512 GPUs: by design, not measured.

    python -m benchmarks.plan

Everything follows from the model's shapes, the formulas of `benchmarks.communication`, which are checked against counted
collectives, and the assumptions that it prints.
"""

from dataclasses import dataclass
from typing import Any

import torch
import tyro

from benchmarks.architecture import saved_bytes
from benchmarks.communication import Job, Shapes, designed, numbers_in
from benchmarks.parallel import Layout
from eval.tables import markdown
from fla_harmonic.models.harmonic import HarmonicConfig, HarmonicForCausalLM

TOKENS = 2**20
WIDTH, MLP, BLOCKS, VOCAB = 2048, 6144, 10, 50257
# the width at which saved bytes are counted; they grow in proportion
_COUNTED_WIDTH = 256


@dataclass(frozen=True)
class Hardware:
    """Assumptions about a GPU (an H200), its links, and how well it is used."""

    memory: float = 141e9
    """Bytes."""

    usable: float = 0.9
    """Share of the memory that tensors may take; the rest is for the allocator's gaps, CUDA and NCCL."""

    flops: float = 989e12
    """Dense bf16 operations per second."""

    utilization: float = 0.4
    """Share of them that is reached, recomputation included."""

    node: int = 8
    """GPUs of a node."""

    inside: float = 450e9
    """Bytes per second that a GPU sends within its node (NVLink)."""

    outside: float = 50e9
    """Bytes per second that a GPU sends to other nodes (400 Gbit/s each)."""


@dataclass(frozen=True)
class Plan:
    """A layout and its options; each rank reads one row of the batch."""

    layout: Layout
    segment_len: int = 0
    loss_chunk: int = 0
    recomputes: bool = False
    keeps: bool = False
    suggested: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a rank."""
        return TOKENS // self.layout.context

    @property
    def segments(self) -> int:
        return -(-self.tokens // self.segment_len) if self.segment_len else 1

    @property
    def tokens_a_step(self) -> int:
        return TOKENS * self.layout.fsdp * self.layout.replicas

    def options(self) -> str:
        """In words."""
        parts = [f"segments of {self.segment_len:,}"] if self.segment_len else []
        parts += ["blocks recomputed"] if self.recomputes else []
        parts += [f"loss chunks of {self.loss_chunk:,}"] if self.loss_chunk else []
        parts += ["never resharded"] if self.keeps else []
        return ", ".join(parts)


_SEGMENTED: dict[str, Any] = dict(segment_len=32768, loss_chunk=8192, keeps=True)
_RECOMPUTED: dict[str, Any] = dict(loss_chunk=8192, recomputes=True)
PLANS = (
    Plan(Layout("FSDP 8", fsdp=8), **_RECOMPUTED),
    Plan(Layout("FSDP 8", fsdp=8), **_SEGMENTED, suggested=True),
    Plan(Layout("CP 8", context=8), **_RECOMPUTED, suggested=True),
    Plan(Layout("FSDP 64", fsdp=64), **_SEGMENTED),
    Plan(Layout("HSDP 8x8", replicas=8, fsdp=8), **_SEGMENTED, suggested=True),
    Plan(Layout("FSDP 4 x CP 16", fsdp=4, context=16), **_RECOMPUTED, suggested=True),
    Plan(Layout("HSDP 64x8", replicas=64, fsdp=8), **_SEGMENTED),
    Plan(Layout("HSDP 8x4 x CP 16", replicas=8, fsdp=4, context=16), **_RECOMPUTED, suggested=True),
    Plan(Layout("HSDP 8x2 x CP 32", replicas=8, fsdp=2, context=32), **_RECOMPUTED, suggested=True),
)

_RANKS = 8
# each kind by itself, and the rows that a data-parallel rank reads; a pipeline needs one per stage to be busy
KINDS = (
    (Layout("FSDP", fsdp=_RANKS), 1),
    (Layout("HSDP 2x4", replicas=2, fsdp=4), 1),
    (Layout("DDP", replicas=_RANKS), 1),
    (Layout("CP", context=_RANKS), 1),
    (Layout("PP, first stage", pipeline=_RANKS), _RANKS),
    (Layout("TP", tensor=_RANKS), 1),
)


@dataclass(frozen=True)
class Costs:
    """
    What the plans need of a model.

    Args:
        shapes (Shapes):
            Shapes of the parameters.
        flops (int):
            Training operations per token.
        saved (float):
            Bytes per token that a block saves for its backward pass, in bf16.
    """

    shapes: Shapes
    flops: int
    saved: float

    @classmethod
    def build(cls) -> "Costs":
        from fla_harmonic.titan.models.hf_model import HFModel, HFModelArgs

        config = HarmonicConfig(hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=BLOCKS, vocab_size=VOCAB)
        args = HFModelArgs.of(config)
        with torch.device("meta"):
            _, flops = args.get_nparams_and_flops(HFModel(args), TOKENS)

        small = HarmonicConfig(hidden_size=_COUNTED_WIDTH, intermediate_size=MLP * _COUNTED_WIDTH // WIDTH,
                               num_hidden_layers=1, vocab_size=16)
        block = HarmonicForCausalLM(small).bfloat16().model.layers[0]
        inputs = torch.randn(1, 256, _COUNTED_WIDTH, dtype=torch.bfloat16, requires_grad=True)
        return cls(Shapes.of(config), flops, saved_bytes(block, inputs) * WIDTH / _COUNTED_WIDTH)


@dataclass(frozen=True)
class Needs:
    """Bytes on a GPU, and seconds per step."""

    resident: float
    """Shards in float32: parameters, both moments of AdamW, gradients."""

    whole: float
    """Gathered parameters, and gradients that are not reduced yet."""

    activations: float
    """What is saved for the backward pass, a block's worth to work in, states and tokens."""

    logits: float
    """Those that exist at a time, with what the loss makes of them."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        return self.resident + self.whole + self.activations + self.logits


def needs(plan: Plan, model: Costs, hardware: Hardware) -> Needs:
    """What a step of the plan takes."""
    shapes, layout = model.shapes, plan.layout
    shards = layout.fsdp * layout.context
    block, table, head = map(numbers_in, (shapes.block, shapes.embeddings, shapes.head))

    # bf16; a block and the next one, each in the buffer that was gathered and as parameters
    whole = 2 * (shapes.parameters if plan.keeps else table + head + 2 * 2 * block)
    # bf16 of all segments until the last is done; in float32 the group that is being reduced
    whole += 2 * (shapes.parameters if plan.segments > 1 else head + 2 * block) + 4 * max(table, head, block)

    at_once = -(-plan.tokens // plan.segments)
    inputs = 2 * shapes.hidden * shapes.blocks
    saved = inputs + model.saved if plan.recomputes else shapes.blocks * model.saved
    states = 4 * shapes.blocks * shapes.levels * shapes.level * plan.segments
    activations = at_once * (saved + model.saved) + states + 16 * plan.tokens

    chunk = min(plan.loss_chunk or at_once, at_once)
    # a logit and its gradient in bf16 and in float32, and the logarithm of its softmax
    logits = 16 * chunk * shapes.vocab
    if plan.loss_chunk:
        # the head's weight and its gradient in float32
        logits += 8 * shapes.vocab * shapes.hidden

    passes = (plan.segments > 1) + plan.recomputes
    operations = plan.tokens * model.flops * (1 + passes / 3)
    job = Job(layout, rows=1, tokens=TOKENS, segments=plan.segments, keeps=plan.keeps, param=2, activation=2, logged=False)
    seconds = sum(
        call.sent / (hardware.inside if _is_inside(call.purpose, plan, hardware) else hardware.outside)
        for call in designed(job, shapes)
    )
    return Needs(16 * shapes.parameters / shards, whole, activations, logits,
                 operations / (hardware.flops * hardware.utilization), seconds)


def _is_inside(purpose: str, plan: Plan, hardware: Hardware) -> bool:
    """Whether the ranks that talk are of one node; neighbors share a sequence first, then shards, then replicas."""
    layout = plan.layout
    if purpose in ("maps of the pieces", "gradients of the states"):
        return layout.context <= hardware.node
    if purpose.startswith(("parameters", "gradients")):
        return layout.fsdp * layout.context <= hardware.node
    return layout.ranks <= hardware.node


def assumptions(model: Costs, hardware: Hardware) -> str:
    """The assumptions in Markdown."""
    shapes = model.shapes
    return markdown(("assumption", ""), (
        ("model", f"{shapes.parameters:,} parameters: {shapes.blocks} blocks of width {shapes.hidden:,}, MLP "
         f"{shapes.intermediate:,}, vocabulary {shapes.vocab:,}, tables not tied"),
        ("sequence", f"{TOKENS:,} tokens, one row per rank (under CP: each rank of its group)"),
        ("numbers", "bf16: gathered parameters, activations; float32: shards, AdamW's moments, reduced gradients"),
        ("operations", f"{model.flops:,} per token; a third more for each recomputed forward pass"),
        ("a block saves",
         f"{model.saved:,.0f} bytes per token (counted on the CPU at width {_COUNTED_WIDTH}, in proportion)"),
        ("GPU", f"{hardware.memory / 1e9:.0f} GB, of which tensors take at most {hardware.usable:.0%}; "
         f"{hardware.flops / 1e12:.0f} TFLOP/s, {hardware.utilization:.0%} of them reached"),
        ("links", f"a GPU sends {hardware.inside / 1e9:.0f} GB/s within a node of {hardware.node}, "
         f"{hardware.outside / 1e9:.0f} GB/s to others; latency is left out"),
    ))


def table(model: Costs, hardware: Hardware) -> str:
    """The plans in Markdown; GB are of 10^9 bytes."""
    rows = []
    for plan in PLANS:
        need = needs(plan, model, hardware)
        fits = need.total <= hardware.memory * hardware.usable
        hours = 20e9 / plan.tokens_a_step * (need.compute + need.communication) / 3600
        mark = "**" if plan.suggested else ""
        memory = (need.resident, need.whole, need.activations, need.logits, need.total)
        rows.append((
            plan.layout.ranks, f"{mark}{plan.layout.name}{mark}", plan.options(), f"{plan.tokens_a_step:,}",
            *(f"{part / 1e9:.1f}" for part in memory), "yes" if fits else "no", f"{need.compute:.2f}",
            f"{need.communication:.2f}", f"{hours:.2f}" if fits else ""))
    return markdown((
        "GPUs", "layout", "options", "tokens per step", "shards, GB", "gathered, GB", "activations, GB", "logits, GB",
        "total, GB", "fits", "compute, s", "communication, s", "20B tokens, hours"), rows)


def kinds_table(model: Costs) -> str:
    """What a rank sends with each kind of parallelism by itself, in Markdown."""
    lines = []
    for layout, rows in KINDS:
        together = rows * layout.fsdp * layout.replicas
        tokens = together * TOKENS // layout.ranks
        job = Job(layout, rows=rows, tokens=TOKENS, param=2, activation=2, logged=False)
        sent = sum(call.sent for call in designed(job, model.shapes))
        lines.append(
            (layout.name, f"{together} x {TOKENS:,}", f"{tokens:,}", f"{sent / 1e9:.2f}", f"{sent / tokens:,.0f}"))
    return markdown((f"{_RANKS} ranks", "rows x tokens that they read", "tokens per rank", "sent per step, GB",
                     "sent per token, bytes"), lines)


def main() -> None:
    model, hardware = Costs.build(), Hardware()
    print(assumptions(model, hardware), kinds_table(model), table(model, hardware), sep="\n\n")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
