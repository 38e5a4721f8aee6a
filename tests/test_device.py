"""The loop of fine-tuning on a device without values (`meta`), which stands for a GPU: nothing here has run on one.

An operation that waits for the device (`.item()`, `.tolist()`, `if tensor:`) fails there; copies between devices are found by `Watch`.
test_hypergrad.py counts how often the losses are read.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedl2p import core, hypergrad, many
from fedl2p.bn import mix_bn
from fedl2p.core import seeded
from fedl2p.data import Data
from fedl2p.digits import small_cnn
from fedl2p.finetune import Tuning, client_buffers, same_masks, step_losses
from fedl2p.hypergrad import Descent
from fedl2p.many import run_race, start_race
from fedl2p.strategy import bn_c, bn_g


class Watch(TorchDispatchMode):
    """Names of the operations that bring tensors of two devices together; a single number may come from the CPU."""

    def __init__(self):
        super().__init__()
        self.moves = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        if len({t.device.type for t in tensors if t.dim()}) > 1:
            self.moves.append(str(func))
        return out


@pytest.mark.parametrize("tuning", [{}, {"augment": "crop-flip"}, {"augment": "crop-flip", "fill": (0.5,)}], ids=["plain", "crops", "filled"])
def test_no_step_waits_for_the_device_or_copies_to_it(tuning):
    model = mix_bn(nn.Sequential(small_cnn(), nn.Dropout(0.1)), verbose=False).to("meta")
    data = Data(torch.empty(70, 1, 8, 8, device="meta"), torch.empty(70, dtype=torch.int64, device="meta"))
    steps = step_losses(model, data, client_buffers(model), Tuning(epochs=2, **tuning), torch.Generator().manual_seed(0))
    weights = {name: w.detach() for name, w in model.named_parameters()}
    rates = torch.empty(len(weights), device="meta")
    hyper = {"beta": torch.empty(3, device="meta"), "eta": rates}
    with Watch() as watch:
        for t, step in enumerate(steps):
            loss, slopes = hypergrad._slopes(same_masks(step, t, torch.device("cpu")), weights, hyper, list(weights), "loss")
            weights = {name: w - rate * slopes[name] for (name, w), rate in zip(weights.items(), rates.unbind(), strict=True)}
    assert len(steps) == 6 and {t.device.type for t in (loss, *weights.values())} == {"meta"}
    assert watch.moves == []


def test_waits_and_copies_are_seen():
    x = torch.empty(4, device="meta")
    for wait in (lambda: x.sum().item(), lambda: bool(x.any()), x.tolist):
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            wait()
    with Watch() as watch:
        x[torch.tensor([0, 1])], torch.tensor([1.0]).to("meta"), 2.0 * x
    assert len(watch.moves) == 2


def test_dropout_is_seeded_where_it_is_drawn(monkeypatch):
    """On a GPU, and on a Mac, whose state `fork_rng` does not keep."""
    forked, seeds = [], []
    monkeypatch.setattr(core.torch.random, "fork_rng", lambda devices: forked.append(devices) or nullcontext())
    monkeypatch.setattr(core.torch, "manual_seed", seeds.append)  # seeds all devices
    with seeded(5, "cuda:1"):
        pass
    assert (forked, seeds) == ([[torch.device("cuda:1")]], [5])
    monkeypatch.setattr(core.torch.mps, "get_rng_state", lambda: "before")
    monkeypatch.setattr(core.torch.mps, "set_rng_state", seeds.append)
    with pytest.raises(ZeroDivisionError), seeded(6, "mps"):
        raise ZeroDivisionError
    assert (forked[1:], seeds) == ([[]], [5, 6, "before"])


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_nor_do_strategies_side_by_side(engine, monkeypatch):
    """The race of our own recipe; its loop engine looks at the losses, as `descend` does, so that is left out."""
    model = mix_bn(small_cnn(), verbose=False)
    data = Data(torch.rand(40, 1, 8, 8), torch.arange(40) % 10)
    race = start_race(model, [bn_c(model, 0.1), bn_g(model, 0.1)], data, Tuning(epochs=2), torch.Generator().manual_seed(0), engine)
    race = race._replace(**{name: {k: t.to("meta") for k, t in getattr(race, name).items()} for name in ("weights", "buffers")}, beta=race.beta.to("meta"), eta=race.eta.to("meta"),
                         split=race.split.to("meta"), steps=[([lambda batch=batch: batch().to("meta")], seed) for [batch], seed in race.steps])
    looks = []
    monkeypatch.setattr(many, "descend", lambda losses, weights, hyper, full: looks.append([loss(weights, hyper) for loss in losses]) or Descent([], {}, weights, {}))
    moved = run_race(model.to("meta"), race, "mix")
    assert {t.device.type for t in (*moved.weights.values(), *moved.buffers.values())} == {"meta"} and len(looks) == (2 if engine == "loop" else 0)
