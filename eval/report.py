"""
The page of results, from result files: `python -m eval.report`.

    python -m eval.report --collect outputs

copies what the studies under `outputs` left (tables, figures, the commands that they were started with) to `docs/results`,
and writes `docs/results.md` from there. Without `--collect` it writes the page again from what is in `docs/results`. A study
that is not there is listed as not run; no number on the page is written by hand.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import tyro

from eval.results import COMMANDS, write
from eval.study import bodies
from eval.study.sections import SECTIONS


@dataclass
class Options:
    """Where results are, and where the page goes."""

    collect: Path | None = None
    """Folder with the studies' own folders, whose results are copied first; those of a name replace what was there."""

    results: Path = Path("docs/results")
    """Folder of the results that the page shows."""

    out: Path = Path("docs/results.md")
    """The page."""


_HEAD = """\
# Results

Written by `python -m eval.report` from the files in `{results}`, which the commands below left. Absolute times depend on the
machine, ratios within a table less. Every model was audited for causality (`python -m eval.audit`) before it was scored. These
runs are older than the audit of the scored windows themselves ([audit.md](audit.md)).
"""


def collect(source: Path, results: Path) -> list[str]:
    """Copies the results of the studies in `source` that are there, and returns their names; none is a FileNotFoundError."""
    found = []
    for section in SECTIONS:
        folder = source / section.name
        if not (folder / section.files[0]).is_file():
            continue
        for name in (*section.files, *section.figures, COMMANDS):
            if (folder / name).is_file():
                target = results / section.name / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, target)
        found.append(section.name)
    if not found:
        raise FileNotFoundError(
            f"expected folders of studies in {source}, named {', '.join(section.name for section in SECTIONS)}; found none.")
    return found


def page(results: Path, beside: Path) -> str:
    """The page of a folder of results in Markdown, that lies in the folder `beside`, from which it links figures."""
    parts, missing = [_HEAD.format(results=results)], []
    for section in SECTIONS:
        folder = results / section.name
        if not (folder / section.files[0]).is_file():
            missing.append(section.title)
            continue
        parts += [f"## {section.title}\n", section.text]
        if (folder / COMMANDS).is_file():
            parts.append("".join(f"    {line}\n" for line in (folder / COMMANDS).read_text().splitlines()))
        body = getattr(bodies, section.body)(folder) if section.body else (folder / section.files[0]).read_text().strip()
        parts.append(body + "\n")
        for figure in section.figures:
            if (folder / figure).is_file():
                parts.append(f"![{section.title}]({os.path.relpath(folder / figure, beside)})\n")
    if missing:
        parts += ["## Not run\n", "".join(f"- {title}\n" for title in missing)]
    return "\n".join(parts)


def main(options: Options) -> None:
    if options.collect is not None:
        print(f"collected: {', '.join(collect(options.collect, options.results))}")
    if not options.results.is_dir():
        raise FileNotFoundError(f"expected results in {options.results}; there is no such folder. Pass `--collect outputs`.")
    write(options.out, page(options.results, options.out.parent))
    print(options.out)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
