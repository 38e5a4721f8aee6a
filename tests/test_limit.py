"""The limit on the time of each test, see conftest.py."""

import signal
import sys
import time

import pytest
from conftest import at_most

from fedl2p.runner import attempt

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such clock there")


def test_each_test_has_a_limit_and_keeps_it_after_an_inner_one():
    def left():
        return signal.getitimer(signal.ITIMER_REAL)[0]

    before = left()
    with at_most(100):
        assert left() <= 100
    assert 2000 < before <= 2400 and 2000 < left() <= 2400


def test_a_test_that_hangs_ends_even_if_an_error_is_taken_for_that_of_a_client():
    with pytest.raises(pytest.fail.Exception, match=r"^took more than 0.005 minutes$"), at_most(0.3, again=0.1):
        attempt(lambda: time.sleep(600))  # ended by the first error
        time.sleep(600)
