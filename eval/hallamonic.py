"""
A converted model against the pretrained one: `python -m eval.hallamonic --original DIR --converted DIR ...`.

Three tables, on the text of a torchtitan job (what follows these options overrides the TOML):

- the audit: whether each model is causal, and its loss on uniformly random tokens, of which no causal model has less than
  log2(V) bits;
- the loss on the same targets with growing context (`eval.length`), the original beyond its limit too, which is labelled;
- time and memory of a token that is generated after growing context, the converted models in turn with the original.

A model that reads the future gets no score. A run that was killed goes on where it stopped.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torchtitan.config import ConfigManager

from eval import length
from eval.results import keep_command, write
from eval.scoring import generation
from eval.scoring.models import digest, load, trained_length
from fla_harmonic.text import load_split
from fla_harmonic.text.tokenizers import JsonTokenizer
from fla_harmonic.titan.config import data_section


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


def audits(records: Sequence[dict[str, Any]]) -> str:
    """The audits of the records of `eval.length`, as Markdown."""
    lines = ["| model | causal | bits a token on random tokens | log2(V) |", "|---|---|---|---|"]
    for record in {record["model"]: record for record in records}.values():
        verdict = record["audit"]
        causal = "no" if verdict["failure"] else "yes"
        bits, floor = verdict["random_bits_per_token"], verdict["log2_vocab"]
        lines.append(f"| {record['model']} | {causal} | {bits:.3f} | {floor:.3f} |")
    return "\n".join(lines)


def main(options: Options, overrides: list[str]) -> None:
    keep_command(options.out)
    labels = options.labels or tuple(
        folder.parent.name if folder.name == "hf" else folder.name for folder in options.converted)
    if not options.converted or len(labels) != len(options.converted) or len({"original", *labels}) != len(labels) + 1:
        raise ValueError(
            f"expected converted models and as many different `labels`, none of them 'original'; got {len(options.converted)} "
            f"models and labels {labels}.")
    folders, names = (options.original, *options.converted), ("original", *labels)
    length.main(length.Options(
        models=folders, labels=names, contexts=options.contexts, targets=options.targets, windows=1, beyond=True,
        piece=options.piece, config_file=options.config_file, split=options.split, out=options.out / "length",
    ), overrides)
    records = [json.loads(line) for line in (options.out / "length/length.jsonl").read_text().splitlines()]

    job = ConfigManager().parse_args([f"--job.config_file={options.config_file}", *overrides])
    split = load_split(job.training.dataset, job.training.dataset_path, options.split, JsonTokenizer(options.original),
                       data_section(job))
    subjects = []
    for folder, name in zip(folders, names, strict=True):
        model: Any = load(folder)[0]
        if torch.accelerator.is_available():
            model.to(torch.accelerator.current_accelerator())
        subjects.append(generation.Subject(
            name, model, digest(folder), trained_length(model)))
    costs = generation.run(subjects, split.tokens, options.generation_contexts, options.new_tokens, options.rounds,
                           options.piece, options.out / "generation")
    write(options.out / "generation.jsonl", "".join(json.dumps(record) + "\n" for record in costs))
    write(options.out / "generation.csv", generation.frame(costs).to_csv(index=False))
    generation.plot(costs, options.out / "generation.png")
    text = "\n\n".join([audits(records), length.table(records), generation.table(costs)])
    write(options.out / "hallamonic.md", text + "\n")
    print(f"\n{audits(records)}\n\n{generation.table(costs)}\n\n{options.out / 'hallamonic.md'}, "
          f"{options.out / 'generation.csv'}, {options.out / 'generation.png'}, {options.out / 'length/length.png'}")


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
