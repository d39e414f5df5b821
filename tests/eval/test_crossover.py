import copy
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from eval.ablation import Options as AblationOptions
from eval.ablation import protocol_of as ablation_of
from eval.ablation import variants
from eval.crossover import PRESETS, protocol_of
from eval.study.options import cli
from eval.study.variants import parameters
from fla_harmonic.titan.config import parse_fields

ROOT = Path(__file__).parents[2]
# numbers that no clock has a part in
FIXED = ("parameters", "flops_per_token", "tokens_seen", "kernels", "test", "validation")


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_are_comparable(name: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text " * 1000)
    (tmp_path / "tokenizer.json").write_text("{}")
    options = replace(PRESETS[name], dataset="text", dataset_path=str(tmp_path / "text"), assets=str(tmp_path))
    protocol = protocol_of(options)
    assert len(protocol.shared()) == len(options.models) * len(options.seq_lens) * len(options.seeds)
    assert {cell.tokens for cell in protocol.shared()} == {options.tokens}


def test_study_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text " * 1000)
    with pytest.raises(FileNotFoundError, match="--assets"):
        protocol_of(replace(PRESETS["paper"], dataset="text", dataset_path=str(tmp_path / "text"), assets=str(tmp_path)))


def test_options_are_set_over_the_preset() -> None:
    options = cli(PRESETS, None, ["--preset", "paper", "--seeds", "7", "--overrides=--optimizer.eps=1e-6"])
    paper = PRESETS["paper"]
    assert options == replace(paper, seeds=(7,), overrides=(*paper.overrides, "--optimizer.eps=1e-6"))
    assert cli(PRESETS, None, []) == PRESETS["cpu-small"]
    assert cli(PRESETS, None, ["--preset=compare"]) == PRESETS["compare"]
    with pytest.raises(SystemExit):
        cli(PRESETS, None, ["--preset", "none"])


def start(out: Path, text: Path, *more: str) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "eval.crossover", f"--out={out}", f"--dataset_path={text}", "--models", "harmonic/debug",
        "llama/debug", "--seq_lens", "64", "--seeds", "0", "--tokens", "512", "--step_tokens", "256", "--lrs", "3e-3",
        "6e-3", "--sweep_seq_len", "64", "--test", "256", "--validation", "128", "--processes", "1", *more]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def is_locked(file: Path) -> bool:
    with file.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def fixed(result: dict) -> dict:
    found = copy.deepcopy({key: result[key] for key in FIXED})
    for part in ("test", "validation"):
        # of the time
        del found[part]["audit"]["share"]
    return found


def finished(out: Path) -> dict[str, dict]:
    return {file.parent.name: json.loads(file.read_text()) for file in out.glob("cells/*/result.json")}


@pytest.mark.slow
@pytest.mark.processes
def test_study_killed_in_the_middle_ends_with_the_same_numbers(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of a text, {n * n % 97}.\n" for n in range(2000)))
    killed = start(tmp_path / "killed", text)
    whole = start(tmp_path / "whole", text)
    deadline = time.monotonic() + 300
    while not finished(tmp_path / "killed") and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = finished(tmp_path / "killed")
    assert before
    # what it ran has ended with it, and holds no cell
    deadline = time.monotonic() + 60
    while any(map(is_locked, (tmp_path / "killed").glob("cells/*/lock"))):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert finished(tmp_path / "killed") == before
    output = whole.communicate(timeout=300)[0]
    assert whole.returncode == 0, output
    expected = finished(tmp_path / "whole")
    # 2 at the shared rate, 2 more of the sweep, and the best ones are among these
    assert len(expected) == 4
    assert len(before) < len(expected)
    resumed = start(tmp_path / "killed", text)
    output = resumed.communicate(timeout=300)[0]
    assert resumed.returncode == 0, output
    found = finished(tmp_path / "killed")
    assert found.keys() == expected.keys()
    for name, result in expected.items():
        assert fixed(found[name]) == fixed(result)
        assert result["tokens_seen"] == 512
        assert result["test"]["targets"] == 256
        assert result["test"]["first_target"] == 64
        assert result["test"]["stride"] == result["cell"]["seq_len"] // 2
        assert result["test"]["audit"]["failure"] == ""
    # what was finished before the kill was not made again
    for name, result in before.items():
        assert found[name] == result
    assert {path.name for path in (tmp_path / "killed").iterdir()} >= {
        "results.csv", "results.jsonl", "best_lrs.json", "crossover.png", "curves.png"}


def test_variants_have_the_parameters_of_the_base(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text " * 1000)
    base = parameters("debug", ())
    for study in ("ablation", "search"):
        options = AblationOptions(study=study, dataset_path=str(tmp_path / "text"))  # type: ignore[arg-type]
        for model in ablation_of(options).models:
            assert parameters("debug", model.config) == pytest.approx(base, rel=2e-3)


def test_variants_are_chosen_by_name_and_added() -> None:
    chosen = variants(AblationOptions(variants=("one level",), extra=("mine: gate_rank=4 use_short_conv=true",)))
    assert list(chosen) == ["one level", "mine"]
    assert parse_fields(chosen["mine"]) == {"gate_rank": 4, "use_short_conv": True}
    for wrong in (AblationOptions(variants=("nine levels",)), AblationOptions(extra=("gate_rank=4",)),
                  AblationOptions(extra=("full: gate_rank=4",))):
        with pytest.raises(ValueError, match="must be"):
            variants(wrong)


def test_variant_that_cannot_be_as_small_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text " * 1000)
    with pytest.raises(ValueError, match="Choose smaller maps"):
        ablation_of(AblationOptions(variants=("full",), extra=("big: gate_ratio=4",), dataset_path=str(tmp_path / "text")))
