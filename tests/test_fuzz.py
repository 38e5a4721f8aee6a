"""A few hundred wrong inputs; ten thousand by `cd tests && python -m fuzz 10000 --seed 1`."""

import random

import pytest
from fuzz.trial import trial, wrong


@pytest.mark.parametrize("part", range(4))
def test_every_case_ends_in_success_or_in_one_sentence(part):
    faults, kinds, good = trial(120, seed=19, first=120 * part)
    assert not faults, "\n".join(faults.values())
    assert min(kinds.values()) >= 9 and len(kinds) == 12
    assert sum(n > 0 for n in good.values()) >= 9, good  # a kind that never succeeds tests one error over and over


def test_an_error_of_the_generators_is_a_fault():
    from fuzz.cases import damaged_json  # any function of the generators

    for broken in (lambda: random.Random(0).sample([1], 2), lambda: damaged_json({}, None)):
        with pytest.raises((ValueError, AttributeError, TypeError)) as raised:
            broken()
        assert wrong(raised.value)
