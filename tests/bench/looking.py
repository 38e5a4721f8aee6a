"""What do clients gain in the loss of their trials if a selector that others taught chooses for them? By what it looks at.

    python tests/bench/looking.py [FOLDER ...]        by default, some of the trials in nbs/experiments/policy

Each folder holds the trials of one federation. A gain is that over the best single candidate for all, for clients that did not teach
(three parts, as in `learn_to_choose`); means and errors are over the clients of all folders of a condition. Two references: a linear
fit of the losses, for which the clients would have to show them, and, where a client's name says it, the kind that it is of.
"""

import math
import statistics
import sys
from pathlib import Path

import torch

from fedl2p.bn import mix_bn
from fedl2p.config import Config
from fedl2p.core import Json, State
from fedl2p.data import Client, Data
from fedl2p.digits import small_cnn
from fedl2p.policy import untrained
from fedl2p.selector import candidates
from fedl2p.studies.models import small_resnet
from fedl2p.trials import FOLDS, learn_to_choose, read_kept

POLICY = Path(__file__).parents[2] / "nbs/experiments/policy"
CONDITIONS = ("cifar10-mixed/small/fedavg-e15", "cifar10/small/fedavg-alpha0.5-e15", "digits/small/fedavg-alpha1000-e5")
LOOKS = {"ξ and features": ("xi", "features"), "ξ, features and labels": ("xi", "features", "labels"), "labels alone": ("labels",)}
EMPTY = Data(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))  # trials are all that is asked of a client


def network(n_inputs: int):
    "The model whose profiles have so many numbers."
    for model in (small_cnn(), small_resnet("cifar", stride=2)):
        mixing = mix_bn(model, verbose=False)
        if len(untrained(mixing, Config()).center) == n_inputs:
            return mixing
    raise ValueError(f"inputs must be those of a network of the digits or of CIFAR-10, got {n_inputs} of them")


def learned(clients: list[Client], looks: tuple) -> tuple[State, Json]:
    "A selector that learned from the trials of clients, and what it found out about itself."
    inputs = torch.stack([c.kept["inputs"] for c in clients])
    model, config = network(inputs.shape[1]), Config(looks_at=looks)
    selector, deviation = untrained(model, config), inputs.std(0, unbiased=False)
    selector.center.copy_(inputs.mean(0))
    selector.deviation.copy_(torch.where(deviation > 1e-6 * (1 + inputs.mean(0).abs()), deviation, 1.0))
    return learn_to_choose(model, config, dict(selector.state_dict()), clients)


def chosen(clients: list[Client], looks: tuple) -> tuple[float, float]:
    "Gain and error of the selector, by its own check."
    found = learned(clients, looks)[1]
    return found["gain"], found["error"]


def references(clients: list[Client], penalty: float = 10.0) -> dict[str, list[float]]:
    "Gains of each client by a ridge regression, and by its kind."
    losses, inputs = (torch.stack([c.kept[name] for c in clients]).double() for name in ("losses", "inputs"))
    kinds = [c.id.split("-")[1] if c.id.startswith("cifar10-") and c.id.count("-") == 2 else "" for c in clients]
    gains: dict[str, list[float]] = {"ridge regression of losses": [], "its kind": []}
    for fold in range(FOLDS):
        own = range(fold, len(clients), FOLDS)
        others = [i for i in range(len(clients)) if i not in own]
        center, deviation = inputs[others].mean(0), inputs[others].std(0)
        known = torch.cat([torch.ones(len(clients), 1), ((inputs - center) / deviation.clamp(min=1e-6)).clamp(-3, 3)], 1).double()
        taught = known[others]
        weights = torch.linalg.solve(taught.T @ taught + penalty * torch.eye(taught.shape[1]).double(), taught.T @ losses[others])
        common = losses[others].mean(0).argmin()
        for i in own:
            gains["ridge regression of losses"].append((losses[i, common] - losses[i, (known[i] @ weights).argmin()]).item())
            if kinds[i]:
                alike = losses[[j for j in others if kinds[j] == kinds[i]]].mean(0).argmin()
                gains["its kind"].append((losses[i, common] - losses[i, alike]).item())
    return gains


def mean_of(found: list[tuple[float, float]]) -> str:
    "Mean and error over federations of equal size."
    return f"{statistics.mean(g for g, _ in found):+.3f} ± {math.sqrt(sum(e * e for _, e in found)) / len(found):.3f}" if found else "—"


def main() -> None:
    torch.set_num_threads(1)
    groups = {c: sorted((POLICY / c).glob("trials-seed*")) for c in CONDITIONS} if len(sys.argv) == 1 else {"given": list(map(Path, sys.argv[1:]))}
    table: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for condition, folders in groups.items():
        for folder in folders:
            kept = [read_kept(path) for path in sorted(folder.glob("*.safetensors"))]
            clients = [Client(id, EMPTY, EMPTY, EMPTY, kept=tensors) for tensors, id in kept if len(tensors["losses"]) == len(candidates())]
            found = {name: chosen(clients, looks) for name, looks in LOOKS.items()}
            found |= {name: (statistics.mean(g), statistics.stdev(g) / math.sqrt(len(g))) for name, g in references(clients).items() if g}
            for name, gain in found.items():
                table.setdefault(name, {}).setdefault(condition, []).append(gain)
            print(folder, file=sys.stderr, flush=True)
    print("| chooses by | " + " | ".join(c.replace("/small/", ", ") for c in groups) + " |\n|---|" + "--:|" * len(groups))
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(mean_of(row.get(c, [])) for c in groups) + " |")


if __name__ == "__main__":
    main()
