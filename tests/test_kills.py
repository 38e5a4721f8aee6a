"""Killed runs go on to the same bytes; twenty kills of each kind by `python tests/kills.py demo study simulation deployed`."""

import pytest
from kills import trial


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["demo", "study", "simulation", "deployed"])
def test_three_kills(kind):
    if kind in ("simulation", "deployed"):
        pytest.importorskip("flwr", reason='the extra "flower" is not installed')
    done = trial(kind, 3, seed=1)
    assert done["kills"] == done["equal"] == 3, done["problems"]
