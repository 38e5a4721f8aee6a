"""Clients and partitions: every sample once, whatever alpha; clients are checked before work."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedl2p.data import Client, Data, check, label_tastes, lda_partition, make_client, split, split_batches
from fedl2p.digits import digits_clients, small_cnn


@given(st.lists(st.integers(0, 6), min_size=1, max_size=200), st.integers(1, 60), st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 1e3, 1e8]), st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_every_sample_once_and_equal_sizes(labels, n_clients, alpha, seed):
    n_clients = min(n_clients, len(labels))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a division by zero would be one
        parts = lda_partition(torch.tensor(labels), n_clients, alpha, seed)
    assert torch.cat(parts).sort().values.tolist() == list(range(len(labels)))
    sizes = [len(p) for p in parts]
    assert max(sizes) - min(sizes) <= 1


def test_small_alpha_gives_few_classes_and_large_alpha_all():
    labels = torch.arange(10).repeat(500)
    classes = {alpha: np.mean([len(labels[p].unique()) for p in lda_partition(labels, 50, alpha)]) for alpha in (1e-3, 1e3)}
    assert classes[1e-3] < 1.5 and classes[1e3] > 9.5  # the last clients take what is left


def test_the_same_seed_gives_the_same_tastes_for_another_set():
    first, second = torch.arange(10).repeat(300), torch.arange(10).repeat(60)
    counts = [torch.stack([torch.bincount(y[p], minlength=10).double() / len(p) for p in lda_partition(y, 20, 0.5, seed=3)]) for y in (first, second)]
    same = torch.corrcoef(torch.stack([c.flatten() for c in counts]))[0, 1]
    other = torch.corrcoef(torch.stack([counts[0].flatten(), counts[1].roll(1, 0).flatten()]))[0, 1]
    assert same > 0.7 > other


@pytest.mark.parametrize("n_clients, alpha, classes", [(0, 1.0, 10), (5, 0.0, 10), (5, -1.0, 10), (5, float("nan"), 10), (5, float("inf"), 10), (5, 1.0, 0)])
def test_wrong_tastes(n_clients, alpha, classes):
    wrong = {name: value for name, value in {"n_clients": n_clients, "classes": classes, "alpha": alpha}.items() if not 0 < value < np.inf}
    (name, value), = wrong.items()
    with pytest.raises(ValueError, match=f"^{name} must be > 0 and finite, got {value}$"):
        label_tastes(n_clients, classes, alpha)


def test_more_clients_than_samples():
    with pytest.raises(ValueError, match=r"^n_clients must be in \[1, 3\], the number of samples, got 4$"):
        lda_partition(torch.tensor([0, 1, 2]), 4, 1.0)


@given(st.integers(0, 100), st.floats(0.05, 0.5))
@settings(max_examples=50, deadline=None)
def test_split_keeps_every_sample(n, share):
    data = Data(torch.arange(n).float(), torch.arange(n))
    a, b = split(data, share, torch.Generator().manual_seed(0))
    assert sorted([*a.y.tolist(), *b.y.tolist()]) == list(range(n))
    assert len(b) >= min(1, n // 2)


def test_a_client_depends_on_its_name_and_seed_only():
    x, y = torch.rand(30, 1), torch.arange(30)
    a, b, c = make_client("a", Data(x, y)), make_client("a", Data(x, y)), make_client("b", Data(x, y))
    assert torch.equal(a.train.y, b.train.y) and not torch.equal(a.train.y, c.train.y)


@pytest.mark.parametrize(
    "x, y, message",
    [
        ([1.0], torch.tensor([0]), "^x must be a tensor, got <class 'list'>$"),
        (torch.rand(1), [0], "^y must be a tensor, got <class 'list'>$"),
        (torch.rand(3), torch.rand(3), r"^y must be torch.int64 of shape \[N\], got torch.float32 of shape \[3\]$"),
        (torch.rand(3, 1), torch.zeros(3, 1, dtype=torch.int64), r"^y must be .*, got torch.int64 of shape \[3, 1\]$"),
        (torch.rand(3), torch.tensor([0, 1]), r"^x must have shape \[2, ...\], a sample a label, got \[3\]$"),
        (torch.tensor(1.0), torch.tensor([0]), r"^x must have shape \[1, ...\], a sample a label, got \[\]$"),
    ],
)
def test_wrong_data(x, y, message):
    with pytest.raises(ValueError, match=message):
        Data(x, y)


@pytest.fixture
def client():
    return digits_clients(5, seed=1, shifts=["clean"])[0]


def test_check_names_client_and_part(client):
    model = small_cnn()
    before = [m.training for m in model.modules()]
    check(client, model)
    assert [m.training for m in model.modules()] == before
    for part, words in [("train", "train is empty"), ("val", "val is empty")]:
        with pytest.raises(ValueError, match=f"^client 'clean-0': {words}$"):
            check(replace(client, **{part: client.train[:0]}), model)
    check(replace(client, val=client.val[:0]), model, ["train"])
    spoiled = client.test.x.clone()
    spoiled[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="^client 'clean-0': test.x has 1 values that are not finite"):
        check(replace(client, test=Data(spoiled, client.test.y)), model, ["train", "test"])
    check(replace(client, test=Data(spoiled, client.test.y)), model)  # nobody needs it for learning
    for label in (-1, 10):
        with pytest.raises(ValueError, match=rf"^client 'clean-0': val.y must be in \[0, 9\], the model's outputs, got {label} to {label}$"):
            check(replace(client, val=Data(client.val.x, torch.full_like(client.val.y, label))), model)


def test_clients_move_between_devices_and_keep_their_names():
    client = Client("x", *[Data(torch.zeros(2, 1), torch.tensor([0, 1]))] * 3, "home")
    moved = client.to("meta")
    assert moved.train.x.device.type == "meta" and (moved.id, moved.domain) == ("x", "home")


def test_ids_are_text_and_models_classify(client):
    with pytest.raises(ValueError, match="^id must be a str, got 5$"):
        make_client(5, client.train)

    class Pair(torch.nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(ValueError, match=r"^the model must return a tensor \[2, classes\] for 2 samples, got <class 'tuple'>$"):
        check(client, Pair())


def test_a_batch_norm_without_running_statistics_can_be_checked():  # A5: it wants two samples, in evaluation as well
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 10))
    x = torch.randn(1, 1, 8, 8)
    check(Client("a", *[Data(x, torch.zeros(1, dtype=torch.int64))] * 3), model)


@settings(deadline=None)
@given(n=st.integers(1, 200), batch_size=st.integers(1, 50))
def test_batches_hold_everything_once_and_none_is_alone(n, batch_size):
    parts = split_batches(torch.arange(n), batch_size)
    assert torch.equal(torch.cat(parts), torch.arange(n))
    assert all(len(part) == batch_size for part in parts[:-1]) and len(parts[-1]) <= max(batch_size + 1, 2)
    assert batch_size == 1 or n == 1 or all(len(part) > 1 for part in parts)


def test_numbers_of_another_precision_are_named(model):
    data = Data(torch.zeros(4, 1, 8, 8, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"train\.x must be torch\.float32, as the model is, got torch\.float64"):
        check(Client("a", data, data, data), model, ["train"])
