"""Kill and go on: SIGKILL at random moments, the same command again, and hashes compared with those of an unbroken run.

    python tests/kills.py demo study simulation deployed --kills 20 --seed 0
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
ROOT = Path(__file__).resolve().parent.parent
LIMIT = 900.0  # seconds that a run may take on a busy machine
SMALL = ["--seeds", "3", "--clients", "5", "--unseen", "5", "--pretraining-rounds", "3", "--epochs", "1", "--rounds", "3", "--fraction", "0.4", "--estimator", "fomaml", "--workers", "2"]
STUDY = ["cifar10", "--scale", "smoke", "--seeds", "0", "--epochs", "1", "--alpha", "0.5", "--device", "cpu", "--workers", "2"]
TIMED = ("seconds", "pretraining_seconds", "machine")


def arguments(kind, out, data):
    if kind == "demo":
        return ["demo", *SMALL, "--out", str(out)]
    name, methods = ("run", ["none", "fedl2p-fomaml", "fedl2p-ours"]) if kind == "study" else ("flower", ["fedl2p-fomaml"])
    return [name, *STUDY, "--methods", *methods, "--data", str(data), "--out", str(out)]


# Most of a small run is its imports: they are done once, in a process that every run is a fork of.
os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), FLWR_TELEMETRY_ENABLED="0")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["fedl2p.cli", "fedl2p.studies.runs", "fedl2p.studies.demo", "fedl2p.report"])


def run(args, said):
    """The command in a session of its own, so that its workers can be killed with it."""
    os.setsid()
    with open(said, "w") as file, open(os.devnull, "w") as nowhere:
        os.dup2(file.fileno(), 2)
        os.dup2(nowhere.fileno(), 1)
    from fedl2p import command

    sys.argv = ["fedl2p", *args]
    sys.exit(command())


def start(args, seconds):
    """A process after some time, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        process = FORKS.Process(target=run, args=(args, said))
        process.start()
        process.join(seconds)
        return process, said.read_text() if said.exists() else ""


def finish(args):
    process, said = start(args, LIMIT)
    assert process.exitcode == 0, f"{process.exitcode}: {said[-3000:]}"


def killed(args, seconds):
    """Whether it was killed, and not done before."""
    process, said = start(args, seconds)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return True
    assert process.exitcode == 0, f"{process.exitcode}: {said[-3000:]}"
    return False


class Deployed:
    """A server and two nodes, of which the server and one node are killed; then everything is started again."""

    settings = "nodes=2 pretraining-rounds=2 rounds=2 epochs=1 timeout=900.0"  # an answer on a busy machine

    def run(self, out, seconds=None):
        """Whether it was killed, some seconds after the server was asked to start."""
        from test_flower_deployment import Deployment, ours, tool

        home = Path(tempfile.mkdtemp())
        deployment = Deployment(home)
        try:
            deployment.superlink()
            nodes = [deployment.supernode(k) for k in range(2)]
            run = deployment.start("run", tool("flwr"), "run", str(ROOT / "nbs" / "flower"), "here", "--run-config", f'{self.settings} out="{out}"', "--stream")
            if seconds is None:
                begin = time.monotonic()
                code = run.wait(LIMIT)  # it is 0 even if the server failed
                assert code == 0 and (out / "traffic.json").exists(), deployment.log("run")[-3000:]
                self.took = time.monotonic() - begin
                return False
            try:
                run.wait(seconds)
                return False
            except subprocess.TimeoutExpired:
                for pid in ours(deployment.home):  # the server first: no round may end without the node
                    if os.getpgid(pid) != nodes[0].pid and os.getpgid(pid) != nodes[1].pid:
                        os.kill(pid, signal.SIGKILL)
                os.killpg(nodes[1].pid, signal.SIGKILL)
                return True
        finally:
            deployment.stop()
            shutil.rmtree(home, ignore_errors=True)


def hashes(out):
    """Of all that a run leaves behind, but for times and traffic."""
    found = {}
    for path in sorted(p for p in out.rglob("*") if p.is_file()):
        raw, name = path.read_bytes(), path.relative_to(out).as_posix()
        if name in ("traffic.json", "versions.json") or path.suffix == ".png" or "/models/" in f"/{name}":
            continue
        if path.suffix == ".json":
            content = json.loads(raw)
            raw = json.dumps({k: v for k, v in content.items() if k not in TIMED} if isinstance(content, dict) else content).encode()
        if path.suffix == ".md" and "hours" in raw.decode():
            continue  # it says how long it took
        found[name] = hashlib.sha256(raw).hexdigest()
    return found


def left_out(out):
    """Clients that failed in a round, and why: on a busy machine a node may be late, and that is no fault of a restart."""
    from fedl2p.storage import load_tensors

    lines = [json.loads(line) for path in out.rglob("rounds.jsonl") for line in path.read_text().splitlines()]
    found = {f"round {line['round']}": line["failed"] for line in lines if line["failed"]}
    if (path := out / "pretraining.safetensors").exists():
        found |= {"pretraining": json.loads(load_tensors(path, "fedl2p checkpoint 1")[1]["info"]).get("failed", {})}
    return found


def trial(kind, kills, seed=0, keep=None):
    """Kills, and endings that are equal to an unbroken one; folders that differ are copied to where they are to be kept."""
    rng, tried, equal, problems = random.Random(f"{kind} {seed}"), 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        if kind in ("study", "simulation"):
            import made_up

            made_up.cifar10(home)
        begin, whole, deployed = time.monotonic(), home / "unbroken", Deployed()
        deployed.run(whole) if kind == "deployed" else finish(arguments(kind, whole, home))
        took = deployed.took if kind == "deployed" else time.monotonic() - begin
        expected, number = hashes(whole), 0
        while tried < kills:
            number += 1
            assert number <= 4 * kills + 4, "it is done before it can be killed"
            out, moment = home / f"killed-{number}", rng.uniform(0.05, 0.95) * took
            was_killed = deployed.run(out, moment) if kind == "deployed" else killed(arguments(kind, out, home), moment)
            if was_killed:
                tried += 1
                deployed.run(out) if kind == "deployed" else finish(arguments(kind, out, home))
                after = hashes(out)
                parts = [p.name for p in out.rglob("*.part")]
                equal += after == expected and not parts
                if after != expected or parts:
                    odd = sorted(k for k in {**after, **expected} if after.get(k) != expected.get(k))
                    problems.append(f"{kind}, killed after {moment:.1f} s: {odd[:5]} {parts[:3]} {left_out(out)}")
                    for made in (out, whole) if keep else ():
                        shutil.copytree(made, Path(keep, f"{kind}-{seed}-{made.name}"), dirs_exist_ok=True)
                print(f"{kind}: {equal} of {tried} equal", *problems[-1:], file=sys.stderr, flush=True)
            shutil.rmtree(out, ignore_errors=True)
    return {"kind": kind, "kills": tried, "equal": equal, "problems": problems}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=["demo", "study", "simulation", "deployed"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for results that differ, and for unbroken ones")
    args = parser.parse_args()
    done = []
    for kind in args.kinds:
        done.append(trial(kind, args.kills, args.seed, args.keep))
        print(json.dumps(done[-1]), flush=True)
    sys.exit(any(d["kills"] != d["equal"] for d in done))
