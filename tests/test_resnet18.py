"""The paper's network at the paper's settings, one round of two clients: does it run, how long, in how much memory? `pytest -m slow -s`"""

import resource
import time
from dataclasses import replace

import pytest
import torch

from fedl2p.bn import mix_bn
from fedl2p.data import Client, Data
from fedl2p.learner import FedL2P
from fedl2p.runner import quiet
from fedl2p.studies.settings import setting


@pytest.mark.slow
def test_one_round_at_the_papers_settings(capsys):
    how, numbers = setting("cifar10", "paper", "data"), torch.Generator().manual_seed(0)
    data = Data(torch.randn(50, 3, 32, 32, generator=numbers), torch.randint(10, (50,), generator=numbers))
    clients = [Client(name, data[:40], data[40:], data[:0]) for name in "ab"]
    config = replace(how.config, rounds=1, meta_steps=1, fraction=1.0)  # one hypergradient each; all else as in the paper
    model = mix_bn(how.model(0), verbose=False)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.time()
    learner = FedL2P(model, config).fit(clients, workers=1, track=quiet)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with capsys.disabled():
        print(f"\nResNet-18, e = {config.epochs}, two clients, one meta-step: {time.time() - start:.0f} s on {torch.get_num_threads()} threads, peak {peak / 1024:.0f} MB (before: {before / 1024:.0f} MB)")
    assert learner.history[0]["clients"] == ["a", "b"] and learner.history[0]["val_loss"] > 0
