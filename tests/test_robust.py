"""Robust means: what they are, that a minority cannot move them far, and what they save and cost in a federation."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from federation import QUICK, network, seen
from hypothesis import given, settings
from hypothesis import strategies as st

from fedl2p import pretraining, rounds, trials
from fedl2p.config import Config
from fedl2p.digits import accuracy, digits_federation, small_cnn
from fedl2p.federated import Update, average, fedavg
from fedl2p.learner import FedL2P
from fedl2p.policy import untrained
from fedl2p.pretraining import Recipe, pretrain, train_client
from fedl2p.robust import MEANS, bounded, robust_mean
from fedl2p.runner import Runner

START = {"w": torch.zeros(3), "count": torch.tensor(2)}


def updates(rows, weight=1.0):
    return {f"c{i}": Update({"w": torch.tensor(row), "count": torch.tensor(i)}, weight) for i, row in enumerate(rows)}


numbers = st.lists(st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3), min_size=1, max_size=9)


@settings(deadline=None, max_examples=40)
@given(numbers)
def test_a_median_is_the_median(rows):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept, _ = bounded(START, updates(rows))
        found = robust_mean(START, updates(rows), "median")
    table = torch.stack([u.state["w"] for u in kept.values()]).double()
    torch.testing.assert_close(found["w"].double(), table.quantile(0.5, 0), rtol=1e-5, atol=1e-6)
    assert found["count"] == len(rows) - 1


def test_equal_steps_are_the_plain_mean():
    rows = [[1.0, 2.0, 2.0], [2.0, 1.0, 2.0], [2.0, 2.0, 1.0]]
    plain = average((u.state, u.weight) for u in updates(rows).values())
    assert torch.equal(robust_mean(START, updates(rows), "mean")["w"], plain["w"])
    assert torch.equal(robust_mean(START, updates(rows), "trimmed", trim=0.0)["w"], plain["w"])


def test_long_steps_are_cut_and_named():
    rows = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, -1e30]]
    kept, cut = bounded(START, updates(rows))
    assert cut == ["c3"] and kept["c3"].state["w"].norm().item() == pytest.approx(3.0)
    with pytest.warns(RuntimeWarning, match="more than 3 times the median: 'c3'"):
        robust_mean(START, updates(rows), "median")
    with pytest.warns(RuntimeWarning, match="more than 100 times the median: 'c3'"):
        assert robust_mean(START, updates(rows), "mean")["w"].norm().item() < 26
    nobody, cut = bounded(START, updates([[0.0] * 3] * 3))
    assert not cut and all(torch.equal(u.state["w"], START["w"]) for u in nobody.values())


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("honest, liars", [(1, 1), (2, 2), (3, 3)])
def test_half_of_few_clients_cannot_take_the_lead(mean, honest, liars):
    """The mean of both middle steps would be half of the lie."""
    rows = [[1.0, 0.0, 0.0]] * honest + [[0.0, 0.0, -1e30]] * liars
    with pytest.warns(RuntimeWarning, match=f"times the median: 'c{honest}'"):
        assert robust_mean(START, updates(rows), mean)["w"].norm().item() <= 51


def test_clients_that_do_not_move_hide_nobody():
    kept, cut = bounded(START, updates([[0.0] * 3, [0.0] * 3, [1.0, 0.0, 0.0], [0.0, 0.0, 1e30]]))
    assert cut == ["c3"] and kept["c3"].state["w"].norm().item() == pytest.approx(3.0)


def test_a_claimed_weight_is_bounded_in_a_plain_mean():
    honest = updates([[0.01, 0.0, 0.0]] * 19)
    liar = {"liar": Update({"w": torch.tensor([0.9, 0.0, 0.0]), "count": torch.tensor(1)}, 1e6)}
    found = robust_mean(START, honest | liar, "mean")["w"][0].item()
    assert found == pytest.approx((19 * 0.01 + 100 * 0.9) / 119, rel=1e-4)
    ten = {id: u._replace(weight=10.0 + 90 * (id == "c0")) for id, u in updates([[1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [1.0, 1.0, 1.0]]).items()}
    plain = average((u.state, u.weight) for u in ten.values())  # honest weights are as they were
    assert torch.equal(robust_mean(START, ten, "mean")["w"], plain["w"])


@pytest.mark.parametrize("wrong, words", [({"mean": "mode"}, "mean must be one of mean, median, trimmed, got 'mode'"), ({"mean": "trimmed", "trim": 0.5}, r"trim must be in \[0, 0.5\), got 0.5")])
def test_what_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        robust_mean(START, updates([[1.0, 1.0, 1.0]]), **wrong)


OURS = Config(epochs=1, choosing_rounds=2)


def ten():
    clients = digits_federation(5, 0, size=40).pretraining[:10]
    return [replace(c, id=f"c-{i}") for i, c in enumerate(clients)]


def backwards(work, liars):
    """The work of a client, but some send its step ten times and backwards."""
    def lie(model, settings, state, client, number):
        update = work(model, settings, state, client, number)
        if client.id not in liars:
            return update
        lie = {k: state[k] - 10 * (t - state[k]) if t.is_floating_point() else t for k, t in update.state.items()}
        return update._replace(state={k: t.abs() if k.endswith("running_var") else t for k, t in lie.items()})

    return lie


lying = backwards(train_client, ("c-0", "c-1", "c-2"))


def accuracy_after(work, mean, number=8):
    clients, model = ten(), small_cnn(width=4)
    start = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        course = fedavg(work, model, Recipe(epochs=2), start, clients, number, 1.0, 0, Runner(0), mean=mean)
        *_, last = course
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        t.data.copy_(last.state[name])
    tests = sum([c.test for c in clients[1:]], start=clients[0].test)
    return accuracy(model.eval(), tests.x, tests.y)


def test_thirty_percent_liars():
    """Plain averaging is ruined by them; a median keeps most of what honest clients reach."""
    honest, ruined, saved = accuracy_after(train_client, None), accuracy_after(lying, None), accuracy_after(lying, partial(robust_mean, mean="median"))
    assert honest > 0.4 and ruined < 0.3 and saved > ruined + 0.15


@pytest.mark.slow
def test_what_robust_means_save_and_cost():
    """The table: accuracy of ten honest clients, and with three liars among them."""
    means = {"plain": None, **{m: partial(robust_mean, mean=m) for m in MEANS}}
    found = {name: (accuracy_after(train_client, mean, 12), accuracy_after(lying, mean, 12)) for name, mean in means.items()}
    print({name: tuple(round(v, 3) for v in pair) for name, pair in found.items()})
    assert min(found["median"][1], found["trimmed"][1]) > found["plain"][1] + 0.2
    assert min(found["median"][0], found["trimmed"][0]) > found["plain"][0] - 0.1


def huge(work, name, value=1e30, who=("clean-0",)):
    """The work of a client, but for some who send a number that is finite and wrong."""
    def worked(model, settings, state, client, number):
        update = work(model, settings, state, client, number)
        return update._replace(state={**update.state, name: torch.full_like(update.state[name], value)}) if client.id in who else update

    return worked


@pytest.mark.filterwarnings("ignore:no round had")
def test_a_node_that_sends_1e30_is_named_and_moves_lambda_little(monkeypatch):
    """With the plain mean of the paper's recipe, where nothing else guards."""
    config = replace(QUICK, rounds=2, fraction=1.0)
    name = next(iter(untrained(network(), config).state_dict()))
    honest = FedL2P(network(), config).fit(seen(), runner=Runner(0))
    monkeypatch.setattr(rounds, "learn_client", huge(rounds.learn_client, name))
    with pytest.warns(RuntimeWarning, match="more than 100 times the median: 'clean-0'"):
        learner = FedL2P(network(), config).fit(seen(), runner=Runner(0))
    assert not any(r["failed"] for r in learner.history)
    assert (learner.last_state[name] - honest.last_state[name]).abs().max() < 1


@pytest.mark.filterwarnings("ignore:cut the steps")
def test_liars_among_those_who_choose_and_those_who_pretrain(monkeypatch):
    """Three of ten, in our own recipe and in pretraining: a median bears them, a plain mean does not."""
    losses = {c.id: torch.rand(54, generator=torch.Generator().manual_seed(i)) + (torch.arange(54) != 7) for i, c in enumerate(ten())}
    clients = [replace(c, kept={"losses": losses[c.id], "inputs": torch.zeros(len(untrained(network(), OURS).center))}) for c in ten()]
    state, liars = dict(untrained(network(), OURS).state_dict()), [c.id for c in clients[:3]]
    monkeypatch.setattr(trials, "choose_client", backwards(trials.choose_client, liars))
    found = {mean: trials.learn_to_choose(network(), replace(OURS, mean=mean), state, clients)[0]["common"].argmax().item() for mean in MEANS}
    assert found["median"] == found["trimmed"] == 7 != found["mean"]

    monkeypatch.setattr(pretraining, "train_client", backwards(train_client, liars))
    tests = sum([c.test for c in clients[1:]], start=clients[0].test)
    accuracies = {}
    for mean in ("mean", "median"):
        trained = pretrain(small_cnn(width=4), clients, Recipe(rounds=8, epochs=2, fraction=1.0, mean=mean), Runner(0))
        accuracies[mean] = accuracy(trained, tests.x, tests.y)
    assert accuracies["mean"] < 0.3 and accuracies["median"] > accuracies["mean"] + 0.15


@pytest.mark.filterwarnings("ignore:no round had", "ignore:cut the steps")
@pytest.mark.parametrize("mean", ["median", "trimmed"])
def test_meta_nets_are_learned_by_a_robust_mean(mean):
    learner = FedL2P(network(), replace(QUICK, mean=mean, rounds=1)).fit(seen(), runner=Runner(0))
    plain = FedL2P(network(), replace(QUICK, rounds=1)).fit(seen(), runner=Runner(0))
    assert not any(r["failed"] for r in learner.history)
    assert any(not torch.equal(learner.last_state[k], t) for k, t in plain.last_state.items())
