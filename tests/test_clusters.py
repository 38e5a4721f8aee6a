"""Clusters, distance maps and spread on cases with known answers and on broken ones; standardised inputs from end to end."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedl2p.analysis import Gain, plot_gains
from fedl2p.bn import mix_bn
from fedl2p.client import l2p_client, learn_client
from fedl2p.clusters import cluster, distance_map, distances, mean_strategy, plot_maps, spread, spread_table
from fedl2p.config import Config
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.learner import FedL2P
from fedl2p.metanet import MetaNets
from fedl2p.policy import policy, profile_of, untrained
from fedl2p.profile import Profile
from fedl2p.runner import Runner
from fedl2p.storage import load_tensors, save_tensors

QUICK = Config.paper(lr=0.05, epochs=1, rounds=3, fraction=0.4, meta_steps=1, estimator="fomaml")
STANDARD = replace(QUICK, inputs="standard")
rows_of = st.lists(st.lists(st.floats(-100, 100), min_size=2, max_size=2), min_size=6, max_size=6).map(torch.tensor)


@pytest.fixture(scope="module")
def federation():
    return digits_federation(5, 5, 0.5, 0)


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(), verbose=False)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


@settings(deadline=None)
@given(rows_of)
def test_a_map_is_symmetric_and_its_diagonal_is_zero(rows):
    answer = distance_map(rows, list("aabbcc"))
    torch.testing.assert_close(answer.values, answer.values.T, equal_nan=True)
    diagonal = answer.values.diagonal()
    assert ((diagonal.abs() < 1e-9) | diagonal.isnan()).all()
    assert bool(answer.why) == bool(diagonal.isnan().any())


@settings(deadline=None)
@given(rows_of, st.floats(1e-6, 1e6))
def test_a_map_does_not_depend_on_the_unit(rows, unit):
    one, other = (distance_map(r, list("aabbcc")).values for r in (rows.double(), rows.double() * unit))
    torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(rows_of)
def test_variance_splits_into_two_parts(rows):
    s = spread(rows, list("abcabc"))
    torch.testing.assert_close(s.between + s.within, s.deviation**2, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(s.deviation**2, rows.double().var(0, correction=0))


def test_what_differs_by_rounding_only_is_the_same():
    rows = torch.full((4, 3), 0.5)
    rows[0, 0] += 1e-8
    assert not distances(rows).any()
    assert cluster(rows, list("aabb")).why == "all clients have the same numbers"
    assert distance_map(rows, list("aabb")).why == "all clients alike: a, b"


def test_clients_too_far_apart_for_any_similarity_are_said(monkeypatch):
    """scikit-learn may give up on a matrix without any similarity; whether it does depends on its version."""
    def give_up(*args):
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr("sklearn.cluster.SpectralClustering.fit_predict", give_up)
    assert cluster(torch.tensor([[0.0], [1e3], [2e3]]), list("aab")).why == "clients are too far apart to be similar to each other"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_named(bad):
    with pytest.raises(ValueError, match="rows must be finite, got NaN or infinity"):
        cluster(torch.tensor([[bad], [1.0], [2.0]]), list("aab"))


@pytest.mark.parametrize("function", [cluster, distance_map, spread])
def test_a_domain_for_each_client(function):
    with pytest.raises(ValueError, match="number of domains must be 3, one for each row, got 2"):
        function(torch.zeros(3, 1), ["a", "b"])


def test_constant_outputs_make_a_picture_and_a_table():
    rows = {"beta": torch.full((4, 2), 0.5), "eta": torch.tensor([[0.1], [0.1], [0.2], [0.3]])}
    figure = plot_maps(rows, list("aabb"))
    assert "all clients alike: a, b" in figure.axes[0].get_xlabel()
    table = spread_table({"x": [{"beta": [0.5], "eta": [0.0], "domain": "a"}] * 3})
    assert table.rows == [["x", "0", "—", "0", "—"]]


def test_the_mean_of_equal_clients_is_each_of_them(model, federation):
    client, learner = federation.seen[0], FedL2P(model, QUICK)
    twins = [replace(client, id="a"), replace(client, id="b")]
    with torch.no_grad():
        own = policy(learner.metanets, profile_of(model, QUICK, client.train, (0,)), QUICK)
    torch.testing.assert_close(mean_strategy(learner, twins).eta, own.eta)


def test_standardised_inputs_have_mean_0_and_deviation_1(model, federation):
    learner = FedL2P(model, STANDARD).fit(federation.seen, runner=Runner(0))
    known = [profile_of(model, STANDARD, c.train, (0,)) for c in federation.seen]
    inputs = torch.stack([torch.cat([p.xi, p.feature_stats]) for p in known])
    torch.testing.assert_close(learner.metanets.center, inputs.mean(0))
    torch.testing.assert_close(learner.metanets.deviation, inputs.std(0, correction=0), rtol=1e-3, atol=1e-6)


def test_a_run_with_standardised_inputs_goes_on(model, federation, tmp_path):
    whole = FedL2P(model, STANDARD).fit(federation.seen, runner=Runner(2))

    def stopped(rounds, title, total, done):
        for r in rounds:
            yield r
            if r.number == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FedL2P(model, STANDARD).fit(federation.seen, tmp_path, Runner(0, progress=stopped))
    parts = FedL2P(model, STANDARD).fit(federation.seen, tmp_path, Runner(0))
    assert equal(parts.last_state, whole.last_state) and equal(parts.metanets.state_dict(), whole.metanets.state_dict())


def test_a_policy_keeps_what_it_compares_with(model, federation, tmp_path):
    learner = FedL2P(model, STANDARD).fit(federation.seen, runner=Runner(0))
    learner.save(tmp_path / "policy")
    loaded = FedL2P.load(model, tmp_path / "policy")
    assert equal(loaded.metanets.state_dict(), learner.metanets.state_dict())
    torch.testing.assert_close(loaded.strategy(federation.unseen[0]).eta, learner.strategy(federation.unseen[0]).eta)


def test_a_policy_from_before_the_option_is_raw(model, tmp_path):
    FedL2P(model, QUICK).save(tmp_path / "policy")
    tensors, header = load_tensors(tmp_path / "policy", "fedl2p metanets 1")
    save_tensors(tmp_path / "old", tensors, {k: v for k, v in header.items() if k != "inputs"})
    assert MetaNets.load(tmp_path / "old", model).inputs == "raw"


def test_a_client_from_elsewhere_gets_a_strategy_within_reason(model, federation):
    learner = FedL2P(model, STANDARD).fit(federation.seen, runner=Runner(0))
    strange = Profile(torch.full((3,), 1e6), torch.full((14,), -1e6))
    assert learner.metanets(strange).eta.abs().max() < 1.0


def test_pairs_are_compared_with_untrained_nets_that_see_the_same(model, federation):
    config = replace(STANDARD, keep="paired", meta_lr_bn=0.0, meta_lr_lr=0.0, meta_lr_scale=0.0)
    learner = FedL2P(model, config).fit(federation.seen, runner=Runner(0))
    assert [r["start_loss"] for r in learner.history] == [r["val_loss"] for r in learner.history]
    state = {name: t.clone() for name, t in learner.metanets.state_dict().items()}
    state["center"] += 100.0  # untrained nets with another idea of the mean say something else
    told = learn_client(model, config, state, federation.seen[0], 1).report
    assert told["start_loss"] == told["val_loss"]
    torch.testing.assert_close(untrained(model, config, state).center, state["center"])


def test_a_client_that_cannot_describe_itself_is_left_out(model, federation):
    broken = replace(federation.seen[0], train=federation.seen[0].train[:0])
    with pytest.warns(RuntimeWarning, match="is left out"):
        learner = FedL2P(model, STANDARD).fit([broken, *federation.seen[1:]], runner=Runner(0))
    assert learner.metanets.deviation.isfinite().all()


def test_who_learns_alone_has_nobody_to_compare_with(model, federation):
    alone, raw = (l2p_client(model, config, 1, federation.seen[0]) for config in (STANDARD, QUICK))
    assert torch.equal(alone.strategy.eta, raw.strategy.eta)


def test_other_inputs_are_named(model):
    with pytest.raises(ValueError, match="inputs must be one of raw, standard, got 'log'"):
        Config.paper(inputs="log")
    with pytest.raises(ValueError, match="inputs must be one of raw, standard, got 'log'"):
        MetaNets.for_model(model, 0.1, inputs="log")


def test_many_domains_make_no_large_picture():
    """A page of 400 clients in 200 domains took gigabytes and minutes: a number in each of 40,000 squares, and a legend of 200 names."""
    rows, domains = torch.randn(80, 3, generator=torch.Generator().manual_seed(0)), [f"d{i % 40:02}" for i in range(80)]
    fig = plot_maps({"a": rows}, domains)
    ax = fig.axes[0]
    assert not ax.texts and len(ax.get_xticklabels()) == len(ax.get_yticklabels()) == 20
    assert not plot_gains([Gain(f"c{i}", d, {0: float(i)}, 10) for i, d in enumerate(domains)]).legends
    few = plot_maps({"a": rows}, [f"d{i % 4}" for i in range(80)])
    assert len(few.axes[0].texts) == 16


def test_means_of_distances_as_they_are_defined():
    rows, domains = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), list("aabbbccca")
    apart = distances(rows)
    mean = {}
    for a in "abc":
        for b in "abc":
            mean[a, b] = torch.stack([apart[i, j] for i in range(9) for j in range(9) if i != j and (domains[i], domains[j]) == (a, b)]).mean()
    expected = torch.stack([(mean[a, b] / (mean[a, a] * mean[b, b]).sqrt()).log() for a in "abc" for b in "abc"]).view(3, 3)
    torch.testing.assert_close(distance_map(rows, domains).values, expected)
