"""Memory of `fit` for 40, 400 and 4,000 lazy clients: `python tests/bench/lazy_memory.py [CLIENTS ...]` (Linux, some minutes).

Each client would hold half a megabyte of images if they were in memory. Each count has a process of its own, which does all the work.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

SHAPE, IMAGES = (3, 64, 64), 10


def image(number: int) -> torch.Tensor:
    """An image, made when it is read."""
    return torch.full(SHAPE, number % 7 / 7.0)


def peak() -> float:
    """Most memory that this process has had, in MB."""
    return int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def fit(n: int) -> None:
    from fedl2p import Client, Config, FedL2P
    from fedl2p.loaders import LazyData
    from fedl2p.runner import Runner

    data = LazyData(image, torch.arange(IMAGES) % 3)
    clients = [Client(f"c{i}", data[:6], data[6:8], data[8:]) for i in range(n)]
    model = nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(48, 3))
    start = time.process_time()
    FedL2P(model, Config(epochs=1, splits=1, choosing_rounds=1)).fit(clients, runner=Runner(0))
    images = n * IMAGES * 4 * torch.Size(SHAPE).numel() / 2**20
    print(f"| {n:,} | {images:,.0f} | {peak():,.0f} | {time.process_time() - start:.0f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        fit(int(sys.argv[2]))
    else:
        print("| lazy clients | their images (MB) | peak of the process (MB) | CPU (s) |\n|---:|---:|---:|---:|", flush=True)
        for n in sys.argv[1:] or ["40", "400", "4000"]:
            subprocess.run([sys.executable, __file__, "--one", n], check=True)
