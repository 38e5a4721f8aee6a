"""fedl2p.storage: files that are whole or not there, tensors with a header, JSON that comes back and is made once."""

import fcntl
import json
import os
from pathlib import Path

import pytest
from safetensors.torch import save_file

from fedl2p.bn import mix_bn
from fedl2p.digits import small_cnn
from fedl2p.metanet import MetaNets
from fedl2p.storage import claimed, load_or_make, load_tensors, write_json


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(), verbose=False)


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


def huge(path, header):
    """A file of 16 GB that takes no room on the disk."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 16 << 30)


@pytest.mark.parametrize("header, words", [
    ({}, "number of bytes must be 10, as its header says, got 17179869184"),
    ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "number of bytes must be .*, as its header says"),
    ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]}}, r"data_offsets\[0\]\[1\] must be a whole number, got '4'"),
    ({"w": {}}, r"data_offsets\[0\] must be a list, got None"), ({"w": 3}, "header.w must be an object, got 3"), ([], r"header must be an object, got \[\]"),
])
def test_a_large_file_is_not_read_before_its_header_is_checked(header, words, tmp_path, monkeypatch):
    huge(tmp_path / "a.safetensors", header)
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(ValueError, match=f"a.safetensors is not a complete safetensors file .*{words}"):
        load_tensors(tmp_path / "a.safetensors", "x")


def test_a_folder_that_cannot_be_locked_is_named(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be locked .*Operation not supported.*; make sure that no other run uses it"), claimed(tmp_path):
        pass


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
