"""What the page of results has, in its order: the words around the tables of each study."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eval.study import bodies, published


@dataclass(frozen=True)
class Section:
    """
    A part of the page.

    Args:
        name (str):
            Folder of its results.
        title, text (str):
            What was done, in words that hold whatever came out.
        files (tuple[str, ...]):
            Results that are kept, of which the first has to be there.
        body (Callable, Optional):
            Makes the tables of the folder. Default: the first file has them in Markdown.
        figures (tuple[str, ...]):
            Names of figures. Default: none.
    """

    name: str
    title: str
    text: str
    files: tuple[str, ...]
    body: Callable[[Path], str] | None = None
    figures: tuple[str, ...] = ()


_TABLE = ("table.md",)

SECTIONS = (
    Section("crossover", "Quality against context length", """\
Models x lengths x seeds under one token budget: every cell is a run of stock torchtitan, exported, audited for causality, and
scored on the same target tokens, in windows as long as it was trained on and a stride of half of them. Speeds are those of
cells that ran beside one another on a machine that did other work, too: the losses are what was studied. Harmonic's flavor
here comes from a search that the other families did not have (next section).
""", ("results.csv", "best_lrs.json", "facts.json"), bodies.crossover_beside_published, ("crossover.png", "curves.png")),
    Section("search", "Blocks around the three levels", """\
Variants of the debug stack at equal parameters, tokens and sweeps, with Mamba and Llama beside them; each at its best.
Only Harmonic was searched. This table is the last round: 29 configurations of Harmonic were tried before it on the same text,
one seed each and most at one learning rate, with their test losses in sight; Mamba and Llama got the sweep of learning rates
and nothing else. `debug-best` is the variant with three blocks that keeps a slow level; on the validation split the one with
all levels fast was a little lower, and was left for its short memory. So where `debug-best` is compared with another family,
Harmonic had the larger tuning budget, and part of the test text had been seen in choosing it.
""", ("results.csv",), bodies.ablation),
    Section("ablation", "What the parts are worth", f"""\
Variants of the debug flavor at equal parameters, at one learning rate, in pairs with the full model. Its decays are free and
begin in the paper's ranges (`init`); in the other timescale mode they are confined to them (`bounded`). The histograms are the
timescales of the trained channels on the test text. The published ablation (WikiText-2, 8,192 tokens, one seed, bits
per token) has {", ".join(f"{name} {bits}" for name, bits in published.ABLATION.items())}.
""", ("results.csv", "timescales.json"), bodies.ablation, ("timescales.png",)),
    Section("audit", "Causality", """\
Every flavor of the plugin, untrained, and models with planted leaks, which have to be caught: a shift by one token, pooling
over four, a norm over time, one early position that reads a late one, a bidirectional layer.
""", ("table.md",)),
    Section("length", "What context is worth", """\
The same target tokens with more and more context, and the loss by position. What is longer than a model was trained on is
labelled.
""", ("table.md", "length.jsonl", "length.csv"), figures=("length.png",)),
    Section("recall", "Recall", """\
Small generated tasks that recurrences are known to be weak at: multi-query associative recall, and a passkey at growing
distance.
""", ("table.md", "recall.jsonl", "recall.csv"), figures=("recall.png",)),
    Section("lambada", "The last word", """\
LAMBADA's task through lm-eval: the whole last word of a passage. The table says of what text.
""", ("table.md", "lambada.jsonl"), figures=("lambada.png",)),
    Section("memory", "Memory of a training step", """\
Peak memory and time of one step of batch 1 against length, each in a process of its own, until it fails. The time is that of
the first step, with compilation in it.
""", ("memory.md", "memory.jsonl", "memory.csv"), figures=("memory.png",)),
    Section("memory-28m", "Memory of a training step of 28M parameters", """\
The paper's layer at 65,536 tokens of GPT-2's tokenizer, in segments.
""", ("memory.md", "memory.jsonl", "memory.csv")),
    Section("hallamonic_debug/length", "Hallamonic: a small Llama converted", """\
A Llama that learned on sequences of 1,024 bytes, its attention replaced, tuned in two phases; every model on the same bytes
after 1,024 to 16,384 others. Several seeds are one label.
""", ("table.md", "length.jsonl", "length.csv"), figures=("length.png",)),
    Section("hallamonic_start", "Hallamonic: SmolLM2-135M-Instruct before training", """\
The dequantised Q4_1 model with layers replaced, that begin as its attention or at random; none replaced is the model itself.
""", ("start.md", "start.jsonl"), figures=("start.png",)),
    Section("hallamonic_phase1", "Hallamonic: SmolLM2-135M-Instruct in phase 1", """\
The new layers alone train, from attention and from random weights, on the same text in the same order.
""", ("phase1.md", "phase1.jsonl"), figures=("phase1.png",)),
    Section("hallamonic", "Hallamonic: a converted model against the original", """\
Audit, loss with growing context, and the time and memory of a generated token after it.
""", ("hallamonic.md", "generation.csv", "length/length.png"), figures=("generation.png",)),
    Section("compare", "Two novels", """\
The debug flavors on the text that comes with the package, one seed, one learning rate: `make compare`.
""", ("results.csv",), bodies.crossover, ("curves.png",)),
    Section("train", "The first run", """\
The debug flavor on two novels: `make train`.
""", _TABLE),
    Section("parallel", "Every parallel layout against one process", """\
The debug model on gloo from the same initial weights on the same windows, at a learning rate of 1e-3: at the debug file's 3e-3
Adam amplifies rounding beyond 1e-6 within these steps.
""", _TABLE),
    Section("growth", "A text of any length", """\
Processes that have read or written texts of two lengths, timed in turn, 100 tokens at a time, on one thread.
""", _TABLE),
    Section("scan", "The scans", """\
Time of a scan that allocates its output over the time to stream the bytes that it must move (a `torch.add` of its two inputs
into a ready buffer, scaled by the number of tensors), and of a python loop over the tokens over the scan's. `numba` is the
default on a CPU, `torch` what runs without numba.
""", ("scan.csv",), bodies.scan, ("scan.png",)),
)
