import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchtitan.tools.utils
from torchtitan.components.metrics import build_device_memory_monitor

from fla_harmonic.titan import patches
from fla_harmonic.titan.patches import cpu

without_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="the shim is for machines without one")


@pytest.mark.parametrize("found", ["0.1.0", "0.3.0", "1.0"])
def test_another_torchtitan_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "version", lambda name: found)
    with pytest.raises(RuntimeError, match=rf"expects torchtitan 0\.2\.x, but found {found}.*pip install torchtitan==0\.2\.2"):
        patches.apply()


def test_the_shim_leaves_an_accelerator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torchtitan.tools.utils.device_module
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not cpu.install_cpu_shim()
    assert torchtitan.tools.utils.device_module is before


@pytest.mark.processes
@without_accelerator
def test_every_copy_of_the_device_is_replaced() -> None:
    patches.apply()
    # a copy that a new torchtitan adds shows here: the modules that the trainer imports, all of them
    code = (
        "import sys, torch, torchtitan.train, fla_harmonic.titan\n"
        "left = [n for n, m in sys.modules.items() if n.startswith('torchtitan') and"
        " (getattr(m, 'device_type', 'cpu') != 'cpu' or getattr(m, 'device_module', None) is torch.cuda)]\n"
        "assert not left, left"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@without_accelerator
@pytest.mark.skipif(sys.platform != "linux", reason="the numbers to compare with are read from /proc")
def test_memory_is_that_of_the_machine_and_the_process() -> None:
    monitor = build_device_memory_monitor()
    stats = monitor.get_peak_stats()
    assert monitor.device_capacity == 1024 * int(re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1])
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20
    assert resident * 0.99 <= stats.max_active_gib <= monitor.device_capacity_gib
    assert stats.num_alloc_retries == stats.num_ooms == 0


@without_accelerator
def test_a_cpu_has_no_peak_flops_rather_than_those_of_an_a100() -> None:
    assert math.isnan(torchtitan.tools.utils.get_peak_flops("cpu"))
