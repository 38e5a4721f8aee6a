"""The same federation on Flower in one simulation: a server that is stopped, nodes that lie, are silent, or all fail."""

import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fedl2p.bn import mix_bn
from fedl2p.federated import Diverged
from fedl2p.pretraining import pretrain
from fedl2p.runner import Runner

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it when it is imported
pytest.importorskip("flwr", reason='the extra "flower" is not installed')

from federation import PRETRAINING, QUICK, fit, load, network, same, seen, stop_after, without  # noqa: E402
from flwr.app import Array  # noqa: E402
from grid import lean  # noqa: E402

from fedl2p.flower import Nodes  # noqa: E402
from fedl2p.node import client_app  # noqa: E402
from fedl2p.simulated import simulate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:no round had a lower validation loss than the first", "ignore:round")
BAD = 7  # the seed of the runs in which nodes misbehave, so that good and bad runs can share a simulation
EVIL = 8  # and in which all of them do


def sabotage(message, context, call_next):
    """A mod that spoils what a node sends."""
    reply, seed, k = call_next(message, context), json.loads(message.content["config"]["settings"])["seed"], context.node_config["partition-id"]
    Path(os.environ["FEDL2P_TEST_SILENCE"]).with_name(f"nice-{k}").write_text(f"{os.nice(0)}")
    if seed not in (BAD, EVIL) or reply.has_error():
        return reply
    arrays = reply.content["arrays"]
    name = next(iter(arrays))
    if k == 0 or seed == EVIL:
        arrays[name] = Array(arrays[name].numpy() * float("nan"))
    elif k == 1:
        arrays[name] = Array(arrays[name].numpy()[:1])
    elif k == 2:  # silent, until the file is there: no clock decides
        silence = Path(os.environ["FEDL2P_TEST_SILENCE"])
        while not silence.exists():
            time.sleep(0.1)
    return reply


class NotAll:
    """A grid that waits until all nodes but one have learned, however long they take."""

    def __init__(self, grid):
        self.grid, self.get_node_ids = grid.grid, grid.get_node_ids

    def send_and_receive(self, messages, timeout):
        asked, replies = set(self.grid.push_messages(messages)), []
        while len(replies) < len(messages) - (messages[0].metadata.message_type == "train"):
            replies += self.grid.pull_messages(asked - {r.metadata.reply_to_message_id for r in replies})
            time.sleep(0.05)
        return replies


def scenarios(folder, grid):
    """All that is done in the one simulation."""
    nodes = Nodes(grid, 600)
    clients, runner = nodes.clients(5), Runner(transport=nodes)
    done = {"names": [c.id for c in clients]}
    with pytest.raises(KeyboardInterrupt):
        fit(nodes, clients, folder=folder, progress=stop_after(2))
    done["traffic"] = list(nodes.traffic)
    again = Nodes(grid, 600)
    done["learner"] = fit(again, again.clients(5), folder=folder)
    done["scores"] = done["learner"].score(clients, Runner(transport=again))
    done["resumed traffic"] = again.traffic
    done["model"] = pretrain(network(), clients, PRETRAINING, runner)
    with pytest.raises(RuntimeError) as error:
        fit(nodes, clients, replace(QUICK, seed=EVIL))
    done["all fail"] = error.value
    with pytest.warns(RuntimeWarning, match="is left out"):
        done["bad"] = fit(Nodes(NotAll(grid), 600), clients, replace(QUICK, seed=BAD, rounds=1))
    Path(os.environ["FEDL2P_TEST_SILENCE"]).touch()
    return done


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    import flwr.simulation  # noqa: F401, sets a variable of Ray's on import

    folder = tmp_path_factory.mktemp("simulation")
    os.environ["FEDL2P_TEST_SILENCE"] = str(folder / "over")
    before = dict(os.environ)
    done = simulate(partial(scenarios, folder / "run"), client_app(load, folder / "models", [sabotage]), 5, 2)
    assert dict(os.environ) == before
    del os.environ["FEDL2P_TEST_SILENCE"]
    done["nice"] = [path.read_text() for path in folder.glob("nice-*")]
    return done


def test_a_simulation_equals_the_loop_in_process(simulated):
    clients = sorted(seen(), key=lambda c: c.id)
    here = fit(None, clients)
    assert simulated["names"] == [c.id for c in clients]
    assert same(simulated["learner"].last_state, here.last_state) and same(simulated["learner"].metanets.state_dict(), here.metanets.state_dict())
    assert simulated["learner"].history == lean(here.history, "beta", "eta")
    for a, b in zip(simulated["scores"], here.score(clients, Runner(0)), strict=True):
        assert (a.id, a.domain, a.score) == (b.id, b.domain, b.score)
        assert torch.equal(a.strategy.beta, b.strategy.beta) and torch.equal(a.strategy.eta, b.strategy.eta) and (a.strategy.bn, a.strategy.distance) == (b.strategy.bn, b.strategy.distance)
    assert same(simulated["model"].state_dict(), pretrain(network(), clients, PRETRAINING, Runner(0)).state_dict())


def test_nodes_do_not_wait_for_everybody_else(simulated):
    """Ray's workers had a niceness of 15: beside ten other jobs a core they got a three-hundredth of it, and a simulation did not begin."""
    assert simulated["nice"] == [f"{os.nice(0)}"] * 5


def test_the_model_is_sent_once(simulated):
    """Messages of the first round carry it; later ones, those of scoring, and all of a server that starts again do not."""
    first, second = [t["sent"] for t in simulated["traffic"] if t["kind"] == "train"]
    size = sum(t.numel() * t.element_size() for t in mix_bn(network(), verbose=False).state_dict().values())
    _, score = [t["sent"] for t in simulated["resumed traffic"] if t["kind"] == "evaluate"]  # the first judges the last lambda
    assert first - second > 5 * size and abs(score - second) < size
    assert all(t["sent"] < first - 4 * size for t in simulated["resumed traffic"])


def test_a_server_that_starts_again_goes_on(simulated):
    """It was stopped after two rounds of three; that the end is the same, the first test says."""
    assert sum(t["kind"] == "train" for t in simulated["resumed traffic"]) == 1


def test_bad_and_silent_nodes_are_left_out(simulated):
    clients, (record, _) = seen(), simulated["bad"].history
    assert record["clients"] == sorted(c.id for c in clients[3:])
    nan, shape, silent = (record["failed"][c.id] for c in clients[:3])
    assert "not finite" in nan and "with shape" in shape and silent == "did not answer in 600 s"
    alone = fit(without({(c.id, 1) for c in clients[:3]}), clients, replace(QUICK, seed=BAD, rounds=1))
    assert same(simulated["bad"].last_state, alone.last_state)


def test_all_failing_is_an_error(simulated):
    error = simulated["all fail"]
    assert "all of its 5 clients failed" in str(error) and "not finite" in str(error)
    assert not isinstance(error, Diverged)  # what they sent was refused
