"""fedl2p.digits: the running example."""

import pytest
import torch

from fedl2p.data import label_counts
from fedl2p.digits import SHIFTS, accuracy, digits, digits_clients, digits_federation, fit, shift, small_cnn


def test_shifts_keep_shape_and_the_input():
    x, _ = digits()
    before = x.clone()
    for kind in SHIFTS:
        assert shift(x, kind).shape == x.shape
    assert torch.equal(x, before)
    assert not torch.equal(shift(x, "noisy", seed=0), shift(x, "noisy", seed=1))


def test_unknown_shift():
    with pytest.raises(ValueError, match="^kind must be one of clean, faded, blurred, noisy, inverted, got 'upside down'$"):
        shift(torch.zeros(1, 1, 8, 8), "upside down")


def test_accuracy_wants_a_label_for_each_image():
    with pytest.raises(ValueError, match="^y must have 2 labels, one for each image, got 1$"):
        accuracy(small_cnn(), torch.zeros(2, 1, 8, 8), torch.zeros(1))


def test_training_is_reproducible_and_learns():
    torch.set_num_threads(1)
    x, y = digits()
    a, b = (fit(small_cnn(width=8), x[:400], y[:400], epochs=4) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not a.training and accuracy(a, x[:400], y[:400]) > 0.8


def test_digits_federation():
    federation = digits_federation(10, 5, alpha=0.1, seed=2, size=30)
    assert [c.domain for c in federation.unseen] == list(SHIFTS)
    assert len({c.id for c in federation.seen + federation.unseen}) == 15
    assert label_counts(federation.seen).sum(1).tolist() == [30] * 10
    for name, value, least in [("n_seen", 7, 5), ("n_unseen", 3, 0), ("n_seen", 0, 5), ("n_unseen", -5, 0)]:
        message = rf"^{name} must be a multiple of 5 \(the number of domains\) >= {least}, got {value}$"
        with pytest.raises(ValueError, match=message):
            digits_federation(**{name: value})
    with pytest.raises(ValueError, match="^6 clients a domain need 5 to 1397 images, since .*, got 6000 with size 1000$"):
        digits_federation(size=1000)
    with pytest.raises(ValueError, match="^n_clients must be >= 5, one for each of the domains clean, .*, inverted, got 3$"):
        digits_clients(3)
