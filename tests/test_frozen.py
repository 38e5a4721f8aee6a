"""A body that does not move: the same weights by features, and no shortcut where features could change."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedl2p import finetune as lesson
from fedl2p.bn import mix_bn
from fedl2p.core import generator
from fedl2p.data import Data
from fedl2p.digits import digits, small_cnn
from fedl2p.evaluation import evaluate
from fedl2p.finetune import Tuning, finetune
from fedl2p.frozen import without_body
from fedl2p.measure import count_flops
from fedl2p.strategy import Strategy, bn_c, bn_g, bn_i, body_only, head_only

TUNING = Tuning(epochs=4, batch_size=13, statistics="precise")


@pytest.fixture(scope="module")
def data():
    x, y = digits()
    return Data(x[:45], y[:45])


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(width=4), verbose=False)


def plain(model, strategy, data, tuning, monkeypatch):
    "Fine-tuning that computes features in each step."
    with monkeypatch.context() as m:
        m.setattr(lesson, "without_body", lambda *_: None)
        return finetune(model, strategy, data, tuning, generator(0))


def agrees(model, strategy, data, monkeypatch, tuning=TUNING):
    assert without_body(model, [strategy], data) is not None
    short, long = finetune(model, strategy, data, tuning, generator(0)), plain(model, strategy, data, tuning, monkeypatch)
    assert any(not torch.equal(t, long.path.kept[0][name]) for name, t in long.path.end.items())  # something moved
    assert short.path.end.keys() == long.path.end.keys()
    for name, t in long.path.end.items():
        torch.testing.assert_close(short.path.end[name], t, rtol=1e-5, atol=1e-6)
    a, b = (evaluate(model, tuned, data) for tuned in (short, long))
    assert (a.right, a.n) == (b.right, b.n) and a.loss == pytest.approx(b.loss, rel=1e-5)


@pytest.mark.parametrize("statistics", ["precise", "pretrained", "zero-one"])
def test_the_same_weights(model, data, monkeypatch, statistics):
    agrees(model, head_only(model, 0.3), data, monkeypatch, replace(TUNING, statistics=statistics))


def test_a_backbone_frozen_by_hand(model, data, monkeypatch):
    """Under a strategy that would move everything; also if only a part of the head is free."""
    for free in (["head.weight", "head.bias"], ["head.weight"]):
        frozen = deepcopy(model)
        for name, p in frozen.named_parameters():
            p.requires_grad_(name in free)
        agrees(frozen, bn_g(frozen, 0.3), data, monkeypatch)


def test_no_batch_norms_and_double_precision(data, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    wide = Data(data.x.double(), data.y)
    agrees(net, head_only(net, 0.3), wide, monkeypatch)


class Odd(nn.Module):
    "A head with a dull name deep inside, dropout behind no head, and a forward of its own."

    def __init__(self, after=None, twice=False):
        super().__init__()
        self.parts = nn.ModuleDict({"out": nn.Linear(8, 10), "body": nn.Linear(64, 8)})
        self.after, self.twice = after, twice

    def forward(self, x):
        h = self.parts["body"](x.flatten(1)).relu()
        out = self.parts["out"](h)
        if self.twice:
            return out + 0 * self.parts["out"](h + 1)
        return self.after(out) if self.after else out


def moves(net, *names):
    return Strategy(torch.zeros(0), torch.tensor([0.1 * any(n.startswith(s) for s in names) for n, _ in net.named_parameters()]))


def test_a_head_with_another_name(data, monkeypatch):
    torch.manual_seed(0)
    net = Odd()
    agrees(net, moves(net, "parts.out"), data, monkeypatch)


def test_no_shortcut_where_features_could_change(model, data):
    few, unlike = data[:3], {
        "the client's statistics": (model, head_only(model, 0.1, beta=1.0)), "a little of them": (model, Strategy(torch.tensor([0.0, 0.0, 0.01]), head_only(model, 0.1).eta)),
        "the batch's": (model, bn_i(model, 0.1)), "all moves": (model, bn_g(model, 0.1)), "the body moves": (model, body_only(model, 0.1)), "nothing moves": (model, bn_c(model, 0.0)),
    }
    dropout = mix_bn(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.2), nn.Linear(8, 10)), verbose=False)
    by_batch = mix_bn(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 10)), verbose=False)
    unlike |= {name: (net, head_only(net, 0.1)) for name, net in {"dropout": dropout, "norms by batch": by_batch}.items()}
    for name, net in {"asked twice": Odd(twice=True), "something follows": Odd(nn.LogSoftmax(1))}.items():
        unlike[name] = net, moves(net, "parts.out")
    unlike["two layers move"] = Odd(), moves(Odd(), "parts")
    tied = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64))
    tied[2].weight = tied[1].weight
    unlike["tied"] = tied, moves(tied, "1.weight")
    for name, (net, strategy) in unlike.items():
        assert without_body(net, [strategy], data) is None, name
    assert without_body(model, [head_only(model, 0.1)], few) is None
    assert without_body(model, [head_only(model, 0.1), bn_g(model, 0.1)], data) is None


def test_images_that_change_their_looks_take_the_long_way(model, data, monkeypatch):
    tuning = replace(TUNING, augment="crop-flip")
    asked = []
    monkeypatch.setattr(lesson, "without_body", lambda *args: asked.append(args))
    finetune(model, head_only(model, 0.3), data, tuning, generator(0))
    finetune(model, head_only(model, 0.3), data, TUNING, generator(0), full=True)  # a hypergradient goes through the body
    assert not asked


def test_arithmetic_of_the_body_is_that_of_one_pass(model, data, monkeypatch):
    """And half a pass of the first 256, to see that training mode says the same."""
    strategy, body = head_only(model, 0.3), nn.Sequential(*list(model.children())[:-1])
    one_pass, head = count_flops(lambda: body(data.x)), 2 * 45 * 16 * 10
    here = count_flops(lambda: finetune(model, strategy, data, TUNING, generator(0)))
    assert here == pytest.approx(one_pass * (1 + 23 / 45) + head * (1 + 23 / 45 + 2 * TUNING.epochs), rel=1e-6)
    long = count_flops(lambda: plain(model, strategy, data, TUNING, monkeypatch))
    assert long == pytest.approx(TUNING.epochs * (one_pass + 2 * head), rel=1e-6)


def test_the_model_is_not_changed(data):
    net = mix_bn(small_cnn(width=4), verbose=False).train()
    before, keys = deepcopy(net.state_dict()), set(net.__dict__)
    numbers = torch.get_rng_state()
    finetune(net, head_only(net, 0.3), data, TUNING, generator(0))
    assert net.training and set(net.__dict__) == keys and not net.head._forward_hooks
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items()) and net(data.x).shape == (45, 10)
    assert torch.equal(torch.get_rng_state(), numbers)


def test_a_head_whose_inputs_are_not_rows_of_images(data):
    """Three rows for each image: half of the images are not half of the rows, and that is no error."""
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(64, 9), nn.Linear(3, 10)

        def forward(self, x):
            return self.head(self.body(x.flatten(1)).view(-1, 3))

    net = Rows()
    assert without_body(net, [head_only(net, 0.1)], data[:5]) is None
