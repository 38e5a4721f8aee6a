"""One thread for each process of the tests: they are small, and run on all cores already. The longest files come first, and some need the same clients."""

import os
from collections import Counter

import pytest

# More threads than cores cost more than they bring. Set before torch is imported, and passed on to child processes.
os.environ["OMP_NUM_THREADS"] = "1"

FIRST = ("test_flower_deployment.py", "test_flower_simulation.py")  # few tests, a minute or so each


def pytest_configure(config):
    config.option.loadscopereorder = False  # of pytest-xdist: files with the most tests first, and the longest test, alone in its file, last


def pytest_collection_modifyitems(items):
    """Long files first, then those with the most tests, so that no process waits for another at the end."""
    tests = Counter(item.path.name for item in items)
    items.sort(key=lambda item: (item.path.name not in FIRST, -tests[item.path.name]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """The same random numbers for a test, whichever tests ran before it in the same process."""
    import torch  # not above: it comes after the number of threads

    torch.manual_seed(0)


@pytest.fixture(scope="module")
def federation():
    """Ten clients with digits, half of them unseen."""
    from fedl2p.digits import digits_federation  # not above: torch comes after the number of threads

    return digits_federation(5, 5, size=30)


@pytest.fixture(scope="module")
def model():
    """A small network with mixing batch norms."""
    from fedl2p.bn import mix_bn
    from fedl2p.digits import small_cnn

    return mix_bn(small_cnn(width=4), verbose=False)
