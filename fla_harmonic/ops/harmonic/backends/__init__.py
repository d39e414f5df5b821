"""
The other backends of the scans, registered on import: "numba" and "torch" for the CPU, and fla's HGRN kernels.

"torch" also serves float64 and the devices that no other backend does.
"""

import logging
from functools import cache

import torch

from fla_harmonic.ops.harmonic.backends import fla_scan, torch_scan
from fla_harmonic.ops.harmonic.backends.dense import dense_backend
from fla_harmonic.ops.harmonic.chunk import serves_triton
from fla_harmonic.ops.harmonic.op import BACKENDS, Backend

logger = logging.getLogger(__name__)

NO_NUMBA: str | None = None
try:
    from fla_harmonic.ops.harmonic.backends import numba_scan
except ImportError as error:
    numba_scan = None  # type: ignore[assignment]
    NO_NUMBA = str(error)


def _serves_numba(x: torch.Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype == torch.float64:
        return False
    if NO_NUMBA is not None and not torch.compiler.is_compiling():
        warn_slow_path()
    return NO_NUMBA is None


@cache
def warn_slow_path() -> None:
    """Says once that numba is missing."""
    logger.warning("numba cannot be imported (%s): the scan runs in plain torch, slower. Install it with "
                   "`pip install numba`.", NO_NUMBA)


BACKENDS["numba"] = Backend(
    _serves_numba, lambda *args: numba_scan.forward(*args), lambda *args: numba_scan.backward(*args))
BACKENDS["fla"] = dense_backend(serves_triton, fla_scan.scan)
BACKENDS["torch"] = dense_backend(lambda x: True, torch_scan.scan)
