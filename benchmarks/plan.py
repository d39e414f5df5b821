"""
What a model of a billion parameters needs at a million tokens on 8, 64 and 512 GPUs: by design, not measured.

    python -m benchmarks.plan

Everything follows from the model's shapes, the formulas of `benchmarks.communication`, which are checked against counted
collectives, and the assumptions that it prints.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tyro

from benchmarks.architecture import saved_bytes
from benchmarks.communication import Shapes, designed, numbers_in
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

    # bytes, and the share of them that tensors may take; the rest is for the allocator's gaps, CUDA and NCCL
    memory: float = 141e9
    usable: float = 0.9
    # dense bf16 operations per second, and the share of them that is reached, recomputation included
    flops: float = 989e12
    utilization: float = 0.4
    # GPUs of a node, and bytes per second that one sends within it (NVLink) and to others (400 Gbit/s each)
    node: int = 8
    inside: float = 450e9
    outside: float = 50e9


_SEGMENTED: dict[str, Any] = dict(segment_len=32768, loss_chunk=8192, keeps=True)
_RECOMPUTED: dict[str, Any] = dict(loss_chunk=8192, recomputes=True)
# each rank reads one row of the batch; and whether we would start with it
PLANS = (
    (Layout("FSDP 8", fsdp=8, **_RECOMPUTED), False),
    (Layout("FSDP 8", fsdp=8, **_SEGMENTED), True),
    (Layout("CP 8", context=8, **_RECOMPUTED), True),
    (Layout("FSDP 64", fsdp=64, **_SEGMENTED), False),
    (Layout("HSDP 8x8", replicas=8, fsdp=8, **_SEGMENTED), True),
    (Layout("FSDP 4 x CP 16", fsdp=4, context=16, **_RECOMPUTED), True),
    (Layout("HSDP 64x8", replicas=64, fsdp=8, **_SEGMENTED), False),
    (Layout("HSDP 8x4 x CP 16", replicas=8, fsdp=4, context=16, **_RECOMPUTED), True),
    (Layout("HSDP 8x2 x CP 32", replicas=8, fsdp=2, context=32, **_RECOMPUTED), True),
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
# bf16, in steps that are not logged
_designed = partial(designed, tokens=TOKENS, param=2, activation=2, logged=False)


@dataclass(frozen=True)
class Costs:
    """What the plans need of a model."""

    shapes: Shapes

    flops: int
    """Training operations per token."""

    saved: float
    """Bytes per token that a block saves for its backward pass, in bf16."""

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


def needs(layout: Layout, model: Costs, hardware: Hardware) -> tuple[tuple[float, float, float, float], float, float]:
    """
    What a step of the plan takes.

    Returns:
        Bytes on a GPU of shards (parameters, both moments of AdamW and gradients in float32), of gathered parameters and
        gradients that are not reduced yet, of activations (what is saved for the backward pass, a block's worth to work in,
        states and tokens), and of the logits that exist at a time with what the loss makes of them; seconds of computation;
        seconds of communication.
    """
    shapes, shards = model.shapes, layout.fsdp * layout.context
    tokens = TOKENS // layout.context
    segments = layout.segments(tokens)
    block, table, head = map(numbers_in, (shapes.block, shapes.embeddings, shapes.head))

    # bf16; a block and the next one, each in the buffer that was gathered and as parameters
    whole = 2 * (shapes.parameters if layout.keeps else table + head + 2 * 2 * block)
    # bf16 of all segments until the last is done; in float32 the group that is being reduced
    whole += 2 * (shapes.parameters if segments > 1 else head + 2 * block) + 4 * max(table, head, block)

    at_once = -(-tokens // segments)
    saved = 2 * shapes.hidden * shapes.blocks + model.saved if layout.recomputes else shapes.blocks * model.saved
    states = 4 * shapes.blocks * shapes.levels * shapes.level * segments
    activations = at_once * (saved + model.saved) + states + 16 * tokens

    # a logit and its gradient in bf16 and in float32, and the logarithm of its softmax
    logits = 16 * min(layout.loss_chunk or at_once, at_once) * shapes.vocab
    if layout.loss_chunk:
        # the head's weight and its gradient in float32
        logits += 8 * shapes.vocab * shapes.hidden

    passes = (segments > 1) + layout.recomputes
    operations = tokens * model.flops * (1 + passes / 3)
    # ranks that a purpose spans: neighbors share a sequence first, then shards, then replicas
    spans = {"maps of the pieces": layout.context, "gradients of the states": layout.context,
             "parameters": shards, "gradients": shards}
    seconds = 0.0
    for call in _designed(layout, shapes, rows=1):
        span = spans.get(call.purpose.partition(":")[0], layout.ranks)
        seconds += call.sent / (hardware.inside if span <= hardware.node else hardware.outside)
    return ((16 * shapes.parameters / shards, whole, activations, logits),
            operations / (hardware.flops * hardware.utilization), seconds)


def options(layout: Layout) -> str:
    """In words."""
    words = {
        f"segments of {layout.segment_len:,}": layout.segment_len, "blocks recomputed": layout.recomputes,
        f"loss chunks of {layout.loss_chunk:,}": layout.loss_chunk, "never resharded": layout.keeps}
    return ", ".join(word for word, used in words.items() if used)


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
    for layout, suggested in PLANS:
        memory, compute, communication = needs(layout, model, hardware)
        total = sum(memory)
        fits = total <= hardware.memory * hardware.usable
        step = TOKENS * layout.fsdp * layout.replicas
        hours = 20e9 / step * (compute + communication) / 3600
        rows.append((
            layout.ranks, f"**{layout.name}**" if suggested else layout.name, options(layout), f"{step:,}",
            *(f"{part / 1e9:.1f}" for part in (*memory, total)), "yes" if fits else "no", f"{compute:.2f}",
            f"{communication:.2f}", f"{hours:.2f}" if fits else ""))
    return markdown((
        "GPUs", "layout", "options", "tokens per step", "shards, GB", "gathered, GB", "activations, GB", "logits, GB",
        "total, GB", "fits", "compute, s", "communication, s", "20B tokens, hours"), rows)


def kinds_table(model: Costs) -> str:
    """What a rank sends with each kind of parallelism by itself, in Markdown."""
    lines = []
    for layout, rows in KINDS:
        together = rows * layout.fsdp * layout.replicas
        tokens = together * TOKENS // layout.ranks
        sent = sum(call.sent for call in _designed(layout, model.shapes, rows=rows))
        lines.append(
            (layout.name, f"{together} x {TOKENS:,}", f"{tokens:,}", f"{sent / 1e9:.2f}", f"{sent / tokens:,.0f}"))
    return markdown((f"{_RANKS} ranks", "rows x tokens that they read", "tokens per rank", "sent per step, GB",
                     "sent per token, bytes"), lines)


def main() -> None:
    model, hardware = Costs.build(), Hardware()
    print(assumptions(model, hardware), kinds_table(model), table(model, hardware), sep="\n\n")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
