"""Office-Caltech-10 from its folder, by the loader for folders: policy against plain fine-tuning, three seeds (about an hour on two cores).

    python tests/bench/office.py DATA [SEED ...]     DATA holds office_caltech_10/ and resnet18_backbone.pt

The head is trained on the images of one domain that no client has; the others are four clients each, one of which comes later. 64 pixels.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from fedl2p import FedL2P
from fedl2p.core import generator
from fedl2p.loaders import ToTensor, class_names, clients_from_folder, data_from_files, images_in
from fedl2p.studies.datasets import IMAGENET_MEAN, IMAGENET_STD
from fedl2p.studies.models import imagenet_resnet18

SOURCE, EPOCHS = "amazon", 20  # the domain of pretraining, and passes over its features


def pretrained(root: Path, backbone: Path, classes: list[str], look: ToTensor, seed: int) -> nn.Module:
    "A backbone of ImageNet with a head trained on half of one domain."
    model, files = imagenet_resnet18(len(classes), seed, backbone).eval(), images_in(root / SOURCE)
    order = torch.randperm(len(files), generator=generator(seed, "office")).tolist()
    data = data_from_files([files[i] for i in order[: len(files) // 2]], classes, look, lazy=False)
    head, model.fc = model.fc, nn.Identity()
    with torch.no_grad():
        features = torch.cat([model(part) for part in data.x.split(64)])
    optimizer = torch.optim.Adam(head.parameters(), 1e-3)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(data), generator=generator(seed, "order")).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(features[part]), data.y[part]).backward()
            optimizer.step()
    model.fc = head
    return model


def main(data: Path, seeds: list[int]) -> None:
    root, look = data / "office_caltech_10", ToTensor(64, IMAGENET_MEAN, IMAGENET_STD)
    classes = class_names(root)
    for seed in seeds:
        model = pretrained(root, data / "resnet18_backbone.pt", classes, look, seed)
        clients = [c for c in clients_from_folder(root, look, clients_each=4, seed=seed) if c.domain != SOURCE]
        unseen = clients[seed % 4 :: 4]
        policy = FedL2P(model).fit([c for c in clients if c not in unseen], folder=f"office-{seed}")
        print(f"\nseed {seed}: {policy!r}\n\n{policy.gained.notes[-1]}")
        for pool, some in (("seen", [c for c in clients if c not in unseen]), ("unseen", unseen)):
            print(f"\n{pool}\n\n{policy.compare(some)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(s) for s in sys.argv[2:]] or [0, 1, 2])
