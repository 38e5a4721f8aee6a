"""fedl2p.core: messages, random numbers by key, modes and seeds that are given back, devices, whole-or-nothing files, tables."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedl2p.bn import mix_bn
from fedl2p.core import (
    Table,
    device_of,
    evaluating,
    generator,
    load_or_make,
    markdown,
    pick_device,
    require,
    require_choice,
    seeded,
    versions,
    write_json,
)
from fedl2p.digits import small_cnn
from fedl2p.metanet import MetaNets


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


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(), verbose=False)


# --- on disk -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(model, tmp_path):
    nets = MetaNets.for_model(model, lr=0.1, hidden=20, seed=5)
    nets.save(tmp_path / "policy.safetensors")
    return nets, tmp_path / "policy.safetensors"


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_truncated_files(saved, model, keep):
    data = saved[1].read_bytes()
    saved[1].write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        MetaNets.load(saved[1], model)


def test_files_of_something_else(model, tmp_path):
    text, tensors = tmp_path / "notes.txt", tmp_path / "model.safetensors"
    text.write_text("dear diary, today I pretrained a network, and tomorrow I shall personalize it")
    save_file(dict(model.state_dict()), tensors)
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        MetaNets.load(text, model)
    with pytest.raises(ValueError, match=f"format of {tensors} must be 'fedl2p metanets 1', got None"):
        MetaNets.load(tensors, model)
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"there is no file {path}$"):
            MetaNets.load(path, model)
    for path in (tmp_path / "no" / "folder", tmp_path, ""):
        with pytest.raises(FileNotFoundError, match="path must be a file in a folder that exists, got "):
            MetaNets.for_model(model, lr=0.1).save(path)


def test_a_failed_save_leaves_the_old_file(saved, model, monkeypatch):
    nets, path = saved
    before = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        MetaNets.for_model(model, lr=0.5).save(path)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", [{"a": [1, 2], "b": None}, [{"a": 1}, 2.5], "text", {}, []])
def test_json_comes_back_and_is_made_once(content, tmp_path):
    path, calls = tmp_path / "r.json", []
    for _ in range(2):
        assert load_or_make(path, lambda: calls.append(1) or content) == content
    assert len(calls) == 1 and json.loads(path.read_text()) == content
    path.write_text(path.read_text()[:-2] + "!")
    with pytest.raises(ValueError, match=f"{path} is damaged .*; delete it"):
        load_or_make(path, dict)


def test_json_has_a_line_for_each_entry_and_no_nan(tmp_path):
    write_json(tmp_path / "r.json", {"a": [1, 2], "b": 3})
    assert (tmp_path / "r.json").read_text() == '{"a": [1, 2],\n "b": 3}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "n.json", [float("nan")])
    assert not (tmp_path / "n.json").exists()


def test_a_table_in_markdown():
    table = Table(["method", "pool", "accuracy"], [["A", "seen", "0.9"]], labels=2, notes=["One.", "Two."])
    assert markdown(table) == "| method | pool | accuracy |\n|---|---|---:|\n| A | seen | 0.9 |\n\nOne.\n\nTwo.\n" == table._repr_markdown_()

def test_a_long_value_is_not_repeated_in_full():
    with pytest.raises(ValueError, match=r"^name must be short, got 'a{199}\.\.\.$"):
        require(False, "name", "short", "a" * 10_000)
