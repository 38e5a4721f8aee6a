"""The same federation on Flower in processes: in one simulation, and with a real SuperLink and two SuperNodes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fedl2p.bn import mix_bn
from fedl2p.client import Config
from fedl2p.core import load_tensors
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.federated import Diverged
from fedl2p.learner import FedL2P
from fedl2p.pretraining import pretrain
from fedl2p.runner import Runner

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it when it is imported
pytest.importorskip("flwr", reason='the extra "flower" is not installed')

from federation import PRETRAINING, QUICK, TRIALS, fit, load, network, same, seen, stop_after, without  # noqa: E402
from flwr.app import Array  # noqa: E402
from grid import lean  # noqa: E402

from fedl2p.flower import Nodes, client_app, simulate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:the lowest validation loss was that of the meta-nets at their start", "ignore:round")
ROOT = Path(__file__).resolve().parent.parent
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
    elif k == 2:  # silent, until the file is there: no clock decides
        silence = Path(os.environ["FEDL2P_TEST_SILENCE"])
        while not silence.exists():
            time.sleep(0.1)
    return reply


class NotAll:
    """A grid that waits until all nodes but one have learned, however long they take."""

    def __init__(self, grid):
        self.grid, self.get_node_ids = grid.grid, grid.get_node_ids

    def send_and_receive(self, messages, timeout):
        asked, replies = set(self.grid.push_messages(messages)), []
        while len(replies) < len(messages) - (messages[0].metadata.message_type == "train"):
            replies += self.grid.pull_messages(asked - {r.metadata.reply_to_message_id for r in replies})
            time.sleep(0.05)
        return replies


def scenarios(folder, grid):
    """All that is done in the one simulation."""
    nodes = Nodes(grid, 600)
    clients, runner = nodes.clients(5), Runner(transport=nodes)
    done = {"names": [c.id for c in clients]}
    with pytest.raises(KeyboardInterrupt):
        fit(nodes, clients, folder=folder, progress=stop_after(2))
    done["traffic"] = list(nodes.traffic)
    again = Nodes(grid, 600)
    done["learner"] = fit(again, again.clients(5), folder=folder)
    done["scores"] = done["learner"].score(clients, Runner(transport=again))
    done["resumed traffic"] = again.traffic
    done["trials"] = fit(nodes, clients, replace(TRIALS, rounds=1))
    done["model"] = pretrain(network(), clients, PRETRAINING, runner)
    with pytest.raises(RuntimeError) as error:
        fit(nodes, clients, replace(QUICK, seed=EVIL))
    done["all fail"] = error.value
    with pytest.warns(RuntimeWarning, match="is left out"):
        done["bad"] = fit(Nodes(NotAll(grid), 600), clients, replace(QUICK, seed=BAD, rounds=1))
    Path(os.environ["FEDL2P_TEST_SILENCE"]).touch()
    return done


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    import flwr.simulation  # noqa: F401, sets a variable of Ray's on import

    folder = tmp_path_factory.mktemp("simulation")
    os.environ["FEDL2P_TEST_SILENCE"] = str(folder / "over")
    before = dict(os.environ)
    done = simulate(partial(scenarios, folder / "run"), client_app(load, folder / "models", [sabotage]), 5, 2)
    assert dict(os.environ) == before
    del os.environ["FEDL2P_TEST_SILENCE"]
    return done


def test_a_simulation_equals_the_loop_in_process(simulated):
    clients = sorted(seen(), key=lambda c: c.id)
    here = fit(None, clients)
    assert simulated["names"] == [c.id for c in clients]
    assert same(simulated["learner"].last, here.last) and same(simulated["learner"].metanets.state_dict(), here.metanets.state_dict())
    assert simulated["learner"].history == lean(here.history, "beta", "eta")
    for a, b in zip(simulated["scores"], here.score(clients, Runner(0)), strict=True):
        assert (a.id, a.domain, a.score) == (b.id, b.domain, b.score)
        assert torch.equal(a.strategy.beta, b.strategy.beta) and torch.equal(a.strategy.eta, b.strategy.eta) and (a.strategy.bn, a.strategy.distance) == (b.strategy.bn, b.strategy.distance)
    assert same(simulated["model"].state_dict(), pretrain(network(), clients, PRETRAINING, Runner(0)).state_dict())


def test_trials_in_a_simulation_equal_the_loop_in_process(simulated):
    """Trials, choosing, and a round of hypergradients."""
    here, there = fit(None, seen(), replace(TRIALS, rounds=1)), simulated["trials"]
    assert same(there.last, here.last) and same(there.metanets.state_dict(), here.metanets.state_dict())
    assert there.history == lean(here.history, "beta", "eta") and there.chosen == here.chosen


def test_the_model_is_sent_once(simulated):
    """Messages of the first round carry it; later ones, those of scoring, and all of a server that starts again do not."""
    first, second = [t["sent"] for t in simulated["traffic"] if t["kind"] == "train"]
    size = sum(t.numel() * t.element_size() for t in mix_bn(network(), verbose=False).state_dict().values())
    _, score = [t["sent"] for t in simulated["resumed traffic"] if t["kind"] == "evaluate"]  # the first judges the last lambda
    assert first - second > 5 * size and abs(score - second) < size
    assert all(t["sent"] < first - 4 * size for t in simulated["resumed traffic"])


def test_a_server_that_starts_again_goes_on(simulated):
    """It was stopped after two rounds of three; that the end is the same, the first test says."""
    assert sum(t["kind"] == "train" for t in simulated["resumed traffic"]) == 1


def test_bad_and_silent_nodes_are_left_out(simulated):
    clients, (record, _) = seen(), simulated["bad"].history
    assert record["clients"] == sorted(c.id for c in clients[3:])
    nan, shape, silent = (record["failed"][c.id] for c in clients[:3])
    assert "not finite" in nan and "with shape" in shape and silent == "did not answer in 600 s"
    alone = fit(without({(c.id, 1) for c in clients[:3]}), clients, replace(QUICK, seed=BAD, rounds=1))
    assert same(simulated["bad"].last, alone.last)


def test_all_failing_is_an_error(simulated):
    error = simulated["all fail"]
    assert "all of its 5 clients failed" in str(error) and "not finite" in str(error)
    assert not isinstance(error, Diverged)  # what they sent was refused


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


def test_a_deployment_equals_the_loop_in_process(deployed):
    """Until a node is killed, and after: the run goes on without it, counts it, and says so."""
    out, said = deployed
    clients = digits_federation().seen[:2]
    config = Config.paper(lr=0.01, epochs=1, rounds=2, fraction=1.0, estimator="fomaml")
    runner = Runner(0, without({("clean-1", 2), ("clean-1", 3)}))
    here = FedL2P(small_cnn(), config).fit(clients, runner=runner)
    tensors, _ = load_tensors(out / "checkpoint.safetensors", "fedl2p checkpoint 1")
    assert same({name.removeprefix("now."): t for name, t in tensors.items() if name.startswith("now.")}, here.last)
    assert same(FedL2P.load(here.model, out / "policy.safetensors").metanets.state_dict(), here.metanets.state_dict())
    history = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [r["val_loss"] for r in history] == [r["val_loss"] for r in here.history] and [list(r["failed"]) for r in history] == [[], ["clean-1"], ["clean-1"]]
    (score,) = json.loads((out / "scores.json").read_text())
    (mine,) = here.score(clients[:1])
    assert (score["client"], score["right"], score["n"], score["loss"]) == ("clean-0", mine.score.right, mine.score.n, mine.score.loss)
    assert score["beta"] == mine.strategy.beta.tolist()
    assert "round 2: client 'clean-1' is left out: " in said
    first, second = [t["sent"] for t in json.loads((out / "traffic.json").read_text()) if t["kind"] == "train"]
    assert first - second > 2 * sum(t.numel() * t.element_size() for t in small_cnn().parameters())
