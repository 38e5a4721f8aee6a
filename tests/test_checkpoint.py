"""Checkpoints: other settings, damaged files, files of earlier versions, and fingerprints."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedl2p.checkpoint import changed, fingerprint, load_checkpoint, save_checkpoint
from fedl2p.data import Client, Data
from fedl2p.storage import load_tensors, save_tensors


def test_checkpoints(tmp_path):
    path = tmp_path / "c.safetensors"
    assert load_checkpoint(None, {}) is None and load_checkpoint(path, {}) is None
    save_checkpoint(path, {"a": (1, 2)}, {"w": torch.ones(2)}, {"round": 3})
    tensors, info = load_checkpoint(path, {"a": [1, 2]})
    assert info == {"round": 3} and tensors["w"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"other settings: a was \[1, 2\] and is 5, b was None and is 1"):
        load_checkpoint(path, {"a": 5, "b": 1})
    for damage in (b"", path.read_bytes()[:20], b"\0" * 100):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match="delete the file to start from the beginning"):
            load_checkpoint(path, {"a": [1, 2]})
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_as_it_always_was(tmp_path):
    """What version 0.1.0 wrote is read, and what is written now has the same header: old and new runs go on from either."""
    path, header = tmp_path / "c.safetensors", {"format": "fedl2p checkpoint 1", "settings": '{"lr": 0.1, "drops": [0.5]}', "info": '{"round": 3}'}
    save_tensors(path, {"w": torch.ones(2)}, header)
    tensors, info = load_checkpoint(path, {"lr": 0.1, "drops": (0.5,)})
    assert info == {"round": 3} and tensors["w"].tolist() == [1, 1]
    save_checkpoint(path, {"lr": 0.1, "drops": (0.5,)}, {"w": torch.ones(2)}, {"round": 3})
    assert load_tensors(path, "fedl2p checkpoint 1")[1] == header


def test_settings_that_an_old_file_does_not_know_have_their_defaults(tmp_path):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, {"lr": 0.1}, {"w": torch.ones(2)}, {})
    assert load_checkpoint(path, {"lr": 0.1, "keep": "lowest"}, lambda old: {"keep": "lowest", **old}) is not None
    with pytest.raises(ValueError, match="other settings: keep was 'lowest' and is 'paired'; use those settings, or choose another folder"):
        load_checkpoint(path, {"lr": 0.1, "keep": "paired"}, lambda old: {"keep": "lowest", **old})


def test_another_file_is_not_a_checkpoint(tmp_path):
    path = tmp_path / "policy.safetensors"
    save_tensors(path, {"w": torch.ones(2)}, {"format": "fedl2p metanets 1"})
    with pytest.raises(ValueError, match="must be 'fedl2p checkpoint 1', got 'fedl2p metanets 1'; delete the file to start from the beginning"):
        load_checkpoint(path, {})


def test_changed_compares_as_a_file_would():
    settings = {"drops": (0.5, 0.75), "last": None, "lr": 0.1}
    assert changed(json.loads(json.dumps(settings)), settings) == ""
    assert changed({"drops": [0.5], "lr": 0.1, "old": 1}, settings) == "drops was [0.5] and is [0.5, 0.75], old was 1 and is None"


def linear():
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3))
        model.bias.fill_(0.5)
    return model


def test_fingerprints_are_as_they_always_were():
    """They are in every checkpoint and policy: if they were made in another way, no old run could go on."""
    client = Client("a", *[Data(torch.arange(4.0).view(2, 2), torch.tensor([0, 1]))] * 3)
    assert fingerprint(linear()) == "8d42a74d029d45e6" and fingerprint(linear(), client) == "7bc85d2db6760390"
    others = [replace(client, id="b"), replace(client, val=client.val[:1]), replace(client, test=Data(client.test.x, client.test.y.flip(0)))]
    assert len({fingerprint(linear()), *(fingerprint(linear(), c) for c in (client, *others))}) == 5
    assert fingerprint(linear().double()) != fingerprint(linear())
