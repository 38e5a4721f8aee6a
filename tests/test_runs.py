"""Every study at smoke scale from the command line, on made-up data in the official layouts; cells that are lost, damaged, of other settings, of older versions."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import made_up
import pytest
import torch

from fedl2p.bn import mix_bn
from fedl2p.checkpoint import fingerprint
from fedl2p.cli import main
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.evaluation import baselines
from fedl2p.metanet import signature
from fedl2p.selector import candidates, strategy_of
from fedl2p.storage import write_json
from fedl2p.strategy import GRID
from fedl2p.studies import contents, runs
from fedl2p.studies.cells import Cell, Machine, drawn, federation, pretrained
from fedl2p.studies.contents import choose_rate, run_cell, tried
from fedl2p.studies.methods import FAIR, LEARNED, OUR_METHODS, OURS, columns, learned_by
from fedl2p.studies.published import TABLES, Condition
from fedl2p.studies.runs import Run, cells, conditions, job_of, run_study
from fedl2p.studies.tables import collect, read_cell, results, study_table


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
    args = ["--seeds", "0", "--epochs", "1", "--alpha", "0.5", "--data", str(world), "--workers", "0", "--device", "cpu"]
    assert main(command(world, "run", study, *args)) == 0
    wanted = cells(Run(study, "smoke", (0.5,), (1,), (0,)))
    assert all(cell.path(world / "results", "smoke").exists() for cell in wanted)
    shown = capsys.readouterr().out
    assert "e 1" in shown and "| seeds | 1 " in shown and "Ours: scale smoke, seeds 0" in shown
    assert main(command(world, "table", study)) == 0
    assert (world / "results" / f"{study}-smoke.md").read_text() in capsys.readouterr().out


def test_conditions_are_the_papers_unless_asked():
    for study, rows in TABLES.items():
        assert conditions(study) == list(rows)
        assert set(columns(study)) == ({m for row in rows.values() for m in row} or set(FAIR))
    assert {c.alpha for study in ("speech", "mixed") for c in conditions(study, alpha=[0.3])} == {None}
    assert conditions("ablation", datasets=["office"]) == [Condition("office", 1000.0, 15, "imagenet")]


def test_corrupted_images_start_from_the_model_for_clean_ones(world):
    run = Run("cifar10c", "smoke", (0.5,), (1,), (0,), ("none",), out=world / "results", machine=Machine(world, 0, "cpu"))
    run_study(run)
    assert (world / "results" / "cifar10" / "smoke" / "pretrained" / "fedavg-alpha1000.safetensors").exists()
    assert not (world / "results" / "cifar10c" / "smoke" / "pretrained").exists()
    rows = Condition("cifar10c", 0.5, 1, "fedavg"), Condition("cifar10", 1000.0, 1, "fedavg")
    corrupted, clean = (pretrained(job_of(run, Cell(row, "none", 0))) for row in rows)
    assert fingerprint(corrupted) == fingerprint(clean)


def one(world, method="ft-c", seed=0, **more):
    return Run("cifar10", "smoke", (0.5,), (1,), (seed,), (method,), out=world / "results", machine=Machine(world, 0, "cpu", **more))


def job(run):
    """The only job of a run."""
    [cell] = cells(run)
    return job_of(run, cell)


def test_methods_of_ours_run_too(world):
    for method in OUR_METHODS:
        run = one(world, method)
        run_study(run)
        content = run_cell(job(run))
        assert content["pools"] == ["seen"] and len(content["clients"]) == 2
        assert all(0 <= r["right"] <= r["n"] == 5 for r in content["clients"])
        assert ("chosen" in content) == method.endswith("-best") and ("looking" in content) == (method in OURS)
        assert ("tried" in content) == (method.endswith("-best") or method in OURS)
        assert ("rounds" in content) == (method in LEARNED or method in OURS)  # not with mean inputs, whose rounds are another method's
        if (policy := learned_by(method)) not in ("", "fedl2p-start"):
            assert (job(run).path.with_name(f"{policy}-seed0") / "rounds.jsonl").exists()


def test_a_policy_with_mean_inputs_is_that_of_the_method():
    assert learned_by("fedl2p-fomaml-mean") == learned_by("fedl2p-fomaml") == "fedl2p-fomaml"
    assert learned_by("fedl2p-mean") == learned_by("fedl2p") == "fedl2p"
    assert {learned_by(m) for m in ("none", "ft-c", "ft-i-best", "l2p")} == {""}


def test_cells_of_one_seed_do_not_depend_on_others(world, tmp_path):
    run_study(one(world, "fedl2p", 7))
    alone = replace(one(world, "fedl2p", 7), out=tmp_path)
    run_study(alone)
    timed = ("seconds", "pretraining_seconds")
    contents = [run_cell(job(replace(alone, out=out))) for out in (world / "results", tmp_path)]
    first, second = ({k: v for k, v in content.items() if k not in timed} for content in contents)
    assert first == second


def test_all_seeds_share_the_clients_of_seed_0_unless_a_setting_says_otherwise(world):
    shared = job(one(world, seed=7))
    assert shared.data_seed == 0 and shared._replace(how=replace(shared.how, new_clients=True)).data_seed == 7


def test_damaged_and_foreign_cells_are_refused(world, capsys):
    run = one(world, "ft-g", 8)
    run_study(run)
    path = job(run).path
    good = path.read_text()
    write_json(path, {**json.loads(good), "settings": {**json.loads(good)["settings"], "lr": 5.0}})
    with pytest.raises(ValueError, match="result for other settings: lr was 5.0 and is 0.01"):
        run_study(run)
    path.write_text(good[:100])
    with pytest.raises(ValueError, match="is damaged"):
        results(run.out, "smoke")
    path.unlink()
    run_study(run)
    assert all(json.loads(path.read_text())[k] == json.loads(good)[k] for k in ("pools", "clients"))


def test_cells_with_wrong_types_are_refused(world):
    """JSON that can be read, and means nothing: file and field are named."""
    run = one(world, "ft-g", 11)
    run_study(run)
    path = job(run).path
    good = json.loads(path.read_text())
    first, *rest = good["clients"]
    odd = {"settings must be an object, got []": {"settings": []}, "clients must be a list, got {}": {"clients": {}},
           "clients[0] must be an object, got []": {"clients": [[], *rest]}, "clients[0].n must be a whole number, got '5'": {"clients": [{**first, "n": "5"}, *rest]}}
    for words, damage in odd.items():
        write_json(path, good | damage)
        with pytest.raises(ValueError, match=f"^{re.escape(f'{path} is damaged ({words})')}; delete it, and this part will be run again$"):
            run_study(run)
    path.unlink()


def test_cells_of_older_versions_are_results(world):
    """They hold accuracies instead of counts, and only those settings of pretraining that are not the default."""
    run = one(world, "ft-g", 10)
    run_study(run)
    path = job(run).path
    new = json.loads(path.read_text())
    old = {k: v for k, v in new.items() if k not in ("pools", "new_clients")}
    old["clients"] = [{**{k: v for k, v in r.items() if k not in ("right", "lr")}, "accuracy": r["right"] / r["n"]} for r in new["clients"]]
    old["accuracy"] = {"seen": sum(r["right"] for r in new["clients"]) / sum(r["n"] for r in new["clients"])}
    old["settings"] = {**new["settings"], "recipe": {k: new["settings"]["recipe"][k] for k in ("rounds", "epochs", "fraction", "augment")}}
    before = collect([read_cell(path)])
    write_json(path, old)
    run_study(run)
    assert json.loads(path.read_text()) == old and collect([read_cell(path)]) == before
    write_json(path, {**old, "settings": {**old["settings"], "recipe": {**old["settings"]["recipe"], "rounds": 9}}})
    with pytest.raises(ValueError, match="other settings: recipe was .*'rounds': 9"):
        run_study(run)


def test_missing_data_leave_out_a_data_set_only(world, tmp_path, capsys):
    made_up.cifar10(tmp_path)
    args = ["ablation", "--epochs", "1", "--alpha", "0.5", "--seeds", "0", "--methods", "ft-c", "--data", str(tmp_path), "--workers", "0", "--device", "cpu", "--scale", "smoke", "--out", str(tmp_path / "out")]
    with pytest.warns(RuntimeWarning, match="office is left out"):
        assert main(["run", *args]) == 1
    said = capsys.readouterr()
    assert "| cifar10, alpha 0.5, e 1 | accuracy |\n|---|---:|\n| FT (BN C) |" in said.out
    assert "office is left out: put images into" in said.err and "domainnet is left out" in said.err
    with pytest.warns(RuntimeWarning):
        assert main(["run", "office", *args[1:]]) == 1


@pytest.mark.parametrize(("args", "words"), [
    (["mnist"], "mnist"),
    (["cifar10", "--scale", "huge"], "huge"),
    (["cifar10", "--seeds", "1", "1"], "seeds must be different whole numbers >= 0, at least one, got (1, 1)"),
    (["cifar10", "--methods", "ft"], "methods must be one of none, ft-c, ... got 'ft'"),
    (["cifar10", "--datasets", "office"], "datasets must be some of cifar10 in study cifar10, got ('office',)"),
    (["cifar10", "--amp", "True", "--device", "cpu"], "device must be cuda if amp is on, got 'cpu'"),
    (["cifar10", "--alpha", "-1"], "alpha must be > 0, got -1.0"),
    (["cifar10", "--epochs", "0"], "epochs must be >= 1, got 0"),
    (["cifar10", "--device", "tpu"], "device must be one of auto, ... on this machine, got 'tpu'"),
])
def test_wrong_words_are_explained(args, words, tmp_path, capsys):
    try:
        code = main(["run", *args, "--out", str(tmp_path / "out"), "--data", str(tmp_path)])
    except SystemExit as stop:
        code = stop.code
    assert code not in (0, None)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert all(part in said for part in words.split("..."))


def test_half_precision_is_for_one_process_on_a_gpu(world, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(runs, "pick_device", lambda name: "cuda")
        with pytest.raises(ValueError, match="workers must be 0 if amp is on, got 2"):
            Run("cifar10", machine=Machine(workers=2, amp=True))
    halved = job(one(world, "fedl2p"))
    halved = halved._replace(machine=replace(halved.machine, amp=True, compile=True))
    with pytest.raises(ValueError, match="amp must be False with second derivatives by differences"):
        run_cell(halved)


def fails_for(client_id, error, work):
    """The work, but one client meets an error."""
    def failing(model, settings, state, client, number):
        if client.id == client_id:
            raise error
        return work(model, settings, state, client, number)
    return failing


def test_a_client_that_is_lost_is_no_result(world, monkeypatch):
    """A GPU that is full for the largest client must not leave a mean over the others."""
    for method, name in (("ft-c", "score_strategies"), ("l2p", "l2p_client")):
        run = one(world, method, 9)
        path, how = job(run).path, job(run).how
        seen = drawn(federation(how, 0.5, 0).seen, how.scored, 9)
        with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="out of memory"):
            patch.setattr(contents, name, fails_for(seen[1].id, RuntimeError("CUDA out of memory"), getattr(contents, name)))
            with pytest.raises(RuntimeError, match="^1 of 2 clients were scored, so nothing is stored; see the warnings$"):
                run_study(run)
        assert not path.exists()
        run_study(run)
        assert path.exists()


def test_divergence_is_a_result(world, tmp_path):
    diverging = job(Run("speech", "smoke", (), (2,), (0,), ("fedl2p",), out=tmp_path, machine=Machine(world, 0, "cpu")))
    config = replace(diverging.how.config, lr=1e30, fraction=1.0)
    with pytest.warns(RuntimeWarning, match="has no result"):
        run_cell(diverging._replace(how=replace(diverging.how, config=config)))
    content = json.loads(diverging.path.read_text())
    assert content["pools"] == ["seen", "unseen"] and content["clients"] == [] and "FloatingPointError" in content["diverged"]
    assert str(study_table("speech", "smoke", tmp_path, ["fedl2p"])).count("diverges |") == 2


def test_other_clients_or_models_are_noticed(world, tmp_path):
    run_study(replace(one(world), out=tmp_path))
    made_up.cifar10(tmp_path, n=130)
    with pytest.raises(ValueError, match="other clients or with another pretrained model|other settings: model and clients"):
        run_study(replace(one(tmp_path, "ft-g"), out=tmp_path))


def test_killed_and_continued(world, tmp_path):
    """A run that is killed in the middle of a cell goes on there, and ends with the same numbers."""
    code = f"""
import sys; from pathlib import Path
from dataclasses import replace
import fedl2p.studies.settings as settings
plain = settings.setting
settings.setting = lambda *args: replace(plain(*args), config=replace(plain(*args).config, rounds=6))
from fedl2p.studies.cells import Machine
from fedl2p.studies.runs import Run, run_study
run = Run("cifar10", "smoke", (0.5,), (5,), (0,), ("fedl2p",), out=Path(sys.argv[1]), machine=Machine(Path({str(world)!r}), 0, "cpu"))
def progress(rounds, title, total, done):
    if title.endswith("fedl2p"): print("began with", done)
    return rounds
run_study(run, progress)
"""
    done, broken = tmp_path / "done", tmp_path / "broken"
    assert "began with 0" in subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(done)], check=True, capture_output=True, text=True).stdout
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, str(broken)])
    deadline = time.monotonic() + 600
    while not list(broken.glob("**/fedl2p-seed0/checkpoint.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(broken.glob("**/fedl2p-seed0/checkpoint.safetensors")) and not list(broken.glob("**/fedl2p-seed0.json"))
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(broken)], check=True, capture_output=True, text=True).stdout
    assert "began with 0" not in said and "began with" in said
    first, second = (json.loads(next(folder.glob("**/fedl2p-seed0.json")).read_text()) for folder in (done, broken))
    assert len(first["rounds"]) == 7 and first["rounds"][-1]["final"]  # the last lambda is judged by one more
    assert all(first[k] == second[k] for k in ("pools", "rounds", "clients"))


@pytest.mark.parametrize(("method", "kind", "losses", "best"), [
    ("ft-c", ("all", 1.0), {0.1: (0.25, 0.25), 1.0: (0.5, 0.5)}, 0.1),
    ("ft-g", ("all", 0.0), {0.01: (0.5, 1.0), 0.0001: (0.75, 0.75)}, 0.01),  # of two that are equal, the larger one
    ("ft-i", ("batch", 1.0), {1.0: (0.25, 1.5), 0.1: (0.75, 0.75)}, 0.1),  # each client counts once, however sure it is
])
def test_rates_are_chosen_by_trials(method, kind, losses, best):
    """Made-up losses of two clients; those of all other candidates are lower, and no rate of this method."""
    model = mix_bn(small_cnn(), verbose=False)
    names, like = signature(model), next(model.parameters())
    rows = [i for i, c in enumerate(candidates()) if (c.who, c.beta) == kind]
    assert [candidates()[i].lr for i in rows] == list(GRID)
    for i in rows:  # what was tried is what will be scored
        plain, tried = baselines(model, candidates()[i].lr)[method], strategy_of(candidates()[i], names, like)
        assert plain.bn == tried.bn and torch.equal(plain.beta, tried.beta) and torch.equal(plain.eta, tried.eta)
    clients = []
    for k, client in enumerate(digits_federation(5, 0).seen[:2]):
        own = torch.zeros(len(candidates()))
        own[rows] = torch.tensor([losses.get(lr, (2.0, 2.0))[k] for lr in GRID])
        clients.append(replace(client, kept={"losses": own}))
    assert choose_rate(method, clients) == best


def test_all_seen_clients_try_or_a_draw_of_them(world):
    """As the setting says; each file is there once, and is not made again."""
    work = job(one(world, "ft-c-precise-best"))
    everybody = federation(work.how, work.cell.condition.alpha, work.data_seed).seen
    model = pretrained(work)
    some = work._replace(how=replace(work.how, tried=1), out=world / "some")
    for j, expected in ((work._replace(out=world / "all"), [c.id for c in drawn(everybody, work.how.tried, 0)]), (some, [c.id for c in drawn(everybody, 1, 0)])):
        ready = tried(j, model, j.config, everybody)
        assert [c.id for c in ready] == expected and all(c.kept["losses"].shape == (len(candidates()),) for c in ready)
        files = {p: p.stat().st_mtime_ns for p in (j.path.parent / "trials-seed0").iterdir()}
        again = tried(j, model, j.config, everybody)
        assert len(files) == len(expected) and files == {p: p.stat().st_mtime_ns for p in (j.path.parent / "trials-seed0").iterdir()}
        assert all(torch.equal(a.kept["losses"], b.kept["losses"]) for a, b in zip(ready, again, strict=True))
