"""Our own ten corruptions: shapes, seeds, severities, and what is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from fedl2p.studies.corruptions import CORRUPTIONS, corrupt


def pictures():
    """Three pictures [3, 3, 32, 32] whose colours differ: a look that moves colours moves them."""
    grey = np.asarray(Image.effect_mandelbrot((32, 32), (-2, -1.5, 1, 1.5), 50)).copy()
    x = torch.from_numpy(np.stack([grey, np.flip(grey, 1), grey // 2 + 30]))
    return torch.stack([x, x // 2 + 60, 255 - x])


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corrupt(kind):
    x = pictures()
    before = x.clone()
    out = corrupt(x, kind, 3, seed=1)
    assert out.shape == x.shape and out.dtype == torch.uint8 and torch.equal(x, before)
    assert torch.equal(out, corrupt(x, kind, 3, seed=1))
    if kind in ("frost", "snow", "motion_blur", "speckle_noise", "fog"):
        assert any(not torch.equal(out, corrupt(x, kind, 3, seed=seed)) for seed in (2, 3, 4))
    change = [(corrupt(x, kind, severity).float() - x).abs().mean() for severity in (1, 3, 5)]
    assert 0.5 < change[0] < change[1] < change[2]
    assert corrupt(x[:0], kind).shape == x[:0].shape


def test_saturate_moves_colours_and_nothing_else():
    x = pictures()
    grey = x[:, :1].expand_as(x)
    assert torch.equal(corrupt(grey, "saturate", 5), grey)
    spread = [(y.amax(1) - y.amin(1)).float().mean() for y in (x, corrupt(x, "saturate", 1), corrupt(x, "saturate", 5))]
    assert spread[0] < spread[1] < spread[2]


def test_corrupt_faults():
    x = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    for args, words in [
        ((x, "rain"), "kind must be one of brightness, .*, saturate, got 'rain'"),
        ((x, "fog", 6), "severity must be one of 1, 2, 3, 4, 5, got 6"),
        ((x.float(), "fog"), r"x must be torch.uint8 of shape \[N, 3, H, W\], got torch.float32 of shape \[1, 3, 8, 8\]"),
        ((x[:, :1], "fog"), r"x must be torch.uint8 of shape \[N, 3, H, W\], got torch.uint8 of shape \[1, 1, 8, 8\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            corrupt(*args)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corrupt_does_not_depend_on_what_was_made_before(kind):
    x = torch.randint(0, 256, (2, 3, 16, 24), generator=torch.Generator().manual_seed(0)).to(torch.uint8)  # not square
    first = corrupt(x, kind, 2)
    torch.rand(3)
    corrupt(x, "fog", 2)
    assert torch.equal(first, corrupt(x, kind, 2)) and first.shape == x.shape
