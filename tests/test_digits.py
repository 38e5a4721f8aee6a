"""fedl2p.digits: the running example."""

import pytest
import torch

from fedl2p.digits import SHIFTS, accuracy, digits, fit, shift, small_cnn


def test_shifts_keep_shape_and_the_input():
    x, _ = digits()
    before = x.clone()
    for kind in SHIFTS:
        assert shift(x, kind).shape == x.shape
    assert torch.equal(x, before)
    assert not torch.equal(shift(x, "noisy", seed=0), shift(x, "noisy", seed=1))


def test_unknown_shift():
    with pytest.raises(ValueError, match="kind is 'upside down'; allowed are clean, faded, blurred, noisy, inverted"):
        shift(torch.zeros(1, 1, 8, 8), "upside down")


def test_accuracy_wants_a_label_for_each_image():
    with pytest.raises(ValueError, match="x has 2 samples and y 1"):
        accuracy(small_cnn(), torch.zeros(2, 1, 8, 8), torch.zeros(1))


def test_training_is_reproducible_and_learns():
    torch.set_num_threads(1)
    x, y = digits()
    a, b = (fit(small_cnn(width=8), x[:400], y[:400], epochs=4) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not a.training and accuracy(a, x[:400], y[:400]) > 0.8
