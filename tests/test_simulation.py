"""Studies on Flower: the same numbers as without, and what is refused."""

import json
import os

import made_up
import pytest

from fedl2p.cli import main
from fedl2p.studies.datasets import OFFICE_CLASSES, OFFICE_DOMAINS

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it when it is imported
pytest.importorskip("flwr", reason='the extra "flower" is not installed')

from grid import Here, lean  # noqa: E402

from fedl2p.studies import simulation  # noqa: E402
from fedl2p.studies.cells import Machine  # noqa: E402
from fedl2p.studies.runs import Run, cells, job_of  # noqa: E402
from fedl2p.studies.simulation import everybody, simulate_study  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:no round had a lower validation loss than the first", "ignore:round")
TIMED = ("seconds", "pretraining_seconds", "machine")


@pytest.mark.parametrize(("study", "dataset", "method"), [
    ("cifar10", "cifar10", "fedl2p"),
    ("cifar10c", "cifar10c", "fedl2p-fomaml"),
    ("speech", "speech", "fedl2p-start"),
    ("office", "office", "fedl2p"),
    ("cifar10", "cifar10", "fedl2p-ours"),
    ("office", "office", "fedl2p-common"),
])
def test_a_study_on_flower_has_the_same_numbers(study, dataset, method, tmp_path, monkeypatch):
    """From the command line; nodes here are calls, since test_flower.py has a simulation."""
    make = {"speech": made_up.speech, "office": lambda root: made_up.domains(root, "office_caltech_10", OFFICE_DOMAINS, OFFICE_CLASSES)}
    make.get(dataset, made_up.cifar10)(tmp_path)
    monkeypatch.setattr(simulation, "simulate", lambda serve, app, nodes, workers, gpus: serve(Here(app, nodes)))
    args = [study, "--scale", "smoke", "--datasets", dataset, "--methods", method, "--seeds", "0", "--epochs", "1", "--alpha", "0.5", "--data", str(tmp_path), "--workers", "0", "--device", "cpu"]
    contents = []
    for command in ("run", "flower"):
        assert main([command, *args, "--out", str(tmp_path / command)]) == 0
        (path,) = (tmp_path / command).rglob("*-seed0.json")
        [content] = lean([json.loads(path.read_text())], *TIMED)
        rounds, clients = lean(content["rounds"], "beta", "eta"), lean(content["clients"], "xi", "feature_stats", "labels")
        contents.append({**content, "rounds": rounds, "clients": clients})
    assert contents[0] == contents[1] and contents[0]["clients"]


@pytest.mark.parametrize(("args", "words"), [
    (["--methods", "l2p"], "methods must be one of fedl2p, fedl2p-fomaml, ... got 'l2p'"),
    (["--methods", "ft-c"], "methods must be one of fedl2p, fedl2p-fomaml, ... got 'ft-c'"),
    (["--methods", "fedl2p", "fedl2p-mean"], "methods must be one of fedl2p, fedl2p-fomaml, ... got 'fedl2p-mean'"),
    (["--compile", "True"], "compile must be False on Flower, got True"),
])
def test_what_is_refused(args, words, tmp_path, capsys):
    """Baselines, what needs everybody's inputs in one place, and what nodes do not have."""
    assert main(["flower", "cifar10", "--device", "cpu", *args, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert all(part in said for part in words.split("...")) and not list(tmp_path.iterdir())


def test_half_precision_is_refused():
    """`Run` refuses it without a GPU before this does."""
    run = Run("cifar10", machine=Machine(device="cpu"))
    object.__setattr__(run.machine, "amp", True)
    with pytest.raises(ValueError, match="amp must be False on Flower, got True"):
        simulate_study(run)


def test_everybody_has_a_node(tmp_path):
    """Also those who pretrain the model of another data set."""
    made_up.cifar10(tmp_path)
    run = Run("cifar10c", "smoke", (0.5,), (1,), (0,), ("fedl2p",), out=tmp_path, machine=Machine(tmp_path, 0, "cpu"))
    [cell] = cells(run)
    ids = [client.id for client in everybody(job_of(run, cell))]
    assert len(set(ids)) == len(ids) == 8 and sum(id.startswith("cifar10-") for id in ids) == 4
