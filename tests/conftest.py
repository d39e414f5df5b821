from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# the first call of a scan compiles, so no deadline; derandomised, so that a red run is red again
settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=20, suppress_health_check=list(HealthCheck))
settings.load_profile("suite")


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
