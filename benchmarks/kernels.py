"""
What the Triton kernels cost by their compiled code, without a GPU: `python -m benchmarks.kernels`.

Each kernel is compiled to machine code for the named architectures; registers, spills and shared memory are the
assembler's own count. Bytes per element (a token's channel) are counted by design, and the time is those bytes over the
given bandwidth: a bound, not a measurement. Chunk summaries (8 bytes per channel and chunk) are left out of the bytes. A
forward pass is the first two kernels (or the recurrent one), a backward pass the next two; `carry_kernel` is in both.
"""

import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

import triton
import tyro
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from eval.tables import markdown
from fla_harmonic.ops.harmonic import chunk, fused_recurrent

# pointer arguments by name: "T" has the dtype of the logits
POINTERS = {
    "a": "T", "b": "T", "h": "T", "h_out": "T", "dh": "T", "da": "T", "db": "T", "kept": "u8", "first": "i32", "last": "i32",
    "offsets": "i64", "state": "fp32", "final": "fp32", "dfinal": "fp32", "dstate": "fp32", "entering": "fp32",
    "chunk_c": "fp32", "chunk_x": "fp32",
}
SCALARS = {"tokens": "i32", "D": "i32", "chunks": "i32", "q_min": "fp32", "width": "fp32"}
# tensors of the logits' size that a pass reads and writes
KERNELS = {
    "forward_summary_kernel": 2,
    "forward_output_kernel": 3,
    "backward_summary_kernel": 2,
    "backward_output_kernel": 6,
    "carry_kernel": 0,
    "recurrent_forward_kernel": 3,
    "recurrent_backward_kernel": 6,
}


class Usage(NamedTuple):
    """What a compiled kernel uses."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def compile_kernel(name: str, arch: int, dtype: str, harmonic: bool = True) -> Usage:
    """
    Compiles a kernel to machine code of the architecture.

    Raises:
        RuntimeError: the assembler refuses the kernel or does not say what it uses.
    """
    kernel = getattr(fused_recurrent if name.startswith("recurrent") else chunk, name)
    # None: without a mask
    constants: dict[str, int | None] = dict(
        IS_HARMONIC=harmonic, HAS_MASK=False, kept=None, CHUNK=chunk.CHUNK, TILE=chunk.TILE, BD=64)
    if name == "carry_kernel":
        constants = dict(REVERSE=False, TILE=chunk.CHUNK_TILE, BD=32)
    constexprs = {argument: constants[argument] for argument in kernel.arg_names if argument in constants}
    signature = {
        argument: "constexpr" if argument in constants
        else SCALARS.get(argument) or f"*{POINTERS[argument].replace('T', dtype)}"
        for argument in kernel.arg_names}
    # what the launcher finds in the arguments: aligned pointers and a D divisible by 16
    aligned = [["tt.divisibility", 16]]
    attrs = {(index,): aligned for index, argument in enumerate(kernel.arg_names)
             if signature[argument].startswith("*") or argument == "D"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": fused_recurrent.NUM_WARPS})
    return _assemble(compiled.asm["ptx"], compiled.metadata.shared)


def _assemble(ptx: str, shared: int) -> Usage:
    target = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    if target is None:
        raise RuntimeError("expected PTX with a .target line; found none. Use the Triton of constraints.txt.")
    ptxas = get_ptxas(int(target[2])).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        run = subprocess.run([ptxas, "-v", f"--gpu-name={target[1]}", source, "-o", Path(folder) / "kernel.cubin"],
                             capture_output=True, text=True)
    used = re.search(r"Used (\d+) registers", run.stderr)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", run.stderr)
    if run.returncode or not used or not spills:
        raise RuntimeError(f"expected {ptxas} to assemble the kernel for {target[1]}; it said: {run.stderr.strip()}")
    return Usage(int(used[1]), int(spills[1]) + int(spills[2]), shared)


def main(
    archs: tuple[int, ...] = (80, 90, 100),
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    size: tuple[int, int, int] = (1, 65536, 1024),
    bandwidth: float = 4.3,
) -> None:
    """
    Args:
        archs: Compute capabilities, e.g. 90 for the H100 and H200.
        dtype: Of logits and outputs.
        size: (B, T, D) that the time is given for.
        bandwidth: Copy bandwidth in TB/s; 4.3 was measured on an H200.
    """
    item = {"bf16": 2, "fp16": 2, "fp32": 4}[dtype]
    print(f"{dtype}, chunk {chunk.CHUNK}, tile {chunk.TILE} x 64, {fused_recurrent.NUM_WARPS} warps; "
          f"time at {bandwidth} TB/s for {size}: by design, not measured")
    rows = []
    for name, tensors in KERNELS.items():
        for arch in archs:
            microseconds = math.prod(size) * tensors * item / bandwidth / 1e6
            rows.append((name, f"sm_{arch}", *compile_kernel(name, arch, dtype), tensors * item, f"{microseconds:.0f}"))
    print(markdown(("kernel", "arch", "registers", "spilled B", "shared B", "B/element", "time, us"), rows))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
