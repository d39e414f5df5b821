"""
torchtitan 0.2.2 takes "cuda" for granted on a machine without an accelerator: it is pointed at the CPU.

Some of its modules copy `device_type` and `device_module` when they are imported, which is before a custom import runs. So
those copies are replaced, in an explicit list of modules.
"""

import os
import platform
import resource
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import torch
from torch._utils import _get_available_device_type

# every module that the trainer imports and that holds its own copy
_COPIES = {
    "torchtitan.tools.utils": ("device_type", "device_module"),
    "torchtitan.tools.profiling": ("device_module",),
    "torchtitan.components.metrics": ("device_type", "device_module"),
    "torchtitan.distributed.parallel_dims": ("device_type",),
    "torchtitan.distributed.utils": ("device_type", "device_module"),
    "torchtitan.distributed.dual_pipe_v": ("device_type", "device_module"),
}


class CPUModule(ModuleType):
    """`torch.cpu` with the calls that torchtitan makes on a device module and `torch.cpu` lacks."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: torch.device | str | None = None) -> str:
        return platform.processor() or platform.machine() or "cpu"

    def get_device_properties(self, device: torch.device | str | None = None) -> SimpleNamespace:
        """`total_memory` is the machine's physical memory in bytes."""
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: torch.device | str | None = None) -> dict[str, int]:
        """The process's peak resident memory in bytes. It has no reset: the peak counts from the start of the process."""
        # ru_maxrss is in KiB on Linux and in bytes on macOS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: torch.device | str | None = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def current_device(self) -> int:
        return 0


def install_cpu_shim() -> bool:
    """Point torchtitan at the CPU where no accelerator is; returns whether it did. Harmless when repeated."""
    if torch.accelerator.is_available() or _get_available_device_type() is not None:
        return False
    replacements = {"device_type": "cpu", "device_module": CPUModule("fla_harmonic_cpu")}
    for module_name, names in _COPIES.items():
        module = import_module(module_name)
        for name in names:
            setattr(module, name, replacements[name])
    return True
