"""What one client does: settings, meta-steps, the estimators, learning alone, scores."""

import warnings
import weakref
from copy import deepcopy
from dataclasses import asdict, fields, replace
from functools import partial
from typing import get_args

import pytest
import torch

from fedl2p import client as module
from fedl2p.bn import bn_layers, mix_bn
from fedl2p.client import (
    Config,
    Estimator,
    Step,
    l2p_client,
    l2p_passes,
    learn_client,
    meta_steps,
    move,
    policy,
    profile_of,
    score_all,
    score_policy,
    score_strategies,
    tune,
)
from fedl2p.core import generator
from fedl2p.data import Data
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.finetune import Tuning, batches
from fedl2p.hypergrad import NeumannDiverges
from fedl2p.metanet import MetaNets
from fedl2p.profile import profile
from fedl2p.runner import Failure, Outcome, Runner
from fedl2p.scores import baselines, score_client
from fedl2p.strategy import bn_c

pytestmark = pytest.mark.filterwarnings("ignore:the lowest validation loss was that of the meta-nets at their start")
QUICK = Config.paper(lr=0.05, epochs=1, rounds=3, fraction=0.5, meta_steps=1)


@pytest.fixture(scope="module")
def federation():
    return digits_federation(5, 5, size=30)


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(width=4), verbose=False)


def test_defaults_are_the_papers():
    c = Config.paper()
    assert (c.lr, c.epochs, c.batch_size, c.rounds, c.fraction, c.meta_steps) == (1e-3, 15, 32, 500, 0.1, 3)
    assert (c.meta_lr_bn, c.meta_lr_lr, c.meta_lr_scale, c.clip, c.neumann_terms, c.psi, c.patience) == (1e-3, 1e-3, 1e-4, 1.0, 3, 0.1, 50)
    assert (c.estimator, c.scaled, c.statistics, c.learn, c.hidden) == ("ift", False, "zero-one", "both", 100)
    with pytest.raises(AttributeError):
        c.lr = 1.0


NAN = float("nan")
WRONG = [
    ({"estimator": "adam"}, "estimator must be one of ift, fomaml, unrolled, got 'adam'"),
    ({"hvp": "none"}, "hvp must be one of exact, central, forward, got 'none'"),
    ({"learn": "all"}, "learn must be one of both, bn, lr, got 'all'"),
    ({"statistics": "mean"}, "statistics must be one of zero-one, pretrained, precise, got 'mean'"),
    ({"augment": "flip"}, "augment must be one of none, crop-flip, got 'flip'"),
    ({"keep": "best"}, "keep must be one of lowest, paired, after, got 'best'"),
    ({"inputs": "whitened"}, "inputs must be one of raw, standard, got 'whitened'"),
    ({"epochs": 0}, "epochs must be >= 1, got 0"),
    ({"rounds": 0}, "rounds must be >= 1, got 0"),
    ({"meta_steps": 0}, "meta_steps must be >= 1, got 0"),
    ({"fraction": 0.0}, "fraction must be in (0, 1], got 0.0"),
    ({"fraction": NAN}, "fraction must be in (0, 1], got nan"),
    ({"beta": 2.0}, "beta must be in [0, 1], got 2.0"),
    ({"lr": NAN}, "lr must be > 0 and finite, got nan"),
    ({"lr": -1.0}, "lr must be > 0 and finite, got -1.0"),
    ({"clip": 0.0}, "clip must be > 0 and finite, got 0.0"),
    ({"psi": 0.0}, "psi must be > 0 and finite, got 0.0"),
    ({"neumann_terms": -1}, "neumann_terms must be >= 0, got -1"),
    ({"last": 0}, "last must be >= 1 or None, got 0"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_settings(wrong, message):
    with pytest.raises(ValueError) as caught:
        Config.paper(**wrong)
    assert str(caught.value) == message


def test_settings_of_fine_tuning():
    config = Config.paper(epochs=2, batch_size=7, statistics="precise", augment="crop-flip", fill=[-1.0], personalize_on="train")
    assert config.tuning == Tuning(2, 7, "precise", "crop-flip", (-1.0,), "train")
    assert Config.paper().tuning == Tuning(15, 32, "zero-one", "none", (0.0,), "train+val")


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_half_precision(model, federation, estimator):
    """As on a GPU with --amp: other numbers in the third digit, the same types and shapes, nothing fails."""
    client, config = federation.seen[0], replace(QUICK, estimator=estimator)
    start = MetaNets.for_model(model, config.lr).state_dict()
    with torch.backends.mkldnn.flags(enabled=False):  # which has no half precision on many CPUs
        plain = learn_client(model, config, start, client, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = learn_client(model, config, start, client, 1)
            score = score_strategies(model, config, {"": bn_c(model, 0.1)}, client)[""].score
    assert all(half.state[k].dtype == v.dtype and (half.state[k] - v).abs().max() < 5e-4 for k, v in plain.state.items())
    assert half.report["val_loss"] == pytest.approx(plain.report["val_loss"], rel=0.02) and score.loss > 0


def test_ablations_move_only_their_meta_net(model, federation):
    client = federation.seen[0]
    start = MetaNets.for_model(model, 0.05).state_dict()
    for learn, moving in {"bn": ("bn_net",), "lr": ("lr_net", "eta_scale"), "both": ("bn_net", "lr_net", "eta_scale")}.items():
        moved = learn_client(model, replace(QUICK, learn=learn), start, client, 1).state
        assert {name.split(".")[0] for name in start if not torch.equal(moved[name], start[name])} == set(moving)
    known = profile(model, client.train.x)
    metanets = MetaNets.for_model(model, 0.05)
    assert policy(metanets, known, replace(QUICK, learn="lr", beta=1.0)).beta.tolist() == [1, 1, 1]
    assert set(policy(metanets, known, replace(QUICK, learn="bn")).eta.tolist()) == {torch.tensor(0.05).item()}


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_every_estimator_by_name(model, federation, estimator):
    moved = learn_client(model, replace(QUICK, estimator=estimator, epochs=3), MetaNets.for_model(model, 0.05).state_dict(), federation.seen[0], 1)
    assert moved.weight == len(federation.seen[0].val) and moved.report["val_loss"] > 0


def test_unrolled_learns_what_the_validation_loss_asks_for(model, federation):
    """Follow the exact gradient with one client: the validation loss that it minimises falls."""
    client = federation.seen[0]
    config = replace(QUICK, estimator="unrolled", epochs=4, meta_steps=15, meta_lr_bn=1e-2, meta_lr_lr=1e-2)
    losses = [step.val_loss for step in meta_steps(model, config, MetaNets.for_model(model, 0.05), client, 15, ("x",))]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_k_counts_passes_over_the_validation_samples(model, federation):
    client = federation.seen[0]
    wide = replace(client, val=client.train + client.val)
    n = len(list(meta_steps(model, replace(QUICK, batch_size=16), MetaNets.for_model(model, 0.05), wide, 2, ("x",))))
    assert n == 2 * -(-len(wide.val) // 16)


def test_the_validation_loss_is_that_of_all_samples_and_of_the_lambda_that_was_sent(model, federation):
    client = replace(federation.seen[0], val=federation.seen[0].train + federation.seen[0].val)
    config = replace(QUICK, batch_size=8)
    sent = MetaNets.for_model(model, 0.05).state_dict()
    reports = [learn_client(model, replace(config, meta_lr_bn=zeta, meta_lr_lr=zeta), sent, client, 1).report["val_loss"] for zeta in (0.0, 1.0)]
    assert reports[0] == reports[1]


def odd_model():
    """Modes as nobody else would leave them: they differ from layer to layer."""
    model = mix_bn(small_cnn(width=4), verbose=False).train()
    model.bn2.eval()
    model.bn1.mode = "batch"
    return model


def modes(model):
    return [m.training for m in model.modules()], [layer.mode for layer in bn_layers(model).values()]


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_a_loop_over_meta_steps_sees_the_callers_modes(federation, estimator):
    """Neither no_grad nor evaluation mode nor the batch norms' mode of the steps reach into the body of the loop."""
    model, config = odd_model(), replace(QUICK, estimator=estimator)
    own, seen = modes(model), []
    for step in meta_steps(model, config, MetaNets.for_model(model, 0.05), federation.seen[0], 2, ("x",)):
        seen.append((torch.is_grad_enabled(), modes(model)))
        assert step.strategy.eta.sum().requires_grad
    assert seen == [(True, own)] * 2 and modes(model) == own
    unfinished = meta_steps(model, config, MetaNets.for_model(model, 0.05), federation.seen[0], 2, ("x",))
    next(unfinished)
    assert torch.is_grad_enabled() and modes(model) == own


def test_modes_do_not_matter_to_meta_steps(model, federation):
    states = [learn_client(m, QUICK, MetaNets.for_model(m, 0.05).state_dict(), federation.seen[0], 1).state for m in (model, odd_model())]
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items())


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_meta_steps_are_tune_and_move(model, federation, estimator):
    client, config, key = federation.seen[0], replace(QUICK, estimator=estimator), (0, "learning", 1, "x")
    ours, theirs = MetaNets.for_model(model, 0.05), MetaNets.for_model(model, 0.05)
    steps = list(meta_steps(model, config, theirs, client, 2, key))
    known, losses = profile_of(model, config, client.train, key), []
    for k, part in enumerate(batches(len(client.val), 2, config.batch_size, generator(*key, "validation"))):
        step = tune(model, config, policy(ours, known, config), client, generator(*key, "training", k))
        losses.append(step.val_loss)
        move(model, config, ours, step, client.val[part])
    assert all(isinstance(step, Step) for step in steps) and [step.val_loss for step in steps] == losses
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))


def test_a_step_is_of_the_lambda_before_it_moves(model, federation):
    """What it holds does not change when lambda does."""
    client, metanets = federation.seen[0], MetaNets.for_model(model, 0.05)
    sent = policy(metanets, profile_of(model, QUICK, client.train, ("x",)), QUICK)
    steps = meta_steps(model, replace(QUICK, meta_lr_bn=1.0, meta_lr_lr=1.0), metanets, client, 2, ("x",))
    first = next(steps)
    second = next(steps)
    assert not any(value.requires_grad for value in first.tuned.hyper.values())
    assert torch.equal(first.tuned.hyper["eta"], sent.eta) and torch.equal(first.tuned.hyper["beta"], sent.beta)
    assert not torch.equal(second.tuned.hyper["eta"], sent.eta) and not torch.equal(second.tuned.hyper["beta"], sent.beta)
    assert len(first.fresh()) == min(QUICK.batch_size, len(client.train)) and first.tuned.strategy is first.strategy


def test_no_number_of_lambda_moves_further_than_its_rate_times_clip(model, federation):
    config = replace(QUICK, clip=1e-3, meta_lr_bn=0.5, meta_lr_lr=0.25, meta_lr_scale=0.125)
    metanets = MetaNets.for_model(model, 0.05)
    before = deepcopy(metanets.state_dict())
    next(steps := meta_steps(model, config, metanets, federation.seen[0], 1, ("x",)))
    assert all(torch.equal(t, before[name]) for name, t in metanets.state_dict().items())
    assert next(steps, None) is None
    for name, zeta in {"bn_net": 0.5, "lr_net": 0.25, "eta_scale": 0.125}.items():
        moved = max((t - before[k]).abs().max().item() for k, t in metanets.state_dict().items() if k.startswith(name))
        assert moved == pytest.approx(zeta * 1e-3, rel=1e-3)


def test_neumann_series_that_diverge_are_counted_by_the_type_of_the_warning(model, federation, monkeypatch):
    client, start = federation.seen[0], MetaNets.for_model(model, 0.05).state_dict()
    wild = replace(QUICK, psi=1e3, meta_steps=3)
    assert learn_client(model, wild, start, client, 1).report["diverging"] == 3
    assert learn_client(model, QUICK, start, client, 1).report["diverging"] == 0

    def says(category, *_):
        warnings.warn("the Neumann series diverges", category, stacklevel=1)

    for category, times in {NeumannDiverges: 3, RuntimeWarning: 0}.items():
        monkeypatch.setattr(module, "move", partial(says, category))
        assert learn_client(model, wild, start, client, 1).report["diverging"] == times


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_steps_that_are_over_are_let_go(model, federation, monkeypatch, estimator):
    """A round has as many steps as there are validation batches, and each holds weights of the whole model."""
    ends, alive = [], []

    def watched(*fields):
        step = tune(*fields)
        ends.append(weakref.ref(step.tuned.path.end["head.weight"]))
        alive.append(sum(end() is not None for end in ends))
        return step

    monkeypatch.setattr(module, "tune", watched)
    start = MetaNets.for_model(model, 0.05).state_dict()
    learn_client(model, replace(QUICK, estimator=estimator, meta_steps=8), start, federation.seen[0], 1)
    assert len(alive) == 8 and max(alive) <= 2  # the last one and the new one


def test_budget_of_l2p():
    assert l2p_passes(Config.paper(), 1000) == 150  # 500 rounds, 100 of 1000 clients, 3 steps
    assert l2p_passes(replace(Config.paper(), rounds=15, fraction=0.2), 20) == 9


def test_l2p_uses_only_its_own_client(model, federation):
    result = l2p_client(model, QUICK, 2, federation.seen[0])
    assert result.id == federation.seen[0].id and 0 <= result.score.accuracy <= 1


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
    nan[0] = NAN
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
    with pytest.warns(RuntimeWarning, match="train is empty"), pytest.raises(RuntimeError, match="^all 5 clients failed; see the warnings$"):
        score_all(score_strategies, model, QUICK, baselines(model, 0.05), empty, Runner(0))
