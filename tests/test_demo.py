"""`fedl2p demo`: killed and continued, interrupted, and its folder."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedl2p.cli import main
from fedl2p.core import part
from fedl2p.finetune import GRID
from fedl2p.learner import Config
from fedl2p.studies.demo import Demo, open_folder, run_demo

SMALL = ["--seeds", "3", "--clients", "5", "--unseen", "5", "--rounds", "6", "--epochs", "1", "--fraction", "0.4", "--meta-steps", "1", "--pretraining-rounds", "8"]
RESULTS = ["clients.jsonl", "table.md", "config.json", "seed-3/fedl2p-ift/rounds.jsonl", "seed-3/fedl2p-ift/policy.safetensors", "seed-3/fedl2p-fomaml/policy.safetensors", "seed-3/pretraining.safetensors"]


def start(out: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-c", "from fedl2p.cli import main; raise SystemExit(main())", "demo", *SMALL, "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(process: subprocess.Popen, ready) -> None:
    limit = time.time() + 120
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.time() < limit
        time.sleep(0.01)


def alive(session: int) -> list[int]:
    "Processes of a session that still run (not zombies)."
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(sid) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "unbroken"
    process = start(out, "--workers", "1")
    said, log = process.communicate(timeout=300)
    assert process.returncode == 0, log
    return out, said


def test_killed_at_any_moment_it_goes_on_to_the_same_numbers(unbroken, tmp_path):
    """A real SIGKILL in pretraining, between parts, and in the middle of learning; then the end."""
    out = tmp_path / "killed"
    learning = out / "seed-3" / "fedl2p-ift" / "rounds.jsonl"
    moments = [lambda: (out / "seed-3" / "pretraining.safetensors").exists(), lambda: (out / "seed-3" / "baselines.json").exists(), lambda: learning.exists() and len(learning.read_text().splitlines()) >= 3]
    for ready in moments:
        process = start(out)
        wait_for(process, ready)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    rounds_before = len(learning.read_text().splitlines())
    assert 3 <= rounds_before < 6 and not (out / "table.md").exists()
    process = start(out)
    said, log = process.communicate(timeout=300)
    assert process.returncode == 0, log
    assert f"learning to personalize (ift): {rounds_before}/6" not in log  # rounds that were done are not run again
    for name in RESULTS:
        ours, theirs = out / name, unbroken[0] / name
        if name.endswith(".safetensors"):  # the order of a header differs from run to run, the tensors may not
            ours, theirs = load_file(ours), load_file(theirs)
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours), name
        else:
            assert ours.read_bytes() == theirs.read_bytes(), name
    assert not list(out.rglob("*.part"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc")
def test_ctrl_c_says_how_to_go_on_and_leaves_no_process(tmp_path):
    process = start(tmp_path / "out")
    wait_for(process, (tmp_path / "out" / "seed-3" / "pretraining.safetensors").exists)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the workers, too
    said, log = process.communicate(timeout=60)
    assert process.returncode == 130, log
    assert "the same command goes on from there" in log and "Traceback" not in log
    assert_ends(process.pid)


def assert_ends(session: int) -> None:
    limit = time.time() + 30
    while alive(session) and time.time() < limit:
        time.sleep(0.1)
    assert not alive(session)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc")
@pytest.mark.parametrize("gap", [0.1, 0.5])
def test_ctrl_c_twice_does_not_hang(tmp_path, gap):
    process = start(tmp_path / "out")
    wait_for(process, (tmp_path / "out" / "seed-3" / "pretraining.safetensors").exists)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(gap)
    try:
        os.killpg(process.pid, signal.SIGINT)
    except ProcessLookupError:  # it was quicker
        pass
    process.communicate(timeout=30)
    assert process.returncode in (130, -signal.SIGINT)
    assert_ends(process.pid)


def test_the_folder(unbroken):
    out, said = unbroken
    table, _, seeds = (out / "table.md").read_text().partition("\n\n")
    assert table in said and seeds.endswith("over the seeds 3.\n") and "FT (BN I), best rate" in table
    found = [json.loads(line) for line in (out / "clients.jsonl").read_text().splitlines()]
    assert {r["method"] for r in found} >= {"no fine-tuning", "L2P", "FedL2P, ift", "FedL2P, fomaml"}
    assert all(0 <= r["accuracy"] <= 1 and len(r["beta"]) == 3 and len(r["eta"]) == 11 for r in found)
    assert {r["lr"] for r in found if r["method"].endswith("initial rate")} == {0.01}
    assert {r["lr"] for r in found if r["method"].endswith("best rate")} <= set(GRID)
    for name in ("accuracy", "learning", "strategies"):
        assert (out / f"{name}.png").read_bytes()[1:4] == b"PNG"
    assert json.loads((out / "versions.json").read_text())["torch"] == version("torch")
    assert json.loads((out / "config.json").read_text())["epochs"] == 1


def test_another_seed_goes_into_the_same_folder(unbroken, capsys):
    """Seeds are added, not mixed up: the old ones are not run again."""
    out, _ = unbroken
    before = {p: p.stat().st_mtime_ns for p in (out / "seed-3").rglob("*") if p.is_file()}
    old = (out / "clients.jsonl").read_text()
    assert main(["demo", *SMALL, "--out", str(out), "--seeds", "3", "4", "--workers", "1"]) == 0
    assert before == {p: p.stat().st_mtime_ns for p in before}
    assert "±" in (out / "table.md").read_text() and (out / "clients.jsonl").read_text().startswith(old)
    assert main(["demo", *SMALL, "--out", str(out), "--workers", "1"]) == 0  # as it was


def test_folders_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    for out, words in [("file", "nothing can be written"), ("full", "holds other files")]:
        assert main(["demo", *SMALL, "--out", str(tmp_path / out)]) == 1
        assert words in capsys.readouterr().err
    assert main(["demo", *SMALL, "--out", "/proc/nowhere"]) == 1
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_other_settings_and_damaged_files(unbroken, capsys, tmp_path):
    out, _ = unbroken
    assert main(["demo", *SMALL, "--out", str(out), "--alpha", "0.3"]) == 1
    assert "alpha was 0.5 and is 0.3" in capsys.readouterr().err
    records = out / "seed-3" / "l2p.json"
    good = records.read_bytes()
    records.write_bytes(good[:50])
    assert main(["demo", *SMALL, "--out", str(out)]) == 1
    assert "l2p.json is damaged" in capsys.readouterr().err
    records.write_bytes(good)


def test_an_empty_start_with_other_settings_is_forgotten(tmp_path):
    open_folder(tmp_path, {"a": 1})
    open_folder(tmp_path, {"a": 2})
    part(tmp_path / "result.json", dict)
    with pytest.raises(ValueError, match="a was 2 and is 3"):
        open_folder(tmp_path, {"a": 3})


def test_demo_without_unseen_clients(tmp_path):
    demo = Demo(Config(lr=0.01, epochs=1, rounds=1, fraction=0.4, meta_steps=1), seeds=(0,), clients=5, unseen=0, pretraining_rounds=1, out=tmp_path / "o", workers=1, more_estimators=())
    assert "unseen" not in run_demo(demo) and run_demo(replace(demo, workers=2))
