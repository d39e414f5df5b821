"""What the page of results has, in its order: the words around the tables of each study are in `sections.toml`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    name: str
    """Folder of its results."""
    title: str
    text: str
    """What was done, in words that hold whatever came out."""
    files: tuple[str, ...]
    """Results that are kept, of which the first has to be there."""
    body: str = ""
    """Function of `eval.study.bodies` that makes the tables. Default: the first file has them in Markdown."""
    figures: tuple[str, ...] = ()


SECTIONS = [Section(**fields) for fields in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["section"]]
