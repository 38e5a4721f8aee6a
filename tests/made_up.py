"""Small made-up files in the official layouts of the five data sets."""

import wave
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedl2p.studies.datasets import (
    DOMAINNET_CLASSES,
    DOMAINNET_DOMAINS,
    OFFICE_CLASSES,
    OFFICE_DOMAINS,
    RATE,
    SPEECH_CLASSES,
)
from fedl2p.studies.models import resnet18


def image(path, colour=(200, 100, 50), mode="RGB", side=12):
    """A picture of one colour."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), colour).convert(mode).save(path)


def wav(path, seconds=1.0, pitch=440.0, rate=RATE, channels=1, width=2):
    """A tone."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    tone = (8000 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * RATE)) / RATE)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(tone.tobytes())


def cifar10(root, n=120):
    """Noise, brighter for higher labels."""
    y = (np.arange(n) % 10).astype(np.uint8)
    noise = (np.random.default_rng(seed).integers(0, 60, (n, 3, 32, 32)) for seed in (0, 1))
    train, test = ((x + 18 * y[:, None, None, None]).astype(np.uint8) for x in noise)
    np.savez(Path(root) / "cifar10.npz", x_train=train, y_train=y, x_test=test, y_test=y)


def domains(root, name, kinds, classes, each=2):
    """One folder for each domain and class, each domain and class of another colour."""
    for d, kind in enumerate(kinds):
        for c, label in enumerate(classes):
            for i in range(each):
                image(Path(root) / name / kind / label / f"{i}.png", (25 * c, 40 * d, 100 * i))


def backbone(root):
    """A ResNet-18 without its head, of random weights."""
    whole = resnet18("imagenet").state_dict()
    state = {name: t.half() if t.is_floating_point() else t for name, t in whole.items() if not name.startswith("fc.")}
    torch.save(state, Path(root) / "resnet18_backbone.pt")


def speech(root, speakers=6, held_out=3):
    """Each speaker says seven words; the last speakers are on the lists for validation and test."""
    folder = Path(root) / "SpeechCommands" / "speech_commands_v0.02"
    lists = {"validation_list.txt": [], "testing_list.txt": []}
    for s in range(speakers):
        for w, word in enumerate([*SPEECH_CLASSES[:5], "bed", "cat"]):
            name = f"{word}/{s:08x}_nohash_0.wav"
            wav(folder / name, pitch=200 + 100 * w + 10 * s)
            if s >= speakers - held_out:
                lists["testing_list.txt" if s % 2 else "validation_list.txt"].append(name)
    wav(folder / "_background_noise_" / "hum.wav", seconds=3.0, pitch=50)
    for file, names in lists.items():
        (folder / file).write_text("\n".join(names) + "\n")


def everything(root):
    """All of them."""
    cifar10(root)
    domains(root, "office_caltech_10", OFFICE_DOMAINS, OFFICE_CLASSES)
    domains(root, "DomainNet", DOMAINNET_DOMAINS, DOMAINNET_CLASSES)
    backbone(root)
    speech(root)
