"""
The audit of every flavor of the plugin, and of models with planted leaks: `python -m eval.audit_all`.

Exit status 1 if a flavor is not causal, or a planted leak is not seen. What is done is not audited again.
"""

import hashlib
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import tyro
from torch import nn
from tqdm import tqdm

from eval.results import finished, keep_command, write
from eval.scoring.audit import Audit, audit
from eval.scoring.models import FAMILIES, build
from eval.scoring.planted_leaks import MIXES, Table
from eval.tables import markdown


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
    return Audit(**finished(file, lambda: asdict(audit(model, options.length, batch_size=4))))


def table(verdicts: dict[str, Audit]) -> str:
    """The verdicts as Markdown."""
    columns = ["model", "causal", "largest change before a split", "at the split", "bits on random tokens", "log2(V)",
               "packing"]
    return markdown(columns, (
        [name, "yes" if verdict.causal else f"no: {verdict.failure}", f"{verdict.largest_change:.1e}",
         f"{verdict.largest_effect:.1e}", f"{verdict.random_bits_per_token:.4f}", f"{verdict.log2_vocab:.4f}", verdict.packing]
        for name, verdict in verdicts.items()))


def main(options: Options) -> None:
    keep_command(options.out)
    models = {flavor: partial(build, flavor) for flavor in options.flavors}
    planted = {f"planted: {mix}": partial(Table, mix=mix) for mix in MIXES}
    verdicts = {}
    for name, make in tqdm({**models, **planted}.items()):
        torch.manual_seed(0)
        verdicts[name] = verdict_of(name.replace(": ", "-"), make(), options)
    wrong = [name for name, verdict in verdicts.items() if verdict.causal == (name in planted)]
    text = table(verdicts)
    write(options.out / "table.md", text + "\n")
    print(text)
    if wrong:
        sys.exit(f"not as expected: {', '.join(wrong)}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
