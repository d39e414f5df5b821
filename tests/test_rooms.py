"""The import graph between the rooms of the package and of eval, read from the source: lazy imports count as well."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BELOW_TITAN = {"ops", "modules", "layers", "models", "text"}
# room -> the other rooms it may import; "package" is fla_harmonic/__init__.py, which nothing inside the package imports
ARROWS = {
    "version": set(),
    "ops": set(),
    "modules": {"ops"},
    "layers": {"ops", "modules"},
    "models": {"ops", "modules", "layers"},
    "hallamonic": {"ops", "modules", "layers", "models"},
    "package": {"version", "layers", "models", "hallamonic"},
    "text": set(),
    # of the components, what a whole checkpoint is and how a batch is audited
    "titan.patches": {"titan.base", "titan.components"},
    "titan.base": BELOW_TITAN,
    "titan.components": {*BELOW_TITAN, "titan.base"},
    "titan.distributed": {*BELOW_TITAN, "titan.base", "titan.components"},
    "titan.models": {*BELOW_TITAN, "titan.base", "titan.components", "titan.distributed", "hallamonic"},
}
ARROWS["titan"] = {*ARROWS["titan.models"], "titan.models", "titan.patches"}
ARROWS["eval.base"] = {*ARROWS["titan"], "titan", "package"}
ARROWS["eval.scoring"] = {*ARROWS["eval.base"], "eval.base"}
ARROWS["eval.study"] = {*ARROWS["eval.scoring"], "eval.scoring"}
ARROWS["eval.tasks"] = ARROWS["eval.hallamonic"] = {*ARROWS["eval.study"], "eval.study"}
ARROWS["eval"] = {*ARROWS["eval.study"], "eval.study", "eval.tasks", "eval.hallamonic"}


@dataclass(frozen=True)
class Edge:
    importer: str
    imported: str
    names: tuple[str, ...]
    # under `if TYPE_CHECKING`: a dependency, but never executed, so no circle
    types_only: bool

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}"


@cache
def sources() -> dict[str, ast.Module]:
    """Each module's dotted name and its tree; a package goes by its own name."""
    files = sorted([*ROOT.glob("fla_harmonic/**/*.py"), *ROOT.glob("eval/**/*.py")])
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(file.read_text())
            for file in files}


def is_package(module: str) -> bool:
    return ROOT.joinpath(*module.split("."), "__init__.py").exists()


def package(module: str) -> str:
    return module if is_package(module) else module.rpartition(".")[0]


def room(module: str) -> str:
    top, *inner = module.split(".")
    if module in ("eval.results", "eval.tables"):
        return "eval.base"
    if top == "eval":
        # `python -m eval.hallamonic` is a command, as eval/score.py is one
        return "eval" if not inner or inner[-1] == "__main__" or not is_package(f"eval.{inner[0]}") else f"eval.{inner[0]}"
    if not inner:
        return "package"
    if inner[0] != "titan" or len(inner) == 1:
        return inner[0]
    if inner[1] in ("config", "combinations"):
        return "titan.base"
    return f"titan.{inner[1]}" if is_package(f"fla_harmonic.titan.{inner[1]}") else "titan"


def targets(module: str, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The project's modules that a statement imports, each with the names taken from it."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, ()) for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        here = package(module).split(".")
        base = ".".join([*here[:len(here) - node.level + 1], *([base] if base else [])])
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        yield (inner, ()) if inner in sources() else (base, (alias.name,))


@cache
def edges() -> tuple[Edge, ...]:
    found = []
    for module, tree in sources().items():
        typing_only = {id(node) for test in ast.walk(tree)
                       if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.unparse(test.test)
                       for statement in test.body for node in ast.walk(statement)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                found += [Edge(module, imported, names, id(node) in typing_only)
                          for imported, names in targets(module, node) if imported.split(".")[0] in ("fla_harmonic", "eval")]
    return tuple(found)


def wrong_arrows() -> set[str]:
    return {str(edge) for edge in edges() if room(edge.importer) != room(edge.imported)
            and room(edge.imported) not in ARROWS[room(edge.importer)]}


def circles() -> set[str]:
    """The edges whose target leads back to their source."""
    graph: dict[str, set[str]] = {}
    for edge in edges():
        if not edge.types_only:
            graph.setdefault(edge.importer, set()).add(edge.imported)

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for module in graph.get(todo.pop(), ()):
                if module not in seen:
                    seen.add(module)
                    todo.append(module)
        return seen

    return {f"{module} -> {imported}" for module in graph for imported in graph[module]
            if imported == module or module in reached(imported)}


def private_names() -> set[str]:
    """`_names` of another package: imported, or read as an attribute of an imported module."""
    found = {f"{edge} {name}" for edge in edges() for name in edge.names
             if name.startswith("_") and not name.endswith("__") and package(edge.importer) != package(edge.imported)}
    for module, tree in sources().items():
        aliases = {alias.asname or alias.name: target for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                   for alias in node.names if (target := f"{node.module}.{alias.name}") in sources()}
        found |= {f"{module} -> {aliases[node.value.id]} {node.attr}" for node in ast.walk(tree)
                  if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases
                  and node.attr.startswith("_") and not node.attr.endswith("__")
                  and package(module) != package(aliases[node.value.id])}
    return found


def test_every_module_is_in_a_room_of_the_table() -> None:
    assert {room(module) for module in sources()} - set(ARROWS) == set()


def test_imports_go_along_the_arrows() -> None:
    assert not wrong_arrows()


def test_no_module_imports_itself_through_others() -> None:
    assert not circles()


def test_private_names_stay_in_their_package() -> None:
    assert not private_names()


@pytest.mark.processes
def test_the_text_room_leaves_torchtitan_out() -> None:
    modules = "; ".join(f"import {module}" for module in sources() if room(module) == "text")
    subprocess.run([sys.executable, "-c", f"{modules}; import sys; assert 'torchtitan' not in sys.modules"],
                   check=True, cwd=ROOT)
