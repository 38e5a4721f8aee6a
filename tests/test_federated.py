"""The loop: means, draws, rounds, workers, and what goes wrong with clients."""

import weakref
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedl2p import federated
from fedl2p import runner as pool
from fedl2p.data import Client, Data
from fedl2p.federated import (
    EMPTY_ROUNDS,
    MAX_WEIGHT,
    Diverged,
    FedAdam,
    Round,
    Update,
    average,
    fedavg,
    refusal,
    run_round,
    sample,
)
from fedl2p.runner import Failure, Outcome, Runner, Task


def friends(n=4):
    return [Client(f"c{i}", *[Data(torch.full((i + 1, 1), float(i)), torch.zeros(i + 1, dtype=torch.int64))] * 3) for i in range(n)]


def step(model, settings, state, client, number):
    return Update({"w": state["w"] + 0.1 * (client.train.x.mean() - state["w"])}, len(client.train), {"id": client.id})


def run(clients, rounds, fraction=0.1, work=step, state=None, **options):
    """Rounds of work that needs neither a model nor settings."""
    return fedavg(work, None, None, state or {"w": torch.zeros(1)}, clients, rounds, fraction, **options)


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
    for weights, message in {(0, 0): "the sum of all weights must be > 0, got 0", (-1, 2): "weight must be finite and >= 0, got -1",
                             (float("nan"), 1): "weight must be finite and >= 0, got nan"}.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            average(zip(states, weights, strict=True))


def test_average_of_nothing_is_empty():
    assert average([]) == {} and average(iter(())) == {}


def test_sample():
    ids = [f"c{i}" for i in range(10)]
    assert sample(ids, 0.3, 0, 1) == sample(reversed(ids), 0.3, 0, 1)
    assert len(sample(ids, 0.01, 0, 1)) == 1 and sample(ids, 1.0, 0, 1) == ids
    assert {i for n in range(40) for i in sample(ids, 0.1, 0, n)} == set(ids)
    for fraction in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=rf"^fraction must be in \(0, 1\], got {fraction}$"):
            sample(ids, fraction, 0, 1)
    with pytest.raises(ValueError, match="^the number of clients must be >= 1, got 0$"):
        sample([], 0.3, 0, 1)


def test_any_order_and_any_number_of_workers_give_the_same():
    people = friends()
    orders = [(people, 0), (people[::-1], 1), (people, 2), (people[::-1], 3)]
    ends = [list(run(order, 5, 0.5, runner=Runner(workers)))[-1].state["w"] for order, workers in orders]
    assert all(torch.equal(e, ends[0]) for e in ends)


def test_a_run_that_goes_on_equals_an_unbroken_one():
    whole = list(run(friends(), 6, 0.5, runner=Runner(0)))
    rest = list(run(friends(), 6, 0.5, state=whole[2].state, runner=Runner(0), done=3))
    assert [r.number for r in rest] == [4, 5, 6] and torch.equal(rest[-1].state["w"], whole[-1].state["w"])


def test_the_work_gets_model_settings_state_client_and_number():
    came = []

    def work(*fields):
        came.append(fields)
        return step(*fields)

    people, state = friends(), {"w": torch.zeros(1)}
    first, second = fedavg(work, "model", "settings", state, people, 2, 0.5, seed=7, runner=Runner(0))
    ids = [sample([c.id for c in people], 0.5, 7, number) for number in (1, 2)]
    assert [(m, s, c.id, n) for m, s, _, c, n in came] == [("model", "settings", id, n + 1) for n in (0, 1) for id in ids[n]]
    assert all(fields[2] is state for fields in came[:2]) and all(fields[2] is first.state for fields in came[2:])
    assert all(fields[3] is people[int(fields[3].id[1:])] for fields in came)
    assert list(second.reports) == ids[1]


FAULTS = {"c1": "not finite", "c2": "shape [2]", "c3": "something else", "c4": "weight inf", "c5": "something else",
          "c6": "torch.float64; the server has", "c7": "KeyError: 'c7'", "c8": "FloatingPointError: the loss is nan"}


def faulty(model, settings, state, client, number):
    if client.id == "c8":
        raise FloatingPointError("the loss is nan")
    good = step(model, settings, state, client, number)
    return {"c0": good, "c1": Update({"w": torch.full((1,), float("nan"))}, 1), "c2": Update({"w": torch.zeros(2)}, 1),
            "c3": Update({"v": torch.zeros(1)}, 1), "c4": Update({"w": torch.zeros(1)}, float("inf")), "c5": None,
            "c6": Update({"w": torch.zeros(1, dtype=torch.float64)}, 1)}[client.id]


@pytest.mark.filterwarnings("ignore:round 1")
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_answers_are_left_out_and_named(workers):
    """With the kind of the failure; a process that dies is in `test_runner`, since it takes some seconds."""
    with pytest.warns(RuntimeWarning, match="client 'c1' is left out: sent w with values that are not finite"):
        (r,) = run(friends(9), 1, 1.0, faulty, runner=Runner(workers))
    assert list(r.reports) == ["c0"] and r.failed.keys() == FAULTS.keys()
    assert all(text in r.failed[id].reason for id, text in FAULTS.items())
    kinds = {kind: [id for id, failure in r.failed.items() if failure.kind == kind] for kind in ("refused", "raised", "diverged")}
    assert kinds == {"refused": ["c1", "c2", "c3", "c4", "c5", "c6"], "raised": ["c7"], "diverged": ["c8"]}


def test_refusal():
    state = {"w": torch.zeros(2), "n": torch.tensor(3)}
    good = Update({"w": torch.ones(2), "n": torch.tensor(4)}, 1)
    assert refusal(good, state) is None

    def sends(**tensors):
        return good._replace(state={**good.state, **tensors})

    bad = {
        "sent something else than the server's tensors": [None, {"w": torch.ones(2)}, *[good._replace(state=s) for s in (
            {"w": torch.ones(2)}, None, [], "wn", ["w", "n"], list(good.state.items()), 3, {})], sends(w=None), sends(w=[1.0, 1.0]), sends(w=np.ones(2, "float32")), sends(n=4)],
        "sent w with shape [3] and type torch.float32; the server has [2] and torch.float32": [sends(w=torch.ones(3))],
        "sent n with shape [] and type torch.float32; the server has [] and torch.int64": [sends(n=torch.tensor(4.0))],
        "sent w with values that are not finite": [sends(w=torch.tensor([1, float("inf")])), sends(w=torch.tensor([float("nan"), 1]))],
        **{f"sent weight {name}; it must be a number > 0 and <= 1e+06": [good._replace(weight=w) for w in weights] for name, weights in {
            "0": [0, 0.0], "-1": [-1, -1.0], "nan": [float("nan"), None, "3", True, [3], 1j, torch.tensor(3.0)], "1e+300": [1e300], "1e+308": [1e308],
            "inf": [float("inf"), 10**400, 10**5000], "1.00001e+06": [MAX_WEIGHT + 10]}.items()},
    }
    for reason, updates in bad.items():
        assert [refusal(update, state) for update in updates] == [Failure("refused", reason)] * len(updates)
    assert not any(refusal(good._replace(weight=w), state) for w in (1, 0.5, np.int64(3), np.float32(0.5), Fraction(1, 3), MAX_WEIGHT, int(MAX_WEIGHT)))
    assert refusal(None, {}) == Failure("refused", "sent something else than the server's tensors")


@pytest.mark.filterwarnings("ignore:round 1")
@pytest.mark.parametrize("weight", [1e300, 1e308, float("inf"), -1, float("nan"), "3", None, pytest.param(10**400, id="huge")])
@pytest.mark.parametrize("workers", [1, 2])
def test_no_weight_ruins_the_mean(weight, workers):
    (r,) = run(friends(4), 1, 1.0, partial(heavy, weight), runner=Runner(workers))
    assert list(r.reports) == ["c0", "c1"] and list(r.failed) == ["c2", "c3"]
    assert torch.equal(r.state["w"], torch.tensor([2 / 3 * 0.1]))


def heavy(weight, model, settings, state, client, number):
    """The last two clients have a weight of their own choice."""
    update = step(model, settings, state, client, number)
    return update if client.id in ("c0", "c1") else update._replace(weight=weight)


@pytest.mark.parametrize("weight", [1, 3, 0.25])
def test_weights_may_have_any_type_of_number(weight):
    """And the mean is the very same."""
    def work(kind, *args):
        return step(*args)._replace(weight=kind(weight * (1 + len(args[3].train))))

    means = [next(run(friends(3), 1, 1.0, partial(work, kind), runner=Runner(1))).state["w"] for kind in (float, np.float64, Fraction)]
    assert torch.equal(means[0], means[1]) and torch.equal(means[0], means[2])


def test_a_round():
    state, people = {"w": torch.zeros(1)}, friends(3)
    tasks = [Task(faulty, None, None, state, client, 4) for client in people]
    with pytest.warns(RuntimeWarning) as caught:
        r = run_round(state, tasks, 4, Runner(0))
    assert [str(w.message) for w in caught] == [
        "round 4: client 'c1' is left out: sent w with values that are not finite",
        "round 4: client 'c2' is left out: sent w with shape [2] and type torch.float32; the server has [1] and torch.float32"]
    assert isinstance(r, Round) and r.number == 4 and r.reports == {"c0": {"id": "c0"}} and list(r.failed) == ["c1", "c2"]
    assert torch.equal(r.state["w"], step(None, None, state, people[0], 4).state["w"])
    with pytest.warns(RuntimeWarning):
        empty = run_round(state, tasks[1:], 5, Runner(0))
    assert empty.state is state and empty.reports == {} and list(empty.failed) == ["c1", "c2"]


def test_a_reason_is_warned_of_once_in_a_run(caplog):
    with pytest.warns(RuntimeWarning) as caught, caplog.at_level("INFO", logger="fedl2p"):
        rounds = list(run(friends(3), 3, 1.0, faulty, runner=Runner(0)))
    assert [list(r.failed) for r in rounds] == [["c1", "c2"]] * 3
    assert [str(w.message)[:27] for w in caught] == ["round 1: client 'c1' is lef", "round 1: client 'c2' is lef"]
    assert "round 3: client 'c2' is left out" in caplog.text


def test_a_round_with_a_transport():
    """The transport sees the tasks of a round as they are; what it brings is judged like what comes from here."""
    rounds = []

    def transport(tasks):
        rounds.append(tasks)
        failed = Outcome(None, Failure("died", "no reply"))
        return (failed if task.client.id == "c1" else Outcome(step(*task[1:])) for task in tasks)

    with pytest.warns(RuntimeWarning, match="round 1: client 'c1' is left out: no reply"):
        (r,) = run(friends(3), 1, 1.0, faulty, runner=Runner(transport=transport))
    assert r.failed == {"c1": Failure("died", "no reply")} and list(r.reports) == ["c0", "c2"]
    assert [[(task.work, task.client.id, task.number) for task in tasks] for tasks in rounds] == [[(faulty, f"c{i}", 1) for i in range(3)]]
    with pytest.raises(ValueError, match="shorter"):
        list(run(friends(3), 1, 1.0, runner=Runner(transport=lambda tasks: (Outcome(step(*task[1:])) for task in tasks[:2]))))


def test_a_round_holds_few_states_at_a_time():
    """A hundred large models would not fit into memory: each is let go before the next but one is asked for."""
    sent, alive = [], []

    def transport(tasks):
        for task in tasks:
            update = step(*task[1:])
            sent.append(weakref.ref(update.state["w"]))
            alive.append(sum(state() is not None for state in sent))
            yield Outcome(update)

    (r,) = run(friends(9), 1, 1.0, runner=Runner(transport=transport))
    assert len(r.reports) == 9 and max(alive) <= 3  # the first gives the types, then one in the mean and one on its way


@pytest.mark.filterwarnings("ignore:round 1")
def test_all_failing_is_an_error():
    with pytest.raises(RuntimeError, match="round 1: all of its 2 clients failed; the first, 'c1': sent w with values that are not finite") as caught:
        list(run(friends(3)[1:], 1, 1.0, faulty, runner=Runner(0)))
    assert caught.type is RuntimeError


def named(model, settings, state, client, number):
    """Raises what the settings name for this client; texts are the same for all."""
    raise settings[client.id]("FloatingPointError")


@pytest.mark.filterwarnings("ignore:round 1")
@pytest.mark.parametrize("workers", [0, 2])
def test_diverged_is_an_error_of_its_own_if_nothing_else_happened(workers):
    kinds = {"c0": FloatingPointError, "c1": FloatingPointError}
    with pytest.raises(Diverged, match="all of its 2 clients failed; the first, 'c0': FloatingPointError"):
        list(fedavg(named, None, kinds, {"w": torch.zeros(1)}, friends(2), 1, 1.0, runner=Runner(workers)))
    with pytest.raises(RuntimeError) as caught:
        list(fedavg(named, None, {**kinds, "c1": ValueError}, {"w": torch.zeros(1)}, friends(2), 1, 1.0, runner=Runner(workers)))
    assert caught.type is RuntimeError


@pytest.mark.filterwarnings("ignore:round")
def test_a_round_without_an_answer_is_not_the_end():
    """Two of three clients always fail, and each round asks one: rounds without an answer leave the state as it is."""
    people = [friends(1)[0], *friends(3)[1:]]
    rounds = []
    with pytest.raises(RuntimeError, match="all of its 1 clients failed"):
        for r in run(people, 400, 0.3, faulty, {"w": torch.ones(1)}, runner=Runner(0)):
            rounds.append(r)
    empty = [r for r in rounds if not r.reports]
    assert empty and len(rounds) > len(empty) and all(len(r.failed) == 1 for r in empty)
    assert not any(torch.isnan(r.state["w"]).any() for r in rounds)


def sometimes(model, settings, state, client, number):
    if number in settings:
        return step(model, settings, state, client, number)
    raise ValueError("no time")


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.parametrize("limit", [EMPTY_ROUNDS, 5])
def test_so_many_empty_rounds_in_a_row_are_the_end(limit, monkeypatch):
    monkeypatch.setattr(federated, "EMPTY_ROUNDS", limit)
    for answers in ([], [limit]):  # an answer in the last moment, and the count starts anew
        rounds, last = [], sum(answers) + limit
        with pytest.raises(RuntimeError, match=f"round {last}: all of its 2 clients failed; the first, .*: ValueError: no time"):
            for r in fedavg(sometimes, None, answers, {"w": torch.zeros(1)}, friends(), 100, 0.5, runner=Runner(0)):
                rounds.append(r)
        assert [r.number for r in rounds if r.reports] == answers and [r.number for r in rounds] == list(range(1, last))


def test_three_empty_rounds_are_allowed():
    assert EMPTY_ROUNDS == 3


def test_ids_must_differ():
    with pytest.raises(ValueError, match=r"^ids of clients must be all different, got \['c0', 'c0'\]$"):
        list(run(friends(1) * 2, 1))
    twin = replace(friends(2)[1], id="c0")
    with pytest.raises(ValueError, match=r"^ids of clients must be all different, got \['c0', 'c0'\]$"):
        list(run([friends(1)[0], twin], 1))


def test_only_clients_of_the_round_are_packed(monkeypatch):
    packed, pack = [], pool._pack
    monkeypatch.setattr(pool, "_pack", lambda thing: packed.append(pack(thing)) or packed[-1])
    list(run(friends(200), 1, 0.01, runner=Runner(2)))
    assert len(packed) == 1 + 2  # the work, and its two clients
    view = torch.zeros(1_000_000)[:3]
    assert len(pack(view)) < 1000  # the rest of a view stays at home


# --- the server's Adam ----------------------------------------------------------------------------------------


def server_slopes(n=6):
    numbers = torch.Generator().manual_seed(0)
    return [{"w": torch.randn(4, generator=numbers), "b": torch.randn(2, generator=numbers)} for _ in range(n)]


def test_fedadam_is_adamw_on_what_the_mean_would_change():
    start = {"w": torch.linspace(-1, 1, 4), "b": torch.ones(2)}
    expected = {k: t.clone().requires_grad_() for k, t in start.items()}
    groups = [{"params": [expected["w"]], "weight_decay": 1.0}, {"params": [expected["b"]], "weight_decay": 0.0}]
    torch_adam = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.99), eps=1e-8)
    server, state = FedAdam(0.05, {"w": 1.0}), start
    for slopes in server_slopes():
        state = server(state, {k: t - slopes[k] for k, t in state.items()})
        for k, t in expected.items():
            t.grad = slopes[k].clone()
        torch_adam.step()
        assert all(torch.allclose(state[k], t, atol=1e-5) for k, t in expected.items())
    assert not torch.equal(state["w"], start["w"])


def test_fedadam_goes_on_from_its_moments():
    start, slopes = {"w": torch.zeros(4), "b": torch.zeros(2)}, server_slopes()
    whole, first = FedAdam(0.1), FedAdam(0.1)
    state = half = start
    for i, slope in enumerate(slopes):
        state = whole(state, {k: t - slope[k] for k, t in state.items()})
        if i == 3:
            first = FedAdam(0.1, moments={k: t.clone() for k, t in first.moments.items()})
        half = first(half, {k: t - slope[k] for k, t in half.items()})
    assert all(torch.equal(state[k], half[k]) for k in state)


def test_fedadam_moves_what_it_is_for():
    """Adam makes a whole step of the smallest slope: what nobody learns must not walk away with a rounding error, or with noise."""
    state = {"w": torch.zeros(4), "b": torch.zeros(2), "count": torch.tensor(3)}
    mean = {"w": torch.ones(4), "b": torch.full((2,), 1e-9), "count": torch.tensor(3)}
    everything, some = FedAdam(0.1)(state, mean), FedAdam(0.1, only=("w",))(state, mean)
    assert torch.allclose(everything["w"], torch.full((4,), 0.1)) and everything["b"].min() > 1e-3 and everything["count"] == 3
    assert torch.equal(some["w"], everything["w"]) and torch.equal(some["b"], state["b"]) and some["count"] == 3


def test_a_round_without_answers_is_no_step_of_the_server():
    calls = []

    def server(state, mean):
        calls.append(1)
        return mean

    def work(model, settings, state, client, number):
        if number == 2:
            raise ValueError("not now")
        return Update({"w": state["w"] + 1}, 1.0)

    nothing = Data(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    clients = [Client(id, nothing, nothing, nothing) for id in "ab"]
    with pytest.warns(RuntimeWarning, match="not now"):
        rounds = list(fedavg(work, None, None, {"w": torch.zeros(1)}, clients, 3, 0.5, runner=Runner(0), server=server))
    assert [r.state["w"].item() for r in rounds] == [1, 1, 2] and len(calls) == 2
