"""Five clients with digits, and what is learned by them in this process or over a transport, for the tests of flower."""

from functools import lru_cache

import torch

from fedl2p.config import Config
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.learner import FedL2P
from fedl2p.pretraining import Recipe
from fedl2p.runner import Failure, Outcome, Runner, attempt, quiet

PRETRAINING = Recipe(rounds=2, fraction=0.5)
QUICK = Config.paper(lr=0.05, epochs=1, rounds=3, fraction=1.0, meta_steps=1)
TRIALS = Config(epochs=1, splits=1, choosing_rounds=3)


@lru_cache
def seen():
    return digits_federation(5, 0, size=30).seen


def load(context):
    return seen()[int(context.node_config["partition-id"])], small_cnn(width=4)


def network():
    return small_cnn(width=4, seed=1)  # other weights than the nodes start from


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def fit(transport, clients, config=QUICK, folder=None, progress=quiet):
    """What is learned by a transport such as `Nodes`; without one, in this process."""
    return FedL2P(network(), config).fit(clients, folder, Runner(0, transport, progress))


def stop_after(n):
    def progress(rounds, title, total, done):
        for r in rounds:
            yield r
            if r.number == n:
                raise KeyboardInterrupt

    return progress


def without(lost):
    """A transport to this process, as if some clients did not answer in some rounds."""
    def transport(tasks):
        gone = Outcome(None, Failure("died", "gone"))
        return iter([gone if (task.client.id, task.number) in lost else attempt(task.run) for task in tasks])

    return transport
