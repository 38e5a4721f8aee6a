"""fedl2p.studies.models: shapes, seeds, files of weights, and what is refused; with `pytest -m slow -s` a round of ResNet-18."""

import pickle
import resource
import time
from dataclasses import replace

import made_up
import pytest
import torch
from torch import nn

from fedl2p.bn import mix_bn
from fedl2p.data import Client, Data
from fedl2p.learner import FedL2P
from fedl2p.runner import Runner
from fedl2p.studies.models import imagenet_resnet18, resnet18, small_resnet
from fedl2p.studies.settings import setting


@pytest.mark.parametrize("make", [resnet18, small_resnet])
@pytest.mark.parametrize(("stem", "shape"), [("cifar", (3, 32, 32)), ("speech", (1, 40, 101)), ("imagenet", (3, 64, 64))])
def test_each_stem_takes_its_input(make, stem, shape):
    state = torch.get_rng_state()
    model = make(stem, classes=7, seed=3).eval()
    assert torch.equal(state, torch.get_rng_state())
    assert model(torch.zeros(2, *shape)).shape == (2, 7)
    same, other = make(stem, classes=7, seed=3), make(stem, classes=7, seed=4)
    assert torch.equal(model.conv1.weight, same.conv1.weight) and not torch.equal(model.conv1.weight, other.conv1.weight)


def test_small_ones_are_as_wide_and_deep_as_asked():
    model = small_resnet(width=4, blocks=(2, 1))
    # One before the blocks, two a block, one in a shortcut.
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 1 + 2 * 3 + 1
    assert model.fc.in_features == 8 and model.conv1.stride == (1, 1) and small_resnet(stride=2).conv1.stride == (2, 2)


def test_weights_from_a_file(tmp_path):
    made_up.backbone(tmp_path)
    model = imagenet_resnet18(classes=5, seed=1, weights=tmp_path / "resnet18_backbone.pt")
    assert torch.equal(model.conv1.weight, resnet18("imagenet").conv1.weight.half().float()) and model.fc.out_features == 5
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pt")
    with pytest.raises(ValueError, match="other.pt is not a state dict of torchvision's resnet18"):
        imagenet_resnet18(weights=tmp_path / "other.pt")


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("write", [torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing, 2))], ids=["torch", "pickle"])
def test_no_code_in_a_file_of_weights_runs(tmp_path, write):
    write({"conv1.weight": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"^\S*evil.pt cannot be read as a state dict \(.+\); replace the file$"):
        imagenet_resnet18(weights=tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("call", "words"), [
    (lambda: resnet18("mnist"), "stem must be one of cifar, speech, imagenet, got 'mnist'"),
    (lambda: small_resnet("mnist"), "stem must be one of cifar, speech, imagenet, got 'mnist'"),
    (lambda: small_resnet(width=0), "width must be >= 1, got 0"),
    (lambda: small_resnet(blocks=()), r"blocks must be one or more numbers >= 1, got \(\)"),
    (lambda: small_resnet(blocks=(1, 0)), r"blocks must be one or more numbers >= 1, got \(1, 0\)"),
])
def test_wrong_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.slow
def test_one_round_at_the_papers_settings(capsys):
    """The paper's network, one round of two clients: does it run, how long, in how much memory?"""
    how, numbers = setting("cifar10", "paper", "data"), torch.Generator().manual_seed(0)
    data = Data(torch.randn(50, 3, 32, 32, generator=numbers), torch.randint(10, (50,), generator=numbers))
    clients = [Client(name, data[:40], data[40:], data[:0]) for name in "ab"]
    config = replace(how.config, rounds=1, meta_steps=1, fraction=1.0)  # one hypergradient each; all else as in the paper
    model = mix_bn(how.model(0), verbose=False)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.time()
    learner = FedL2P(model, config).fit(clients, runner=Runner(workers=0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with capsys.disabled():
        print(f"\nResNet-18, e = {config.epochs}, two clients, one meta-step: {time.time() - start:.0f} s "
              f"on {torch.get_num_threads()} threads, peak {peak / 1024:.0f} MB (before: {before / 1024:.0f} MB)")
    assert learner.history[0]["clients"] == ["a", "b"] and learner.history[0]["val_loss"] > 0
