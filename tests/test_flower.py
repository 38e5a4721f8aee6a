"""The same federation on Flower: equal numbers, hostile and silent nodes, restarts. Nodes are calls here; test_flower_simulation.py and test_flower_deployment.py have processes."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch

from fedl2p.bn import mix_bn
from fedl2p.checkpoint import fingerprint
from fedl2p.client import learn_client
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.federated import Diverged
from fedl2p.learner import FedL2P
from fedl2p.losses import with_loss
from fedl2p.metanet import signature
from fedl2p.runner import Failure, Runner, Task
from fedl2p.scoring import score_all
from fedl2p.storage import load_tensors
from fedl2p.trials import KEPT, choose_client, kept_file, run_trials

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it when it is imported
pytest.importorskip("flwr", reason='the extra "flower" is not installed')

from federation import QUICK, TRIALS, fit, load, network, same, seen, stop_after, without  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict  # noqa: E402
from grid import Here, lean  # noqa: E402

from fedl2p.flower import Nodes, Privacy, _read  # noqa: E402
from fedl2p.node import WORK, client_app  # noqa: E402
from fedl2p.simulated import simulate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:no round had a lower validation loss than the first", "ignore:round")


@pytest.fixture
def here(tmp_path):
    return Here(client_app(load, tmp_path / "models"))


class Hostile(Here):
    """A grid on which the first node's answers to one kind of message are spoiled."""

    kind, spoil = "", None

    def deliver(self, message):
        reply = super().deliver(message)
        if message.metadata.dst_node_id == 100 and message.metadata.message_type == self.kind:
            self.spoil(reply.content)
        return reply


def setter(record, key, value):
    def spoil(content):
        content[record][key] = value

    return spoil


def large(n):
    """An array of a few bytes that says it has n numbers."""
    raw = BytesIO()
    np.lib.format.write_array_header_1_0(raw, {"descr": "<f4", "fortran_order": False, "shape": (n,)})
    return Array("float32", (n,), "numpy.ndarray", raw.getvalue() + bytes(64))


@pytest.mark.parametrize("spoil", [
    lambda c: c.clear(),
    lambda c: c.pop("metrics"),
    lambda c: c.update(arrays=ConfigRecord({"w": 1})),
    lambda c: c.update(metrics=ArrayRecord()),
    lambda c: c["arrays"].clear(),
    lambda c: c["arrays"].update(more=Array(torch.zeros(1).numpy())),
    lambda c: c["arrays"].update({next(iter(c["arrays"])): Array("float32", (1,), "numpy.ndarray", b"no array")}),
    lambda c: c["arrays"].update({next(iter(c["arrays"])): large(10**8)}),
    lambda c: c["arrays"].update({next(iter(c["arrays"])): large(10**12)}),
    lambda c: c["metrics"].pop("val_loss"),
    setter("metrics", "val_loss", float("nan")),
    setter("metrics", "val_loss", [0.1, 0.2]),
    setter("metrics", "more", 1.0),
    setter("metrics", "num-examples", -1),
    setter("metrics", "num-examples", 10**400),
    setter("metrics", "num-examples", []),
])
def test_whatever_a_node_sends_costs_its_own_update_only(here, spoil):
    grid = Hostile(here.app)
    grid.kind, grid.spoil = "train", spoil
    nodes = Nodes(grid)
    clients = nodes.clients(5)
    learner = fit(nodes, clients, replace(QUICK, rounds=1))
    assert list(learner.history[0]["failed"]) == [seen()[0].id] and len(learner.history[0]["clients"]) == 4


@pytest.mark.parametrize("spoil", [lambda c: c.clear(), setter("metrics", "right", 1000), setter("metrics", "right", -1), setter("metrics", "n", 0), setter("metrics", "beta", [0.5]), setter("metrics", "eta", 0.1), setter("metrics", "beta", [float("nan")] * 3)])
def test_whatever_a_node_says_of_itself(here, spoil):
    grid = Hostile(here.app)
    grid.kind, grid.spoil = "evaluate", spoil
    nodes = Nodes(grid)
    clients = nodes.clients(5)
    with pytest.warns(RuntimeWarning, match=f"client '{seen()[0].id}' is left out"):
        assert len(FedL2P(network(), QUICK).score(clients, Runner(transport=nodes))) == 4


@pytest.mark.parametrize("spoil", [lambda c: c.clear(), setter("config", "id", 3), setter("config", "models", 5)])
def test_a_node_that_does_not_say_who_it_is(here, spoil):
    grid = Hostile(here.app)
    grid.kind, grid.spoil = "query", spoil
    nodes = Nodes(grid)
    with pytest.warns(RuntimeWarning, match="node 100 is left out"):
        assert len(nodes.clients(5)) == 4
    assert len(nodes.clients(5)) == 4 and len(grid.log) == 1  # it is not asked again
    with pytest.raises(RuntimeError, match="no node gave its name in 0.1 s; 0 were asked"):
        Nodes(Here(here.app, 0)).clients(1, 0.1)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize(("content", "reason"), [
    ({}, "KeyError: "),
    ({"config": {"work": "known"}}, "KeyError: "),
    ({"config": {"work": "magic"}}, "ValueError: work must be one of "),
    ({"model": ArrayRecord()}, "KeyError: "),
    ({"model": ArrayRecord({"w": Array(torch.zeros(1).numpy())})}, "RuntimeError: "),
    ({"arrays": ArrayRecord(), "config": {"work": "known", "model": "../x", "settings": "{}", "round": 1}}, "the node does not have the model ../x: "),
])
def test_a_node_survives_its_server(here, kind, content, reason, tmp_path):
    known = {"train": "learn", "evaluate": "score"}[kind]
    content = {k: ConfigRecord({**v, "work": v["work"].replace("known", known)}) if k == "config" else v for k, v in content.items()}
    reply = here.deliver(Message(RecordDict(content), 100, kind))
    assert reply.has_error() and reply.error.reason.startswith(reason) and not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("settings", ["[]", "3", "null"])
def test_a_node_takes_settings_in_an_object_only(here, settings):
    config = ConfigRecord({"work": "train", "model": "", "settings": settings, "round": 1})
    reply = here.deliver(Message(RecordDict({"arrays": ArrayRecord(), "config": config}), 100, "train"))
    assert reply.error.reason.startswith("ValueError: settings must be an object, got ")


def test_a_damaged_model_is_sent_again(here, tmp_path):
    nodes = Nodes(here)
    clients, config = nodes.clients(5), replace(QUICK, rounds=1)
    fit(nodes, clients, config)
    (path,) = (tmp_path / "models").iterdir()
    assert path.stem == fingerprint(mix_bn(network(), verbose=False))
    path.write_bytes(path.read_bytes()[:-4])
    assert not fit(nodes, clients, config).history[0]["failed"]  # it came once more, in the same round
    assert [t["messages"] for t in nodes.traffic if t["kind"] == "train"] == [5, 5, 5]


def learning(clients, config=QUICK):
    """The tasks of the first round."""
    model, state = mix_bn(network(), verbose=False), FedL2P(network(), config).metanets.state_dict()
    return [Task(learn_client, model, config, state, client, 1) for client in clients]


HUGE = [1e6 + 1, 10**7, 1e300, 1e308, float("inf"), 10**400]
ODD = [0, -1, float("nan"), "3", None, True, [3]]


@pytest.mark.parametrize("work", ["train", "describe", "try", "choose", "learn"])
def test_numbers_of_samples_are_bounded(work):
    """`_read` by itself, with records that Flower might not even send."""
    task, numbers = learning(seen()[:1])[0], {"learn": {"val_loss": 1.0, "diverging": 0}, "choose": {"size": 1.0, "gain": -0.5}}.get(work, {})
    arrays = ArrayRecord({"w": Array(torch.ones(2).numpy())})

    def read(n, **more):
        return _read(work, task, {"arrays": arrays, "metrics": {"num-examples": n, **numbers, **more}})

    for n in (1, 0.5, 157, 1e6):
        assert read(n).weight == n and read(n).report == numbers
    for n in HUGE + ODD:
        with pytest.raises(ValueError, match="^num-examples must be > 0 and <= 1e\\+06, got|^numbers must be finite"):
            read(n)
    for name in numbers:
        for value in (float("inf"), float("nan"), "3", None, True, 10**400, 1e308, -1e7):
            with pytest.raises(ValueError, match="^numbers must be finite"):
                read(1, **{name: value})


def test_a_cross_entropy_below_zero_is_refused():
    """It would make the lambda of its round the best, whatever the others say; other losses may be negative."""
    task, arrays = learning(seen()[:1])[0], ArrayRecord({"w": Array(torch.ones(2).numpy())})
    content = {"arrays": arrays, "metrics": {"num-examples": 3, "val_loss": -0.1, "diverging": 0}}
    with pytest.raises(ValueError, match="^val_loss must be >= 0, as a cross-entropy is, got -0.1"):
        _read("learn", task, content)
    content["metrics"]["val_loss"] = -0.1
    own = task._replace(model=with_loss(task.model, lambda out, y: -out.mean()))
    assert _read("learn", own, content).report["val_loss"] == -0.1


def test_scores_are_bounded():
    (task,) = learning(seen()[:1])
    layers = signature(task.model)
    good = {"right": 3, "n": 10, "loss": 0.5, "mixes": 1, "distance": 0.0, "beta": [0.5] * len(layers.bn_layers), "eta": [0.1] * len(layers.tensors)}

    def read(**more):
        return _read("score", task, {"metrics": {**good, **more}}).score

    assert read() == (3, 0.5, 10) and read(n=10**6).n == 10**6 and read(loss=float("inf")).loss == float("inf") and read(loss=2).loss == 2.0
    for n in [*HUGE, *ODD, 10.0]:
        with pytest.raises(ValueError, match="^n must be >= 1 and <= 1e\\+06, got|^right and n must be whole numbers"):
            read(n=n)
    for right in (-1, 11, 2.5, 3.0, float("nan"), "3", None, True, 10**400):
        with pytest.raises(ValueError, match="right"):
            read(right=right)
    for odd in ({"mixes": 2}, {"mixes": None}, {"distance": float("nan")}, {"distance": "far"}):
        with pytest.raises(ValueError, match="^mixes must be 0 or 1 and distance a number"):
            read(**odd)
    for loss in (float("nan"), "0.5", None, True, [0.5], 10**400):
        with pytest.raises(ValueError, match="^right and n must be whole numbers and loss a number"):
            read(loss=loss)


class Failing(Here):
    """A grid on which the first node answers one message with an error."""

    error = None

    def deliver(self, message):
        if self.error and message.metadata.dst_node_id == 100 and message.metadata.message_type == "train":
            error, self.error = self.error, None
            return Message(error, reply_to=message)
        return super().deliver(message)


def test_a_node_that_lost_the_model_is_known_by_a_code(here):
    """Whatever the error says: only this code makes the server send the model once more in the same round."""
    grid = Failing(here.app)
    nodes = Nodes(grid)
    tasks = learning(nodes.clients(5))
    nobody = {"work": "learn", "model": "0" * 16, "settings": "{}", "round": 1}
    asked = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord(nobody)})
    lost = grid.deliver(Message(asked, 101, "train")).error
    assert not any(outcome.failure for outcome in nodes(tasks))  # all nodes have it now

    grid.error = Error(lost.code, "in other words")
    assert not any(outcome.failure for outcome in nodes(tasks))
    assert [t["messages"] for t in nodes.traffic[-2:]] == [5, 1]
    grid.error = Error(2, lost.reason)
    [failure] = [outcome.failure for outcome in nodes(tasks) if outcome.failure]
    assert failure == Failure("raised", lost.reason) and nodes.traffic[-1]["messages"] == 5


@pytest.mark.parametrize("code", [3, 4, 5, 8])
def test_an_answer_that_flower_lost_is_asked_for_again(here, code):
    """A busy machine is late with its signs of life, and Flower answers for it; the client was left out of the round before."""
    grid = Failing(here.app)
    nodes = Nodes(grid)
    tasks = learning(nodes.clients(5))
    grid.error = Error(code, "no sign of life")
    assert not any(outcome.failure for outcome in nodes(tasks)) and [t["messages"] for t in nodes.traffic[-2:]] == [5, 1]

    class Gone(Failing):
        def deliver(self, message):
            reply = super().deliver(message)
            if reply.has_error():
                del self.contexts[100]
            return reply

    gone = Gone(here.app)
    gone.error, nodes = Error(code, "it is gone"), Nodes(gone)
    [failure] = [outcome.failure for outcome in nodes(learning(nodes.clients(5))) if outcome.failure]
    assert failure == Failure("raised", "it is gone") and nodes.traffic[-1]["messages"] == 5


def test_a_failure_keeps_its_kind(tmp_path):
    """One client diverges: the others learn on, and the rounds count it, as in one process."""
    def large(client):
        return replace(client, train=replace(client.train, x=client.train.x * 1e16))

    def load_large(context):
        client, model = load(context)
        return large(client) if context.node_config["partition-id"] == 0 else client, model

    (first, *others), config = seen(), replace(QUICK, rounds=1)
    nodes = Nodes(Here(client_app(load_large, tmp_path)))
    clients, records = nodes.clients(5), []
    for transport, everybody in ((nodes, clients), (None, [large(first), *others])):
        with pytest.warns(RuntimeWarning, match=f"client '{first.id}' is left out: FloatingPointError: "):
            records.append(fit(transport, everybody, config).history)
    there, here = records
    assert there[0]["diverged"] == 1 and len(there[0]["clients"]) == 4 and there == lean(here, "beta", "eta")
    outcomes = nodes(learning(clients, config))
    kinds = {c.id: o.failure and o.failure.kind for c, o in zip(clients, outcomes, strict=True)}
    assert kinds == {first.id: "diverged", **dict.fromkeys(c.id for c in others)}


def test_all_clients_that_diverge_are_a_result(here):
    nodes = Nodes(here)
    with pytest.raises(Diverged, match="all of its 5 clients failed; the first, .*: FloatingPointError: "):
        fit(nodes, nodes.clients(5), replace(QUICK, lr=1e30))


def test_other_failures_are_no_divergence(here):
    """A node whose answer cannot be used, one that is gone, and those that raise."""
    grid = Hostile(here.app)
    grid.kind, grid.spoil = "train", lambda content: content.clear()
    nodes = Nodes(grid)
    tasks = learning(nodes.clients(5))
    del grid.contexts[101]
    kinds = {task.client.id: outcome.failure and outcome.failure.kind for task, outcome in zip(tasks, nodes(tasks), strict=True)}
    assert kinds == dict(zip([c.id for c in seen()], ["refused", "died", None, None, None], strict=True))
    broken = [task._replace(state={"nonsense": torch.zeros(1)}) for task in tasks if kinds[task.client.id] is None]
    assert [outcome.failure.kind for outcome in nodes(broken)] == ["raised"] * 3


def test_a_server_that_starts_again_without_a_node_goes_on(here, tmp_path):
    nodes, path = Nodes(here), tmp_path / "clients.json"
    with pytest.raises(KeyboardInterrupt):
        fit(nodes, nodes.clients(5, path=path), folder=tmp_path, progress=stop_after(2))
    again = Nodes(Here(here.app, 4))
    clients = again.clients(5, 0.1, path)
    resumed = fit(again, clients, folder=tmp_path)
    lost = seen()[4].id
    assert resumed.history[2]["failed"] == {lost: "its node is offline"} and len(resumed.history) == 4
    assert same(resumed.last_state, fit(without({(lost, 3)}), seen()).last_state)


def test_names_are_kept_in_one_order(here, tmp_path):
    """They stood in the file as nodes had come, so that two equal runs left different files."""
    other = Here(here.app)
    other.contexts = dict(reversed(other.contexts.items()))
    contents = []
    for grid in (here, other):
        Nodes(grid).clients(5, path=(path := tmp_path / f"{len(contents)}.json"))
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


@pytest.mark.parametrize(("text", "words"), [("[]", "content must be an object, got []"), ('{"clean-0": 3}', "clean-0 must be text, got 3")])
def test_damaged_names_are_refused(here, tmp_path, text, words):
    path = tmp_path / "clients.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        Nodes(here).clients(5, path=path)
    assert str(error.value).startswith(f"{path} is damaged ({words}); ")


def test_only_known_work(here):
    nodes = Nodes(here)
    names = ", ".join(["train_client", "describe_client", "try_client", "choose_client", "learn_client", "validate_client", "score_policy"])
    with pytest.raises(ValueError, match=f"work must be one of {names}, got <function load "):
        score_all(load, network(), QUICK, {}, nodes.clients(5), Runner(transport=nodes))
    assert names == ", ".join(work.__name__ for work in WORK.values())


def step(here, privacy):
    """How far one round goes from the start, in all numbers."""
    nodes = Nodes(here, privacy=privacy)
    learner = fit(nodes, nodes.clients(5), replace(QUICK, rounds=1))
    start = FedL2P(network(), QUICK).metanets.state_dict()
    return torch.cat([(learner.last_state[name] - start[name]).flatten() for name in start])


def test_differential_privacy(here):
    """Without noise and with a long clip it is the mean; a short clip is the length; noise has the deviation that it should."""
    plain, z = step(here, None), 0.5
    torch.testing.assert_close(step(here, Privacy(0.0, 1e6)), plain, rtol=0, atol=1e-6)  # all clients have as many samples
    assert step(here, Privacy(0.0, 1e-3)).norm() <= 1.001e-3 < plain.norm()
    noise = step(here, Privacy(z, 1e-3))
    assert noise.std().item() == pytest.approx(z * 1e-3 / 5, rel=0.02)


def test_differential_privacy_leaves_out_the_bad(here):
    grid = Hostile(here.app)
    grid.kind, grid.spoil = "train", lambda c: c["arrays"].clear()
    nodes = Nodes(grid, privacy=Privacy(1.0, 1e-3))
    history = fit(nodes, nodes.clients(5), replace(QUICK, rounds=1)).history
    assert list(history[0]["failed"]) == [seen()[0].id]


def test_differential_privacy_of_a_client_that_does_not_move(here):
    """Flower's clipping divides by the length of a step."""
    start = FedL2P(network(), QUICK).metanets.state_dict()
    grid = Hostile(here.app)
    grid.kind, grid.spoil = "train", lambda c: c["arrays"].update({name: Array(t.numpy()) for name, t in start.items()})
    nodes = Nodes(grid, privacy=Privacy(1.0, 1e-3))
    history = fit(nodes, nodes.clients(5), replace(QUICK, rounds=1)).history
    assert history[0]["failed"] == {seen()[0].id: "sent back what it was given"}


def test_noise_on_the_nodes(tmp_path):
    from flwr.clientapp.mod import LocalDpMod

    far = step(Here(client_app(load, tmp_path, [LocalDpMod(1e-3, 1e-3, 1.0, 0.1)])), None)
    assert far.std().item() == pytest.approx(1e-3 * (2 * torch.tensor(12.5).log().item()) ** 0.5 / 5**0.5, rel=0.02)


def test_standardised_inputs_on_nodes(here):
    """One round more, in which nodes tell the inputs of their meta-nets; then as in one process."""
    config, nodes = replace(QUICK, inputs="standard"), Nodes(here)
    there = fit(nodes, nodes.clients(5), config)
    assert same(there.last_state, fit(None, seen(), config).last_state)
    assert [t["messages"] for t in nodes.traffic][:2] == [5, 5]  # who are you, and what do your data look like


class Recording(Here):
    """A grid that keeps what nodes answer, by the work that they were asked for."""

    def deliver(self, message):
        reply = super().deliver(message)
        if "config" in message.content and "work" in message.content["config"]:
            self.replies.append((message.content["config"]["work"], reply.content))
        return reply


def told(learner):
    """What the server knows of trials wherever the clients are."""
    return {k: v for k, v in learner.trials.items() if not k.endswith("_loss") and not k.startswith("common_")}


def test_losses_of_trials_stay_on_their_nodes(tmp_path, monkeypatch):
    """What travels is lambda, a number of samples, and of each round how far a client is and what looking gains it."""
    monkeypatch.setattr("fedl2p.trials.ENOUGH", 10)
    many = digits_federation(10, 0, size=30).seen
    grid = Recording(client_app(lambda context: (many[context.node_config["partition-id"]], small_cnn(width=4)), tmp_path), len(many))
    grid.replies = []
    nodes = Nodes(grid)
    there, here = fit(nodes, nodes.clients(10), TRIALS), fit(None, many, TRIALS)
    assert same(there.metanets.state_dict(), here.metanets.state_dict()) and told(there) == told(here) and here.trials["error"] > 0
    assert dict.fromkeys(work for work, _ in grid.replies) == dict.fromkeys(["describe", "try", "choose"])
    sizes = {name: list(t.shape) for name, t in here.metanets.state_dict().items()}
    for work, content in grid.replies:
        assert content.keys() == {"arrays", "metrics"}
        assert content["metrics"].keys() == {"num-examples", *(["size", "gain"] if work == "choose" else [])}
        shapes = {name: list(array.shape) for name, array in content["arrays"].items()}
        assert shapes == {"describe": {"mean": sizes["center"], "square": sizes["center"]}, "try": {}, "choose": sizes}[work]
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "kept").iterdir()}
    losses = [load_tensors(p, KEPT)[0]["losses"] for p in files]
    sent = [torch.from_numpy(array.numpy()) for _, content in grid.replies for array in content["arrays"].values()]
    assert len(files) == 10 and not any(table.shape == t.shape and torch.allclose(t.to(table), table) for t in sent for table in losses)

    again = Nodes(grid)  # the server starts from nothing: nodes remember, and do not try again
    assert same(fit(again, again.clients(10), TRIALS).metanets.state_dict(), here.metanets.state_dict())
    assert files == {p: p.stat().st_mtime_ns for p in (tmp_path / "kept").iterdir()}


def test_trials_on_nodes_equal_the_loop_in_process(here):
    """Trials, choosing, and a round of hypergradients."""
    nodes, config = Nodes(here), replace(TRIALS, rounds=1)
    there, plain = fit(nodes, nodes.clients(5), config), fit(None, seen(), config)
    assert same(there.last_state, plain.last_state) and same(there.metanets.state_dict(), plain.metanets.state_dict())
    assert there.history == lean(plain.history, "beta", "eta") and told(there) == told(plain)
    assert "common_loss" in plain.trials and "common_loss" not in there.trials  # losses stay with the nodes


class Slow(Here):
    """A grid on which the first node misses its first questions."""

    misses = 2

    def deliver(self, message):
        if message.metadata.dst_node_id == 100 and self.misses:
            self.misses -= 1
            return None if self.misses else Message(Error(0, "busy"), reply_to=message)
        return super().deliver(message)


def test_a_node_that_misses_a_question_is_asked_again(here):
    """It was left out for the whole run before, however long the server would have waited."""
    nodes = Nodes(Slow(here.app))
    assert len(nodes.clients(5, wait=60)) == 5 and not nodes.unheard


def test_a_node_that_never_answers_is_named_with_its_reason(here):
    grid = Slow(here.app)
    grid.misses = 10**9
    nodes = Nodes(grid)
    with pytest.warns(RuntimeWarning, match="node 100 is left out: (did not answer|busy)"):
        assert len(nodes.clients(5, wait=0.1)) == 4
    alone = Slow(here.app, 1)
    alone.misses = 10**9
    with pytest.raises(RuntimeError, match="no node gave its name in 0.1 s; 1 were asked; the first: (busy|did not answer)"):
        Nodes(alone).clients(1, 0.1)


@pytest.mark.parametrize("workers", [-1, 0, 10**20, "two", 1.5])
def test_a_simulation_says_what_is_wrong_with_its_workers(here, workers):
    with pytest.raises(ValueError, match="^workers must be "):
        simulate(len, here.app, 1, workers)


def test_a_server_cannot_look_around_on_a_node(here, tmp_path):
    """A model has a name of 16 letters; a path, be it absolute, is not even looked for."""
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(b"x")
    asked = {"work": "learn", "settings": "{}", "round": 1}
    answers = [here.deliver(Message(RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord({**asked, "model": name})}), 100, "train")).error.reason for name in (str(secret.with_suffix("")), str(tmp_path / "nowhere"))]
    assert all(reason.endswith("this is not the name of a model") for reason in answers)


def test_a_node_keeps_a_few_models_only(tmp_path):
    from fedl2p.node import _MODELS, _keep

    for seed in range(_MODELS + 3):
        _keep(small_cnn(width=4), tmp_path, ArrayRecord({k: Array(t.numpy()) for k, t in mix_bn(small_cnn(width=4, seed=seed), verbose=False).state_dict().items()}))
    (tmp_path / "mine.safetensors").write_bytes(b"x")
    last = fingerprint(mix_bn(small_cnn(width=4, seed=_MODELS + 2), verbose=False))
    assert len(list(tmp_path.glob("*.safetensors"))) == _MODELS + 1 and (tmp_path / f"{last}.safetensors").exists()


def arrays_of(seed):
    return ArrayRecord({k: Array(t.numpy()) for k, t in mix_bn(small_cnn(width=4, seed=seed), verbose=False).state_dict().items()})


def test_a_clock_that_was_set_back_does_not_cost_a_node_its_new_model(tmp_path):
    """The oldest file goes; by such a clock that was the one just written, in every round."""
    from fedl2p.node import _MODELS, _keep

    for seed in range(_MODELS):
        _keep(small_cnn(width=4), tmp_path, arrays_of(seed))
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() + 86400,) * 2)
    _keep(small_cnn(width=4), tmp_path, arrays_of(_MODELS))
    last = fingerprint(mix_bn(small_cnn(width=4, seed=_MODELS), verbose=False))
    assert (tmp_path / f"{last}.safetensors").exists() and len(list(tmp_path.iterdir())) == _MODELS


def test_half_a_model_of_a_dead_process_is_swept(tmp_path):
    """A day later: before, another node of the same machine may still be writing it."""
    from fedl2p.node import _keep

    old, new = (tmp_path / f"0123456789abcdef.safetensors.{pid}.part" for pid in (123, 456))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 90000,) * 2)
    _keep(small_cnn(width=4), tmp_path, arrays_of(0))
    assert not old.exists() and new.exists()


def test_a_node_that_forgot_its_trials_is_left_out(tmp_path):
    """It has been asked to choose, and has nothing to choose by; the others go on."""
    grid = Here(client_app(load, tmp_path))
    nodes = Nodes(grid)
    clients, model = nodes.clients(5), mix_bn(network(), verbose=False)
    run_trials(model, TRIALS, clients, Runner(transport=nodes))
    kept_file(tmp_path / "kept", model, TRIALS, seen()[0]).unlink()
    state = FedL2P(network(), TRIALS).metanets.state_dict()
    outcomes = nodes([Task(choose_client, model, TRIALS, state, client, 1) for client in clients])
    assert {c.id for c, o in zip(clients, outcomes, strict=True) if o.failure} == {seen()[0].id}


def test_noise_is_for_what_is_learned(here):
    """The means that inputs are compared with travel with lambda, and stay as they are."""
    config, nodes = replace(QUICK, inputs="standard", rounds=1), Nodes(here, privacy=Privacy(3.0, 1.0))
    private, plain = fit(nodes, nodes.clients(5), config).last_state, fit(None, seen(), config).last_state
    assert torch.equal(private["center"], plain["center"]) and torch.equal(private["deviation"], plain["deviation"])
    assert not torch.equal(private["eta_scale"], plain["eta_scale"])


def test_noise_stays_where_something_is_learned(here):
    """Without rounds of refinement there are no offsets, and with too few clients nothing that looks at them: noise must not make any."""
    nodes = Nodes(here, privacy=Privacy(0.1, 1.0))
    private, plain = fit(nodes, nodes.clients(5), TRIALS).last_state, fit(None, seen(), TRIALS).last_state
    assert {name for name, t in private.items() if not torch.equal(t, plain[name])} == {"common"}
    refined = fit(nodes, nodes.clients(5), replace(TRIALS, rounds=1)).last_state
    learned = {name for name, t in refined.items() if not torch.equal(t, plain[name])}
    assert learned == {"common", "beta_offset", "eta_offset"} and torch.equal(refined["last"], plain["last"])


def test_two_nodes_with_one_name(here):
    here.contexts[104].node_config["partition-id"] = 0
    with pytest.raises(RuntimeError, match="names of nodes must be different, got 4 for 5 nodes"):
        Nodes(here).clients(5, wait=0.1)


def test_fewer_nodes_than_asked_for_is_said(here):
    with pytest.warns(RuntimeWarning, match="5 of 7 clients take part"):
        assert len(Nodes(here).clients(7, wait=0.1)) == 5


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_flower_is_a_transport_only():
    """Its import brings in no study, and leaves the environment as it is."""
    done = python("""
import os, sys
before = dict(os.environ)
import fedl2p.flower, fedl2p.node, fedl2p.simulated
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
assert not [name for name in sys.modules if name.startswith("fedl2p.studies")]
""")
    assert done.returncode == 0, done.stderr


def test_without_flower_everything_else_works():
    """A plain install neither needs nor imports flwr; who asks for it hears how to get it."""
    done = python("""
import pkgutil, sys
sys.modules["flwr"] = None  # every import of it fails
import fedl2p, importlib
names = [module.name for module in pkgutil.walk_packages(fedl2p.__path__, "fedl2p.")]
on_flower = ["fedl2p.flower", "fedl2p.node", "fedl2p.simulated", "fedl2p.studies.simulation"]
assert {"fedl2p.learner", "fedl2p.studies.runs", *on_flower} <= set(names)
for name in names:
    if name not in on_flower:
        importlib.import_module(name)
for name in on_flower[:3]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert str(error) == f'{name} needs Flower: pip install "fedl2p[flower]"', error
    else:
        raise AssertionError(name)
from fedl2p.cli import main
assert main(["flower", "cifar10"]) == 1
""")
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == 'fedl2p: fedl2p.flower needs Flower: pip install "fedl2p[flower]"'


def test_a_start_that_fails_leaves_no_processes_to_the_next(monkeypatch):
    """On a busy machine Ray gives up on itself; what it had started ran on, and made the machine busier still."""
    import ray

    from fedl2p import simulated

    started = []

    def init(**settings):
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        if len(started) < 3:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: len(started) == 3)
    monkeypatch.setenv("PYTHONPATH", "")
    simulated._start_ray(1)
    first, second, third = started
    assert first.wait(300) == second.wait(300) == -9 and third.poll() is None
    third.kill()
    third.wait(300)


def test_a_simulation_that_cannot_start_says_so_in_time(monkeypatch):
    import ray

    from fedl2p import simulated

    def init(**settings):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(simulated, "_START", 0.3)
    monkeypatch.setenv("PYTHONPATH", "")
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^the processes of the simulation did not start in 0.3 s \(The current node timed out"):
        simulate(len, client_app(load), 1, 1)
    assert 0.3 <= time.monotonic() - begin < 300  # and not the usual 600


def test_ray_waits_for_its_own_node(monkeypatch, tmp_path):
    """It asked for 30 s, and gave up on itself; now each question waits for its answer, but not for ever, nor for a process that is dead."""
    from ray._private import services

    from fedl2p.simulated import _waiting

    def get_node(address, node):
        asked.append(node)
        if len(asked) < 4:
            raise RuntimeError("no such node")
        return {"node": node}

    asked = []
    monkeypatch.setattr(services, "get_node", get_node)
    with _waiting(60):
        assert services.get_node("here", "a") == {"node": "a"} and len(asked) == 4
    asked = []
    with _waiting(0.15), pytest.raises(RuntimeError, match="no such node"):
        services.get_node("here", "b")
    shutil.copy(shutil.which("true"), tmp_path / "raylet")
    raylet = subprocess.Popen([tmp_path / "raylet"])
    os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
    asked = []
    with _waiting(600), pytest.raises(RuntimeError, match="no such node"):
        services.get_node("here", "c")
    assert raylet.wait() == 0 and len(asked) == 1 and services.get_node is get_node
