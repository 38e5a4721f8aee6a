"""Our own ten corruptions: shapes, seeds, severities, and what is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from fedl2p.studies import datasets
from fedl2p.studies.corruptions import CORRUPTIONS, corrupt


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corrupt(kind):
    x = torch.from_numpy(np.asarray(Image.effect_mandelbrot((32, 32), (-2, -1.5, 1, 1.5), 50).convert("RGB")).copy()).movedim(-1, 0).repeat(3, 1, 1, 1)
    x = torch.stack([x[0], x[1] // 2 + 60, 255 - x[2]])
    before = x.clone()
    out = corrupt(x, kind, 3, seed=1)
    assert out.shape == x.shape and out.dtype == torch.uint8 and torch.equal(x, before)
    assert torch.equal(out, corrupt(x, kind, 3, seed=1))
    if kind in ("frost", "snow", "motion_blur", "speckle_noise", "fog"):
        assert any(not torch.equal(out, corrupt(x, kind, 3, seed=seed)) for seed in (2, 3, 4))
    assert (corrupt(x, kind, 5).float() - x).abs().mean() > (corrupt(x, kind, 1).float() - x).abs().mean() > 0.01 or kind == "saturate"
    assert corrupt(x[:0], kind).shape == x[:0].shape


def test_corrupt_faults():
    x = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    for args, words in [((x, "rain"), "kind is 'rain'"), ((x, "fog", 6), "severity 6"), ((x.float(), "fog"), "torch.float32"), ((x[:, :1], "fog"), r"\[1, 1, 8, 8\]")]:
        with pytest.raises(ValueError, match=words):
            corrupt(*args)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corrupt_does_not_depend_on_what_was_made_before(kind):
    x = torch.randint(0, 256, (2, 3, 16, 24), generator=torch.Generator().manual_seed(0)).to(torch.uint8)  # not square
    first = corrupt(x, kind, 2)
    torch.rand(3)
    corrupt(x, "fog", 2)
    assert torch.equal(first, corrupt(x, kind, 2)) and first.shape == x.shape


def test_datasets_still_offers_them():
    assert datasets.CORRUPTIONS is CORRUPTIONS and datasets.corrupt is corrupt and {"CORRUPTIONS", "corrupt"} <= set(datasets.__all__)
