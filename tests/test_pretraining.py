"""Pretraining: against PyTorch and autograd, stopped and continued, and what is refused."""

import json
import random
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import get_args

import numpy as np
import pytest
import torch
from federation import stop_after, without
from torch import nn
from torch.nn import functional as F

from fedl2p.bn import mix_bn
from fedl2p.checkpoint import fingerprint
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.pretraining import Pretraining, Recipe, perfedavg_step, pretrain, train_client
from fedl2p.runner import Runner, Task, attempt, quiet
from fedl2p.storage import load_tensors, save_tensors

HALF = Recipe(fraction=0.5, rounds=1)  # one round of half of the clients


@pytest.fixture(scope="module")
def clients():
    return digits_federation(5, 0, size=62).pretraining[:6]


def test_another_model_or_other_data_do_not_go_on(clients, tmp_path):
    pretrain(small_cnn(width=4), clients, HALF, Runner(0), tmp_path / "p")
    other = [replace(clients[0], train=clients[0].train[:20]), *clients[1:]]
    for model, people in [(small_cnn(width=4, seed=1), clients), (small_cnn(width=8), clients), (small_cnn(width=4), other)]:
        with pytest.raises(ValueError, match="model and clients was"):
            pretrain(model, people, HALF, Runner(0), tmp_path / "p")


def test_perfedavg_moves_statistics_once_a_step(clients):
    client = replace(clients[0], train=clients[0].train[:40])
    model = pretrain(small_cnn(width=4), [client], Recipe("perfedavg", rounds=1), Runner(0))
    assert model.bn1.num_batches_tracked == 2


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("method", get_args(Pretraining))
def test_pretraining_goes_on_after_a_stop(method, clients, tmp_path):
    recipe = Recipe(method, rounds=4, fraction=0.5)
    whole = pretrain(small_cnn(width=4), clients, recipe, Runner(0))

    def stop(rounds, title, total, done):
        for r in rounds:
            yield r
            if r.number == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(small_cnn(width=4), clients, recipe, Runner(0, progress=stop), tmp_path / "p")
    again = pretrain(small_cnn(width=4), clients[::-1], recipe, Runner(2), tmp_path / "p")
    assert equal(whole, again)
    assert whole.bn1.num_batches_tracked.dtype == torch.int64
    with pytest.raises(ValueError, match="lr was 0.1 and is 0.2"):
        pretrain(small_cnn(width=4), clients, replace(recipe, lr=0.2), Runner(0), tmp_path / "p")
    with pytest.raises(ValueError, match="fraction was 0.5 and is 1.0"):
        pretrain(small_cnn(width=4), clients, replace(recipe, fraction=1.0), Runner(0), tmp_path / "p")


def test_a_checkpoint_of_version_0_1_0_goes_on(clients, tmp_path):
    """Its header, written out by hand; `fraction` was no part of the recipe then."""
    recipe, model = Recipe(rounds=2, fraction=0.5), small_cnn(width=4)
    whole = pretrain(model, clients, recipe, Runner(0))
    middle = []

    def stop(rounds, title, total, done):
        middle.append(next(rounds).state)
        return iter(())

    pretrain(model, clients, recipe, Runner(0, progress=stop))
    settings = {
        "method": "fedavg", "rounds": 2, "epochs": 1, "lr": 0.1, "batch_size": 32, "drops": [0.5, 0.75], "final_lr": None, "augment": "none",
        "inner_lr": 0.01, "seed": 0, "fraction": 0.5, "model and clients": fingerprint(model, *sorted(clients, key=lambda c: c.id)),
    }
    header = {"format": "fedl2p checkpoint 1", "settings": json.dumps(settings), "info": '{"round": 1}'}
    save_tensors(tmp_path / "p", middle[0], header)
    went = []

    def watch(rounds, title, total, done):
        went.append((title, total, done))
        return rounds

    again = pretrain(model, clients, recipe, Runner(0, progress=watch), tmp_path / "p")
    assert equal(whole, again) and went == [("pretraining by fedavg", 2, 1)]
    assert settings.keys() - asdict(recipe).keys() == {"model and clients"}  # what a recipe has, in the same words
    for change, match in [({"train_on": "train+val"}, "train_on was 'train' and is 'train[+]val'"), ({"delta": 0.01}, "delta was 0.001 and is 0.01")]:
        save_tensors(tmp_path / "p", middle[0], header)
        with pytest.raises(ValueError, match=f"other settings: {match};"):
            pretrain(model, clients, replace(recipe, **change), Runner(1), tmp_path / "p")


def test_a_transport_gets_the_tasks_of_each_round(clients):
    rounds, recipe, model = [], Recipe(rounds=2, fraction=0.5), small_cnn(width=4)

    def transport(tasks):
        rounds.append(tasks)
        return (attempt(task.run) for task in tasks)

    assert equal(pretrain(model, clients, recipe, Runner(transport=transport)), pretrain(model, clients, recipe, Runner(0)))
    assert [[(type(t), t.work, t.model, t.settings, t.number) for t in tasks] for tasks in rounds] == [
        [(Task, train_client, model, recipe, number)] * 3 for number in (1, 2)]


def test_pretraining_by_hand(clients):
    """Two clients, one batch each, one round: the mean of two steps of SGD, weighted by samples."""
    pair = [replace(clients[0], train=clients[0].train[:30]), replace(clients[1], train=clients[1].train[:10])]
    ours = pretrain(small_cnn(width=4), pair, Recipe(fraction=1.0, rounds=1, lr=0.05, drops=()), Runner(0))
    states = []
    for c in pair:
        model = small_cnn(width=4).train()
        nn.functional.cross_entropy(model(c.train.x), c.train.y).backward()
        torch.optim.SGD(model.parameters(), lr=0.05).step()
        states.append(model.state_dict())
    for name, value in ours.state_dict().items():
        expected = states[0][name] if not value.is_floating_point() else 0.75 * states[0][name] + 0.25 * states[1][name]
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


class Tied(nn.Module):
    """Two layers that share a weight, and the second one a bias of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


class Scaled(nn.Module):
    """Its scale and its counter are buffers that `state_dict` leaves out; the counter moves in training."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(64, 10)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.register_buffer("steps", torch.tensor(0), persistent=False)

    def forward(self, x):
        if self.training:
            self.steps += 1
        return self.head(x.flatten(1) * self.scale)


@pytest.mark.parametrize("network", [Tied, Scaled])
@pytest.mark.parametrize("workers", [1, 2])
def test_shared_weights_and_buffers_that_are_not_kept(network, workers, clients, tmp_path):
    """Two clients, one batch each, one round: the mean of two steps of SGD; then a second round from the file."""
    pair = [replace(clients[0], train=clients[0].train[:30]), replace(clients[1], train=clients[1].train[:10])]
    recipe = Recipe(fraction=1.0, rounds=1, lr=0.05, drops=())
    ours = pretrain(network(), pair, recipe, Runner(workers))
    stepped = []
    for c in pair:
        model = network().train()
        F.cross_entropy(model(c.train.x), c.train.y).backward()
        torch.optim.SGD(model.parameters(), lr=0.05).step()
        stepped.append(model)
    start, (a, b) = dict(network().named_parameters()), (dict(m.named_parameters()) for m in stepped)
    for name, value in ours.named_parameters():
        torch.testing.assert_close(value, 0.75 * a[name] + 0.25 * b[name], rtol=1e-4, atol=1e-6)
        assert not torch.equal(value, start[name])
    assert [(name, t.item()) for name, t in ours.named_buffers()] == [(name, t.item()) for name, t in stepped[0].named_buffers()]
    if network is Tied:
        assert ours.second.weight is ours.first.weight
    longer = replace(recipe, rounds=2)
    whole = pretrain(network(), pair, longer, Runner(workers))
    pretrain(network(), pair, longer, Runner(workers, progress=lambda rounds, title, total, done: iter([next(rounds)])), tmp_path / "p")
    again = pretrain(network(), pair, longer, Runner(workers), tmp_path / "p")
    assert equal(whole, again) and [t.item() for t in again.buffers()] == [t.item() for t in whole.buffers()]


@pytest.mark.parametrize("method", get_args(Pretraining))
def test_validation_samples_can_train_too(method, clients):
    """Training on both parts is training on a client whose training samples are both."""
    client, both = clients[0], replace(clients[0], train=clients[0].train + clients[0].val)
    model = small_cnn(width=4)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    ours = train_client(model, Recipe(method, train_on="train+val"), state, client, 1)
    by_hand = train_client(model, Recipe(method), state, both, 1)
    assert len(client.val) > 0 and ours.weight == by_hand.weight == len(client.train) + len(client.val)
    assert all(torch.equal(t, by_hand.state[name]) for name, t in ours.state.items())
    alone = replace(client, val=client.val[:0])  # a client of one sample has nothing to validate by
    ours, by_hand = (train_client(model, Recipe(method, train_on=parts), state, alone, 1) for parts in ("train+val", "train"))
    assert ours.weight == by_hand.weight == len(client.train)
    assert all(torch.equal(t, by_hand.state[name]) for name, t in ours.state.items())


def test_validation_samples_are_checked_if_they_train(clients):
    broken = replace(clients[0], val=replace(clients[0].val, y=clients[0].val.y + 10))
    model = small_cnn(width=4)
    train_client(model, Recipe(), model.state_dict(), broken, 1)
    with pytest.raises(ValueError, match="val.y must be in"):
        train_client(model, Recipe(train_on="train+val"), model.state_dict(), broken, 1)


def test_delta_is_part_of_the_recipe(clients):
    """The width of the difference reaches the step: a wide one gives other weights, a narrow one nearly the same."""
    model = Tied().double()  # smooth: with ReLU, the difference depends on jumps
    client = replace(clients[0], train=replace(clients[0].train, x=clients[0].train.x.double()))
    state = dict(model.named_parameters())
    weights = [train_client(model, Recipe("perfedavg", inner_lr=0.1, delta=delta), state, client, 1).state["first.weight"] for delta in (1e-3, 1e-4, 1.0)]
    near, far = ((w - weights[0]).norm() for w in weights[1:])
    assert 0 < near < 0.1 * far


def test_fedbabu_leaves_the_head(clients):
    model = pretrain(small_cnn(width=4), clients, Recipe("fedbabu", fraction=0.5, rounds=2), Runner(0))
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


@pytest.mark.parametrize("name, must, values", [
    ("rounds", ">= 1", [0, -1]), ("epochs", ">= 1", [0]), ("batch_size", ">= 1", [0]),
    ("lr", "> 0 and finite", [0, -1.0, float("nan"), float("inf")]), ("final_lr", "> 0 and finite", [0.0, -0.1]),
    ("inner_lr", "> 0 and finite", [0.0]), ("delta", "> 0 and finite", [0.0]),
    ("fraction", "in (0, 1]", [0, 1.1]), ("drops", "all in (0, 1]", [(0.0,), (0.5, 1.5)]),
    ("train_on", "one of train, train+val", ["val"]),
])
def test_wrong_recipes(name, must, values):
    for value in values:
        with pytest.raises(ValueError) as error:
            Recipe(**{name: value})
        assert str(error.value) == f"{name} must be {must}, got {value!r}"


def test_wrong_pretraining(clients):
    with pytest.raises(ValueError, match="^method must be one of fedavg, fedbabu, perfedavg, got 'fedsgd'$"):
        Recipe("fedsgd")
    with pytest.raises(ValueError, match="^the number of mixing batch norms must be 0, as before mix_bn, got 3$"):
        pretrain(mix_bn(small_cnn(), verbose=False), clients)
    empty = replace(clients[0], train=clients[0].train[:0])
    left_out = "client '.*' is left out: ValueError: client '.*': train is empty$"
    with pytest.warns(RuntimeWarning, match=left_out), pytest.raises(RuntimeError, match="all of its 1 clients failed"):
        pretrain(small_cnn(), [empty], Recipe(rounds=1), Runner(0))


def test_the_caller_keeps_model_and_random_state(clients):
    model = small_cnn(width=4).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    pretrain(model, clients, HALF, Runner(0))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and model.training
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1] and np.random.get_state()[1].tolist() == states[2]


def test_a_client_does_not_change_what_the_server_sent(clients):
    model = small_cnn(width=4)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = {k: v.clone() for k, v in state.items()}
    train_client(model, Recipe(), state, clients[0], 1)
    assert all(torch.equal(v, before[k]) for k, v in state.items())


def test_a_checkpoint_says_who_was_left_out(clients, tmp_path):
    """A warning on the terminal of a server was all that there was; two runs that differed could not be told apart by it."""
    path, lost = tmp_path / "pretraining.safetensors", clients[1].id
    for rounds in (2, 3):  # stopped after two
        with pytest.raises(KeyboardInterrupt) if rounds == 2 else nullcontext():
            pretrain(small_cnn(width=4), clients, Recipe(rounds=3, fraction=1.0), Runner(0, without({(lost, 1), (lost, 3)}), stop_after(2) if rounds == 2 else quiet), path)
    info = json.loads(load_tensors(path, "fedl2p checkpoint 1")[1]["info"])
    assert info == {"round": 3, "failed": {"1": {lost: "gone"}, "3": {lost: "gone"}}}
