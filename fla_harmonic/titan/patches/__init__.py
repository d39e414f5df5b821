"""
Every edit of stock torchtitan, one file each. They are written for 0.2.2: torchtitan's trainer and modules bind these names
themselves, and have no hook in their place.
"""

from importlib.metadata import PackageNotFoundError, version


def check_torchtitan_version() -> None:
    """A RuntimeError where torchtitan is missing, or is not 0.2.x, for which the specs and the patches are written."""
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        found = "none"
    if not found.startswith("0.2."):
        raise RuntimeError(
            f"fla_harmonic.titan expects torchtitan 0.2.x, but found {found}. Remedy: pip install torchtitan==0.2.2, or this "
            "package with its extra: pip install 'fla-harmonic[titan]' (in a checkout: pip install '.[titan]')"
        )


def apply() -> None:
    """Apply all patches. Harmless when repeated."""
    check_torchtitan_version()
    # known to be there only now; the device comes first, so that what later imports copy is the CPU
    from fla_harmonic.titan.patches.cpu import install_cpu_shim
    install_cpu_shim()
    from fla_harmonic.titan.patches.checkpoint import install_checkpoint_hooks
    from fla_harmonic.titan.patches.peak_flops import install_peak_flops
    from fla_harmonic.titan.patches.training_audit import install_training_audit
    install_peak_flops()
    install_checkpoint_hooks()
    install_training_audit()
