"""The same federation on a real SuperLink and two SuperNodes, one of which is killed."""

import contextlib
import inspect
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedl2p.config import Config
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.learner import FedL2P
from fedl2p.runner import Runner
from fedl2p.storage import claimed, load_tensors

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it when it is imported
pytest.importorskip("flwr", reason='the extra "flower" is not installed')

from federation import same, without  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:no round had a lower validation loss than the first", "ignore:round")
ROOT = Path(__file__).resolve().parent.parent


def free_ports(n):
    """Ports of loopback that nobody uses now, nor takes before they are used: another process that runs tests begins elsewhere, Ray's ports end at 19999, and the system gives away those from 32768."""
    ports = []
    for port in (21000 + (8 * os.getpid() + k) % 10000 for k in range(10000)):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == n:
            return ports
    raise OSError("no port is free")


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
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not in {seconds} s"
        time.sleep(0.2)


# A node looks for messages every three seconds, and so does the server for answers: a test would do little but wait. Python runs a file of this name at its start.
SOONER = """import sys, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(0.3 if seconds == 3 else seconds)
if any(word.endswith("flwr-clientapp") for word in sys.orig_argv):
    sleep({delay})
"""

# A process that answers a message has 30 s to start; then Flower starts another one. On a busy machine none is quick enough, and the node never answers. There is no option for it.
PATIENT = """import sys
from flwr.supercore.corestate import in_memory_corestate
in_memory_corestate.HEARTBEAT_DEFAULT_INTERVAL = 600
from {} import {} as main
sys.exit(main())
"""


def check_flower():
    """What the two programs above change must be there, or they change nothing, and nobody would notice."""
    from flwr.supercore.corestate import in_memory_corestate
    from flwr.superlink.grid import http_grid
    from flwr.supernode import start_client_internal

    assert hasattr(in_memory_corestate, "HEARTBEAT_DEFAULT_INTERVAL"), "Flower has renamed what PATIENT sets"
    assert all("time.sleep(3)" in inspect.getsource(module) for module in (http_grid, start_client_internal)), "Flower waits in another way than SOONER shortens"


class Deployment:
    """A SuperLink and SuperNodes as processes on loopback, with TLS and keys, as nbs/flower/README.md has them."""

    def __init__(self, folder, delay=0):
        """The delay is that of every process that answers a message, in seconds."""
        check_flower()
        self.folder, self.home = folder, folder / "home"
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # Flower starts its other commands by name
        self.env = {**os.environ, "PATH": tools, "FLWR_HOME": str(self.home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONPATH": os.pathsep.join([str(self.home), str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self.port, *self.node_ports = free_ports(4)
        self.home.mkdir()
        (self.home / "sitecustomize.py").write_text(SOONER.format(delay=delay))
        self.call("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30", "-keyout", "server.key", "-out", "server.pem", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        (self.home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{folder}/server.pem"\n')

    def call(self, *command):
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self, name, *command):
        with open(self.folder / f"{name}.log", "wb") as log:
            return subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def superlink(self):
        self.start("superlink", sys.executable, "-c", PATIENT.format("flwr.superlink.cli", "flower_superlink"), "--ssl-ca-certfile", "server.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key", "--enable-supernode-auth", "--port", str(self.port), "--disable-runtime-dependency-installation")
        until(lambda: "Application startup complete" in self.log("superlink"), 600, "the SuperLink starts")

    def supernode(self, k, registered=True):
        key = ["--auth-supernode-private-key", f"node-{k}"] if registered else []  # without one, a node tries to register itself
        if registered:
            self.call("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"node-{k}")
            self.call(tool("flwr"), "supernode", "register", f"node-{k}.pub", "here")
        return self.start(f"node-{k}", sys.executable, "-c", PATIENT.format("flwr.supernode.cli", "flower_supernode"), "--root-certificates", "server.pem", "--superlink", f"127.0.0.1:{self.port}", "--port", str(self.node_ports[k]), *key, "--node-config", f'partition-id={k} folder="{self.folder}/models-{k}"')

    def stop(self):
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for pid in ours(self.home):
                try:
                    os.kill(pid, sign)
                except ProcessLookupError:
                    pass
            end = time.monotonic() + 10
            while ours(self.home) and time.monotonic() < end:
                time.sleep(0.2)


def tools_or_skip():
    if not all(map(shutil.which, ("openssl", "ssh-keygen"))) or not Path("/proc").exists():
        pytest.skip("openssl or ssh-keygen is not there, or no /proc to find processes by")


def tool(name):
    return str(Path(sys.executable).parent / name)


@pytest.fixture(scope="module", params=[signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])  # the SuperLink learns of the second by missing heartbeats, in up to a minute
def deployed(request, tmp_path_factory):
    """The app of nbs/flower on two nodes, one of which is killed in the middle of the last round."""
    tools_or_skip()
    folder = tmp_path_factory.mktemp("deployment")
    deployment = Deployment(folder)
    try:
        deployment.superlink()
        stranger = deployment.supernode(2, registered=False)
        nodes = [deployment.supernode(k) for k in range(2)]
        settings = f'nodes=2 pretraining-rounds=0 rounds=2 epochs=1 timeout=600.0 out="{folder}/out"'
        run = deployment.start("run", tool("flwr"), "run", str(ROOT / "nbs" / "flower"), "here", "--run-config", settings, "--stream")
        until(lambda: deployment.log("node-1").count("Receiving: train message") == 2, 600, "the second round starts")
        os.killpg(nodes[1].pid, request.param)
        assert run.wait(1500) == 0 and (folder / "out" / "traffic.json").exists(), deployment.log("run")  # 0 even if the server failed
        assert stranger.wait(300) == 1 and "All SuperNodes must be registered" in deployment.log("node-2"), "a node that nobody registered takes part: " + deployment.log("node-2")
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
    assert same({name.removeprefix("now."): t for name, t in tensors.items() if name.startswith("now.")}, here.last_state)
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


@pytest.mark.slow
def test_processes_that_start_slowly_are_waited_for(tmp_path):
    """In more than 30 s, as on a machine with 25 jobs a core. The node was left out: "did not answer", and two equal runs differed."""
    tools_or_skip()
    deployment = Deployment(tmp_path, delay=35)
    try:
        deployment.superlink()
        deployment.supernode(0)
        settings = f'nodes=1 pretraining-rounds=0 rounds=1 epochs=1 timeout=300.0 out="{tmp_path}/out"'
        run = deployment.start("run", tool("flwr"), "run", str(ROOT / "nbs" / "flower"), "here", "--run-config", settings, "--stream")
        assert run.wait(1500) == 0 and (tmp_path / "out" / "traffic.json").exists(), deployment.log("run")
        history = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
        assert [r["clients"] for r in history] == [["clean-0"]] * 2
        assert deployment.log("node-0").count("Start `flwr-clientapp` process") == 4  # who, learn, validate, score
    finally:
        deployment.stop()


def test_a_second_server_in_a_folder_stops_before_it_asks_anybody(tmp_path):
    main = runpy.run_path(str(ROOT / "nbs" / "flower" / "app.py"))["main"]
    settings = {"out": str(tmp_path), "nodes": 2, "timeout": 1.0, "noise": 0.0, "pretraining-rounds": 1}
    with claimed(tmp_path), pytest.raises(RuntimeError, match="another run is using"):
        main(None, SimpleNamespace(run_config=settings))  # no grid: a question would be an AttributeError
    assert not list(tmp_path.iterdir())
