"""One thread for each process of the tests: they are small, and run on all cores already. The longest files come first, and some need the same clients."""

import os
import signal
import threading
from collections import Counter
from contextlib import contextmanager

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


@contextmanager
def at_most(seconds, again=60.0):
    """End what takes longer: a hang would cost CI an hour, and not even say which test it was. No test is near: the longest take a minute or so.

    The error comes again every minute, since code under test may take the first one for that of a client. A thread cannot be
    interrupted, and Windows has no such clock: there is no limit there. An outer limit goes on afterwards.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_):
        pytest.fail(f"took more than {seconds / 60:g} minutes")

    handler, timer = signal.signal(signal.SIGALRM, late), signal.setitimer(signal.ITIMER_REAL, seconds, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def limit(item):
    """Seconds for a test, and as many for the fixtures that it is the first to ask for; those marked slow may take hours."""
    return at_most(0 if item.get_closest_marker("slow") else 40 * 60)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    import torch  # not above: it comes after the number of threads

    torch.manual_seed(0)  # the same random numbers, whichever tests ran before in this process
    with limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with limit(item):
        return (yield)


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
