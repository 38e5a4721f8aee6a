"""Folded models compute what the mixing ones do, and outlive the package: state dicts, torch.export, ONNX."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from fedl2p.bn import MODES, MixBatchNorm, bn_layers, mix_bn
from fedl2p.shipping import fold_bn, ship, without_statistics

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Twice(nn.Module):
    """One batch norm in two places, and tied weights."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3, eps=1e-3), nn.Linear(3, 3)
        self.again, self.tail = self.bn, nn.Linear(3, 3)
        self.tail.weight = self.head.weight

    def forward(self, x):
        return self.tail(self.head(self.again(torch.relu(self.bn(self.conv(x)))).mean((2, 3))))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.BatchNorm1d(5)).eval()


def used(model, mode, beta=0.3):
    """A mixing model as fine-tuning leaves it."""
    torch.manual_seed(1)
    mixed = mix_bn(model, beta, verbose=False).eval()
    for layer in bn_layers(mixed).values():
        layer.mode = mode
        layer.running_mean, layer.running_var = torch.randn(layer.num_features), torch.rand(layer.num_features) + 0.3
    return mixed


@torch.no_grad()
def same(a, b, x=X, tolerance=1e-5):
    return torch.allclose(torch.as_tensor(a(x)), torch.as_tensor(b(x)), atol=tolerance, rtol=0)


@pytest.mark.parametrize("make", [network, lambda seed=0: Twice().eval()], ids=["1d and 2d", "shared"])
@pytest.mark.parametrize("mode", MODES)
def test_folding_is_exact_and_loads_into_the_plain_network(make, mode):
    mixed = used(make(), mode)
    folded = fold_bn(mixed)
    assert same(folded, mixed) and not bn_layers(folded) and bn_layers(mixed)
    assert [type(m) for m in folded.modules()] == [type(m) for m in make().modules()]
    fresh = make(seed=3)
    fresh = without_statistics(fresh) if mode == "batch" else fresh
    assert not same(fresh, mixed)
    fresh.load_state_dict(folded.state_dict())  # strictly
    assert same(fresh, mixed)


def test_a_layer_made_by_hand_cannot_be_folded():
    with pytest.raises(ValueError, match="made by mix_bn to be folded.*'norm'"):
        fold_bn(nn.Sequential(MixBatchNorm(3, name="norm")))


@pytest.mark.parametrize("mode", ["mix", "batch"])
def test_torch_export_round_trip(tmp_path, mode):
    folded = fold_bn(used(network(), mode))
    ship(folded, tmp_path / "mine.pt2", X)
    again = torch.export.load(tmp_path / "mine.pt2").module()
    assert same(again, folded) and same(again, folded, X[:3])


@pytest.mark.parametrize("mode", ["mix", "batch"])
def test_onnx_round_trip(tmp_path, mode):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folded = fold_bn(used(network(), mode))
    ship(folded, tmp_path / "mine.onnx", X)
    session = runtime.InferenceSession(tmp_path / "mine.onnx", providers=["CPUExecutionProvider"])
    for x in (X, X[:3]):
        assert same(lambda x: session.run(None, {"x": x.numpy()})[0], folded, x)


def test_files_need_no_fedl2p(tmp_path):
    folded = fold_bn(used(network(), "mix"))
    ship(folded, tmp_path / "mine.pt", X)
    ship(folded, tmp_path / "mine.pt2", X)
    torch.save((X, folded(X).detach()), tmp_path / "pair.pt")
    code = """
import sys, torch
sys.modules["fedl2p"] = None
x, out = torch.load("pair.pt")
assert len(torch.load("mine.pt", weights_only=True)) == 12
assert torch.allclose(torch.export.load("mine.pt2").module()(x), out, atol=1e-5)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_wrong_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="suffix of path must be one of .safetensors, .pt, .pt2, .onnx"):
        ship(network(), tmp_path / "mine.pkl", X)
    with pytest.raises(ValueError, match="example must be two or more samples for a .pt2 file, got 1"):
        ship(network(), tmp_path / "mine.pt2", X[:1])
    assert not list(tmp_path.iterdir())
