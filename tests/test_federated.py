"""The loop: means, draws, workers, faults."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedl2p import runner as pool
from fedl2p.data import Client, Data
from fedl2p.federated import Update, average, fedavg, sample


def friends(n=4):
    return [Client(f"c{i}", *[Data(torch.full((i + 1, 1), float(i)), torch.zeros(i + 1, dtype=torch.int64))] * 3) for i in range(n)]


def step(state, client, number):
    return Update({"w": state["w"] + 0.1 * (client.train.x.mean() - state["w"])}, len(client.train), {"id": client.id})


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0.1, 100)), min_size=1, max_size=20), st.randoms())
@settings(max_examples=50, deadline=None)
def test_average_is_the_weighted_mean(pairs, rng):
    values, weights = zip(*pairs, strict=True)
    mean = average([({"w": torch.tensor([v], dtype=torch.float64)}, w) for v, w in pairs])["w"].item()
    assert mean == pytest.approx(np.average(values, weights=weights), abs=1e-9 * 1e3)


def test_average_keeps_types_and_counters():
    states = [{"w": torch.ones(2, dtype=t), "n": torch.tensor(k)} for t, k in [(torch.float16, 3), (torch.float16, 5)]]
    mean = average([(s, 1) for s in states])
    assert mean["w"].dtype == torch.float16 and mean["n"].dtype == torch.int64 and mean["n"] == 5
    for weights in ([0, 0], [-1, 2], [float("nan"), 1]):
        with pytest.raises(ValueError, match="weight"):
            average(zip(states, weights, strict=True))


def test_sample():
    ids = [f"c{i}" for i in range(10)]
    assert sample(ids, 0.3, 0, 1) == sample(reversed(ids), 0.3, 0, 1)
    assert len(sample(ids, 0.01, 0, 1)) == 1 and sample(ids, 1.0, 0, 1) == ids
    assert {i for n in range(40) for i in sample(ids, 0.1, 0, n)} == set(ids)
    for fraction in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="fraction is"):
            sample(ids, fraction, 0, 1)


def test_any_order_and_any_number_of_workers_give_the_same():
    people = friends()
    ends = [list(fedavg({"w": torch.zeros(1)}, order, step, 5, 0.5, workers=w))[-1].state["w"] for order, w in [(people, 1), (people[::-1], 1), (people, 2), (people[::-1], 3)]]
    assert all(torch.equal(e, ends[0]) for e in ends)


def test_a_run_that_goes_on_equals_an_unbroken_one():
    whole = list(fedavg({"w": torch.zeros(1)}, friends(), step, 6, 0.5, workers=1))
    rest = list(fedavg(whole[2].state, friends(), step, 6, 0.5, workers=1, done=3))
    assert [r.number for r in rest] == [4, 5, 6] and torch.equal(rest[-1].state["w"], whole[-1].state["w"])


def faulty(state, client, number):
    good = step(state, client, number)
    return {"c0": good, "c1": Update({"w": torch.full((1,), float("nan"))}, 1), "c2": Update({"w": torch.zeros(2)}, 1), "c3": Update({"v": torch.zeros(1)}, 1),
            "c4": Update({"w": torch.zeros(1)}, float("inf")), "c5": None, "c6": Update({"w": torch.zeros(1, dtype=torch.float64)}, 1)}[client.id]


@pytest.mark.filterwarnings("ignore:round 1")
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_answers_are_left_out_and_named(workers):
    with pytest.warns(RuntimeWarning, match="client 'c1' is left out"):
        (r,) = fedavg({"w": torch.zeros(1)}, friends(8), faulty, 1, 1.0, workers=workers)
    assert list(r.reports) == ["c0"] and set(r.failed) == {f"c{i}" for i in range(1, 8)}
    assert "not finite" in r.failed["c1"] and "shape [2]" in r.failed["c2"] and "something else" in r.failed["c3"] and "weight inf" in r.failed["c4"] and "KeyError" in r.failed["c7"]


@pytest.mark.filterwarnings("ignore:round 1")
def test_all_failing_is_an_error():
    with pytest.raises(RuntimeError, match="round 1: all of its 2 clients failed; the first, 'c1': sent w with values that are not finite"):
        list(fedavg({"w": torch.zeros(1)}, friends(3)[1:], faulty, 1, 1.0, workers=1))


@pytest.mark.filterwarnings("ignore:round")
def test_a_round_without_an_answer_is_not_the_end():
    """Four of five clients always fail, and each round asks one: rounds without an answer leave the state as it is."""
    people = [friends(1)[0], *friends(3)[1:]]
    rounds = []
    with pytest.raises(RuntimeError, match="all of its 1 clients failed"):
        for r in fedavg({"w": torch.ones(1)}, people, faulty, 400, 0.3, workers=1):
            rounds.append(r)
    empty = [r for r in rounds if not r.reports]
    assert empty and len(rounds) > len(empty) and all(len(r.failed) == 1 for r in empty)
    assert not any(torch.isnan(r.state["w"]).any() for r in rounds)


def test_ids_must_differ():
    with pytest.raises(ValueError, match="2 clients with 1 different ids"):
        list(fedavg({"w": torch.zeros(1)}, friends(1) * 2, step, 1))


def test_only_clients_of_the_round_are_packed(monkeypatch):
    packed, pack = [], pool._pack
    monkeypatch.setattr(pool, "_pack", lambda thing: packed.append(pack(thing)) or packed[-1])
    list(fedavg({"w": torch.zeros(1)}, friends(200), step, 1, 0.01, workers=2))
    assert len(packed) == 1 + 2  # the work, and its two clients
    view = torch.zeros(1_000_000)[:3]
    assert len(pack(view)) < 1000  # the rest of a view stays at home
