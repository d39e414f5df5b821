"""
The audit of every flavor of the plugin, and of models with planted leaks: `python -m eval.audit_all`.

Exit status 1 if a flavor is not causal, or a planted leak is not seen. What is done is not audited again.
"""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from torch import nn
from tqdm import tqdm

from eval.results import keep_command, write
from eval.scoring.audit import Audit, audit
from eval.scoring.models import FAMILIES, build
from eval.scoring.planted_leaks import MIXES, Table


@dataclass
class Options:
    """What to audit, and where the verdicts go."""

    flavors: tuple[str, ...] = tuple(f"{family}/{size}" for family, sizes in FAMILIES.items() for size in sizes)
    """family/flavor each, untrained. Default: all."""

    length: int = 264
    """Tokens of the sequences that are tried."""

    out: Path = Path("outputs/audit")
    """Folder of the verdicts."""


def verdict_of(name: str, model: nn.Module, options: Options) -> Audit:
    """The verdict on a model, or the one that is there."""
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    digest = hashlib.sha256(repr((getattr(model, "config", None), shapes)).encode()).hexdigest()[:10]
    file = options.out / "verdicts" / f"{name.replace('/', '-')}-{options.length}-{digest}.json"
    if not file.is_file():
        write(file, json.dumps(asdict(audit(model, options.length, batch_size=4))))
    return Audit(**json.loads(file.read_text()))


def table(verdicts: dict[str, Audit]) -> str:
    """The verdicts as Markdown."""
    lines = ["| model | causal | largest change before a split | at the split | bits on random tokens | log2(V) | packing |",
             "|---|---|---|---|---|---|---|"]
    for name, verdict in verdicts.items():
        said = "yes" if verdict.causal else f"no: {verdict.failure}"
        lines.append(
            f"| {name} | {said} | {verdict.largest_change:.1e} | {verdict.largest_effect:.1e} | "
            f"{verdict.random_bits_per_token:.4f} | {verdict.log2_vocab:.4f} | {verdict.packing} |")
    return "\n".join(lines)


def main(options: Options) -> None:
    keep_command(options.out)
    verdicts, wrong = {}, []
    for flavor in tqdm(options.flavors):
        torch.manual_seed(0)
        verdicts[flavor] = verdict_of(flavor, build(flavor), options)
        wrong += [flavor] if not verdicts[flavor].causal else []
    for mix in MIXES:
        torch.manual_seed(0)
        verdicts[f"planted: {mix}"] = verdict_of(f"planted-{mix}", Table(mix=mix), options)
        wrong += [f"planted: {mix}"] if verdicts[f"planted: {mix}"].causal else []
    text = table(verdicts)
    write(options.out / "table.md", text + "\n")
    print(text)
    if wrong:
        sys.exit(f"not as expected: {', '.join(wrong)}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
