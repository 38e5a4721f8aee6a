"""Algorithm 1: its bookkeeping, its invariances, and clients with bad data."""

import json
import random
import warnings
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedl2p.checkpoint import fingerprint
from fedl2p.client import l2p_client, learn_client, validate_client
from fedl2p.config import Config
from fedl2p.data import Client, Data
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.federated import fedavg
from fedl2p.learner import FedL2P
from fedl2p.policy import untrained
from fedl2p.rounds import _loss, describe_client
from fedl2p.runner import Runner, attempt
from fedl2p.scoring import score_policy
from fedl2p.storage import load_tensors, save_tensors

pytestmark = pytest.mark.filterwarnings("ignore:no round had a lower validation loss than the first")
QUICK = Config.paper(lr=0.05, epochs=1, rounds=3, fraction=0.5, meta_steps=1)


def same(a: FedL2P, b: FedL2P) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.metanets.state_dict().values(), b.metanets.state_dict().values(), strict=True))


def test_the_same_whatever_the_order_the_workers_and_the_global_state(model, federation):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = FedL2P(model, QUICK).fit(federation.seen, runner=Runner(0))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1] and np.random.get_state()[1].tolist() == states[2]
    torch.manual_seed(99)
    second = FedL2P(model, QUICK).fit(federation.seen[::-1], runner=Runner(2))
    assert same(first, second) and first.history == second.history
    assert not same(first, FedL2P(model, replace(QUICK, seed=1)).fit(federation.seen, runner=Runner(0)))
    scores = [[r.score for r in first.score(federation.unseen, Runner(w))] for w in (1, 2)]
    assert scores[0] == scores[1]


def test_the_model_is_not_changed(federation):
    plain = small_cnn(width=4).train()
    before = {k: v.clone() for k, v in plain.state_dict().items()}
    learner = FedL2P(plain, QUICK)
    frozen = fingerprint(learner.model)
    learner.fit(federation.seen, runner=Runner(0)).personalize(federation.unseen[0])
    assert all(torch.equal(v, before[k]) for k, v in plain.state_dict().items())
    assert fingerprint(learner.model) == frozen


def test_best_lambda_is_the_one_that_was_sent(model, federation):
    learner = FedL2P(model, replace(QUICK, rounds=4)).fit(federation.seen, runner=Runner(0))
    losses = [r["val_loss"] for r in learner.history]
    best = losses.index(min(losses))
    if best == 0:
        assert same(learner, FedL2P(model, QUICK))
    else:  # what came out of the round before is what was sent
        start = dict(FedL2P(model, QUICK).metanets.state_dict())
        rounds = list(fedavg(learn_client, learner.model, learner.config, start, federation.seen, best, 0.5, runner=Runner(0)))
        assert all(torch.equal(v, rounds[-1].state[k]) for k, v in learner.metanets.state_dict().items())


def test_augmented_learning_does_not_depend_on_workers(model, federation):
    config = replace(QUICK, augment="crop-flip", keep="paired")
    first, second = (FedL2P(model, config).fit(federation.seen, runner=Runner(n)) for n in (0, 2))
    assert same(first, second) and first.history == second.history
    client = federation.seen[0]
    assert torch.equal(first.strategy(client).eta, first.score([client], Runner(0))[0].strategy.eta)


def bad_clients(client: Client) -> dict[str, Client]:
    nan = client.train.x.clone()
    nan[0] = float("nan")
    return {"empty": replace(client, id="empty", train=client.train[:0], val=client.val[:0], test=client.test[:0]),
            "labels": replace(client, id="labels", train=Data(client.train.x, client.train.y + 20)),
            "nan": replace(client, id="nan", train=Data(nan, client.train.y)),
            "no validation": replace(client, id="no validation", val=client.val[:0])}


def test_bad_clients_are_left_out_and_good_ones_learn(model, federation):
    bad = bad_clients(federation.seen[0])
    config = replace(QUICK, fraction=1.0, rounds=1)
    with pytest.warns(RuntimeWarning, match="is left out"):
        learner = FedL2P(model, config).fit([*federation.seen, *bad.values()], runner=Runner(0))
    failed = learner.history[0]["failed"]
    assert set(failed) == set(bad) and failed["no validation"] == "ValueError: client 'no validation': val is empty"
    assert same(learner, FedL2P(model, config).fit(federation.seen, runner=Runner(0)))
    with pytest.warns(RuntimeWarning, match="client 'nan' is left out"):
        good = learner.score([*federation.unseen, bad["nan"]], Runner(0))
    assert len(good) == len(federation.unseen)
    for name in ("empty", "labels", "nan"):
        with pytest.raises(ValueError, match="client"):
            learner.personalize(bad[name])
    learner.personalize(bad["no validation"])  # needs none


@pytest.mark.filterwarnings("ignore:round 1")
def test_only_bad_clients_is_an_error(model, federation):
    with pytest.raises(RuntimeError, match="all of its 4 clients failed"):
        FedL2P(model, replace(QUICK, fraction=1.0)).fit(list(bad_clients(federation.seen[0]).values()), runner=Runner(0))


def test_one_sample_and_one_class_take_part(model, federation):
    client = federation.seen[0]
    single = Client("single", client.train[:1], client.val[:1], client.test[:1])
    one_class = replace(client, id="one class", train=Data(client.train.x, torch.zeros_like(client.train.y)))
    learner = FedL2P(model, replace(QUICK, fraction=1.0, rounds=1)).fit([single, one_class], runner=Runner(0))
    assert learner.history[0]["clients"] == ["one class", "single"] and not learner.history[0]["failed"]


def test_a_policy_comes_back_from_its_file(model, federation, tmp_path):
    config = replace(QUICK, last=3, learn="lr", beta=1.0)
    learner = FedL2P(model, config).fit(federation.seen, runner=Runner(0))
    learner.save(tmp_path / "policy.safetensors")
    again = FedL2P.load(small_cnn(width=4), tmp_path / "policy.safetensors")
    assert same(learner, again) and again.config == config
    with pytest.warns(RuntimeWarning, match="learned for other weights"):
        FedL2P.load(small_cnn(width=4, seed=9), tmp_path / "policy.safetensors")
    with pytest.raises(ValueError, match="another model"):
        FedL2P.load(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), tmp_path / "policy.safetensors")


# What version 0.1.0 wrote for QUICK: every setting, by name.
OLD_CONFIG = {
    "lr": 0.05, "epochs": 1, "batch_size": 32, "rounds": 3, "fraction": 0.5, "meta_steps": 1,
    "meta_lr_bn": 0.001, "meta_lr_lr": 0.001, "meta_lr_scale": 0.0001, "clip": 1.0, "patience": 50,
    "estimator": "ift", "neumann_terms": 3, "psi": 0.1, "scaled": False, "last": None, "hvp": "exact",
    "learn": "both", "beta": 0.0, "statistics": "running", "augment": "none", "keep": "lowest",
    "hidden": 100, "inputs": "raw", "seed": 0,
}


def old_policy(path, learner, **more):
    """A policy as version 0.1.0 wrote it."""
    tensors = [
        "conv1.weight", "bn1.weight", "bn1.bias", "conv2.weight", "bn2.weight", "bn2.bias",
        "conv3.weight", "bn3.weight", "bn3.bias", "head.weight", "head.bias",
    ]
    header = {
        "config": json.dumps(OLD_CONFIG), "model": fingerprint(learner.model),
        "format": "fedl2p metanets 1", "fedl2p": "0.1.0", "hidden": "100", "inputs": "raw",
        "bn_layers": json.dumps(["bn1", "bn2", "bn3"]),
        "layers": json.dumps(["conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "head"]), "tensors": json.dumps(tensors),
    }
    header = {key: value for key, value in {**header, **more}.items() if value is not None}
    save_tensors(path, learner.metanets.state_dict(), header)
    return header


def test_a_policy_of_version_0_1_0_loads(model, federation, tmp_path):
    learner, path = FedL2P(model, QUICK), tmp_path / "policy.safetensors"
    with torch.no_grad():
        learner.metanets.eta_scale.mul_(torch.linspace(0.5, 2, 11))
    header = old_policy(path, learner)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = FedL2P.load(small_cnn(width=4), path)
    assert same(learner, again) and again.config == QUICK
    client = federation.unseen[0]
    assert torch.equal(learner.strategy(client).eta, again.strategy(client).eta)
    again.save(path)
    written = load_tensors(path, "fedl2p metanets 1")[1]
    trials = ("start", "splits", "held_back", "halving", "looks_at", "choosing_rounds", "refining_lr", "mean", "engine")
    new = {"statistics": "zero-one", "personalize_on": "train+val", "fill": [0.0]}
    new |= {name: json.loads(json.dumps(getattr(QUICK, name))) for name in trials}
    assert {**written, "fedl2p": "0.1.0", "config": ""} == {**header, "config": ""}  # what is written now has the same header
    assert json.loads(written["config"]) == {**json.loads(header["config"]), **new}


def test_policies_of_before_and_after_load_as_far_as_they_are_understood(model, tmp_path):
    """Without what had not been thought of yet, and with a setting that is not known here."""
    learner, path = FedL2P(model, QUICK), tmp_path / "policy.safetensors"
    for config in ({"lr": 0.05, "rounds": 3}, {**OLD_CONFIG, "momentum": 0.9}):
        old_policy(path, learner, config=json.dumps(config), inputs=None, model=None)
        again = FedL2P.load(small_cnn(width=4), path)
        assert same(learner, again) and again.config == Config.paper(**{k: v for k, v in config.items() if k not in ("momentum", "statistics")})


def test_a_checkpoint_of_version_0_1_0_goes_on(model, federation, tmp_path):
    """The first round was learned by the old code, which wrote faults as texts; the others are learned now."""
    whole = FedL2P(model, QUICK).fit(federation.seen, runner=Runner(0))
    start = deepcopy(untrained(model, QUICK).state_dict())
    (r,) = fedavg(learn_client, model, QUICK, start, federation.seen, 1, QUICK.fraction, QUICK.seed, Runner(0))
    values = {name: [report[name] for report in r.reports.values()] for name in ("val_loss", "beta", "eta")}
    means = {name: torch.tensor(v, dtype=torch.float64).mean(0).tolist() for name, v in values.items()}
    record = {"round": 1, **means, "clients": list(r.reports), "failed": {"ghost": "ValueError: train is empty"}, "diverging": 0}
    who = fingerprint(model, untrained(model, QUICK), *sorted(federation.seen, key=lambda c: c.id))
    settings, info = {**OLD_CONFIG, "model and clients": who}, {"rounds": [record]}
    header = {"format": "fedl2p checkpoint 1", "settings": json.dumps(settings), "info": json.dumps(info)}
    tensors = {f"{k}.{name}": t.clone() for k, state in {"now": r.state, "best": start}.items() for name, t in state.items()}
    save_tensors(tmp_path / "checkpoint.safetensors", tensors, header)
    shown = []

    def progress(rounds, title, total, done):
        shown.append((title, total, done))
        return rounds

    learner = FedL2P(model, QUICK).fit(federation.seen, tmp_path, Runner(0, progress=progress))
    assert same(learner, whole) and shown == [("learning to personalize (ift)", 3, 1)]
    assert learner.history == [record, *whole.history[1:]] and whole.history[0] == {**record, "failed": {}, "diverged": 0}
    assert all(torch.equal(t, whole.last_state[name]) for name, t in learner.last_state.items())


def test_a_transport_does_all_of_the_work(model, federation):
    came = []

    def transport(tasks):
        came.append(tasks)
        return (attempt(task.run) for task in tasks)

    config = replace(QUICK, inputs="standard", rounds=2)
    there = FedL2P(model, config).fit(federation.seen, runner=Runner(transport=transport))
    scores = [r.score for r in there.score(federation.unseen, Runner(transport=transport))]
    here = FedL2P(model, config).fit(federation.seen, runner=Runner(0))
    assert same(here, there) and [r.score for r in here.score(federation.unseen, Runner(0))] == scores
    expected = [(describe_client, 1, 5), (learn_client, 1, 2), (learn_client, 2, 2), (validate_client, 3, 2), (score_policy, 0, 5)]
    assert [(tasks[0].work, tasks[0].number, len(tasks)) for tasks in came] == expected
    assert all(task.model is there.model and task.settings is config for tasks in came for task in tasks)


def test_strategy_for_a_client_or_for_data(model, federation):
    learner, client = FedL2P(model, QUICK), federation.unseen[0]
    both = client.train + client.val
    assert torch.equal(learner.strategy(client).eta, learner.strategy(both).eta)
    assert not learner.strategy(client).eta.requires_grad
    assert isinstance(learner.personalize(both), nn.Module)


def test_a_model_without_batch_norm_learns_rates(federation):
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    learner = FedL2P(linear, replace(QUICK, lr=0.1)).fit(federation.seen, runner=Runner(0))
    assert learner.strategy(federation.unseen[0]).beta.shape == (0,)
    assert len(learner.score(federation.unseen, Runner(0))) == 5


# --- the last lambda is judged, too (review A2) ---------------------------------------------------------------


EAGER = replace(QUICK, estimator="unrolled", meta_lr_bn=0.05, meta_lr_lr=0.05, meta_lr_scale=0.01)


def test_one_round_can_learn(model, federation):
    config = replace(EAGER, rounds=1, fraction=1.0, meta_steps=5)
    learner = FedL2P(model, config).fit(federation.seen, runner=Runner(0))
    first, last = learner.history
    assert last["final"] and last["round"] == 2 and "final" not in first and last["clients"] == first["clients"]
    assert last["val_loss"] < first["val_loss"]
    assert all(torch.equal(t, learner.last_state[name]) for name, t in learner.metanets.state_dict().items())
    assert not all(torch.equal(t, untrained(model, config).state_dict()[name]) for name, t in learner.last_state.items())


def test_one_pass_of_l2p_can_learn(model, federation):
    config = replace(EAGER, meta_lr_bn=0.5)
    start = untrained(model, config).state_dict()
    moved = [c.id for c in federation.seen
             if not torch.equal(l2p_client(model, config, 1, c).strategy.beta, score_policy(model, config, start, c).strategy.beta)]
    assert moved


def test_keep_after_is_the_rule_of_the_authors_code(model, federation):
    """The mean loss of all meta-steps counts for the lambda that the round leads to."""
    config = replace(EAGER, keep="after", rounds=3, fraction=1.0, meta_steps=2)
    learner = FedL2P(model, config).fit(federation.seen, runner=Runner(0))
    losses = [r["val_loss"] for r in learner.history]
    assert len(losses) == 3 and "final" not in learner.history[-1]
    states = [r.state for r in fedavg(learn_client, learner.model, config, untrained(model, config).state_dict(), federation.seen, 3, 1.0, runner=Runner(0))]
    best = states[losses.index(min(losses))]
    assert all(torch.equal(t, best[name]) for name, t in learner.metanets.state_dict().items())
    lowest = FedL2P(model, replace(config, keep="lowest")).fit(federation.seen, runner=Runner(0)).history
    assert losses[0] != lowest[0]["val_loss"]


# --- bad clients do not keep the others from learning (review E3) ---------------------------------------------


@pytest.mark.parametrize("keep", ["lowest", "paired"])
@pytest.mark.parametrize("bad", [1, 6])
def test_some_of_twenty_diverge_and_the_others_learn(model, keep, bad):
    people = digits_federation(20, 5, size=20).seen
    wild = [replace(c, id=f"wild-{i}", train=Data(c.train.x * 1e12, c.train.y), val=Data(c.val.x * 1e12, c.val.y)) for i, c in enumerate(people[:bad])]
    config = replace(EAGER, rounds=2, fraction=1.0, keep=keep, learn="lr", beta=0.0)  # nothing normalises such pixels away
    with pytest.warns(RuntimeWarning, match="client 'wild-0' is left out: FloatingPointError"):
        learner = FedL2P(model, config).fit([*people[bad:], *wild], runner=Runner(0))
    assert all(r["diverged"] == bad and len(r["clients"]) == 20 - bad and r["val_loss"] is not None for r in learner.history)
    alone = FedL2P(model, config).fit(people[bad:], runner=Runner(0))
    assert same(learner, alone)  # as if they had not been there
    assert min(map(_loss, learner.history[1:])) < _loss(learner.history[0])


def test_a_model_that_is_frozen_as_a_whole_learns_beta(model, federation):
    frozen = deepcopy(model)
    frozen.requires_grad_(False)
    for estimator in ("ift", "fomaml", "unrolled"):
        config = replace(EAGER, estimator=estimator, rounds=1)
        learner = FedL2P(frozen, config).fit(federation.seen, runner=Runner(0))
        start = untrained(frozen, config).state_dict()
        assert {name.split(".")[0] for name, t in learner.last_state.items() if not torch.equal(t, start[name])} == {"bn_net"}
        assert learner.personalize(federation.unseen[0])(federation.unseen[0].test.x).isfinite().all()


def test_half_precision_is_refused_at_once(model):
    with pytest.raises(ValueError, match="^parameters must be float32 or float64"):
        FedL2P(deepcopy(model).bfloat16())


def test_a_policy_that_has_not_learned_says_so(model, federation, tmp_path):
    """Of our own recipe; untrained meta-nets have a strategy to start from."""
    client, policy = federation.seen[0], FedL2P(model, Config(epochs=1, splits=1, choosing_rounds=1))
    for ask in (policy.strategy, policy.explain, policy.personalize, lambda c: policy.score([c], Runner(0)), lambda c: policy.compare([c], runner=Runner(0))):
        with pytest.raises(RuntimeError, match="has not learned yet; call fit first"):
            ask(client)
    assert FedL2P(model, Config.paper(epochs=1)).strategy(client).eta.any()
    policy.fit(federation.seen, runner=Runner(0)).save(tmp_path / "p")
    assert FedL2P.load(model, tmp_path / "p").strategy(client).bn == policy.strategy(client).bn


def test_what_is_no_model_no_config_and_no_clients(model, federation, tmp_path):
    client = federation.seen[0]
    for make, words in ((lambda: FedL2P("resnet"), "model must be a torch.nn.Module, got 'resnet'"), (lambda: FedL2P(model, {"epochs": 1}), "config must be a Config, got")):
        with pytest.raises(ValueError, match=words):
            make()
    policy = FedL2P(model, Config.paper(epochs=1))
    for ask in (policy.fit, policy.score, policy.compare):
        for wrong in (client, {client.id: client}, [client.train], [(client.train.x, client.train.y)], "abc", (c for c in [client])):
            with pytest.raises(ValueError, match="clients must be a list of Client, as make_client makes them, got"):
                ask(wrong)
        with pytest.raises(ValueError, match="the number of clients must be >= 1, got 0"):
            ask([])
    for ask in (policy.strategy, policy.personalize, policy.explain):
        with pytest.raises(ValueError, match="client must be a Client or Data, got"):
            ask(client.train.x)
    with pytest.raises(ValueError, match="rates must be numbers > 0, one or more, got"):
        policy.compare([client], rates=(-1,))
