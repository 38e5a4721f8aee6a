"""Algorithm 1: its bookkeeping, its invariances, and clients with bad data."""

import json
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedl2p.bn import mix_bn
from fedl2p.checkpoint import fingerprint
from fedl2p.client import (
    Config,
    learn_client,
)
from fedl2p.data import Client, Data
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.federated import Diverged, Round
from fedl2p.learner import FedL2P
from fedl2p.runner import quiet

pytestmark = pytest.mark.filterwarnings("ignore:the lowest validation loss was that of the meta-nets at their start")
QUICK = Config(lr=0.05, epochs=1, rounds=3, fraction=0.5, meta_steps=1)


@pytest.fixture(scope="module")
def federation():
    return digits_federation(5, 5, size=30)


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(width=4), verbose=False)


def same(a: FedL2P, b: FedL2P) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.metanets.state_dict().values(), b.metanets.state_dict().values(), strict=True))


def test_the_same_whatever_the_order_the_workers_and_the_global_state(model, federation):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = FedL2P(model, QUICK).fit(federation.seen, workers=1, track=quiet)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1] and np.random.get_state()[1].tolist() == states[2]
    torch.manual_seed(99)
    second = FedL2P(model, QUICK).fit(federation.seen[::-1], workers=2, track=quiet)
    assert same(first, second) and first.history == second.history
    assert not same(first, FedL2P(model, replace(QUICK, seed=1)).fit(federation.seen, workers=1, track=quiet))
    scores = [[r.score for r in first.score(federation.unseen, workers=w)] for w in (1, 2)]
    assert scores[0] == scores[1]


def test_the_model_is_not_changed(federation):
    plain = small_cnn(width=4).train()
    before = {k: v.clone() for k, v in plain.state_dict().items()}
    learner = FedL2P(plain, QUICK)
    frozen = fingerprint(learner.model)
    learner.fit(federation.seen, workers=1, track=quiet).personalize(federation.unseen[0])
    assert all(torch.equal(v, before[k]) for k, v in plain.state_dict().items())
    assert fingerprint(learner.model) == frozen


def test_best_lambda_is_the_one_that_was_sent(model, federation):
    learner = FedL2P(model, replace(QUICK, rounds=4)).fit(federation.seen, workers=1, track=quiet)
    losses = [r["val_loss"] for r in learner.history]
    best = losses.index(min(losses))
    if best == 0:
        assert same(learner, FedL2P(model, QUICK))
    else:  # what came out of the round before is what was sent
        from fedl2p.federated import fedavg

        start = dict(FedL2P(model, QUICK).metanets.state_dict())
        rounds = list(fedavg(start, federation.seen, partial(learn_client, learner.model, learner.config), best, 0.5, workers=1))
        assert all(torch.equal(v, rounds[-1].state[k]) for k, v in learner.metanets.state_dict().items())


def test_it_says_when_nothing_was_kept(model, federation):
    with pytest.warns(RuntimeWarning, match="as they were"):
        learner = FedL2P(model, replace(QUICK, rounds=1)).fit(federation.seen, workers=1, track=quiet)
    assert same(learner, FedL2P(model, QUICK))


def test_paired_rule_chooses_by_the_difference():
    from fedl2p.learner import _loss, _record

    reports = {"a": {"val_loss": 0.3, "start_loss": 0.5, "diverging": 0}, "b": {"val_loss": 0.9, "start_loss": 0.9, "diverging": 0}}
    assert _loss(_record(Round(1, {}, reports, {}))) == pytest.approx(0.6 - 0.7)


def test_augmented_learning_does_not_depend_on_workers(model, federation):
    config = replace(QUICK, augment="crop-flip", keep="paired")
    first, second = (FedL2P(model, config).fit(federation.seen, workers=n, track=quiet) for n in (1, 2))
    assert same(first, second) and first.history == second.history
    client = federation.seen[0]
    assert torch.equal(first.strategy(client).eta, first.score([client], workers=1)[0].strategy.eta)


def test_patience(model, federation):
    still = replace(QUICK, rounds=30, patience=2, meta_lr_bn=0.0, meta_lr_lr=0.0, meta_lr_scale=0.0, fraction=1.0, estimator="fomaml")
    losses = [r["val_loss"] for r in FedL2P(model, still).fit(federation.seen, workers=1, track=quiet).history]
    assert len(losses) < 30 and losses.index(min(losses)) == len(losses) - 3


def test_a_lambda_under_which_somebody_diverges_is_not_the_best():
    from fedl2p.learner import _record

    reports = {"a": {"val_loss": 0.1, "diverging": 0}}
    assert _record(Round(1, {}, reports, {"b": "ValueError: train is empty"}))["val_loss"] == 0.1
    assert _record(Round(1, {}, reports, {"b": "FloatingPointError: the loss is nan"}))["val_loss"] is None
    assert _record(Round(1, {}, {}, {"b": "ValueError: train is empty"}))["val_loss"] is None


def test_other_clients_do_not_go_on(model, federation, tmp_path):
    FedL2P(model, QUICK).fit(federation.seen, tmp_path, workers=1, track=quiet)
    with pytest.raises(ValueError, match="model and clients was"):
        FedL2P(model, QUICK).fit(digits_federation(5, 5, alpha=0.1, size=30).seen, tmp_path, workers=1, track=quiet)


def bad_clients(client: Client) -> dict[str, Client]:
    nan = client.train.x.clone()
    nan[0] = float("nan")
    return {"empty": replace(client, id="empty", train=client.train[:0], val=client.val[:0], test=client.test[:0]), "labels": replace(client, id="labels", train=Data(client.train.x, client.train.y + 20)),
            "nan": replace(client, id="nan", train=Data(nan, client.train.y)), "no validation": replace(client, id="no validation", val=client.val[:0])}


def test_bad_clients_are_left_out_and_good_ones_learn(model, federation):
    bad = bad_clients(federation.seen[0])
    config = replace(QUICK, fraction=1.0, rounds=1)
    with pytest.warns(RuntimeWarning, match="is left out"):
        learner = FedL2P(model, config).fit([*federation.seen, *bad.values()], workers=1, track=quiet)
    assert set(learner.history[0]["failed"]) == set(bad)
    assert same(learner, FedL2P(model, config).fit(federation.seen, workers=1, track=quiet))
    with pytest.warns(RuntimeWarning, match="client 'nan' is left out"):
        good = learner.score([*federation.unseen, bad["nan"]], workers=1)
    assert len(good) == len(federation.unseen)
    for name in ("empty", "labels", "nan"):
        with pytest.raises(ValueError, match="client"):
            learner.personalize(bad[name])
    learner.personalize(bad["no validation"])  # needs none


@pytest.mark.filterwarnings("ignore:round 1")
def test_only_bad_clients_is_an_error(model, federation):
    with pytest.raises(RuntimeError, match="all of its 4 clients failed"):
        FedL2P(model, replace(QUICK, fraction=1.0)).fit(list(bad_clients(federation.seen[0]).values()), workers=1, track=quiet)


def test_one_sample_and_one_class_take_part(model, federation):
    client = federation.seen[0]
    single = Client("single", client.train[:1], client.val[:1], client.test[:1])
    one_class = replace(client, id="one class", train=Data(client.train.x, torch.zeros_like(client.train.y)))
    learner = FedL2P(model, replace(QUICK, fraction=1.0, rounds=1)).fit([single, one_class], workers=1, track=quiet)
    assert learner.history[0]["clients"] == ["one class", "single"] and not learner.history[0]["failed"]


def test_a_policy_comes_back_from_its_file(model, federation, tmp_path):
    config = replace(QUICK, last=3, learn="lr", beta=1.0)
    learner = FedL2P(model, config).fit(federation.seen, workers=1, track=quiet)
    learner.save(tmp_path / "policy.safetensors")
    again = FedL2P.load(small_cnn(width=4), tmp_path / "policy.safetensors")
    assert same(learner, again) and again.config == config
    with pytest.warns(RuntimeWarning, match="learned for other weights"):
        FedL2P.load(small_cnn(width=4, seed=9), tmp_path / "policy.safetensors")
    with pytest.raises(ValueError, match="another model"):
        FedL2P.load(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), tmp_path / "policy.safetensors")


def test_checkpoint_of_another_model_or_damaged(model, federation, tmp_path):
    FedL2P(model, QUICK).fit(federation.seen, tmp_path, workers=1, track=quiet)
    with pytest.raises(ValueError, match="model and clients was"):
        FedL2P(small_cnn(width=4, seed=5), QUICK).fit(federation.seen, tmp_path, workers=1, track=quiet)
    assert [json.loads(line)["round"] for line in (tmp_path / "rounds.jsonl").read_text().splitlines()] == [1, 2, 3]
    (tmp_path / "checkpoint.safetensors").write_bytes(b"oops")
    with pytest.raises(ValueError, match="delete the file"):
        FedL2P(model, QUICK).fit(federation.seen, tmp_path, workers=1, track=quiet)


def test_a_finished_run_is_not_run_again(model, federation, tmp_path):
    first = FedL2P(model, QUICK).fit(federation.seen, tmp_path, workers=1, track=quiet)
    second = FedL2P(model, QUICK).fit(federation.seen, tmp_path, workers=1, track=lambda rounds, *_: iter(list(rounds) and pytest.fail("ran again") or ()))
    assert same(first, second) and first.history == second.history


def test_strategy_for_a_client_or_for_data(model, federation):
    learner, client = FedL2P(model, QUICK), federation.unseen[0]
    both = client.train + client.val
    assert torch.equal(learner.strategy(client).eta, learner.strategy(both).eta)
    assert not learner.strategy(client).eta.requires_grad
    assert isinstance(learner.personalize(both), nn.Module)


def test_a_model_without_batch_norm_learns_rates(federation):
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    learner = FedL2P(linear, replace(QUICK, lr=0.1)).fit(federation.seen, workers=1, track=quiet)
    assert learner.strategy(federation.unseen[0]).beta.shape == (0,)
    assert len(learner.score(federation.unseen, workers=1)) == 5


def test_a_first_round_without_answers_can_be_kept(model, federation, tmp_path):
    """Then the best lambda is the one that was there, and both are written into one file."""
    wild = replace(QUICK, lr=1e30, fraction=0.5)
    with pytest.raises(Diverged, match="FloatingPointError"), pytest.warns(RuntimeWarning, match="is left out"):
        FedL2P(model, wild).fit(federation.seen, tmp_path, workers=1, track=quiet)
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 2  # the third empty round in a row is an error
