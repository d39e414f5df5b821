import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.processes
def test_kernels_and_twins_under_the_interpreter() -> None:
    # a process of its own: Triton decides at import whether it interprets
    tests = str(Path(__file__).with_name("interpreted_kernels.py"))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
