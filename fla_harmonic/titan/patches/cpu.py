"""
Lets stock torchtitan 0.2.x run on a machine without an accelerator.

torchtitan takes "cuda" for granted there, and some of its modules copy `device_type` and `device_module` when they are
imported, which is before a custom import runs. So those copies are replaced, in an explicit list of modules.
"""

import ctypes
import os
import platform
import resource
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType, SimpleNamespace

import torch
from torch._utils import _get_available_device_type

# every module of torchtitan 0.2.2 that the trainer imports and that holds its own copy
_COPIES = {
    "torchtitan.tools.utils": ("device_type", "device_module"),
    "torchtitan.tools.profiling": ("device_module",),
    "torchtitan.components.metrics": ("device_type", "device_module"),
    "torchtitan.distributed.parallel_dims": ("device_type",),
    "torchtitan.distributed.utils": ("device_type", "device_module"),
    "torchtitan.distributed.dual_pipe_v": ("device_type", "device_module"),
}


# None where the C library is another
_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


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

    def set_device(self, device: torch.device | str | int) -> None:
        pass


def check_torchtitan_version() -> None:
    """
    Raises:
        RuntimeError: torchtitan is missing, or is not 0.2.x, for which the specs and the CPU shim are written.
    """
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        found = "none"
    if not found.startswith("0.2."):
        raise RuntimeError(
            f"fla_harmonic.titan expects torchtitan 0.2.x, but found {found}. Remedy: pip install torchtitan==0.2.2, or this "
            "package with its extra: pip install 'fla-harmonic[titan]' (in a checkout: pip install '.[titan]')"
        )


def install_cpu_shim() -> bool:
    """
    Point torchtitan at the CPU where no accelerator is, and leave it alone where one is. Harmless when repeated.

    Returns:
        Whether the shim is installed.

    Raises:
        RuntimeError: torchtitan is not 0.2.x, or lacks a name that the shim replaces.
    """
    check_torchtitan_version()
    if torch.accelerator.is_available() or _get_available_device_type() is not None:
        return False
    replacements = {"device_type": "cpu", "device_module": CPUModule("fla_harmonic_cpu")}
    for module_name, names in _COPIES.items():
        module = import_module(module_name)
        for name in names:
            if not hasattr(module, name):
                raise RuntimeError(
                    f"expected {module_name}.{name}, but torchtitan {version('torchtitan')} has none. "
                    "Remedy: pip install torchtitan==0.2.2"
                )
            setattr(module, name, replacements[name])
    return True


def release_free_memory() -> None:
    """
    Give memory that was freed back to the system, where the C library is glibc. It keeps holes that are a few bytes too
    small for the next aligned tensor, so that a loop over tensors of one size grows without a tensor being alive.
    """
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)
