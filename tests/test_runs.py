"""Every study at smoke scale from the command line, on made-up data in the official layouts; cells that are lost, damaged, of other settings; tables."""

import inspect
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import made_up
import pytest
import torch

from fedl2p.studies import datasets
from fedl2p.studies import settings as scales
from fedl2p.checkpoint import fingerprint
from fedl2p.cli import main
from fedl2p.core import write_json
from fedl2p.pretraining import Recipe
from fedl2p.studies.models import resnet18
from fedl2p.studies.published import TABLES, Condition
from fedl2p.studies.runs import (
    LEARNED,
    OURS,
    Cell,
    Machine,
    Run,
    cells,
    columns,
    conditions,
    pretrained,
    run_cell,
    run_study,
)
from fedl2p.studies.settings import setting
from fedl2p.studies.tables import collect, comparison, results, table


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


def test_papers_settings(monkeypatch):
    """Numbers of the paper's section 4.1 and its appendix, typed in from there; patience as in the authors' code."""
    for dataset, rounds, patience, lr, fraction in (("cifar10", 500, 50, 1e-3, 0.1), ("cifar10c", 500, 100, 1e-3, 0.1), ("office", 100, 100, 1e-2, 1.0), ("domainnet", 100, 50, 1e-2, 0.1), ("speech", 100, 50, 1e-2, 0.1)):
        how = setting(dataset, "paper", "data")
        c = how.config
        assert (c.rounds, c.patience, c.lr, c.fraction) == (rounds, patience, lr, fraction)
        assert (c.batch_size, c.epochs, c.meta_steps) == (32, 15, 3)
        assert (c.meta_lr_bn, c.meta_lr_lr, c.meta_lr_scale, c.clip, c.neumann_terms, c.psi, c.hidden) == (1e-3, 1e-3, 1e-4, 1.0, 3, 0.1, 100)
        assert (c.estimator, c.scaled, c.statistics, c.keep, c.hvp, c.learn) == ("ift", False, "running", "lowest", "exact", "both")
        assert how.scored is None and not how.differs
    for dataset, final in (("cifar10", None), ("cifar10c", None), ("speech", 0.01)):
        recipe = Recipe(**{k: v for k, v in setting(dataset, "paper", "data").recipe.items() if k != "fraction"})
        assert (recipe.rounds, recipe.epochs, recipe.lr, recipe.final_lr, setting(dataset, "paper", "data").recipe["fraction"]) == (500, 1, 0.1, final, 0.1)
        assert final or recipe.drops == (0.5, 0.75)  # rounds 250 and 375
    assert setting("office", "paper", "data").recipe is None
    asked = {}
    for name in ("cifar10", "cifar10c", "office", "domainnet", "speech"):
        monkeypatch.setattr(scales, name, lambda *args, name=name, **kw: asked.update({name: inspect.signature(getattr(datasets, name)).bind(*args, **kw)}) or [])
        setting(name, "paper", "data").clients(0.5, 3)
        asked[name].apply_defaults()
    wanted = {"cifar10": {"n_clients": 1000, "size": 50, "alpha": 0.5}, "cifar10c": {"clients_each": 25, "severity": 3, "own": False, "size": None, "corruptions": datasets.CORRUPTIONS, "alpha": 0.5},
              "office": {"pixels": 224, "size": None}, "domainnet": {"clients_each": 25, "size": None, "alpha": 0.5}, "speech": {"n_seen": 250, "n_unseen": 50}}
    for name, arguments in wanted.items():
        assert {k: asked[name].arguments[k] for k in arguments} == arguments and asked[name].arguments["seed"] == 3
    layers = [sum(isinstance(m, torch.nn.BatchNorm2d) for m in setting(name, "paper", "data").model(0).modules()) for name in ("cifar10", "speech")]
    assert layers == [20, 20]


def test_corrupted_images_start_from_the_model_for_clean_ones(world):
    run_study(Run("cifar10c", "smoke", (0.5,), (1,), (0,), ("none",), out=world / "results", machine=Machine(world, 1, "cpu")))
    assert (world / "results" / "cifar10" / "smoke" / "pretrained" / "fedavg-alpha1000.safetensors").exists()
    assert not (world / "results" / "cifar10c" / "smoke" / "pretrained").exists()
    a, b = (pretrained(Condition(name, alpha, 1, "fedavg"), "smoke", world / "results", Machine(world, 1, "cpu")) for name, alpha in (("cifar10c", 0.5), ("cifar10", 1000.0)))
    assert fingerprint(a) == fingerprint(b)


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


def test_table_before_any_result(tmp_path, capsys):
    assert main(["table", "office", "--out", str(tmp_path / "none")]) == 0
    assert "Nothing of ours at scale small yet" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_table_numbers(tmp_path):
    """Means and deviations by hand; a diverged seed; seeds of different pools."""
    row = Condition("speech", None, 5, "fedavg")
    gone = {"seen": None, "unseen": None}
    values = {("ft-c", 0): {"seen": 0.5, "unseen": 0.4}, ("ft-c", 1): {"seen": 0.7, "unseen": 0.4}, ("fedl2p", 0): gone, ("fedl2p", 1): gone, ("none", 0): {"seen": 0.2, "unseen": 0.1}, ("none", 1): {"seen": 0.3, "unseen": 0.1}, ("ft-i-best", 1): {"seen": 0.9, "unseen": 0.9}}
    for (method, seed), accuracy in values.items():
        path = Cell(row, method, seed).path(tmp_path, "small")
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {k: v for k, v in row._asdict().items() if k != "pool"}
        clients = [{"client": f"c{i}", "pool": pool, "domain": "", "n": 10, "accuracy": value + 0.1 * i} for pool, value in accuracy.items() for i in (0, 1) if value]
        write_json(path, {**about, "method": method, "seed": seed, "accuracy": accuracy, "clients": clients, "seconds": 1.0, "pretraining_seconds": 0.0, "differs": "made up", "machine": {"device": "cpu", "cores": 2}})
    found = collect(list(results(tmp_path, "small")))
    assert found[row]["ft-c"] == {0: 50.0, 1: 70.0} and found[row._replace(pool="unseen")]["ft-c"] == {0: 40.0, 1: 40.0}
    assert all(math.isnan(found[row._replace(pool=pool)]["fedl2p"][0]) for pool in ("seen", "unseen"))
    text = table("speech", "small", tmp_path)
    assert "| 5 | seen | ours | 25.0 ± 7.1 | **60.0 ± 14.1** | — | — | — | diverges | 90.0 (1) |" in text
    assert "| 5 | unseen | ours | 10.0 ± 0.0 | **40.0 ± 0.0** |" in text
    assert "87.77 ± 0.47" in text  # the paper's, right below, as printed
    assert "| speech, fedavg, e 5 | +35.0 ± 0.0 | 2 |" in comparison("speech", "small", tmp_path, "ft-c", ("none",))  # (30 + 40) / 2 on both clients


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
