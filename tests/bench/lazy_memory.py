"""Memory of `fit` for 40, 400 and 4,000 lazy clients: `python tests/bench/lazy_memory.py [CLIENTS ...]` (Linux).

Each client would hold 2 MB of images if they were in memory. Each count has a process of its own, which does all the work; its peak is printed.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn


def image(number: int) -> torch.Tensor:
    "An image, made when it is read."
    return torch.full((3, 64, 64), number % 7 / 7.0)


def fit(n: int) -> None:
    from fedl2p import Client, Config, FedL2P
    from fedl2p.loaders import LazyData
    from fedl2p.runner import Runner

    data = LazyData(image, torch.arange(42) % 3)
    clients = [Client(f"c{i}", data[:28], data[28:35], data[35:]) for i in range(n)]
    model = nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(48, 3))
    start = time.time()
    FedL2P(model, Config(epochs=1, splits=1, choosing_rounds=1)).fit(clients, runner=Runner(0))
    peak = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024
    print(f"{n:6,} clients: at most {peak:,.0f} MB ({n * 42 * 3 * 64 * 64 * 4 / 2**20:,.0f} MB of images), {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        fit(int(sys.argv[2]))
    else:
        for n in sys.argv[1:] or ["40", "400", "4000"]:
            subprocess.run([sys.executable, __file__, "--one", n], check=True)
