"""Killed runs go on to the same bytes; twenty kills of each kind by `python tests/kills.py demo study simulation deployed`."""

import pytest
import torch
from kills import Deployed, trial
from safetensors.torch import load_file


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["demo", "study", "simulation", "deployed"])
def test_three_kills(kind):
    if kind in ("simulation", "deployed"):
        pytest.importorskip("flwr", reason='the extra "flower" is not installed')
    done = trial(kind, 3, seed=1)
    assert done["kills"] == done["equal"] == 3, done["problems"]


@pytest.mark.slow
def test_a_deployment_that_pretrains_equals_the_loop_in_process(tmp_path):
    pytest.importorskip("flwr", reason='the extra "flower" is not installed')
    Deployed().run(tmp_path / "there")
    equal_to_the_loop(tmp_path / "there", tmp_path / "here")


def equal_to_the_loop(there, here):
    """What a server left behind, and what `Deployed.settings` leave behind in one process."""
    from fedl2p.config import Config
    from fedl2p.digits import digits_federation, small_cnn
    from fedl2p.learner import FedL2P
    from fedl2p.pretraining import Recipe, pretrain
    from fedl2p.runner import Runner

    clients = digits_federation().seen[:2]
    here.mkdir()
    model = pretrain(small_cnn(), clients, Recipe(rounds=2, fraction=1.0), Runner(0), here / "pretraining.safetensors")
    config = Config.paper(lr=0.01, epochs=1, rounds=2, fraction=1.0, estimator="fomaml")
    FedL2P(model, config).fit(clients, here, Runner(0)).save(here / "policy.safetensors")
    pretrained = [load_file(folder / "pretraining.safetensors") for folder in (there, here)]  # the header of one knows the clients' data
    assert pretrained[0].keys() == pretrained[1].keys() and all(torch.equal(t, pretrained[1][name]) for name, t in pretrained[0].items())
    assert (there / "policy.safetensors").read_bytes() == (here / "policy.safetensors").read_bytes()
