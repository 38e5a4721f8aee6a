"""Office-Caltech-10 from its folder, by the loader for folders: policy against plain fine-tuning (about ten minutes of a core for a seed).

    python tests/bench/office.py DATA [SEED ...]     DATA holds office_caltech_10/ and resnet18_backbone.pt
    python tests/bench/office.py                     prints the table of what is there

A head for ImageNet's ResNet-18 is trained on images of one domain. Each of the four domains then has three clients with 52 other images
of 64 pixels, half of them for the test; two clients learn together, the third comes later. Results are kept in office.json beside this
file, and trials in the folder office-SEED: a run that was stopped goes on.

Eight clients are too few to look at (`fedl2p.trials.ENOUGH`), so policy and common strategy are the same. Before that rule the policy
of seed 0 looked, since it gained 0.156 ± 0.108 in loss on clients that it had not learned from, and had 60.6% / 65.4% (seen / unseen)
where its own common strategy had 68.8% / 72.1%. Plain methods choose their rates by the validation samples of all twelve clients.
"""

import json
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

from fedl2p import Client, Config, FedL2P
from fedl2p.core import generator
from fedl2p.folders import class_names, clients_from_folder, data_from_files, images_in
from fedl2p.loaders import ToTensor
from fedl2p.runner import Runner, bar
from fedl2p.studies.datasets import IMAGENET_MEAN, IMAGENET_STD
from fedl2p.studies.models import imagenet_resnet18

RESULTS = Path(__file__).with_suffix(".json")
SOURCE, EACH, IMAGES = "amazon", 3, 52  # the domain of pretraining; clients of a domain; images of a client
LOOK = ToTensor(64, IMAGENET_MEAN, IMAGENET_STD)
CONFIG = Config(epochs=5, batch_size=8, splits=2)  # 15 steps on 21 images, where the default would take hours on a core
HERE = Runner(0, progress=bar)


def dealt(root: Path, seed: int) -> tuple[dict[str, list[str]], list[Path]]:
    """Files of each client, and the files that are left over in the domain of pretraining."""
    lists, rest = {}, {}
    for domain in sorted(p for p in root.iterdir() if p.is_dir()):
        files = images_in(domain)
        files = [files[i] for i in torch.randperm(len(files), generator=generator(seed, "office", domain.name)).tolist()]
        for i in range(EACH):
            lists[f"{domain.name}-{i}"] = [str(f.relative_to(root)) for f in files[i * IMAGES : (i + 1) * IMAGES]]
        rest[domain.name] = files[EACH * IMAGES :]
    return lists, rest[SOURCE]


def pretrained(files: list[Path], classes: list[str], backbone: Path, seed: int) -> nn.Module:
    """A backbone of ImageNet with a head trained on some files."""
    model, data = imagenet_resnet18(len(classes), seed, backbone).eval(), data_from_files(files, classes, LOOK, lazy=False)
    head, model.fc = model.fc, nn.Identity()
    with torch.no_grad():
        features = torch.cat([model(part) for part in data.x.split(64)])
    optimizer, numbers = torch.optim.Adam(head.parameters(), 1e-3), generator(seed, "head")
    for _ in range(20):
        for part in torch.randperm(len(data), generator=numbers).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(features[part]), data.y[part]).backward()
            optimizer.step()
    model.fc = head
    return model


def accuracies(policy: FedL2P, clients: list[Client]) -> dict[str, dict[str, float]]:
    """Method -> client -> percent right: plain methods at their best rates, the common strategy, the policy."""
    common = FedL2P(policy.model, policy.config)  # the same selector, blind
    common.metanets.load_state_dict({k: torch.zeros_like(t) if k == "last" else t for k, t in policy.metanets.state_dict().items()})
    compared = policy.compare(clients, runner=HERE)
    named = {name + (f" at rate {compared.rates[name]:g}" if name in compared.rates else ""): scores for name, scores in compared.scores.items()}
    named |= {"common strategy": {r.id: 100 * r.score.accuracy for r in common.score(clients, HERE)}}
    return {name: {id: round(v, 2) for id, v in scores.items()} for name, scores in named.items()}


def run(data: Path, seed: int) -> dict:
    root = data / "office_caltech_10"
    lists, files = dealt(root, seed)
    classes = class_names(root)
    model = pretrained(files, classes, data / "resnet18_backbone.pt", seed)
    clients = clients_from_folder(root, LOOK, lists=lists, seed=seed, test_share=0.5)
    unseen = clients[EACH - 1 :: EACH]
    policy = FedL2P(model, CONFIG).fit([c for c in clients if c not in unseen], folder=f"office-{seed}", runner=HERE)
    return {"seed": seed, "said": policy.gained.notes[1], "unseen": [c.id for c in unseen], "accuracy": accuracies(policy, clients)}


def percents(results: list[dict], method: str, unseen: bool) -> list[list[float]]:
    """By seed and client; a method may have another rate in each seed."""
    found = [next(v for name, v in r["accuracy"].items() if name.partition(" at rate")[0] == method) for r in results]
    return [[v for id, v in scores.items() if (id in r["unseen"]) == unseen] for r, scores in zip(results, found, strict=True)]


def error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def gain(policy: list[list[float]], other: list[list[float]]) -> str:
    """What the policy gains: mean, and standard errors over seeds / over clients."""
    gains = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(policy, other, strict=True)]
    seeds, clients = [statistics.mean(g) for g in gains], [g for some in gains for g in some]
    return f"{statistics.mean(seeds):+.1f} ± {error(seeds):.1f} / {error(clients):.1f}"


def table(results: list[dict]) -> str:
    """Means over seeds and clients, and what the policy gains over each method; then what was chosen in each seed."""
    lines = ["| method | seen | policy gains | unseen | policy gains |", "|---|---:|---:|---:|---:|"]
    for method in [name.partition(" at rate")[0] for name in results[0]["accuracy"]]:
        cells = []
        for unseen in (False, True):
            scores = percents(results, method, unseen)
            mean = statistics.mean(v for some in scores for v in some)
            cells += [f"{mean:.1f}", "" if method == "policy" else gain(percents(results, "policy", unseen), scores)]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    rates = [", ".join(name for name in r["accuracy"] if " at rate" in name) for r in results]
    return "\n".join([*lines, "", *(f"Seed {r['seed']}: {chosen}. {r['said']}" for r, chosen in zip(results, rates, strict=True))])


def main(data: Path | None, seeds: list[int]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for seed in seeds:
        if data and seed not in [r["seed"] for r in results]:
            results = sorted([*results, run(data, seed)], key=lambda r: r["seed"])
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results) if results else "no results yet")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None, [int(s) for s in sys.argv[2:]] or [0, 1, 2])
