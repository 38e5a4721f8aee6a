"""From a folder of images to a personalized model in a file: `python examples/own_clients.py [FOLDER DOMAIN]`.

FOLDER holds <domain>/<class>/<image>, and DOMAIN is the domain to pretrain on. Without them, the script draws images: seven shapes
in four looks. Copy it and change what you need.
"""

import sys
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import nn

from fedl2p import Client, Config, FedL2P
from fedl2p.folders import class_names, clients_from_folder, data_from_files, images_in
from fedl2p.loaders import ToTensor
from fedl2p.shapes import write_shapes
from fedl2p.shipping import ship


def network(classes: int) -> nn.Module:
    """Your network goes here: any classifier, best with batch norms and pretrained weights."""
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    return nn.Sequential(*block(3, 16), *block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))


def pretrain_on(model: nn.Module, files: list[Path], classes: list[str], look: ToTensor) -> nn.Module:
    """Your pretraining goes here."""
    data, optimizer = data_from_files(files, classes, look, lazy=False), torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(15):
        for part in torch.randperm(len(data)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.x[part]), data.y[part]).backward()
            optimizer.step()
    return model.eval()


def main(folder: str = "", source: str = "photo") -> None:
    torch.manual_seed(0)
    out = Path(mkdtemp())
    root = Path(folder) if folder else write_shapes(out / "shapes", each=30)
    look, classes = ToTensor(size=16), class_names(root)
    model = pretrain_on(network(len(classes)), images_in(root / source), classes, look)

    # Five clients for each of the other domains. One of the five comes later; twelve learn, enough to look at clients. Images are read when they are needed.
    clients: list[Client] = [c for c in clients_from_folder(root, look, clients_each=5) if c.domain != source]
    newcomers = clients[4::5]
    policy = FedL2P(model, Config(epochs=5)).fit([c for c in clients if c not in newcomers])
    print(policy)
    print(policy.compare(newcomers, rates=(0.1, 0.01)))
    policy.save(out / "policy.safetensors")

    mine = newcomers[0]
    print(policy.explain(mine))
    ship(policy.personalize(mine), out / "mine.pt2", mine.test.x)  # runs without fedl2p
    program = torch.export.load(out / "mine.pt2").module()
    print(f"{(program(mine.test.x).argmax(1) == mine.test.y).float().mean():.0%} right; files are in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
