import gc
import platform
import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest
import torch
from hypothesis import HealthCheck, settings

# imports leave little garbage, and the collector's rounds through torch's and fla's modules take a fifth of the collection
gc.disable()
# asked once here: it is the output of a process, and then kept
platform.processor()

# the first call of a scan compiles, so no deadline; derandomised, so that a red run is red again
settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=20, suppress_health_check=list(HealthCheck))
settings.load_profile("suite")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fails a test that starts a process without the mark, so that `-m "not processes"` starts none."""
    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail("starts a process: mark it with @pytest.mark.processes")

    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("processes") is None:
            patch.setattr(subprocess.Popen, "__init__", refuse)
            patch.setattr(BaseProcess, "start", refuse)
        return (yield)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads that a test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills memory that torch hands out uninitialised with NaN: an element that nobody writes shows."""
    torch.use_deterministic_algorithms(True)
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filling
    torch.use_deterministic_algorithms(False)
