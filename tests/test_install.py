"""What the package asks for, and what works without its extras."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, GROUPS = PYPROJECT["project"], PYPROJECT["dependency-groups"]
# what the tests run with; the group `dev` is tools, the extra `mamba` kernels for CUDA
REQUIREMENTS = [Requirement(text) for text in (
    *PROJECT["dependencies"], *PROJECT["optional-dependencies"]["titan"],
    *(text for group in ("eval", "test") for text in GROUPS[group] if isinstance(text, str)))]

# the packages that only the extras bring
WITHOUT_EXTRAS = """
import importlib.metadata, sys, tempfile, torch
for name in ("torchtitan", "torchdata", "datasets", "tensorboard", "tyro", "matplotlib", "pandas", "scipy", "peft"):
    sys.modules[name] = None
found = importlib.metadata.version
def version(name):
    if name == "torchtitan":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
from fla_harmonic import HarmonicAttention, HarmonicConfig, HarmonicForCausalLM
from transformers import AutoModelForCausalLM
assert HarmonicAttention(hidden_size=8)(torch.randn(1, 9, 8))[0].shape == (1, 9, 8)
lm = HarmonicForCausalLM(HarmonicConfig(hidden_size=8, num_hidden_layers=1, vocab_size=11))
x = torch.arange(10)[None]
lm(x, labels=x).loss.backward()
with tempfile.TemporaryDirectory() as folder:
    lm.save_pretrained(folder)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(x).logits, lm.eval()(x).logits)
try:
    import fla_harmonic.titan
except RuntimeError as error:
    assert "found none" in str(error) and "pip install 'fla-harmonic[titan]'" in str(error), error
else:
    raise AssertionError("fla_harmonic.titan was imported without torchtitan")
"""


def pins(name: str) -> dict[str, Version]:
    lines = (ROOT / name).read_text().splitlines()
    return {
        canonicalize_name(requirement.name): Version(str(requirement.specifier).removeprefix("=="))
        for line in lines if not line.startswith("#") and (requirement := Requirement(line))}


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
def test_tests_run_with_the_lowest_and_a_newer_version(requirement: Requirement) -> None:
    lowest = {Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")}
    assert lowest == {pins("constraints-lowest.txt")[requirement.name]}
    assert pins("constraints.txt")[requirement.name] in requirement.specifier


def test_the_lowest_versions_are_those_of_requirements() -> None:
    assert pins("constraints-lowest.txt").keys() == {requirement.name for requirement in REQUIREMENTS}


@pytest.mark.processes
def test_the_layer_and_the_model_need_none_of_the_extras() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
