import pytest

from benchmarks.kernels import KERNELS, compile_kernel


# Triton calls its assembler
@pytest.mark.processes
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("harmonic", [True, False], ids=["harmonic", "linear"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles_to_machine_code_without_spills(name: str, harmonic: bool, arch: int) -> None:
    usage = compile_kernel(name, arch, "bf16", harmonic)
    assert 0 < usage.registers < 255
    assert usage.spilled_bytes == 0
    # two blocks of four warps fit an SM of either
    assert usage.shared_bytes <= 48 << 10


def test_passes_move_the_bytes_that_the_design_promises() -> None:
    # two-byte logits: 10 bytes an element forward, at most 20 backward
    assert 2 * (KERNELS["forward_summary_kernel"] + KERNELS["forward_output_kernel"]) <= 10
    assert 2 * (KERNELS["backward_summary_kernel"] + KERNELS["backward_output_kernel"]) <= 20
