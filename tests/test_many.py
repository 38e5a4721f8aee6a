"""Many strategies side by side: the numbers of `finetune` and `evaluate`, whichever way they are computed."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedl2p.bn import mix_bn
from fedl2p.core import generator
from fedl2p.data import Data
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.evaluation import evaluate
from fedl2p.finetune import STATISTICS, Tuning, finetune
from fedl2p.many import CHUNK, ENGINES, SMALL, fastest_engine, judge_race, pick_engine, run_race, start_race
from fedl2p.measure import Time
from fedl2p.strategy import Strategy, bn_c, bn_g, bn_i, bn_only, body_only, head_only

TUNING = Tuning(epochs=2, batch_size=13, statistics="precise")


@pytest.fixture(scope="module")
def client():
    return digits_federation(5, 0, size=40).seen[-1]  # inverted digits, far from what the model knows


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(width=4), verbose=False)


def mixed(model):
    "Strategies of one mode that differ in everything else."
    half = replace(bn_c(model, 0.1), beta=torch.linspace(0, 1, 3))
    return [bn_c(model, 0.1), bn_g(model, 0.03), half, head_only(model, 0.3), body_only(model, 0.1, 1.0), bn_only(model, 0.3), bn_g(model, 0.0), bn_c(model, 0.0)]


def plain(model, strategies, client, tuning):
    "Losses and right answers of one after the other, by the functions of lesson 5."
    scores = [evaluate(model, finetune(model, s, client.train, tuning, generator(0, "many")), client.test) for s in strategies]
    return torch.tensor([s.loss for s in scores]), torch.tensor([s.right for s in scores])


def judged(model, strategies, client, tuning, engine, stops=()):
    "The same by a race, which may stop on its way."
    bn = strategies[0].bn
    race = start_race(model, strategies, client.train, tuning, generator(0, "many"), engine)
    for steps in (*stops, None):
        race = run_race(model, race, bn, steps)
    return judge_race(model, race, bn, client.train, client.test, tuning.statistics == "precise")


def agrees(model, strategies, client, tuning=TUNING):
    losses, right = plain(model, strategies, client, tuning)
    assert losses.isfinite().all() and losses.max() - losses.min() > 1e-3  # they do differ
    for engine in ("vmap", "loop"):
        found = judged(model, strategies, client, tuning, engine)
        torch.testing.assert_close(found[0], losses, rtol=0, atol=1e-4)
        assert torch.equal(found[1].long(), right)


@pytest.mark.parametrize("statistics", STATISTICS)
def test_a_race_is_fine_tuning_of_each(model, client, statistics):
    tuning = replace(TUNING, statistics=statistics)
    agrees(model, mixed(model), client, tuning)
    agrees(model, [bn_i(model, lr) for lr in (0.3, 0.1, 0.0)], client, tuning)


def test_images_that_change_their_looks(model, client):
    agrees(model, mixed(model)[:3], client, replace(TUNING, augment="crop-flip", fill=(1.0,)))


def test_dropout_draws_the_same_masks(client):
    """In each strategy those that `finetune` draws, and nothing from the global state."""
    net = mix_bn(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Dropout(0.3), nn.Linear(144, 10)), verbose=False)
    before = torch.get_rng_state()
    agrees(net, [bn_c(net, 0.1), bn_c(net, 0.03), bn_g(net, 0.1), head_only(net, 0.1)], client)
    assert torch.equal(torch.get_rng_state(), before)


def test_hand_frozen_parameters_stay(model, client):
    frozen = deepcopy(model)
    frozen.conv1.weight.requires_grad_(False)
    frozen.head.bias.requires_grad_(False)
    strategies = mixed(frozen)
    agrees(frozen, strategies, client)
    for engine in ("vmap", "loop"):
        race = start_race(frozen, strategies, client.train, TUNING, generator(0), engine)
        end = run_race(frozen, race, "mix")
        assert "conv1.weight" not in end.weights and race.eta.shape == (len(strategies), 9)
        assert all(torch.equal(t, frozen.conv1.weight) for t in end.buffers["conv1.weight"])


class Tied(nn.Module):
    "Two layers that share a matrix."

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second, self.head = nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(self.first(self.norm(x.flatten(1))).relu()).relu())


def test_tied_weights(client):
    torch.manual_seed(0)
    net = mix_bn(Tied(), verbose=False)
    agrees(net, [bn_c(net, 0.1), bn_g(net, 0.1), bn_c(net, 0.01), bn_only(net, 0.1)], client)


def test_a_model_without_batch_norms(client):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    agrees(net, [bn_g(net, 0.3), bn_g(net, 0.01), head_only(net, 0.3), bn_g(net, 0.0)], client)


def test_double_precision(model, client):
    wide = deepcopy(model).double()
    far = replace(client, train=Data(client.train.x.double(), client.train.y), test=Data(client.test.x.double(), client.test.y))
    strategies = [bn_c(wide, 0.1), bn_g(wide, 0.1)]
    for engine in ("vmap", "loop"):
        losses = judged(wide, strategies, far, TUNING, engine)[0]
        assert losses.dtype == torch.float64
        torch.testing.assert_close(losses, plain(wide, strategies, far, TUNING)[0].double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_one_that_diverges_harms_no_other(model, client, engine):
    good = [bn_c(model, 0.1), bn_g(model, 0.03)]
    losses, right = judged(model, [good[0], bn_g(model, 1e20), good[1]], client, TUNING, engine)
    alone = judged(model, good, client, TUNING, engine)
    assert losses[1].isnan() and right[1] == 0
    torch.testing.assert_close(losses[[0, 2]], alone[0], rtol=0, atol=1e-6)
    assert torch.equal(right[[0, 2]], alone[1])


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_stopping_half_way_is_going_through(model, client, engine):
    strategies = mixed(model)
    through = judged(model, strategies, client, TUNING, engine)
    stopped = judged(model, strategies, client, TUNING, engine, stops=(1, 0, 2))
    assert all(torch.equal(a, b) for a, b in zip(through, stopped, strict=True))


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_some_go_on_as_they_would_have(model, client, engine):
    strategies, some = mixed(model), torch.tensor([5, 0, 3])
    race = run_race(model, start_race(model, strategies, client.train, TUNING, generator(0, "many"), engine), "mix", 2)
    end = run_race(model, race.only(some), "mix")
    assert end.engine == engine and not end.steps and len(race.steps) == 2  # 26 samples are two batches, twice
    few = judge_race(model, end, "mix", client.train, client.test)
    whole = judged(model, strategies, client, TUNING, engine)
    torch.testing.assert_close(few[0], whole[0][some], rtol=0, atol=1e-6)
    assert torch.equal(few[1], whole[1][some])


def test_more_than_fit_into_a_chunk(model, client):
    strategies = [bn_c(model, lr) for lr in torch.linspace(0.01, 0.2, CHUNK + 3).tolist()]
    losses = plain(model, strategies, client, TUNING)[0]
    torch.testing.assert_close(judged(model, strategies, client, TUNING, "vmap")[0], losses, rtol=0, atol=1e-4)


def test_the_model_is_not_changed(client):
    net = mix_bn(small_cnn(width=4), verbose=False).train()
    before = deepcopy(net.state_dict())
    for engine in ("vmap", "loop"):
        judged(net, mixed(net)[:2], client, TUNING, engine)
    assert net.training and all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert all(layer.mode == "mix" for layer in (net.bn1, net.bn2, net.bn3))


def test_the_size_of_the_network_decides(model):
    """And no stopwatch: the choice is the same in every run. Who asks for an engine gets it."""
    large = nn.Linear(SMALL, 1)
    assert [pick_engine(net, engine) for net in (model, large) for engine in ENGINES] == ["vmap", "vmap", "loop", "loop", "vmap", "loop"]


def test_how_closely_engines_agree(model, client):
    """After the same steps, in all weights: some units of the last place, in strategies that differ in everything."""
    strategies = mixed(model)
    vmap, loop = (run_race(model, start_race(model, strategies, client.train, TUNING, generator(0), engine), "mix") for engine in ("vmap", "loop"))
    assert all((vmap.weights[name] - t).abs().max() <= 2e-6 * max(1.0, t.abs().max()) for name, t in loop.weights.items())


def test_the_fastest_engine_is_the_faster_one(model, client, monkeypatch):
    """By the clock: here one that says so."""
    took = {"vmap": 1.0, "loop": 2.0}
    monkeypatch.setattr("fedl2p.many.seconds", lambda functions, repeats: {name: Time(took[name], 1.0) for name, f in functions.items() if f().steps})
    assert fastest_engine(model, client.train, TUNING) == "vmap"
    took["vmap"] = 3.0
    assert fastest_engine(model, client.train, TUNING) == "loop"


def test_a_network_without_any_step_is_the_pretrained_one(model, client):
    strategies = [bn_g(model, 0.1), bn_g(model, 1.0)]
    race = start_race(model, strategies, client.train, TUNING, generator(0))
    losses, _ = judge_race(model, race, "mix", client.train, client.test)
    untouched = evaluate(model, finetune(model, bn_g(model, 0.0), client.train, TUNING), client.test).loss
    assert losses.tolist() == [pytest.approx(untouched, abs=1e-5)] * 2


def test_wrong_inputs(model, client):
    def begin(*strategies, data=client.train):
        return start_race(model, strategies, data, TUNING, generator(0))

    with pytest.raises(ValueError, match=r"^bn must be the same in all strategies, got \['mix', 'batch'\]"):
        begin(bn_c(model, 0.1), bn_i(model, 0.1))
    with pytest.raises(ValueError, match=r"^bn must be the same in all strategies, got \[\]"):
        begin()
    with pytest.raises(ValueError, match="beta must be 3 numbers"):
        begin(bn_c(model, 0.1), Strategy(torch.zeros(2), torch.zeros(11)))
    with pytest.raises(ValueError, match="^eta must be 11 numbers, one for each parameter of the model, got 10"):
        begin(bn_c(model, 0.1), Strategy(torch.zeros(3), torch.zeros(10)))
    with pytest.raises(ValueError, match="^eta must be finite"):
        begin(Strategy(torch.zeros(3), torch.full((11,), math.nan)))
    with pytest.raises(ValueError, match="^number of samples must be >= 1, got 0"):
        begin(bn_c(model, 0.1), data=client.train[:0])
    with pytest.raises(ValueError, match="^engine must be one of auto, vmap, loop, got 'gpu'"):
        start_race(model, [bn_c(model, 0.1)], client.train, TUNING, generator(0), "gpu")
    assert ENGINES == ("auto", "vmap", "loop")
