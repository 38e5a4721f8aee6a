"""The same federation on Flower: equal numbers, hostile and silent nodes, restarts; in a simulation, and with a real SuperLink and two SuperNodes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch

from fedl2p.bn import mix_bn
from fedl2p.checkpoint import fingerprint
from fedl2p.client import Config, score_all
from fedl2p.core import load_tensors
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.learner import FedL2P
from fedl2p.pretraining import pretrain
from fedl2p.runner import Outcome, each, quiet

pytest.importorskip("flwr", reason='the extra "flower" is not installed')

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict  # noqa: E402
from grid import Here, lean  # noqa: E402

from fedl2p.flower import Nodes, Privacy, client_app, simulate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:the lowest validation loss was that of the meta-nets at their start", "ignore:round")
ROOT = Path(__file__).resolve().parent.parent
QUICK = Config(lr=0.05, epochs=1, rounds=3, fraction=1.0, meta_steps=1)


@lru_cache
def seen():
    return digits_federation(5, 0, size=30).seen


def load(context):
    return seen()[int(context.node_config["partition-id"])], small_cnn(width=4)


def network():
    return small_cnn(width=4, seed=1)  # other weights than the nodes start from


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def here(tmp_path):
    return Here(client_app(load, tmp_path / "models"))


def fit(nodes, clients, config=QUICK, folder=None, track=quiet):
    return FedL2P(network(), config).fit(clients, folder, workers=1, track=track, ask=nodes)


def stop_after(n):
    def track(rounds, title, total, done):
        for r in rounds:
            yield r
            if r.number == n:
                raise KeyboardInterrupt

    return track


BAD = 7  # the seed of the runs in which nodes misbehave, so that good and bad runs can share a simulation
EVIL = 8  # and in which all of them do


def sabotage(message, context, call_next):
    """A mod that spoils what a node sends."""
    reply, seed, k = call_next(message, context), json.loads(message.content["config"]["settings"])["seed"], context.node_config["partition-id"]
    if seed not in (BAD, EVIL) or reply.has_error():
        return reply
    arrays = reply.content["arrays"]
    name = next(iter(arrays))
    if k == 0 or seed == EVIL:
        arrays[name] = Array(arrays[name].numpy() * float("nan"))
    elif k == 1:
        arrays[name] = Array(arrays[name].numpy()[:1])
    elif k == 2:
        time.sleep(20)
    return reply


def scenarios(folder, grid):
    """All that is done in the one simulation."""
    nodes = Nodes(grid, 120)
    clients = nodes.clients(5)
    found = {"names": [c.id for c in clients], "learner": fit(nodes, clients)}
    found["scores"] = found["learner"].score(clients, ask=nodes)
    found["traffic"] = list(nodes.traffic)
    found["model"] = pretrain(network(), clients, fraction=0.5, rounds=2, ask=nodes)
    with pytest.raises(KeyboardInterrupt):
        fit(nodes, clients, folder=folder, track=stop_after(2))
    again = Nodes(grid, 120)
    found["resumed"] = fit(again, again.clients(5), folder=folder)
    found["resumed traffic"] = again.traffic
    with pytest.raises(RuntimeError) as error:
        fit(nodes, clients, replace(QUICK, seed=EVIL))
    found["all fail"] = str(error.value)
    with pytest.warns(RuntimeWarning, match="is left out"):
        found["bad"] = fit(Nodes(grid, 15), clients, replace(QUICK, seed=BAD, rounds=1))
    return found


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulation")
    return simulate(partial(scenarios, folder / "run"), client_app(load, folder / "models", [sabotage]), 5, 2)


def test_a_simulation_equals_the_loop_in_process(simulated):
    clients = sorted(seen(), key=lambda c: c.id)
    here = fit(each, clients)
    assert simulated["names"] == [c.id for c in clients]
    assert same(simulated["learner"].last, here.last) and same(simulated["learner"].metanets.state_dict(), here.metanets.state_dict())
    assert simulated["learner"].history == lean(here.history, "beta", "eta")
    for a, b in zip(simulated["scores"], here.score(clients, workers=1), strict=True):
        assert (a.id, a.domain, a.score) == (b.id, b.domain, b.score) and torch.equal(a.strategy.beta, b.strategy.beta) and torch.equal(a.strategy.eta, b.strategy.eta)
    assert same(simulated["model"].state_dict(), pretrain(network(), clients, fraction=0.5, rounds=2, workers=1).state_dict())


def test_the_model_is_sent_once(simulated):
    """Messages of the first round carry it; later ones, those of scoring, and all of a server that starts again do not."""
    first, *later = [t["sent"] for t in simulated["traffic"] if t["kind"] == "train"]
    size = sum(t.numel() * t.element_size() for t in mix_bn(network(), verbose=False).state_dict().values())
    (score,) = [t["sent"] for t in simulated["traffic"] if t["kind"] == "evaluate"]
    assert all(first - n > 5 * size for n in later) and abs(score - later[0]) < size
    assert all(t["sent"] < first - 4 * size for t in simulated["resumed traffic"])


def test_a_server_that_starts_again_goes_on(simulated):
    assert same(simulated["resumed"].last, simulated["learner"].last) and simulated["resumed"].history == simulated["learner"].history
    assert sum(t["kind"] == "train" for t in simulated["resumed traffic"]) == 1


def test_bad_and_silent_nodes_are_left_out(simulated):
    clients, (record,) = seen(), simulated["bad"].history
    assert record["clients"] == sorted(c.id for c in clients[3:])
    nan, shape, silent = (record["failed"][c.id] for c in clients[:3])
    assert "not finite" in nan and "with shape" in shape and silent == "did not answer in 15 s"
    alone = fit(without({(c.id, 1) for c in clients[:3]}), clients, replace(QUICK, seed=BAD, rounds=1))
    assert same(simulated["bad"].last, alone.last)


def test_all_failing_is_an_error(simulated):
    assert "all of its 5 clients failed" in simulated["all fail"] and "not finite" in simulated["all fail"]


def free_ports(n):
    """Ports of loopback that nobody uses now."""
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def ours(home):
    """Processes, by id, that work for the deployment in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"FLWR_HOME={home}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # of somebody else, or just gone
            pass
    return found


def until(condition, seconds, what):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, f"{what}: not in {seconds} s"
        time.sleep(0.2)


class Deployment:
    """A SuperLink and SuperNodes as processes on loopback, with TLS and keys, as nbs/flower/README.md has them."""

    def __init__(self, folder):
        self.folder, self.home = folder, folder / "home"
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # Flower starts its other commands by name
        self.env = {**os.environ, "PATH": tools, "FLWR_HOME": str(self.home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self.port, *self.node_ports = free_ports(3)
        self.home.mkdir()
        self.call("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30", "-keyout", "server.key", "-out", "server.pem", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        (self.home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{folder}/server.pem"\n')

    def call(self, *command):
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self, name, *command):
        with open(self.folder / f"{name}.log", "wb") as log:
            return subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def superlink(self):
        self.start("superlink", tool("flower-superlink"), "--ssl-ca-certfile", "server.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key", "--enable-supernode-auth", "--port", str(self.port), "--disable-runtime-dependency-installation")
        until(lambda: "Application startup complete" in self.log("superlink"), 60, "the SuperLink starts")

    def supernode(self, k):
        self.call("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"node-{k}")
        self.call(tool("flwr"), "supernode", "register", f"node-{k}.pub", "here")
        return self.start(f"node-{k}", tool("flower-supernode"), "--root-certificates", "server.pem", "--superlink", f"127.0.0.1:{self.port}", "--port", str(self.node_ports[k]), "--auth-supernode-private-key", f"node-{k}", "--node-config", f'partition-id={k} folder="{self.folder}/models-{k}"')

    def stop(self):
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for pid in ours(self.home):
                try:
                    os.kill(pid, sign)
                except ProcessLookupError:
                    pass
            end = time.time() + 10
            while ours(self.home) and time.time() < end:
                time.sleep(0.2)


def tool(name):
    return str(Path(sys.executable).parent / name)


@pytest.fixture(scope="module", params=[signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])  # the SuperLink learns of the second by missing heartbeats, in up to a minute
def deployed(request, tmp_path_factory):
    """The app of nbs/flower on two nodes, one of which is killed in the middle of the last round."""
    if not all(map(shutil.which, ("openssl", "ssh-keygen"))) or not Path("/proc").exists():
        pytest.skip("openssl or ssh-keygen is not there, or no /proc to find processes by")
    folder = tmp_path_factory.mktemp("deployment")
    deployment = Deployment(folder)
    try:
        deployment.superlink()
        nodes = [deployment.supernode(k) for k in range(2)]
        settings = f'nodes=2 pretraining-rounds=0 rounds=2 epochs=1 timeout=60.0 out="{folder}/out"'
        run = deployment.start("run", tool("flwr"), "run", str(ROOT / "nbs" / "flower"), "here", "--run-config", settings, "--stream")
        until(lambda: deployment.log("node-1").count("Receiving: train message") == 2, 120, "the second round starts")
        os.killpg(nodes[1].pid, request.param)
        assert run.wait(180) == 0, deployment.log("run")
        yield folder / "out", deployment.log("run")
    finally:
        deployment.stop()
    assert not ours(deployment.home)


def without(lost):
    """`each`, as if some clients did not answer in some rounds."""
    def ask(function, arguments, workers):
        return iter([Outcome(None, "gone") if (a[1].id, a[2]) in lost else o for a, o in zip(arguments, each(function, arguments, workers), strict=True)])

    return ask


def test_a_deployment_equals_the_loop_in_process(deployed):
    """Until a node is killed, and after: the run goes on without it, counts it, and says so."""
    out, said = deployed
    clients = digits_federation().seen[:2]
    config = Config(lr=0.01, epochs=1, rounds=2, fraction=1.0, estimator="fomaml")
    here = FedL2P(pretrain(small_cnn(), clients, rounds=0), config).fit(clients, workers=1, track=quiet, ask=without({("clean-1", 2)}))
    tensors, _ = load_tensors(out / "checkpoint.safetensors", "fedl2p checkpoint 1")
    assert same({name.removeprefix("now."): t for name, t in tensors.items() if name.startswith("now.")}, here.last)
    assert same(FedL2P.load(here.model, out / "policy.safetensors").metanets.state_dict(), here.metanets.state_dict())
    history = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [r["val_loss"] for r in history] == [r["val_loss"] for r in here.history] and [list(r["failed"]) for r in history] == [[], ["clean-1"]]
    (score,) = json.loads((out / "scores.json").read_text())
    (mine,) = here.score(clients[:1])
    assert (score["client"], score["accuracy"], score["loss"], score["beta"]) == ("clean-0", mine.score.accuracy, mine.score.loss, mine.strategy.beta.tolist())
    assert "round 2: client 'clean-1' is left out: " in said
    first, second = [t["sent"] for t in json.loads((out / "traffic.json").read_text()) if t["kind"] == "train"]
    assert first - second > 2 * sum(t.numel() * t.element_size() for t in small_cnn().parameters())


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


@pytest.mark.parametrize("spoil", [
    lambda c: c.clear(),
    lambda c: c.pop("metrics"),
    lambda c: c.update(arrays=ConfigRecord({"w": 1})),
    lambda c: c.update(metrics=ArrayRecord()),
    lambda c: c["arrays"].clear(),
    lambda c: c["arrays"].update(more=Array(torch.zeros(1).numpy())),
    lambda c: c["arrays"].update({next(iter(c["arrays"])): Array("float32", (1,), "numpy.ndarray", b"no array")}),
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


@pytest.mark.parametrize("spoil", [lambda c: c.clear(), setter("metrics", "accuracy", 1.5), setter("metrics", "n", 0), setter("metrics", "beta", [0.5]), setter("metrics", "eta", 0.1), setter("metrics", "beta", [float("nan")] * 3)])
def test_whatever_a_node_says_of_itself(here, spoil):
    grid = Hostile(here.app)
    grid.kind, grid.spoil = "evaluate", spoil
    nodes = Nodes(grid)
    clients = nodes.clients(5)
    with pytest.warns(RuntimeWarning, match=f"client '{seen()[0].id}' is left out"):
        assert len(FedL2P(network(), QUICK).score(clients, ask=nodes)) == 4


@pytest.mark.parametrize("spoil", [lambda c: c.clear(), setter("config", "id", 3), setter("config", "models", 5)])
def test_a_node_that_does_not_say_who_it_is(here, spoil):
    grid = Hostile(here.app)
    grid.kind, grid.spoil = "query", spoil
    nodes = Nodes(grid)
    with pytest.warns(RuntimeWarning, match="node 100 is left out"):
        assert len(nodes.clients(5)) == 4
    assert len(nodes.clients(5)) == 4 and len(grid.log) == 1  # it is not asked again
    with pytest.raises(RuntimeError, match="no node said who it is in 0.1 s; 0 were asked"):
        Nodes(Here(here.app, 0)).clients(1, 0.1)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("content", [{}, {"config": ConfigRecord({"work": "learn"})}, {"model": ArrayRecord()}, {"model": ArrayRecord({"w": Array(torch.zeros(1).numpy())})}, {"arrays": ArrayRecord(), "config": ConfigRecord({"work": "learn", "model": "../x", "settings": "{}", "round": 1})}])
def test_a_node_survives_its_server(here, kind, content, tmp_path):
    reply = here.deliver(Message(RecordDict(content), 100, kind))
    assert reply.has_error() and "Error: " in reply.error.reason and not list(tmp_path.rglob("*.safetensors"))


def test_a_damaged_model_is_sent_again(here, tmp_path):
    nodes = Nodes(here)
    clients, config = nodes.clients(5), replace(QUICK, rounds=1)
    fit(nodes, clients, config)
    (path,) = (tmp_path / "models").iterdir()
    assert path.stem == fingerprint(mix_bn(network(), verbose=False))
    path.write_bytes(path.read_bytes()[:-4])
    assert not fit(nodes, clients, config).history[0]["failed"]  # it came once more, in the same round
    assert [t["messages"] for t in nodes.traffic if t["kind"] == "train"] == [5, 5, 5]


def test_a_server_that_starts_again_without_a_node_goes_on(here, tmp_path):
    nodes, path = Nodes(here), tmp_path / "clients.json"
    with pytest.raises(KeyboardInterrupt):
        fit(nodes, nodes.clients(5, path=path), folder=tmp_path, track=stop_after(2))
    again = Nodes(Here(here.app, 4))
    clients = again.clients(5, 0.1, path)
    resumed = fit(again, clients, folder=tmp_path)
    lost = seen()[4].id
    assert resumed.history[2]["failed"] == {lost: "its node is not there"} and len(resumed.history) == 3
    assert same(resumed.last, fit(without({(lost, 3)}), seen()).last)


def test_only_known_work(here):
    nodes = Nodes(here)
    with pytest.raises(ValueError, match="nodes know train_client, describe_client, learn_client, score_policy"):
        score_all(load, nodes.clients(5), network(), ask=nodes)


def step(here, privacy):
    """How far one round goes from the start, in all numbers."""
    nodes = Nodes(here, privacy=privacy)
    learner = fit(nodes, nodes.clients(5), replace(QUICK, rounds=1))
    start = FedL2P(network(), QUICK).metanets.state_dict()
    return torch.cat([(learner.last[name] - start[name]).flatten() for name in start])


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
    assert history[0]["failed"] == {seen()[0].id: "sent back what it got"}


def test_noise_on_the_nodes(tmp_path):
    from flwr.clientapp.mod import LocalDpMod

    far = step(Here(client_app(load, tmp_path, [LocalDpMod(1e-3, 1e-3, 1.0, 0.1)])), None)
    assert far.std().item() == pytest.approx(1e-3 * (2 * torch.tensor(12.5).log().item()) ** 0.5 / 5**0.5, rel=0.02)


def test_standardised_inputs_on_nodes(here):
    """One round more, in which nodes tell the inputs of their meta-nets; then as in one process."""
    config, nodes = replace(QUICK, inputs="standard"), Nodes(here)
    there = fit(nodes, nodes.clients(5), config)
    assert same(there.last, FedL2P(network(), config).fit(seen(), workers=1, track=quiet).last)
    assert [t["messages"] for t in nodes.traffic][:2] == [5, 5]  # who are you, and what do your data look like


def test_noise_is_for_what_is_learned(here):
    """The means that inputs are compared with travel with lambda, and stay as they are."""
    config, nodes = replace(QUICK, inputs="standard", rounds=1), Nodes(here, privacy=Privacy(3.0, 1.0))
    private, plain = fit(nodes, nodes.clients(5), config).last, FedL2P(network(), config).fit(seen(), workers=1, track=quiet).last
    assert torch.equal(private["center"], plain["center"]) and torch.equal(private["deviation"], plain["deviation"])
    assert not torch.equal(private["eta_scale"], plain["eta_scale"])


def test_two_nodes_with_one_name(here):
    here.contexts[104].node_config["partition-id"] = 0
    with pytest.raises(RuntimeError, match="5 nodes have 4 different names; allowed is one name for each"):
        Nodes(here).clients(5, wait=0.1)


def test_fewer_nodes_than_asked_for_is_said(here):
    with pytest.warns(RuntimeWarning, match="5 clients take part, of the 7 that were asked for"):
        assert len(Nodes(here).clients(7, wait=0.1)) == 5


def test_without_flower_everything_else_works():
    """A plain install neither needs nor imports flwr; who asks for it hears how to get it."""
    code = """
import pkgutil, sys
sys.modules["flwr"] = None  # every import of it fails
import fedl2p, importlib
for module in pkgutil.iter_modules(fedl2p.__path__):
    if module.name != "flower":
        importlib.import_module(f"fedl2p.{module.name}")
from fedl2p.cli import main
assert main(["flower", "cifar10"]) == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == 'fedl2p: fedl2p.flower needs Flower: pip install "fedl2p[flower]"'
