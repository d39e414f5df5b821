"""
Which kinds of parallelism and of training combine: the tables of docs/scaling.md, from `fla_harmonic.titan.combinations`.

    python -m benchmarks.combinations [--write]
"""

from collections.abc import Iterable, Mapping
from itertools import combinations

import tyro

from benchmarks.parallel import ROOT
from eval.tables import markdown
from fla_harmonic.titan.combinations import refusal

PAGE = ROOT / "docs/scaling.md"
MARKERS = "<!-- python -m benchmarks.combinations --write -->\n", "<!-- end -->\n"
FAMILIES = ("harmonic", "mamba", "llama")
# one and the same kind at different degrees
_DATA = ("FSDP", "HSDP", "DDP")
KINDS = (*_DATA, "TP", "PP", "CP", "segments", "stateful", "chunked loss", "recomputed blocks", "compiled blocks", "documents",
         "bf16", "tied tables")


def _table(
    head: str, rows: Iterable[str], columns: tuple[str, ...], asked: Mapping[tuple[str, str], tuple[str, tuple[str, ...]]],
) -> str:
    """By row and column, whether kinds combine for a family on the CPU, and why not, in Markdown."""
    refused = {cell: refusal(family, {*kinds, "CPU"}) for cell, (family, kinds) in asked.items()}
    words = {cell: "no" if row else "yes" for cell, row in refused.items()}
    reasons: dict[str, list[str]] = {}
    for cell, row in refused.items():
        if row is not None:
            reasons.setdefault(row.reason, []).append(" x ".join(cell))
    table = markdown((head, *columns), ((row, *(words.get((row, column), "") for column in columns)) for row in rows))
    return "\n".join([table, "", *(f"- {', '.join(cells)}: {reason}" for reason, cells in reasons.items())])


def section() -> str:
    """What stands between the markers of the page: pairs of kinds for Harmonic, and kinds by family."""
    pairs = {pair: ("harmonic", pair) for pair in combinations(KINDS, 2) if not set(pair) <= set(_DATA)}
    families = {(family, kind): (family, (kind,)) for family in FAMILIES for kind in KINDS}
    return (f"{_table('Harmonic', KINDS[:-1], KINDS[1:], pairs)}\n\nAnd by family, on the CPU:\n\n"
            f"{_table('model', FAMILIES, KINDS, families)}\n")


def main(write: bool = False) -> None:
    """
    Args:
        write: Whether the tables of docs/scaling.md are replaced.
    """
    print(section(), end="")
    if write:
        begin, end = MARKERS
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
        PAGE.write_text(f"{before}{begin}\n{section()}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
