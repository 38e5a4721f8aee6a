"""The loop: means, draws, workers, faults, checkpoints, pretraining."""

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedl2p import runner as pool
from fedl2p.bn import mix_bn
from fedl2p.checkpoint import load_checkpoint, save_checkpoint
from fedl2p.data import Client, Data
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.federated import Update, average, fedavg, sample
from fedl2p.pretraining import METHODS, Recipe, perfedavg_step, pretrain, train_client
from fedl2p.runner import each


@pytest.fixture(scope="module")
def clients():
    return digits_federation(5, 0, size=62).pretraining[:6]


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


def test_another_model_or_other_data_do_not_go_on(clients, tmp_path):
    options = {"fraction": 0.5, "rounds": 1, "workers": 1, "checkpoint": tmp_path / "p"}
    pretrain(small_cnn(width=4), clients, **options)
    other = [replace(clients[0], train=clients[0].train[:20]), *clients[1:]]
    for model, people in [(small_cnn(width=4, seed=1), clients), (small_cnn(width=8), clients), (small_cnn(width=4), other)]:
        with pytest.raises(ValueError, match="model and clients was"):
            pretrain(model, people, **options)


def test_perfedavg_moves_statistics_once_a_step(clients):
    model = pretrain(small_cnn(width=4), [replace(clients[0], train=clients[0].train[:40])], "perfedavg", rounds=1, workers=1)
    assert model.bn1.num_batches_tracked == 2


def test_ids_must_differ():
    with pytest.raises(ValueError, match="2 clients with 1 different ids"):
        list(fedavg({"w": torch.zeros(1)}, friends(1) * 2, step, 1))


def dies(n):
    if n == 2:
        os._exit(3)
    return n


def test_a_dead_process_costs_one_answer():
    outcomes = list(each(dies, [(n,) for n in range(5)], workers=2))
    assert [o.value for o in outcomes] == [0, 1, None, 3, 4] and "process died" in outcomes[2].error


def threads(_):
    return torch.get_num_threads()


def test_one_thread_each_and_threads_are_put_back():
    before = torch.get_num_threads()
    assert {o.value for w in (1, 2) for o in each(threads, [(0,)] * 3, workers=w)} == {1}
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="workers is 0"):
        list(each(threads, [(0,)], workers=0))


def test_only_clients_of_the_round_are_packed(monkeypatch):
    packed, pack = [], pool._pack
    monkeypatch.setattr(pool, "_pack", lambda thing: packed.append(pack(thing)) or packed[-1])
    list(fedavg({"w": torch.zeros(1)}, friends(200), step, 1, 0.01, workers=2))
    assert len(packed) == 1 + 2  # the work, and its two clients
    view = torch.zeros(1_000_000)[:3]
    assert len(pack(view)) < 1000  # the rest of a view stays at home


def test_what_travels_arrives():
    model = mix_bn(small_cnn(width=2), verbose=False).half()
    things = (model, torch.zeros(3, requires_grad=True), torch.zeros(2, dtype=torch.bfloat16), torch.ones(3, 4).T, nn.Parameter(torch.ones(1), False))
    there = pool.pickle.loads(pool._pack(things))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(model.state_dict().values(), there[0].state_dict().values(), strict=True))
    assert there[1].requires_grad and there[2].dtype == torch.bfloat16 and there[3].shape == (4, 3) and isinstance(there[4], nn.Parameter) and not there[4].requires_grad


def test_checkpoints(tmp_path):
    path = tmp_path / "c.safetensors"
    assert load_checkpoint(None, {}) is None and load_checkpoint(path, {}) is None
    save_checkpoint(path, {"a": (1, 2)}, {"w": torch.ones(2)}, {"round": 3})
    tensors, info = load_checkpoint(path, {"a": [1, 2]})
    assert info == {"round": 3} and tensors["w"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"other settings: a was \[1, 2\] and is 5, b was None and is 1"):
        load_checkpoint(path, {"a": 5, "b": 1})
    for damage in (b"", path.read_bytes()[:20], b"\0" * 100):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match="delete the file to start from the beginning"):
            load_checkpoint(path, {"a": [1, 2]})
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("method", METHODS)
def test_pretraining_goes_on_after_a_stop(method, clients, tmp_path):
    options = {"method": method, "fraction": 0.5, "rounds": 4, "workers": 1}
    whole = pretrain(small_cnn(width=4), clients, **options)

    def stop(rounds, title, total, done):
        for r in rounds:
            yield r
            if r.number == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(small_cnn(width=4), clients, checkpoint=tmp_path / "p", track=stop, **options)
    again = pretrain(small_cnn(width=4), clients[::-1], checkpoint=tmp_path / "p", **{**options, "workers": 2})
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))
    assert whole.bn1.num_batches_tracked.dtype == torch.int64
    with pytest.raises(ValueError, match="lr was 0.1 and is 0.2"):
        pretrain(small_cnn(width=4), clients, checkpoint=tmp_path / "p", lr=0.2, **options)


def test_pretraining_by_hand(clients):
    """Two clients, one batch each, one round: the mean of two steps of SGD, weighted by samples."""
    pair = [replace(clients[0], train=clients[0].train[:30]), replace(clients[1], train=clients[1].train[:10])]
    ours = pretrain(small_cnn(width=4), pair, fraction=1.0, rounds=1, workers=1, lr=0.05, drops=())
    states = []
    for c in pair:
        model = small_cnn(width=4).train()
        nn.functional.cross_entropy(model(c.train.x), c.train.y).backward()
        torch.optim.SGD(model.parameters(), lr=0.05).step()
        states.append(model.state_dict())
    for name, value in ours.state_dict().items():
        expected = states[0][name] if not value.is_floating_point() else 0.75 * states[0][name] + 0.25 * states[1][name]
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def test_fedbabu_leaves_the_head(clients):
    model = pretrain(small_cnn(width=4), clients, "fedbabu", fraction=0.5, rounds=2, workers=1)
    start = small_cnn(width=4)
    assert torch.equal(model.head.weight, start.head.weight) and not torch.equal(model.conv1.weight, start.conv1.weight)


def test_perfedavg_against_autograd():
    """On smooth losses the difference of gradients is the Hessian product: compare with the exact gradient through the step."""
    torch.manual_seed(0)
    x, y = torch.randn(3, 8, 4, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    losses = tuple(lambda w, h, i=i: (torch.tanh(x[i] @ w["w"]) - y[i]).square().mean() for i in range(3))
    w = torch.randn(4, dtype=torch.float64)
    ours = perfedavg_step(losses, {"w": w}, 0.3, 0.5, delta=1e-5)["w"]
    inner = w - 0.3 * torch.autograd.functional.jacobian(lambda w: losses[0]({"w": w}, {}), w)
    v = torch.autograd.functional.jacobian(lambda w: losses[1]({"w": w}, {}), inner)
    hessian = torch.autograd.functional.hessian(lambda w: losses[2]({"w": w}, {}), w)
    torch.testing.assert_close(ours, w - 0.5 * (v - 0.3 * hessian @ v), rtol=1e-7, atol=1e-9)


def test_rates_drop_as_in_the_paper():
    recipe = Recipe()
    assert [recipe.lr_of(n) for n in (1, 250, 251, 375, 376, 500)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    speech = Recipe(final_lr=0.01)
    assert [speech.lr_of(n) for n in (0, 250, 500)] == pytest.approx([0.1, 0.1 / 10**0.5, 0.01])


def test_wrong_pretraining(clients):
    with pytest.raises(ValueError, match="method is 'fedsgd'"):
        pretrain(small_cnn(), clients, "fedsgd")
    with pytest.raises(ValueError, match="3 mixing batch norms"):
        pretrain(mix_bn(small_cnn(), verbose=False), clients)
    empty = replace(clients[0], train=clients[0].train[:0])
    with pytest.warns(RuntimeWarning, match="train is empty"), pytest.raises(RuntimeError, match="all of its 1 clients failed"):
        pretrain(small_cnn(), [empty], rounds=1, workers=1)


def test_the_caller_keeps_model_and_random_state(clients):
    model = small_cnn(width=4).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    pretrain(model, clients, fraction=0.5, rounds=1, workers=1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and model.training
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1] and np.random.get_state()[1].tolist() == states[2]


def test_a_client_does_not_change_what_the_server_sent(clients):
    model = small_cnn(width=4)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = {k: v.clone() for k, v in state.items()}
    train_client(model, Recipe(), state, clients[0], 1)
    assert all(torch.equal(v, before[k]) for k, v in state.items())
