"""Records and pictures: known answers, and cases at the edge."""

import math

import matplotlib
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedl2p.analysis import (
    Gain,
    accuracy_of,
    colours,
    frozen,
    gains,
    layers_of,
    mean_gain,
    plot_accuracy,
    plot_course,
    plot_gains,
    plot_learning,
    plot_sparsity,
    plot_strategies,
    records,
    sparsity,
)
from fedl2p.evaluation import Score
from fedl2p.profile import Profile
from fedl2p.scoring import Result
from fedl2p.strategy import Strategy

matplotlib.use("agg")


def record(client="a", domain="", beta=(0.5,), eta=(0.1, 0.0), **more):
    return {"method": "m", "pool": "seen", "client": client, "domain": domain, "right": 5, "n": 10, "beta": list(beta), "eta": list(eta), **more}


LAYERS = {"beta": ["bn"], "eta": ["w", "b"], "sizes": [30, 10]}


def test_records_are_plain_numbers():
    result = Result("a", "d", Score(2, float("inf"), 4), Strategy(torch.tensor([0.5]), torch.tensor([0.25])), Profile(torch.tensor([1.0]), torch.tensor([2.0, 3.0]), torch.tensor([4.0, 0.5])))
    [plain] = records("m", "seen", [result], lr=0.1)
    assert plain == {"method": "m", "pool": "seen", "client": "a", "domain": "d", "right": 2, "loss": None, "n": 4, "beta": [0.5], "eta": [0.25], "xi": [1.0], "feature_stats": [2.0, 3.0], "lr": 0.1}  # labels are the client's own
    assert accuracy_of(plain) == 0.5
    assert "xi" not in records("m", "seen", [result._replace(profile=None)])[0]


def test_layers_of_a_model_without_batch_norm():
    layers = layers_of(nn.Linear(3, 2))
    assert layers == {"beta": [], "eta": ["weight", "bias"], "sizes": [6, 2]}
    figure = plot_strategies([record(beta=(), eta=(0.1, 0.2))], layers)
    assert len(figure.axes) == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1, max_size=8))
def test_sparsity_is_the_share_of_parameters(tensors):
    sizes, off = zip(*tensors, strict=True)
    [share] = sparsity([[0.0 if o else -0.1 for o in off]], sizes)
    assert share == sum(n for n, o in tensors if o) / sum(sizes)
    assert frozen([[0.0 if o else -0.1 for o in off]]) == [float(o) for o in off]


@pytest.mark.parametrize(("eta", "sizes", "message"), [
    ([[0.1]], [1, 2], r"rows of eta must be of length 2, the length of sizes, got \[1\]"),
    ([[0.1]], [0], "sum of sizes must be >= 1, got 0"),
    ([[]], [], "sum of sizes must be >= 1, got 0"),
])
def test_sparsity_needs_sizes_that_fit(eta, sizes, message):
    with pytest.raises(ValueError, match=message):
        sparsity(eta, sizes)


def test_gains_know_pools_and_seeds():
    results = [record(pool="unseen") | {"method": m, "right": r, "seed": s} for m, r, s in (("x", 9, 0), ("y", 4, 0), ("y", 1, 1))]
    assert [g.points for g in gains(results, "x", "y", "unseen")] == [50.0]
    assert gains(results, "x", "y") == [] and gains(results, "x", "nobody", "unseen") == []


def test_mean_gain_of_few_has_no_error():
    nothing = mean_gain([])
    assert math.isnan(nothing.mean) and nothing[3:] == (0, 0)
    alone = mean_gain([Gain("a", "", {0: 3.0}, 1)])
    assert alone.mean == 3.0 and math.isnan(alone.seeds_error) and math.isnan(alone.clients_error) and str(alone) == "+3.0 ± — / —"
    one_seed = mean_gain([Gain("a", "", {None: 3.0}, 1), Gain("b", "", {None: -1.0}, 1)])
    assert math.isnan(one_seed.seeds_error) and one_seed.clients_error == pytest.approx(2.0) and one_seed[3:] == (1, 2)
    one_client = mean_gain([Gain("a", "", {0: 3.0, 1: 5.0}, 1)])
    assert one_client.seeds_error == pytest.approx(1.0) and str(one_client) == "+4.0 ± 1.0 / —"


def test_errors_over_seeds_and_over_clients():
    """By hand; the second seed has other clients. Clients: 2, (0 + 4) / 2 and 8; seeds: 1 and 6."""
    found = mean_gain([Gain("c", "", {1: 8.0}, 1), Gain("a", "", {0: 2.0}, 1), Gain("b", "", {0: 0.0, 1: 4.0}, 1)])
    assert found == pytest.approx((4.0, 2.5, 2.0, 2, 3)) and str(found) == "+4.0 ± 2.5 / 2.0"


def test_a_gain_is_the_mean_over_its_seeds():
    assert Gain("a", "", {0: 100 / 3, 1: 100 / 3, 2: -200 / 3}, 3).points == 0.0  # an error of rounding is no gain
    both = [record() | {"method": m, "right": r, "seed": s} for m, r, s in (("x", 9, 0), ("y", 4, 0), ("x", 4, 1), ("y", 5, 1))]
    [gain] = gains(both, "x", "y")
    assert gain.by_seed == pytest.approx({0: 50.0, 1: -10.0}) and gain.points == 20.0


def test_colours_do_not_depend_on_the_order():
    assert colours(["b", "a", "b"]) == colours(["a", "b"]) == {"a": "C0", "b": "C1"}


def test_pictures_at_the_edge():
    one, zero = [record()], [record(eta=(0.0, 0.0))]
    wide = [record(eta=(1e-6, 1.0)), record(client="b", eta=(0.0, -0.5))]
    assert plot_strategies(wide, LAYERS).axes[1].get_xscale() == "symlog"
    assert plot_strategies(one, LAYERS, zero, "t").axes[1].get_xscale() == "linear"
    top, bottom = plot_sparsity(zero, LAYERS, one).axes
    assert [bar.get_width() for bar in bottom.patches] == [1.0, 1.0] and top.lines[0].get_ydata().tolist() == [1.0]
    assert "no strategies were recorded" in plot_course([], LAYERS).axes[0].texts[0].get_text()
    course = plot_course([{"round": 1, "val_loss": None, "beta": [0.5], "eta": [0.1, 0.1]}], LAYERS)
    assert [[list(line.get_ydata()) for line in ax.lines] for ax in course.axes] == [[[0.5]], [[0.1], [0.1]]]
    losses = plot_learning({("m", 0): [{"round": 1, "val_loss": None}, {"round": 2, "val_loss": 1.0}]}).axes[0]
    assert losses.get_ylabel() == "validation loss" and losses.lines[0].get_ydata()[1] == 1.0 and losses.get_ylim()[0] == 0
    less = plot_learning({("m", 0): [{"round": 1, "val_loss": 1.0, "start_loss": 2.0}]}).axes[0]
    assert "minus untrained" in less.get_ylabel() and less.lines[0].get_ydata().tolist() == [-1.0]
    assert "0 better, 1 the same, 1 worse" in plot_gains([Gain("a", "", {0: 0.0}, 1), Gain("b", "x", {0: -3.0}, 1)]).axes[0].get_xlabel()
    bars = plot_accuracy({"m": {"seen": [0.5, float("nan")]}, "n": {"unseen": [0.1]}, "nothing": {}}).axes[0].patches
    assert [bar.get_width() for bar in bars] == [0.5, 0.1]
    matplotlib.pyplot.close("all")
