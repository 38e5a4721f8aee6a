"""Pretraining: against PyTorch and autograd, stopped and continued, and what is refused."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedl2p.bn import mix_bn
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.pretraining import METHODS, Recipe, perfedavg_step, pretrain, train_client


@pytest.fixture(scope="module")
def clients():
    return digits_federation(5, 0, size=62).pretraining[:6]


def test_another_model_or_other_data_do_not_go_on(clients, tmp_path):
    options = {"fraction": 0.5, "rounds": 1, "workers": 1, "checkpoint": tmp_path / "p"}
    pretrain(small_cnn(width=4), clients, **options)
    other = [replace(clients[0], train=clients[0].train[:20]), *clients[1:]]
    for model, people in [(small_cnn(width=4, seed=1), clients), (small_cnn(width=8), clients), (small_cnn(width=4), other)]:
        with pytest.raises(ValueError, match="model and clients was"):
            pretrain(model, people, **options)


def test_perfedavg_moves_statistics_once_a_step(clients):
    model = pretrain(small_cnn(width=4), [replace(clients[0], train=clients[0].train[:40])], "perfedavg", rounds=1, workers=1)
    assert model.bn1.num_batches_tracked == 2


@pytest.mark.parametrize("method", METHODS)
def test_pretraining_goes_on_after_a_stop(method, clients, tmp_path):
    options = {"method": method, "fraction": 0.5, "rounds": 4, "workers": 1}
    whole = pretrain(small_cnn(width=4), clients, **options)

    def stop(rounds, title, total, done):
        for r in rounds:
            yield r
            if r.number == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(small_cnn(width=4), clients, checkpoint=tmp_path / "p", track=stop, **options)
    again = pretrain(small_cnn(width=4), clients[::-1], checkpoint=tmp_path / "p", **{**options, "workers": 2})
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))
    assert whole.bn1.num_batches_tracked.dtype == torch.int64
    with pytest.raises(ValueError, match="lr was 0.1 and is 0.2"):
        pretrain(small_cnn(width=4), clients, checkpoint=tmp_path / "p", lr=0.2, **options)


def test_pretraining_by_hand(clients):
    """Two clients, one batch each, one round: the mean of two steps of SGD, weighted by samples."""
    pair = [replace(clients[0], train=clients[0].train[:30]), replace(clients[1], train=clients[1].train[:10])]
    ours = pretrain(small_cnn(width=4), pair, fraction=1.0, rounds=1, workers=1, lr=0.05, drops=())
    states = []
    for c in pair:
        model = small_cnn(width=4).train()
        nn.functional.cross_entropy(model(c.train.x), c.train.y).backward()
        torch.optim.SGD(model.parameters(), lr=0.05).step()
        states.append(model.state_dict())
    for name, value in ours.state_dict().items():
        expected = states[0][name] if not value.is_floating_point() else 0.75 * states[0][name] + 0.25 * states[1][name]
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def test_fedbabu_leaves_the_head(clients):
    model = pretrain(small_cnn(width=4), clients, "fedbabu", fraction=0.5, rounds=2, workers=1)
    start = small_cnn(width=4)
    assert torch.equal(model.head.weight, start.head.weight) and not torch.equal(model.conv1.weight, start.conv1.weight)


def test_perfedavg_against_autograd():
    """On smooth losses the difference of gradients is the Hessian product: compare with the exact gradient through the step."""
    torch.manual_seed(0)
    x, y = torch.randn(3, 8, 4, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    losses = tuple(lambda w, h, i=i: (torch.tanh(x[i] @ w["w"]) - y[i]).square().mean() for i in range(3))
    w = torch.randn(4, dtype=torch.float64)
    ours = perfedavg_step(losses, {"w": w}, 0.3, 0.5, delta=1e-5)["w"]
    inner = w - 0.3 * torch.autograd.functional.jacobian(lambda w: losses[0]({"w": w}, {}), w)
    v = torch.autograd.functional.jacobian(lambda w: losses[1]({"w": w}, {}), inner)
    hessian = torch.autograd.functional.hessian(lambda w: losses[2]({"w": w}, {}), w)
    torch.testing.assert_close(ours, w - 0.5 * (v - 0.3 * hessian @ v), rtol=1e-7, atol=1e-9)


def test_rates_drop_as_in_the_paper():
    recipe = Recipe()
    assert [recipe.lr_of(n) for n in (1, 250, 251, 375, 376, 500)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    speech = Recipe(final_lr=0.01)
    assert [speech.lr_of(n) for n in (0, 250, 500)] == pytest.approx([0.1, 0.1 / 10**0.5, 0.01])


def test_wrong_pretraining(clients):
    with pytest.raises(ValueError, match="method is 'fedsgd'"):
        pretrain(small_cnn(), clients, "fedsgd")
    with pytest.raises(ValueError, match="3 mixing batch norms"):
        pretrain(mix_bn(small_cnn(), verbose=False), clients)
    empty = replace(clients[0], train=clients[0].train[:0])
    with pytest.warns(RuntimeWarning, match="train is empty"), pytest.raises(RuntimeError, match="all of its 1 clients failed"):
        pretrain(small_cnn(), [empty], rounds=1, workers=1)


def test_the_caller_keeps_model_and_random_state(clients):
    model = small_cnn(width=4).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    pretrain(model, clients, fraction=0.5, rounds=1, workers=1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and model.training
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1] and np.random.get_state()[1].tolist() == states[2]


def test_a_client_does_not_change_what_the_server_sent(clients):
    model = small_cnn(width=4)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = {k: v.clone() for k, v in state.items()}
    train_client(model, Recipe(), state, clients[0], 1)
    assert all(torch.equal(v, before[k]) for k, v in state.items())
