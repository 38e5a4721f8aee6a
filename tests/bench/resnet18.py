"""CIFAR-10 with the paper's network, ResNet-18, at 32 pixels: a column of Table 2 by both recipes, as far as two cores go.

    python tests/bench/resnet18.py DATA [SEED ...]     DATA holds cifar10.npz (or CIFAR-10's own files) and resnet18_backbone.pt

Its cells are in nbs/experiments/network; a run that was stopped goes on. With CIFAR's
stem one step takes 15 times the arithmetic, and pretraining alone 47 hours of a core: so the network has ImageNet's stem and weights, and
FedAvg goes on from there.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from fedl2p.runner import Runner
from fedl2p.storage import claimed
from fedl2p.studies.cells import Cell, Job, Machine
from fedl2p.studies.contents import run_cell
from fedl2p.studies.methods import FAIR
from fedl2p.studies.models import imagenet_resnet18
from fedl2p.studies.published import Condition
from fedl2p.studies.settings import Setting, setting
from fedl2p.studies.tables import study_table

OUT = Path(__file__).parents[2] / "nbs/experiments/network"
METHODS = (*FAIR, "fedl2p-full")  # the last: no candidate stops early
CONDITION = Condition("cifar10", 0.5, 5, "fedavg")


def how(data: Path) -> Setting:
    "Clients as at scale small, with another network."
    small = setting("cifar10", "small", data)
    return replace(
        small,
        model=lambda seed: imagenet_resnet18(10, seed, data / "resnet18_backbone.pt"),
        config=replace(small.config, rounds=3, hvp="forward"),
        recipe=replace(small.recipe, rounds=60, epochs=1, lr=0.03),
        tried=4,
        scored=10,
        differs="fp16-derived ImageNet backbone with ImageNet's stem; 200 clients of 50 images, 6 in a round, 3 rounds (60 of "
        "pretraining, 10 clients with one epoch each, rate 0.03); initial rate 1e-2; second derivatives by differences; 4 clients run "
        "trials, 10 are scored, 50 test images each; best lambda by paired loss; pretraining on training samples alone; shifted images "
        "padded with the mean colour",
    )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    data, runner = Path(sys.argv[1]), Runner(1, limit=36000.0)
    with claimed(OUT):
        for seed, method in product(map(int, sys.argv[2:] or ["0"]), METHODS):
            job = Job(Cell(CONDITION, method, seed), how(data), "resnet18", OUT, Machine(data, 1), runner)
            print(method, run_cell(job)["seconds"], file=sys.stderr, flush=True)
    print("\n\n".join(map(str, study_table("cifar10", "resnet18", OUT, METHODS, having=FAIR))))
