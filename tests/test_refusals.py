"""What is refused before any work begins, each in one sentence."""

import pytest
import torch
from torch import nn

from fedl2p import Config, Data, FedL2P, make_client
from fedl2p.cli import main, network
from fedl2p.loaders import ToTensor
from fedl2p.runner import Runner


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()


def clients(n=2):
    return [make_client(f"c{i}", Data(torch.randn(30, 4), torch.arange(30) % 3)) for i in range(n)]


@pytest.mark.parametrize("changes, words", [
    ({"runner": 2}, r"runner must be a Runner, for example Runner\(workers=2\), got 2"), ({"watch": print}, "watch must be a list of functions of a record, got"),
    ({"watch": [3]}, r"watch must be a list of functions of a record, got \[3\]"), ({"clients": [1, 2]}, "clients must be a list of Client, .*got one with a int"),
])
def test_fit_looks_at_its_arguments_first(changes, words):
    with pytest.raises(ValueError, match=words):
        FedL2P(net()).fit(**{"clients": clients(), **changes})


def test_a_policy_that_never_learned_stays_so_in_its_file(tmp_path):
    model = net()
    FedL2P(model).save(tmp_path / "a.safetensors")
    again = FedL2P.load(model, tmp_path / "a.safetensors")
    for use in (again.strategy, again.personalize):
        with pytest.raises(RuntimeError, match="this policy has not learned yet"):
            use(clients()[0])
    with pytest.raises(RuntimeError, match="known after fit, not after load"):
        _ = again.gained


def test_rates_and_one_client():
    learned = FedL2P(net(), Config(epochs=1, splits=1)).fit(clients(), runner=Runner(0))
    with pytest.raises(ValueError, match="rates must be a list of numbers > 0, got 0.1"):
        learned.compare(clients(), rates=0.1, runner=Runner(0))
    table = learned.compare(clients(1), rates=(0.1,), runner=Runner(0)).table
    assert not any("±" in cell for row in table.rows for cell in row)  # one client has no error


@pytest.mark.parametrize("wrong", [{"mean": (float("nan"),)}, {"std": (0.1, float("inf"), 0.1)}])
def test_no_image_is_made_of_nan(wrong):
    with pytest.raises(ValueError, match="(mean|std) must be (finite|a number|> 0)"):
        ToTensor(8, **wrong)


def test_messages_of_the_command_line(tmp_path, capsys):
    (tmp_path / "network.py").write_text("model = None\n")
    with pytest.raises(ValueError, match="network.py must define 'nope'; name what it defines as FILE.py:NAME"):
        network(f"{tmp_path / 'network.py'}:nope")
    with pytest.raises(ValueError, match="model must be a Python file that exists, as FILE.py or FILE.py:NAME, got"):
        network(str(tmp_path / "other.py"))
    with pytest.raises(SystemExit):
        main(["demo", "--clients", "7"])
    said = capsys.readouterr().err
    assert "multiple of 5" in said and "dummy" not in said
