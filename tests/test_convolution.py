"""fedl2p.convolution: second derivatives of convolutions by the library's own backward pass."""

import pytest
import torch
from torch.nn import functional as F

from fedl2p.convolution import NativeConv
from fedl2p.hypergrad import curvature


def close(a, b, tol=1e-10):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


# --- products ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "groups": 2}, {"padding": "same"}])
def test_native_convolutions_have_the_right_second_derivative(dims, options, monkeypatch):
    monkeypatch.setattr(NativeConv, "smallest", 0)
    conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    x = torch.randn(2, 4, *[6] * dims, dtype=torch.float64)
    weights = {"k": torch.randn(4, 4 // options.get("groups", 1), *[3] * dims, dtype=torch.float64), "b": torch.randn(4, dtype=torch.float64),
               "k2": torch.randn(2, 4, *[1] * dims, dtype=torch.float64)}

    def loss(w, h):
        return conv(torch.tanh(conv(x, w["k"], w["b"], **options)), w["k2"]).tanh().pow(2).mean()

    v = {k: torch.randn_like(t) for k, t in weights.items()}
    ours, _ = curvature(loss, weights, {}).product(v)
    _, theirs = torch.autograd.functional.vhp(lambda *w: loss(dict(zip(weights, w, strict=True)), {}), tuple(weights.values()), tuple(v.values()))
    close(list(ours.values()), list(theirs), 1e-10)


def test_a_single_image_without_a_batch(monkeypatch):
    monkeypatch.setattr(NativeConv, "smallest", 0)
    w, x = {"k": torch.randn(2, 1, 3, 3)}, torch.randn(1, 5, 5)
    by_weights, _ = curvature(lambda w, h: F.conv2d(x, w["k"]).pow(2).sum(), w, {}).product(w)
    assert by_weights["k"].isfinite().all()
