"""
Which kinds of parallelism and of training combine: the tables of docs/scaling.md, from `fla_harmonic.titan.combinations`.

    python -m benchmarks.combinations [--write]
"""

from itertools import combinations

import tyro

from benchmarks.parallel import ROOT
from fla_harmonic.titan.combinations import refusal

PAGE = ROOT / "docs/scaling.md"
MARKERS = "<!-- python -m benchmarks.combinations --write -->\n", "<!-- end -->\n"
FAMILIES = ("harmonic", "mamba", "llama")
# one and the same kind at different degrees
_DATA = ("FSDP", "HSDP", "DDP")
KINDS = (*_DATA, "TP", "PP", "CP", "segments", "stateful", "chunked loss", "recomputed blocks", "compiled blocks", "documents",
         "bf16", "tied tables")


def _cell(where: tuple[str, ...], family: str, kinds: tuple[str, ...], reasons: dict[str, list[str]]) -> str:
    """The cell of a table, on the CPU; a reason is noted."""
    row = refusal(family, {*kinds, "CPU"})
    if row is None:
        return "yes"
    reasons.setdefault(row.reason, []).append(" x ".join(where))
    return "no"


def _table(head: str, columns: tuple[str, ...], rows: dict[str, list[str]], reasons: dict[str, list[str]]) -> str:
    lines = [f"| {head} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    listed = [f"- {', '.join(where)}: {reason}" for reason, where in reasons.items()]
    return "\n".join([*lines, "", *listed])


def pairs_table() -> str:
    """Pairs of kinds for Harmonic, and why pairs are refused, in Markdown."""
    reasons: dict[str, list[str]] = {}
    pairs = [pair for pair in combinations(KINDS, 2) if not set(pair) <= set(_DATA)]
    cells = {pair: _cell(pair, "harmonic", pair, reasons) for pair in pairs}
    rows = {row: [cells.get((row, column), "") for column in KINDS[1:]] for row in KINDS[:-1]}
    return _table("Harmonic", KINDS[1:], rows, reasons)


def families_table() -> str:
    """Kinds by family, and why kinds are refused, in Markdown."""
    reasons: dict[str, list[str]] = {}
    rows = {family: [_cell((family, kind), family, (kind,), reasons) for kind in KINDS] for family in FAMILIES}
    return _table("model", KINDS, rows, reasons)


def section() -> str:
    """What stands between the markers of the page."""
    return f"{pairs_table()}\n\nAnd by family, on the CPU:\n\n{families_table()}\n"


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
