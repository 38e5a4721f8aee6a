"""Clients are personalized and judged: under strategies, under a policy, many at a time."""

from dataclasses import asdict, fields, replace
from functools import partial

import pytest
import torch

from fedl2p.config import Config
from fedl2p.core import generator
from fedl2p.data import Data
from fedl2p.evaluation import baselines, score_client
from fedl2p.metanet import MetaNets
from fedl2p.profile import profile
from fedl2p.runner import Failure, Outcome, Runner
from fedl2p.scoring import score_all, score_policy, score_strategies

QUICK = Config.paper(lr=0.05, epochs=1, rounds=3, fraction=0.5, meta_steps=1)


def test_baselines_are_scored_like_policies(model, federation):
    results = score_all(score_strategies, model, QUICK, baselines(model, 0.05), federation.unseen, Runner(0))
    assert [set(r) for r in results] == [{"none", "ft-c", "ft-g", "ft-i"}] * 5
    assert {f.name for f in fields(Config)} == set(asdict(Config.paper()))


def test_strategies_are_judged_on_test_or_on_validation_samples(model, federation):
    client, strategies = federation.unseen[0], baselines(model, 0.05)
    for held_out in (True, False):
        results = score_strategies(model, QUICK, strategies, client, held_out=held_out)
        numbers = partial(generator, QUICK.seed, "personalize", client.id)
        for name, strategy in strategies.items():
            assert results[name].score == score_client(model, strategy, client, QUICK.tuning, numbers(), held_out)
            assert results[name].score.n == len(client.test if held_out else client.val)
            assert (results[name].id, results[name].domain, results[name].strategy) == (client.id, client.domain, strategy)
    score_strategies(model, QUICK, strategies, replace(client, val=client.val[:0]))
    score_strategies(model, QUICK, strategies, replace(client, test=client.test[:0]), held_out=False)
    with pytest.raises(ValueError, match=f"client '{client.id}': val is empty"):
        score_strategies(model, QUICK, strategies, replace(client, val=client.val[:0]), held_out=False)
    with pytest.raises(ValueError, match=f"client '{client.id}': test is empty"):
        score_strategies(model, QUICK, strategies, replace(client, test=client.test[:0]))


def test_a_policy_is_scored_by_the_strategy_that_it_makes(model, federation):
    client, state = federation.unseen[0], MetaNets.for_model(model, 0.05).state_dict()
    result = score_policy(model, QUICK, state, client)
    again = score_strategies(model, QUICK, {"": result.strategy}, client)[""]
    known = profile(model, (client.train + client.val).x)
    assert result.score == again.score and not result.strategy.eta.requires_grad
    assert torch.equal(result.profile.xi, known.xi) and torch.equal(result.profile.feature_stats, known.feature_stats)


def test_bad_clients_are_named_before_a_policy_looks_at_them(model, federation):
    """The message names the client and the part, and not what happens to break first inside of the model."""
    client, state = federation.unseen[0], MetaNets.for_model(model, 0.05).state_dict()
    nan = client.train.x.clone()
    nan[0] = float("nan")
    bad = {"train is empty": replace(client, train=client.train[:0], val=client.val[:0]), "test is empty": replace(client, test=client.test[:0]),
           "train.x has 64 values that are not finite": replace(client, train=Data(nan, client.train.y))}
    for message, broken in bad.items():
        with pytest.raises(ValueError) as caught:
            score_policy(model, QUICK, state, broken)
        assert str(caught.value) == f"client {client.id!r}: {message}"


def test_scores_by_a_transport_and_their_progress(model, federation):
    came, titles = [], []

    def transport(tasks):
        came.extend(tasks)
        return (Outcome(None, Failure("died", "no reply")) if n == 1 else Outcome(task.client.id) for n, task in enumerate(tasks))

    def progress(items, title, total, done):
        titles.append((title, total, done))
        return items

    runner, ids = Runner(None, transport, progress), [c.id for c in federation.unseen]
    with pytest.warns(RuntimeWarning, match=f"client '{ids[1]}' is left out: no reply"):
        assert score_all(score_policy, model, QUICK, "lambda", federation.unseen, runner) == [ids[0], *ids[2:]]
    expected = [(score_policy, model, QUICK, "lambda", id, 0) for id in ids]
    assert [(*task[:4], task.client.id, task.number) for task in came] == expected
    with pytest.warns(RuntimeWarning):
        score_all(score_policy, model, QUICK, "lambda", federation.unseen, runner, "choosing rates")
        score_all(score_policy, model, QUICK, "lambda", federation.unseen, runner.titled("seed 0"), "choosing rates")
    assert titles == [("scoring clients", 5, 0), ("choosing rates", 5, 0), ("seed 0", 5, 0)]


def test_no_scores_at_all_is_an_error(model, federation):
    empty = [replace(c, train=c.train[:0]) for c in federation.unseen]
    with pytest.warns(RuntimeWarning, match="train is empty"), pytest.raises(RuntimeError, match="^all 5 clients failed; the last, 'inverted-0': .*train is empty$"):
        score_all(score_strategies, model, QUICK, baselines(model, 0.05), empty, Runner(0))
