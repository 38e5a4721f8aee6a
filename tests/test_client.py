"""What one client does: settings, meta-steps, the estimators, learning alone, scores."""

from dataclasses import asdict, fields, replace
from functools import partial

import pytest
import torch

from fedl2p.bn import mix_bn
from fedl2p.client import (
    ESTIMATORS,
    Config,
    l2p_client,
    l2p_passes,
    learn_client,
    meta_steps,
    policy,
    score_all,
    score_strategies,
)
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.finetune import baselines
from fedl2p.metanet import MetaNets
from fedl2p.profile import profile
from fedl2p.strategy import bn_c

pytestmark = pytest.mark.filterwarnings("ignore:the lowest validation loss was that of the meta-nets at their start")
QUICK = Config(lr=0.05, epochs=1, rounds=3, fraction=0.5, meta_steps=1)


@pytest.fixture(scope="module")
def federation():
    return digits_federation(5, 5, size=30)


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(width=4), verbose=False)


def test_defaults_are_the_papers():
    c = Config()
    assert (c.lr, c.epochs, c.batch_size, c.rounds, c.fraction, c.meta_steps) == (1e-3, 15, 32, 500, 0.1, 3)
    assert (c.meta_lr_bn, c.meta_lr_lr, c.meta_lr_scale, c.clip, c.neumann_terms, c.psi, c.patience) == (1e-3, 1e-3, 1e-4, 1.0, 3, 0.1, 50)
    assert (c.estimator, c.scaled, c.statistics, c.learn, c.hidden) == ("ift", False, "running", "both", 100)
    with pytest.raises(AttributeError):
        c.lr = 1.0


@pytest.mark.parametrize("wrong", [{"estimator": "adam"}, {"hvp": "none"}, {"learn": "all"}, {"statistics": "mean"}, {"epochs": 0}, {"rounds": 0}, {"meta_steps": 0}, {"fraction": 0.0}, {"fraction": float("nan")}, {"beta": 2.0}, {"lr": float("nan")}, {"lr": -1.0}, {"clip": 0.0}, {"psi": 0.0}, {"neumann_terms": -1}, {"last": 0}])
def test_wrong_settings(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_half_precision(model, federation, estimator):
    """As on a GPU with --amp: other numbers in the third digit, the same types and shapes, nothing fails."""
    client, config = federation.seen[0], replace(QUICK, estimator=estimator)
    start = MetaNets.for_model(model, config.lr).state_dict()
    with torch.backends.mkldnn.flags(enabled=False):  # which has no half precision on many CPUs
        plain = learn_client(model, config, start, client, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = learn_client(model, config, start, client, 1)
            score = score_strategies(model, {"": bn_c(model, 0.1)}, config, client)[""].score
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


@pytest.mark.parametrize("estimator", ESTIMATORS)
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


def test_budget_of_l2p():
    assert l2p_passes(Config(), 1000) == 150  # 500 rounds, 100 of 1000 clients, 3 steps
    assert l2p_passes(replace(Config(), rounds=15, fraction=0.2), 20) == 9


def test_l2p_uses_only_its_own_client(model, federation):
    result = l2p_client(model, QUICK, 2, federation.seen[0])
    assert result.id == federation.seen[0].id and 0 <= result.score.accuracy <= 1


def test_baselines_are_scored_like_policies(model, federation):
    results = score_all(partial(score_strategies, model, baselines(model, 0.05), QUICK), federation.unseen, model, workers=1)
    assert [set(r) for r in results] == [set(baselines(model, 0.05))] * 5
    assert {f.name for f in fields(Config)} == set(asdict(Config()))
