"""fedl2p.strategy: what each known method tunes, and what is refused."""

import pytest
import torch
from torch import nn

from fedl2p.bn import mix_bn
from fedl2p.digits import small_cnn
from fedl2p.strategy import Strategy, bn_c, bn_g, bn_i, bn_only, body_only, eta_by_name, head_only


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(), verbose=False)


def rates(model, strategy):
    return {name for name, eta in eta_by_name(model, strategy).items() if eta != 0}


# --- strategies ----------------------------------------------------------------------------------------------


def test_baselines_tune_everything(model):
    for make, beta, bn in ((bn_c, 1, "mix"), (bn_g, 0, "mix"), (bn_i, 1, "batch")):
        s = make(model, lr=0.02)
        assert s.beta.tolist() == [beta] * 3 and s.bn == bn
        assert torch.equal(s.eta, torch.full((11,), 0.02))


def test_what_each_strategy_tunes(model):
    every = {name for name, _ in model.named_parameters()}
    head, norms = {"head.weight", "head.bias"}, {n for n in every if n.startswith("bn")}
    assert rates(model, head_only(model, 0.1)) == head
    assert rates(model, body_only(model, 0.1)) == every - head
    assert rates(model, bn_only(model, 0.1)) == norms
    assert rates(model, head_only(model, 0.1, head="conv3")) == {"conv3.weight"}


def test_strategies_are_the_same_before_and_after_conversion(model):
    for make in (bn_c, bn_g, bn_i, head_only, body_only, bn_only):
        a, b = make(small_cnn(), 0.1), make(model, 0.1)
        assert torch.equal(a.beta, b.beta) and torch.equal(a.eta, b.eta)


def test_wrong_words(model):
    with pytest.raises(ValueError, match="^head must be one of conv1, bn1, .*, head, or a module that holds one of them, got 'fc'$"):
        head_only(model, 0.1, head="fc")
    with pytest.raises(ValueError, match="^bn must be one of mix, batch, pretrained, got 'local'$"):
        Strategy(torch.zeros(3), torch.zeros(11), bn="local")
    with pytest.raises(ValueError, match="^eta must be 11 numbers, one for each parameter of the model, got 5$"):
        eta_by_name(model, Strategy(torch.zeros(3), torch.zeros(5)))
    with pytest.raises(ValueError, match=r"^eta must be finite, got \[inf, "):
        eta_by_name(model, Strategy(torch.zeros(3), torch.full((11,), torch.inf)))
    with pytest.raises(ValueError, match="^beta must be a tensor of at least one dimension, got 0.5$"):
        Strategy(0.5, torch.zeros(11))
    with pytest.raises(ValueError, match="^lr must be finite, got nan$"):
        bn_c(model, float("nan"))
    with pytest.raises(ValueError, match=r"^beta must be in \[0, 1\], got 5$"):
        head_only(model, 0.1, beta=5)
    with pytest.raises(ValueError, match="model has no parameters that this strategy would tune"):
        bn_only(nn.Linear(2, 2), 0.1)


def test_a_head_of_several_layers():
    net = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))})
    assert rates(net, head_only(net, 0.1, head="head")) == {n for n, _ in net.named_parameters() if n.startswith("head")}
    assert rates(net, body_only(net, 0.1, head="head")) == {"body.weight", "body.bias"}


def test_repr_is_short(model):
    text = repr(head_only(model, 0.1))
    assert text == "Strategy(bn='mix', beta [3] from 0 to 0, eta [11] from 0 to 0.1, frozen tensors 9)"
    assert "beta []" in repr(Strategy(torch.zeros(0), torch.ones(1)))
