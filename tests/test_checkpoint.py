"""Checkpoints: other settings and damaged files."""

import pytest
import torch

from fedl2p.checkpoint import load_checkpoint, save_checkpoint


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
