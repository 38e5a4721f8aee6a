"""Studies on Flower: the same numbers as without, and what is refused."""

import json

import made_up
import pytest

from fedl2p.cli import main
from fedl2p.studies.datasets import OFFICE_CLASSES, OFFICE_DOMAINS

pytest.importorskip("flwr", reason='the extra "flower" is not installed')

from grid import Here, lean  # noqa: E402

from fedl2p import flower  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:the lowest validation loss was that of the meta-nets at their start", "ignore:round")
TIMED = ("seconds", "pretraining_seconds", "machine")


@pytest.mark.parametrize(("study", "dataset", "method"), [("cifar10", "cifar10", "fedl2p"), ("cifar10c", "cifar10c", "fedl2p-fomaml"), ("speech", "speech", "fedl2p-start"), ("office", "office", "fedl2p")])
def test_a_study_on_flower_has_the_same_numbers(study, dataset, method, tmp_path, monkeypatch):
    """From the command line; nodes here are calls, since a simulation is tested above."""
    {"speech": made_up.speech, "office": lambda root: made_up.domains(root, "office_caltech_10", OFFICE_DOMAINS, OFFICE_CLASSES)}.get(dataset, made_up.cifar10)(tmp_path)
    monkeypatch.setattr(flower, "simulate", lambda serve, app, nodes, workers, gpus: serve(Here(app, nodes)))
    args = [study, "--scale", "smoke", "--datasets", dataset, "--methods", method, "--seeds", "0", "--epochs", "1", "--alpha", "0.5", "--data", str(tmp_path), "--workers", "1", "--device", "cpu"]
    found = []
    for command in ("run", "flower"):
        assert main([command, *args, "--out", str(tmp_path / command)]) == 0
        (path,) = (tmp_path / command).rglob("*-seed0.json")
        [content] = lean([json.loads(path.read_text())], *TIMED)
        found.append({**content, "rounds": lean(content["rounds"], "beta", "eta"), "clients": lean(content["clients"], "xi", "feature_stats")})
    assert found[0] == found[1] and found[0]["clients"]


def test_wrong_studies(tmp_path, capsys):
    for args, said in [(["--methods", "l2p"], "methods has l2p; allowed on Flower are fedl2p,"), (["--compile", "True"], "nodes have neither")]:
        assert main(["flower", "cifar10", "--device", "cpu", *args, "--out", str(tmp_path)]) == 1
        assert said in capsys.readouterr().err
