"""A few hundred wrong inputs; ten thousand by `cd tests && python -m fuzz 10000 --seed 1`."""

import pytest
from fuzz.trial import trial


@pytest.mark.parametrize("part", range(4))
def test_every_case_ends_in_success_or_in_one_sentence(part):
    faults, kinds = trial(120, seed=19, first=120 * part)
    assert not faults, "\n".join(faults.values())
    assert min(kinds.values()) >= 9 and len(kinds) == 12
