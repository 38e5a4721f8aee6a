"""Every study at smoke scale from the command line, on made-up data in the official layouts; cells that are lost, damaged, of other settings."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import made_up
import pytest

from fedl2p.checkpoint import fingerprint
from fedl2p.cli import main
from fedl2p.core import write_json
from fedl2p.studies import runs
from fedl2p.studies.published import TABLES, Condition
from fedl2p.studies.runs import (
    GRID,
    LEARNED,
    OUR_METHODS,
    Cell,
    Machine,
    Run,
    cells,
    choose_rate,
    columns,
    conditions,
    drawn,
    federation,
    job_of,
    learned_by,
    pretrained,
    run_cell,
    run_study,
)
from fedl2p.studies.tables import collect, results, study_table


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Data of all studies, and a folder for results that they share."""
    root = tmp_path_factory.mktemp("world")
    made_up.everything(root)
    return root


def command(world, *more):
    return [*more, "--scale", "smoke", "--out", str(world / "results")]


@pytest.mark.parametrize("study", TABLES)
def test_every_study_with_one_command(world, study, capsys):
    args = ["--seeds", "0", "--epochs", "1", "--alpha", "0.5", "--data", str(world), "--workers", "1", "--device", "cpu"]
    assert main(command(world, "run", study, *args)) == 0
    wanted = cells(Run(study, "smoke", (0.5,), (1,), (0,)))
    assert all(cell.path(world / "results", "smoke").exists() for cell in wanted)
    shown = capsys.readouterr().out
    assert "| ours |" in shown and "Ours: scale smoke, seeds 0" in shown
    assert main(command(world, "table", study)) == 0
    assert (world / "results" / f"{study}-smoke.md").read_text() in capsys.readouterr().out


def test_conditions_are_the_papers_unless_asked():
    for study, rows in TABLES.items():
        assert conditions(study) == list(rows)
        assert set(columns(study)) == {m for row in rows.values() for m in row}
    assert {c.alpha for c in conditions("speech", alpha=[0.3])} == {None}
    assert conditions("ablation", datasets=["office"]) == [Condition("office", 1000.0, 15, "imagenet")]


def test_corrupted_images_start_from_the_model_for_clean_ones(world):
    run_study(Run("cifar10c", "smoke", (0.5,), (1,), (0,), ("none",), out=world / "results", machine=Machine(world, 1, "cpu")))
    assert (world / "results" / "cifar10" / "smoke" / "pretrained" / "fedavg-alpha1000.safetensors").exists()
    assert not (world / "results" / "cifar10c" / "smoke" / "pretrained").exists()
    a, b = (pretrained(Condition(name, alpha, 1, "fedavg"), "smoke", world / "results", Machine(world, 1, "cpu")) for name, alpha in (("cifar10c", 0.5), ("cifar10", 1000.0)))
    assert fingerprint(a) == fingerprint(b)


def one(world, method="ft-c", seed=0, **more):
    return Run("cifar10", "smoke", (0.5,), (1,), (seed,), (method,), out=world / "results", machine=Machine(world, 1, "cpu", **more))


def test_methods_of_ours_run_too(world):
    for method in OURS:
        run = one(world, method)
        run_study(run)
        found = run_cell(cells(run)[0], "smoke", run.out, run.machine)
        assert 0 <= found["accuracy"]["seen"] <= 1
        assert ("chosen" in found) == method.endswith("-best") and ("rounds" in found) == (method in LEARNED and method != "fedl2p-mean")  # whose rounds are those of fedl2p


def test_cells_of_one_seed_do_not_depend_on_others(world, tmp_path):
    run_study(one(world, "fedl2p", 7))
    alone = Run("cifar10", "smoke", (0.5,), (1,), (7,), ("fedl2p",), out=tmp_path, machine=Machine(world, 1, "cpu"))
    run_study(alone)
    timed = ("seconds", "pretraining_seconds")
    first, second = ({k: v for k, v in run_cell(cells(alone)[0], "smoke", out, alone.machine).items() if k not in timed} for out in (world / "results", tmp_path))
    assert first == second


def test_damaged_and_foreign_cells_are_refused(world, capsys):
    run = one(world, "ft-g", 8)
    run_study(run)
    path = cells(run)[0].path(run.out, "smoke")
    good = path.read_text()
    write_json(path, {**json.loads(good), "settings": {**json.loads(good)["settings"], "lr": 5.0}})
    with pytest.raises(ValueError, match="result of other settings: lr was 5.0 and is 0.01"):
        run_study(run)
    path.write_text(good[:100])
    with pytest.raises(ValueError, match="is damaged"):
        list(results(run.out, "smoke"))
    path.unlink()
    run_study(run)
    assert json.loads(path.read_text())["accuracy"] == json.loads(good)["accuracy"]


def test_missing_data_leave_out_a_data_set_only(world, tmp_path, capsys):
    made_up.cifar10(tmp_path)
    args = ["ablation", "--epochs", "1", "--alpha", "0.5", "--seeds", "0", "--methods", "ft-c", "--data", str(tmp_path), "--workers", "1", "--device", "cpu", "--scale", "smoke", "--out", str(tmp_path / "out")]
    with pytest.warns(RuntimeWarning, match="office is left out"):
        assert main(["run", *args]) == 1
    said = capsys.readouterr()
    assert "| cifar10 | 0.5 | 1 | fedavg | ours |" in said.out
    assert "office is left out: put images into" in said.err and "domainnet is left out" in said.err
    with pytest.warns(RuntimeWarning):
        assert main(["run", "office", *args[1:]]) == 1


@pytest.mark.parametrize(("args", "words"), [
    (["mnist"], "mnist"), (["cifar10", "--scale", "huge"], "huge"), (["cifar10", "--seeds", "1", "1"], "different whole numbers"), (["cifar10", "--methods", "ft"], "methods has ft; allowed are none, ft-c"),
    (["cifar10", "--datasets", "office"], "has no rows for datasets office; allowed are cifar10"), (["cifar10", "--amp", "True", "--device", "cpu"], "allowed with cuda and one worker only"),
    (["cifar10", "--alpha", "-1"], "alpha is"), (["cifar10", "--epochs", "0"], "epochs"), (["cifar10", "--device", "tpu"], "device is 'tpu'")])
def test_wrong_words_are_explained(args, words, tmp_path, capsys):
    try:
        code = main(["run", *args, "--out", str(tmp_path / "out"), "--data", str(tmp_path)])
    except SystemExit as stop:
        code = stop.code
    assert code not in (0, None)
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


def fails_for(client_id, error, function):
    """The function, but one client meets an error."""
    def work(*args):
        if args[-1].id == client_id:
            raise error
        return function(*args)
    return work


def test_a_client_that_is_lost_is_no_result(world, monkeypatch):
    """A GPU that is full for the largest client must not leave a mean over the others."""
    import fedl2p.studies.runs as studies

    for method, name in (("ft-c", "score_strategies"), ("l2p", "l2p_client")):
        run = one(world, method, 9)
        path = cells(run)[0].path(run.out, "smoke")
        seen = studies._drawn(studies._clients("cifar10", "smoke", world, 0.5)[0], 2, 9)
        with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="out of memory"):
            patch.setattr(studies, name, fails_for(seen[1].id, RuntimeError("CUDA out of memory"), getattr(studies, name)))
            with pytest.raises(RuntimeError, match="scored: {'seen': 1}"):
                run_study(run)
        assert not path.exists()
        run_study(run)
        assert path.exists()


def test_divergence_is_a_result(world, tmp_path, monkeypatch):
    import fedl2p.studies.runs as studies

    plain = studies._config
    monkeypatch.setattr(studies, "_config", lambda *args: replace(plain(*args), lr=1e30, fraction=1.0))
    run = Run("speech", "smoke", (), (2,), (0,), ("fedl2p",), out=tmp_path, machine=Machine(world, 1, "cpu"))
    with pytest.warns(RuntimeWarning, match="has no result"):
        run_study(run)
    found = json.loads(cells(run)[0].path(run.out, "smoke").read_text())
    assert found["accuracy"] == {"seen": None, "unseen": None} and "FloatingPointError" in found["diverged"]
    assert table("speech", "smoke", tmp_path, ["fedl2p"]).count("diverges |") == 2


def test_other_clients_or_models_are_noticed(world, tmp_path):
    run_study(replace(one(world), out=tmp_path))
    made_up.cifar10(tmp_path, n=130)
    with pytest.raises(ValueError, match="other clients or another pretrained model|other settings: model and clients"):
        run_study(replace(one(tmp_path, "ft-g"), out=tmp_path))


def test_killed_and_continued(world, tmp_path):
    """A run that is killed in the middle of a cell goes on there, and ends with the same numbers."""
    code = f"""
import sys; from pathlib import Path
from dataclasses import replace
import fedl2p.studies.runs as s
plain = s.setting
s.setting = lambda d, scale, root: replace(plain(d, scale, root), config=replace(plain(d, scale, root).config, rounds=6))
run = s.Run("cifar10", "smoke", (0.5,), (5,), (0,), ("fedl2p",), out=Path(sys.argv[1]), machine=s.Machine(Path({str(world)!r}), 1, "cpu"))
def track(rounds, title, total, done):
    if title.endswith("fedl2p"): print("began with", done)
    return rounds
s.run_study(run, track)
"""
    done, broken = tmp_path / "done", tmp_path / "broken"
    assert "began with 0" in subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(done)], check=True, capture_output=True, text=True).stdout
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, str(broken)])
    deadline = time.time() + 120
    while not list(broken.glob("**/rounds.jsonl")) and time.time() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(broken.glob("**/rounds.jsonl")) and not list(broken.glob("**/fedl2p-seed0.json"))
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(broken)], check=True, capture_output=True, text=True).stdout
    assert "began with 0" not in said and "began with" in said
    first, second = (json.loads(next(folder.glob("**/fedl2p-seed0.json")).read_text()) for folder in (done, broken))
    assert len(first["rounds"]) == 6
    assert all(first[k] == second[k] for k in ("accuracy", "rounds", "clients"))


def test_rates_are_chosen_by_validation(monkeypatch):
    """Made-up scores: BN C is best at 0.1 in validation, BN G ties (the smaller rate wins), BN I at 1."""
    from fedl2p.bn import mix_bn
    from fedl2p.client import Result
    from fedl2p.digits import small_cnn
    from fedl2p.finetune import Score
    from fedl2p.studies import demo as experiment

    def scored(function, clients, model, workers, track, title):
        assert function.keywords == {"held_out": False}
        accuracy = {"FT (BN C) 0.1": 0.9, "FT (BN G) 0.01": 0.5, "FT (BN G) 0.0001": 0.5, "FT (BN I) 1.0": 0.8}
        return [{name: Result("x", "", Score(accuracy.get(name, 0.1), 1.0, 10), s) for name, s in function.args[1].items()}]

    monkeypatch.setattr(experiment, "score_all", scored)
    assert choose_rates(mix_bn(small_cnn(), verbose=False), [], Config()) == {"FT (BN C)": 0.1, "FT (BN G)": 0.0001, "FT (BN I)": 1.0}
