"""What one client does: meta-steps, the estimators, learning alone."""

import warnings
import weakref
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch

from fedl2p import client as module
from fedl2p.bn import bn_layers, mix_bn
from fedl2p.client import Step, l2p_client, l2p_passes, learn_client, meta_steps, move, tune
from fedl2p.config import Config, Estimator
from fedl2p.core import generator
from fedl2p.digits import small_cnn
from fedl2p.finetune import batches
from fedl2p.hypergrad import NeumannDiverges
from fedl2p.metanet import MetaNets
from fedl2p.policy import policy, profile_of
from fedl2p.profile import profile
from fedl2p.scoring import score_strategies
from fedl2p.strategy import bn_c

pytestmark = pytest.mark.filterwarnings("ignore:no round had a lower validation loss than the first")
QUICK = Config.paper(lr=0.05, epochs=1, rounds=3, fraction=0.5, meta_steps=1)


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
