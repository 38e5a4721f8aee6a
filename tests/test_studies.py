"""Every study at smoke scale from the command line, on made-up data in the official layouts; cells that are lost, damaged, of other settings; tables."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import made_up
import pytest
import torch

from fedl2p.cli import main
from fedl2p.experiment import write_json
from fedl2p.models import resnet18
from fedl2p.paper import TABLES, Condition
from fedl2p.scales import setting
from fedl2p.studies import LEARNED, OURS, Cell, Machine, Run, cells, columns, conditions, run_cell, run_study
from fedl2p.tables import collect, results, table


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


def test_papers_settings():
    """Numbers of the paper's section 4.1 and its appendix, typed in from there."""
    for dataset in ("cifar10", "cifar10c", "office", "domainnet", "speech"):
        c = setting(dataset, "paper", "data").config
        assert (c.batch_size, c.epochs, c.meta_steps, c.rounds) == (32, 15, 3, 500)
        assert (c.meta_lr_bn, c.meta_lr_lr, c.meta_lr_scale, c.clip, c.neumann_terms, c.psi, c.hidden) == (1e-3, 1e-3, 1e-4, 1.0, 3, 0.1, 100)
        assert (c.estimator, c.scaled, c.statistics, c.keep, c.hvp, c.learn) == ("ift", False, "running", "lowest", "exact", "both")
        assert c.lr == (1e-3 if dataset.startswith("cifar10") else 1e-2) and c.fraction == (1.0 if dataset == "office" else 0.1)
        assert setting(dataset, "paper", "data").scored is None and not setting(dataset, "paper", "data").differs
    recipe = setting("cifar10", "paper", "data").recipe
    assert (recipe["rounds"], recipe["fraction"], recipe["epochs"]) == (500, 0.1, 1)
    assert setting("speech", "paper", "data").recipe["final_lr"] == 0.01 and setting("office", "paper", "data").recipe is None


def test_small_scale_takes_the_backbone_that_is_there(world):
    model = setting("office", "small", world).model(0)
    assert torch.equal(model.conv1.weight, resnet18("imagenet").conv1.weight.half().float())
    assert "fp16-derived" in setting("office", "small", world).differs


def one(world, method="ft-c", seed=0, **more):
    return Run("cifar10", "smoke", (0.5,), (1,), (seed,), (method,), out=world / "results", machine=Machine(world, 1, "cpu", **more))


def test_methods_of_ours_run_too(world):
    for method in OURS:
        run = one(world, method)
        run_study(run)
        found = run_cell(cells(run)[0], "smoke", run.out, run.machine)
        assert 0 <= found["accuracy"]["seen"] <= 1
        assert ("chosen" in found) == method.endswith("-best") and ("rounds" in found) == (method in LEARNED)


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
    (["cifar10", "--datasets", "office"], "has no rows for datasets office; allowed are cifar10"), (["cifar10", "--amp", "True", "--device", "cpu"], "allowed with cuda only"),
    (["cifar10", "--alpha", "-1"], "alpha is"), (["cifar10", "--epochs", "0"], "epochs"), (["cifar10", "--device", "tpu"], "device is 'tpu'")])
def test_wrong_words_are_explained(args, words, tmp_path, capsys):
    try:
        code = main(["run", *args, "--out", str(tmp_path / "out"), "--data", str(tmp_path)])
    except SystemExit as stop:
        code = stop.code
    assert code not in (0, None)
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_table_before_any_result(tmp_path, capsys):
    assert main(["table", "office", "--out", str(tmp_path / "none")]) == 0
    assert "Nothing of ours at scale small yet" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_table_numbers(tmp_path):
    """Means and deviations by hand; a diverged seed; seeds of different pools."""
    row = Condition("speech", None, 5, "fedavg")
    values = {("ft-c", 0): {"seen": 0.5, "unseen": 0.4}, ("ft-c", 1): {"seen": 0.7, "unseen": 0.4}, ("fedl2p", 0): {}, ("none", 0): {"seen": 0.2, "unseen": 0.1}}
    for (method, seed), accuracy in values.items():
        path = Cell(row, method, seed).path(tmp_path, "small")
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {k: v for k, v in row._asdict().items() if k != "pool"}
        write_json(path, {**about, "method": method, "seed": seed, "accuracy": accuracy, "seconds": 1.0, "pretraining_seconds": 0.0, "differs": "made up", "machine": {"device": "cpu", "cores": 2}})
    found = collect(list(results(tmp_path, "small")))
    assert found[row]["ft-c"] == [50.0, 70.0] and found[row._replace(pool="unseen")]["ft-c"] == [40.0, 40.0]
    assert math.isnan(found[row]["fedl2p"][0])
    text = table("speech", "small", tmp_path)
    assert "| 5 | seen | ours | 20.0 (1) | **60.0 ± 14.1** | — | — | — | diverges |" in text
    assert "| 5 | unseen | ours | 10.0 (1) | **40.0 ± 0.0** |" in text
    assert "87.8 ± 0.5" in text  # the paper's, right below


def test_only_divergence_is_a_result(world, monkeypatch):
    """A GPU that is full, a disk that is full: neither is a number in a table, nor a data set that is missing."""
    import fedl2p.studies as studies

    run = one(world, "fedl2p", 9)
    for error, words in ((RuntimeError("all of its 2 clients failed; the first: FloatingPointError: the loss is nan"), None), (RuntimeError("CUDA out of memory"), "CUDA"), (OSError("no space left"), "no space")):
        def fails(*_, error=error):
            raise error
        monkeypatch.setattr(studies, "_results", fails)
        if words is None:
            with pytest.warns(RuntimeWarning, match="has no result"):
                run_study(run)
            path = cells(run)[0].path(run.out, "smoke")
            assert json.loads(path.read_text())["accuracy"] == {}
            path.unlink()
        else:
            with pytest.raises(type(error), match=words):
                run_study(run)
            assert not path.exists()


def test_killed_and_continued(world, tmp_path):
    """A run that is killed in the middle of a cell goes on there, and ends with the same numbers."""
    code = f"""
import sys; from pathlib import Path
from dataclasses import replace
import fedl2p.studies as s
plain = s.setting
s.setting = lambda d, scale, root: replace(plain(d, scale, root), config=replace(plain(d, scale, root).config, rounds=6))
run = s.Run("cifar10", "smoke", (0.5,), (5,), (0,), ("fedl2p",), out=Path(sys.argv[1]), machine=s.Machine(Path({str(world)!r}), 1, "cpu"))
s.run_study(run)
"""
    done, broken = tmp_path / "done", tmp_path / "broken"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(done)], check=True)
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, str(broken)])
    deadline = time.time() + 120
    while not list(broken.glob("**/rounds.jsonl")) and time.time() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(broken.glob("**/rounds.jsonl")) and not list(broken.glob("**/fedl2p-seed0.json"))
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(broken)], check=True)
    first, second = (json.loads(next(folder.glob("**/fedl2p-seed0.json")).read_text()) for folder in (done, broken))
    assert len(first["rounds"]) == 6
    assert all(first[k] == second[k] for k in ("accuracy", "rounds", "clients"))
