"""fedl2p.core: messages, random numbers by key, modes and seeds that are given back, devices, tables."""

import random

import pytest
import torch
from torch import nn

from fedl2p.core import (
    Table,
    device_of,
    evaluating,
    generator,
    markdown,
    pick_device,
    require,
    require_choice,
    seeded,
    versions,
)


def test_messages():
    require(True, "psi", "> 0", 1)
    with pytest.raises(ValueError, match=r"^psi must be > 0, got -1$"):
        require(False, "psi", "> 0", -1)
    require_choice("mode", "mix", ("mix", "batch"))
    with pytest.raises(ValueError, match=r"^mode must be one of mix, batch, got 'x'$"):
        require_choice("mode", "x", ("mix", "batch"))


def test_generators_are_independent_and_repeatable():
    draws = [torch.rand(4, generator=generator(*key)).tolist() for key in [(0, "a"), (0, "a"), (0, "b"), (1, "a"), ("0", "a", 0), (0, "a0")]]
    assert draws[0] == draws[1]
    assert len({tuple(d) for d in draws}) == 5


def test_devices():
    assert pick_device("cpu") == "cpu" and pick_device("auto") in ("cpu", "cuda", "mps")


def test_wrong_devices_and_those_of_models():
    with pytest.raises(ValueError, match=r"^device must be one of auto, .*cpu on this machine, got 'tpu'$"):
        pick_device("tpu")
    assert device_of(nn.Linear(1, 1, device="meta")).type == "meta" and torch.__version__.startswith(versions()["torch"])


def test_modes_are_given_back_even_after_an_error():
    net = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(1)).train()
    net[1].eval()
    with pytest.raises(ZeroDivisionError), evaluating(net) as same:
        assert same is net and not any(m.training for m in net.modules())
        1 / 0  # noqa: B018
    assert [m.training for m in net.modules()] == [True, True, False]


def test_the_global_generators_are_given_back_even_after_an_error():
    before, python = torch.get_rng_state(), random.getstate()
    draws = []
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), seeded(5):
            draws.append(torch.rand(3))
            1 / 0  # noqa: B018
    assert torch.equal(*draws) and torch.equal(before, torch.get_rng_state()) and python == random.getstate()
    with seeded(6):
        assert not torch.equal(draws[0], torch.rand(3))


def test_a_table_in_markdown():
    table = Table(["method", "pool", "accuracy"], [["A", "seen", "0.9"]], labels=2, notes=["One.", "Two."])
    assert markdown(table) == "| method | pool | accuracy |\n|---|---|---:|\n| A | seen | 0.9 |\n\nOne.\n\nTwo.\n" == table._repr_markdown_()


def test_a_long_value_is_not_repeated_in_full():
    with pytest.raises(ValueError, match=r"^name must be short, got 'a{199}\.\.\.$"):
        require(False, "name", "short", "a" * 10_000)
