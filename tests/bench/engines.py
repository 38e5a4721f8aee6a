"""Where `vmap` pays: one step of 24 strategies side by side, in the time of a loop, for networks with more and more arithmetic.

    python tests/bench/engines.py     about a minute of one core

Processor time, the least of three turns that the engines take one after the other.
"""

import time

import torch

from fedl2p.bn import mix_bn
from fedl2p.data import Data
from fedl2p.digits import small_cnn
from fedl2p.finetune import Tuning
from fedl2p.many import CHUNK, run_race, start_race
from fedl2p.measure import count_flops
from fedl2p.strategy import bn_c
from fedl2p.studies.models import small_resnet

NETWORKS = {
    "digits": (small_cnn(), (1, 8, 8)),
    "digits, 28 pixels": (small_cnn(), (1, 28, 28)),
    "CIFAR-10, small": (small_resnet("cifar", stride=2), (3, 32, 32)),
    "CIFAR-10, small, 40 pixels": (small_resnet("cifar", stride=2), (3, 40, 40)),
    "CIFAR-10, small, 48 pixels": (small_resnet("cifar", stride=2), (3, 48, 48)),
    "CIFAR-10, small, twice as wide": (small_resnet("cifar", stride=2, width=16), (3, 32, 32)),
    "CIFAR-10, small, full resolution": (small_resnet("cifar", stride=1), (3, 32, 32)),
    "speech, small": (small_resnet("speech", 12), (1, 40, 101)),
}


def main() -> None:
    torch.set_num_threads(1)
    numbers, rows = torch.Generator().manual_seed(0), []
    for name, (network, shape) in NETWORKS.items():
        model = mix_bn(network, verbose=False)
        data = Data(torch.randn(32, *shape, generator=numbers), torch.randint(10, (32,), generator=numbers))
        races = {engine: start_race(model, [bn_c(model, 1e-3)] * CHUNK, data, Tuning(epochs=1), numbers, engine) for engine in ("loop", "vmap")}
        taken = {engine: [] for engine in races}
        for _ in range(4):
            for engine, race in races.items():
                start = time.process_time()
                run_race(model, race, "mix", 1)
                taken[engine].append(time.process_time() - start)
        loop, vmap = (min(taken[engine][1:]) for engine in ("loop", "vmap"))
        with torch.no_grad():
            rows.append((count_flops(lambda model=model, data=data: model(data.x)) / 1e6, name, vmap / loop))
    print("| network | operations of a batch, millions | vmap / loop |\n|---|--:|--:|")
    for operations, name, ratio in sorted(rows):
        print(f"| {name} | {operations:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
