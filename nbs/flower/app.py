"""FedL2P as a Flower app: the digits federation, with client k on the node whose partition-id is k.

For data of your own, let `load` return the client of the node that it runs on, and your network.
"""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedl2p import Config, FedL2P, pretrain
from fedl2p.analysis import records
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.flower import Nodes, Privacy
from fedl2p.node import client_app
from fedl2p.pretraining import Recipe
from fedl2p.runner import Runner, bar
from fedl2p.storage import claimed, write_json


def load(context: Context):
    return digits_federation().seen[int(context.node_config["partition-id"])], small_cnn()


client = client_app(load)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    run = context.run_config
    out = Path(run["out"])
    nodes = Nodes(grid, run["timeout"], Privacy(run["noise"], run["clip"]) if run["noise"] else None)
    runner = Runner(transport=nodes, progress=bar)
    model = small_cnn()
    with claimed(out):  # as `fit` does: a second server in the folder stops here
        clients = nodes.clients(run["nodes"], run["timeout"], out / "clients.json")
        if run["pretraining-rounds"]:
            recipe = Recipe(rounds=run["pretraining-rounds"], fraction=run["fraction"])
            model = pretrain(model, clients, recipe, runner, out / "pretraining.safetensors")
    config = Config.paper(lr=0.01, epochs=run["epochs"], rounds=run["rounds"], fraction=run["fraction"], estimator=run["estimator"])
    learner = FedL2P(model, config).fit(clients, out, runner)
    if nodes.privacy:  # the best round was chosen by exact losses, which would give away what the noise hides
        learner.metanets.load_state_dict(learner.last_state)
    learner.save(out / "policy.safetensors")
    write_json(out / "scores.json", records("fedl2p", "seen", learner.score(clients, Runner(transport=nodes))))
    write_json(out / "traffic.json", nodes.traffic)
