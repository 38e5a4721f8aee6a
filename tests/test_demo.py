"""`fedl2p demo`: killed and continued, interrupted, and its folder, which is one of cells."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from processes import INTERRUPTIBLE, alive

from fedl2p.cli import main
from fedl2p.config import Config
from fedl2p.storage import load_or_make, load_tensors, write_json
from fedl2p.strategy import GRID
from fedl2p.studies.demo import Demo, jobs, open_folder, run_demo
from fedl2p.studies.published import Condition
from fedl2p.studies.tables import collect, condition_of, results, summarise

SMALL = ["--seeds", "3", "--clients", "5", "--unseen", "5", "--rounds", "6", "--epochs", "1", "--fraction", "0.4", "--meta-steps", "1", "--pretraining-rounds", "8"]
PLAIN = ["none", "ft-c-precise-best", "ft-g-best", "ft-i-best"]
LEARNED = ["l2p", "fedl2p-ift", "fedl2p-ours"]
CELLS = Path("digits/small/fedavg-alpha0.5-e1")
PRETRAINED = Path("digits/small/pretrained/fedavg-alpha0.5-seed3.safetensors")
RESULTS = ["clients.jsonl", "table.md", "config.json", CELLS / "fedl2p-ift-seed3/rounds.jsonl"]
TENSORS = [PRETRAINED, CELLS / "fedl2p-ift-seed3/policy.safetensors", CELLS / "fedl2p-ours-seed3/policy.safetensors"]


def start(out: Path, *more: str) -> subprocess.Popen:
    program = INTERRUPTIBLE + "from fedl2p.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "demo", *SMALL, "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(process: subprocess.Popen, ready) -> None:
    limit = time.monotonic() + 600  # a busy machine may need minutes
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "unbroken"
    process = start(out, "--workers", "0")
    said, log = process.communicate(timeout=300)
    assert process.returncode == 0, log
    return out, said


def test_killed_at_any_moment_it_goes_on_to_the_same_numbers(unbroken, tmp_path):
    """A real SIGKILL in pretraining, in the trials, between cells, and in the middle of learning; then the end."""
    out = tmp_path / "killed"
    learning = out / CELLS / "fedl2p-ift-seed3" / "checkpoint.safetensors"

    def rounds_done():
        return len(json.loads(load_tensors(learning, "fedl2p checkpoint 1")[1]["info"])["rounds"]) if learning.exists() else 0

    moments = [
        (out / PRETRAINED).exists,
        lambda: len(list((out / CELLS / "trials-seed3").glob("*.safetensors"))) >= 2,
        (out / CELLS / "ft-i-best-seed3.json").exists,
        lambda: rounds_done() >= 3,
    ]
    for ready in moments:
        process = start(out)
        wait_for(process, ready)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    rounds_before = rounds_done()
    assert 3 <= rounds_before < 6 and not (out / "table.md").exists()
    process = start(out)
    said, log = process.communicate(timeout=300)
    assert process.returncode == 0, log
    title = "digits fedavg-alpha0.5 e1 seed 3: fedl2p-ift"
    assert f"{title}: 6/6" in log
    assert not any(f"{title}: {n}/6" in log for n in range(rounds_before + 1))  # rounds that were done are not run again
    for name in RESULTS:
        assert (out / name).read_bytes() == (unbroken[0] / name).read_bytes(), name
    for name in TENSORS:
        assert (out / name).read_bytes() == (unbroken[0] / name).read_bytes(), name
    for method in PLAIN + LEARNED:
        ours, theirs = (json.loads((folder / CELLS / f"{method}-seed3.json").read_text()) for folder in (out, unbroken[0]))
        timed = {"seconds", "pretraining_seconds"}
        assert ours.keys() == theirs.keys() and all(ours[k] == theirs[k] for k in ours.keys() - timed), method
    assert not list(out.rglob("*.part"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc")
def test_ctrl_c_says_how_to_go_on_and_leaves_no_process(tmp_path):
    process = start(tmp_path / "out")
    wait_for(process, (tmp_path / "out" / PRETRAINED).exists)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the workers, too
    said, log = process.communicate(timeout=300)
    assert process.returncode == 130, log
    assert "the same command resumes from there" in log and "Traceback" not in log
    assert_ends(process.pid)


def assert_ends(session: int) -> None:
    limit = time.monotonic() + 300
    while alive(session) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not alive(session)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc")
@pytest.mark.parametrize("gap", [0.1, 0.5])
def test_ctrl_c_twice_does_not_hang(tmp_path, gap):
    process = start(tmp_path / "out")
    wait_for(process, (tmp_path / "out" / PRETRAINED).exists)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(gap)
    try:
        os.killpg(process.pid, signal.SIGINT)
    except ProcessLookupError:  # it was quicker
        pass
    process.communicate(timeout=300)
    assert process.returncode in (130, -signal.SIGINT)
    assert_ends(process.pid)


def test_the_folder(unbroken):
    out, said = unbroken
    table, _, seeds = (out / "table.md").read_text().partition("\n\n")
    assert table in said and seeds.endswith("one seed, 3, so no ±.\n")
    labels = ["no fine-tuning", "FT (BN C), best rate", "FT (BN G), best rate", "FT (BN I), best rate", "L2P", "FedL2P (paper)", "FedL2P (ours)"]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == labels
    records = [json.loads(line) for line in (out / "clients.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(r["method"] for r in records)) == PLAIN + LEARNED
    assert all(0 <= r["right"] <= r["n"] and r["seed"] == 3 for r in records)
    assert all(len(r["beta"]) == 3 and len(r["eta"]) == 11 for r in records if r["method"] in LEARNED)
    assert {r["lr"] for r in records if r["method"] == "none"} == {0.01}
    assert {r["lr"] for r in records if r["method"].endswith("-best")} <= set(GRID)
    differences = (out / "differences.md").read_text()
    assert differences.startswith("| less FT (BN C), best rate | seen clients | unseen clients |") and all(f"| {name} |" in differences for name in labels if "BN C" not in name)
    for name in ("accuracy", "learning", "strategies"):
        assert (out / f"{name}.png").read_bytes()[1:4] == b"PNG"
    assert json.loads((out / "versions.json").read_text())["torch"] == version("torch")
    assert json.loads((out / "config.json").read_text())["epochs"] == 1


def test_the_folder_is_one_of_cells(unbroken):
    """As of a study: its cells are read by the same functions, and have the numbers of the demo's own files."""
    out, _ = unbroken
    cells = results(out, "small")
    assert sorted(cell["method"] for cell in cells) == sorted(PLAIN + LEARNED)
    row = Condition("digits", 0.5, 1, "fedavg")
    assert {condition_of(cell) for cell in cells} == {row} and all(cell["new_clients"] for cell in cells)
    records = [json.loads(line) for line in (out / "clients.jsonl").read_text().splitlines()]
    shares, by_condition = summarise(records), collect(cells)
    for method in PLAIN + LEARNED:
        for pool in ("seen",) if method == "l2p" else ("seen", "unseen"):
            assert by_condition[row._replace(pool=pool)][method] == {3: 100 * shares[method][pool][0]}


def test_all_that_choose_share_their_trials(unbroken):
    """One file for each client, whoever asks: rates of plain fine-tuning and our own policy are chosen by the same losses."""
    out, _ = unbroken
    assert len(list((out / CELLS / "trials-seed3").iterdir())) == 5
    contents = {m: json.loads((out / CELLS / f"{m}-seed3.json").read_text()) for m in PLAIN + LEARNED}
    assert {m: c["tried"] for m, c in contents.items() if "tried" in c} == {m: 5 for m in [*PLAIN[1:], "fedl2p-ours"]}
    assert all(contents[m]["chosen"] in GRID for m in PLAIN[1:]) and contents["fedl2p-ours"]["looking"].keys() == {"looks", "gain", "error"}
    assert all(contents[m]["settings"]["statistics"] == "precise" for m in ("ft-c-precise-best", "fedl2p-ours"))


def test_another_seed_goes_into_the_same_folder(unbroken, capsys):
    """Seeds are added, not mixed up: the old ones are not run again."""
    out, _ = unbroken
    before = {p: p.stat().st_mtime_ns for p in (out / "digits").rglob("*") if p.is_file()}
    old = (out / "clients.jsonl").read_text()
    assert main(["demo", *SMALL, "--out", str(out), "--seeds", "3", "4", "--workers", "0"]) == 0
    assert before == {p: p.stat().st_mtime_ns for p in before}
    assert "±" in (out / "table.md").read_text() and (out / "clients.jsonl").read_text().startswith(old)
    assert main(["demo", *SMALL, "--out", str(out), "--workers", "0"]) == 0  # as it was


def test_folders_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    for name, must in [("file", "be a folder to write in"), ("full", "be a new or an empty folder")]:
        assert main(["demo", *SMALL, "--out", str(tmp_path / name)]) == 1
        assert f"out must {must}, got {tmp_path / name}" in capsys.readouterr().err
    assert main(["demo", *SMALL, "--out", "/proc/nowhere"]) == 1
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_a_folder_of_an_older_demo_is_refused(tmp_path, capsys):
    """It has a folder for each seed; what is in it stays as it is."""
    args = ["demo", *SMALL, "--out", str(tmp_path)]
    (tmp_path / "seed-3").mkdir()
    write_json(tmp_path / "seed-3" / "l2p.json", [])
    (tmp_path / "clients.jsonl").write_text("")
    write_json(tmp_path / "config.json", {"lr": 0.01})
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert main(args) == 1
    said = capsys.readouterr().err.strip()
    assert said == f"fedl2p: {tmp_path} was written by an older version of the demo; choose another folder with --out"
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="older version of the demo"):
        run_demo(Demo(out=tmp_path))


def test_other_settings_and_damaged_files(unbroken, capsys, tmp_path):
    out, _ = unbroken
    assert main(["demo", *SMALL, "--out", str(out), "--alpha", "0.3"]) == 1
    assert "alpha was 0.5 and is 0.3" in capsys.readouterr().err
    cell = out / CELLS / "l2p-seed3.json"
    good = cell.read_bytes()
    cell.write_bytes(good[:50])
    assert main(["demo", *SMALL, "--out", str(out)]) == 1
    assert "l2p-seed3.json is damaged" in capsys.readouterr().err
    cell.write_bytes(good)


def test_a_policy_that_was_deleted_is_missed(unbroken, tmp_path):
    """A finished folder without it looked finished."""
    out = tmp_path / "out"
    shutil.copytree(unbroken[0], out)
    (out / CELLS / "fedl2p-ift-seed3" / "policy.safetensors").unlink()
    with pytest.warns(RuntimeWarning, match="fedl2p-ift-seed3.json exists, but its policy.safetensors does not; delete the file to make both again"):
        assert main(["demo", *SMALL, "--out", str(out)]) == 0


def test_an_empty_start_with_other_settings_is_forgotten(tmp_path):
    open_folder(tmp_path, {"a": 1})
    open_folder(tmp_path, {"a": 2})
    load_or_make(tmp_path / "result.json", dict)
    with pytest.raises(ValueError, match="a was 2 and is 3"):
        open_folder(tmp_path, {"a": 3})


def test_demo_without_unseen_clients(tmp_path):
    config = Config.paper(lr=0.01, epochs=1, rounds=1, fraction=0.4, meta_steps=1)
    demo = Demo(config, seeds=(0,), clients=5, unseen=0, pretraining_rounds=1, out=tmp_path / "o", workers=0)
    table = run_demo(demo)
    assert table.head == ["method", "seen clients"] and table.rows[0][0] == "no fine-tuning"
    assert run_demo(replace(demo, workers=2)) == table


def test_jobs_of_a_demo():
    """Each seed has the same cells, with clients and a model of its own; no method twice."""
    todo = jobs(Demo(seeds=(3, 5), alpha=0.3, more_methods=("fedl2p-fomaml", "fedl2p-ift")))
    assert [(job.cell.seed, job.cell.method) for job in todo] == [(seed, m) for seed in (3, 5) for m in [*PLAIN, "l2p", "fedl2p-ift", "fedl2p-ours", "fedl2p-fomaml"]]
    assert {job.data_seed for job in todo if job.cell.seed == 5} == {5}
    assert {job.cell.condition for job in todo} == {Condition("digits", 0.3, 5, "fedavg")}
    assert {job.cell.method: (job.config.start, job.config.estimator) for job in todo if job.cell.method.startswith("fedl2p-")} == {
        "fedl2p-ift": ("constant", "ift"), "fedl2p-fomaml": ("constant", "fomaml"), "fedl2p-ours": ("trials", "unrolled")}
    only = jobs(Demo(Config.paper(estimator="unrolled"), seeds=(0,)))
    assert [job.cell.method for job in only] == [*PLAIN, "l2p", "fedl2p-unrolled", "fedl2p-ours"]
    with pytest.raises(ValueError, match=r"^start must be left out \(the demo has both recipes\), got 'trials'"):
        Demo(Config())
