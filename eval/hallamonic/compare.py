"""
A converted model against the pretrained one: `python -m eval.hallamonic --original DIR --converted DIR ...`.

Three tables, on the text of a torchtitan job (what follows these options overrides the TOML):

- the audit: whether each model is causal, and its loss on uniformly random tokens, which is at least log2(V) bits per
  token for any causal model;
- the loss on the same targets with growing context (`eval.scoring.length`), the original beyond its limit too, which is
  labelled;
- time and memory per token generated after growing context, the converted models in turn with the original.

A model that reads the future gets no score. A run that was killed continues where it stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.results import Record, keep_command, write, write_lines
from eval.scoring import generation, length
from eval.scoring.models import digest, label_of, load, to_accelerator, trained_length
from eval.scoring.texts import job_of, split_of
from eval.tables import markdown


@dataclass
class Options:
    """Which models, and how long their contexts are."""

    original: Path
    """Hugging Face directory of the pretrained model."""

    converted: tuple[Path, ...]
    """Directories of what it was converted into: as converted, and after each phase."""

    labels: tuple[str, ...] = ()
    """Names of the converted models, as many. Default: the directories'."""

    contexts: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Tokens before the targets, ascending."""

    targets: int = 2048
    """Tokens that are predicted with every context: the last ones of the split."""

    generation_contexts: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Tokens that are read before the generated ones."""

    new_tokens: int = 16
    """Tokens that a model generates in its turn."""

    rounds: int = 5
    """Turns of each model; the median counts."""

    piece: int = 1024
    """Most tokens that are read at once before generation, and whose logits are there at once."""

    config_file: Path = Path("titan_configs/hallamonic_smollm2_phase1.toml")
    """The job whose `[training] dataset` and `[data]` name the text."""

    split: str = "test"
    """train, validation or test."""

    out: Path = Path("outputs/hallamonic")
    """Folder for results, tables and plots."""


def audits(records: Sequence[Record]) -> str:
    """The audits of the records of `eval.scoring.length`, as Markdown."""
    verdicts = {record["model"]: record["audit"] for record in records}
    return markdown(["model", "causal", "bits per token on random tokens", "log2(V)"], (
        [model, "no" if verdict["failure"] else "yes", f"{verdict['random_bits_per_token']:.3f}",
         f"{verdict['log2_vocab']:.3f}"] for model, verdict in verdicts.items()))


def main(options: Options, overrides: list[str]) -> None:
    keep_command(options.out)
    labels = options.labels or tuple(map(label_of, options.converted))
    if not options.converted or len(labels) != len(options.converted) or len({"original", *labels}) != len(labels) + 1:
        raise ValueError(
            f"expected converted models and as many different `labels`, none of them 'original'; got {len(options.converted)} "
            f"models and labels {labels}.")
    folders, names = (options.original, *options.converted), ("original", *labels)
    records = length.compare(length.Options(
        models=folders, labels=names, contexts=options.contexts, targets=options.targets, windows=1, beyond=True,
        piece=options.piece, config_file=options.config_file, split=options.split, out=options.out / "length",
    ), overrides)

    subjects = []
    for folder, name in zip(folders, names, strict=True):
        model = to_accelerator(load(folder)[0])
        subjects.append(generation.Subject(name, model, digest(folder), trained_length(model)))
    split = split_of(job_of(options.config_file, overrides), options.split, options.original)
    costs = generation.run(subjects, split.tokens, options.generation_contexts, options.new_tokens, options.rounds,
                           options.piece, options.out / "generation")
    write_lines(options.out / "generation.jsonl", costs)
    write(options.out / "generation.csv", generation.frame(costs).to_csv(index=False))
    generation.plot(costs, options.out / "generation.png")
    write(options.out / "hallamonic.md",
          f"{audits(records)}\n\n{length.table(records)}\n\n{generation.table(costs)}\n")
    print(f"\n{audits(records)}\n\n{generation.table(costs)}\n\n{options.out / 'hallamonic.md'}, "
          f"{options.out / 'generation.csv'}, {options.out / 'generation.png'}, {options.out / 'length/length.png'}")
