"""The blocks of docs/extending.md run as they are printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (\w+\.py)\n")


def run(command: list[str], folder: Path) -> str:
    env = os.environ | {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=folder, env=env)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


def test_only_kinds_of_blocks_that_are_run() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "bash"}
    assert sum(kind == "python" for kind, _ in BLOCKS) >= 8


@pytest.mark.processes
def test_python_blocks_run_one_after_another(tmp_path: Path) -> None:
    code = "\n".join(block for kind, block in BLOCKS if kind == "python" and not FILE.match(block))
    (tmp_path / "blocks.py").write_text(code, encoding="utf-8")
    assert "trainable params" in run([sys.executable, "blocks.py"], tmp_path)


@pytest.mark.processes
@pytest.mark.slow
def test_commands_train_what_the_files_register(tmp_path: Path) -> None:
    files = {found[1]: block for kind, block in BLOCKS if kind == "python" and (found := FILE.match(block))}
    assert files
    for name, block in files.items():
        (tmp_path / name).write_text(block, encoding="utf-8")
    (tmp_path / "titan_configs").symlink_to(ROOT / "titan_configs")
    script = "\n".join(block for kind, block in BLOCKS if kind == "bash")
    output = run(["bash", "-euc", script.replace("--nproc_per_node=1", "--nproc_per_node=1 --standalone")], tmp_path)
    assert output.count("Training completed") == 2
    for folder in ("my_outputs", "my_gla_outputs"):
        assert len((tmp_path / folder / "metrics.jsonl").read_text().splitlines()) >= 1
