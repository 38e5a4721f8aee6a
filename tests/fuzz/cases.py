"""Generators of wrong inputs, one function a kind. Each returns a call that must end in success or in one sentence."""

import dataclasses
import json
import os
import re
import warnings
from functools import cache
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedl2p import cli
from fedl2p.cases import cases as report_cases
from fedl2p.checkpoint import load_checkpoint, save_checkpoint
from fedl2p.config import Config
from fedl2p.core import Table, require
from fedl2p.data import Client, Data, check, lda_partition, make_client
from fedl2p.digits import small_cnn
from fedl2p.learner import FedL2P
from fedl2p.policy import untrained
from fedl2p.pretraining import Recipe
from fedl2p.profile import Profile
from fedl2p.rounds import Course, load_course, save_course
from fedl2p.runner import Runner
from fedl2p.storage import save_tensors
from fedl2p.studies.demo import Demo
from fedl2p.studies.files import load_npy, read_list, read_npz, read_wav
from fedl2p.studies.runs import Run
from fedl2p.studies.tables import read_cell, study_table

from .damage import ODD, damaged_bytes, damaged_json

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")


SETTINGS = dataclasses.asdict(Config.paper(hidden=4))


def odd(rng, hint=None):
    """A value for a field: often of its type, sometimes beyond it."""
    args = [a for a in get_args(hint) if a is not ...]
    if rng.random() < 0.4:
        return rng.choice(ODD)
    if get_origin(hint) is tuple:
        return tuple(odd(rng, args[0]) for _ in range(rng.randrange(3)))
    if args and all(isinstance(a, str) for a in args):
        return rng.choice(args)
    return rng.choice([0, 1, 2, 5, 10**6, 10**9, 10**20, 0.0, 0.1, 0.5, 1.0, 2.5, 1e-320, 1e300, -3, None])


def settings_case(rng, folder):
    kind = rng.choice([Config, Recipe, Runner, Demo])
    hints = get_type_hints(kind)
    fields = [f.name for f in dataclasses.fields(kind) if f.name not in ("config", "transport", "progress", "out")]
    names = rng.sample(fields, rng.randrange(1, 1 + min(3, len(fields))))
    values = {name: odd(rng, hints.get(name)) for name in names}
    return f"{kind.__name__}({values})", lambda: kind(**values)


def run_case(rng, folder):
    hints = get_type_hints(Run)
    good = {"alpha": 1000.0, "epochs": 5, "seeds": 1}
    values = {name: good[name] if rng.random() < 0.5 else odd(rng, hints[name]) for name in rng.sample(sorted(good), rng.randrange(1, 3))}
    values = {k: v if isinstance(v, tuple) else (v,) for k, v in values.items()}
    return f"Run({values})", lambda: Run("office", **values)


OPTIONS = ["--clients", "--unseen", "--alpha", "--seeds", "--workers", "--limit", "--pretraining-rounds", "--rounds", "--device", "--fraction", "--lr", "--epochs", "--hidden", "--batch-size", "--meta-lr-bn", "--clip", "--psi", "--estimator", "--hvp", "--statistics", "--more-methods", "--fill", "--nonsense"]
WORDS = ["", "x", "-1", "0", "1", "5", "nan", "inf", "-inf", "1e-320", "1e400", "10**20", "99999999999999999999", "0.5", "None", "True", "ift", "--", "é", "\udcff", "a" * 300]


def options_case(rng, folder):
    command = rng.choice([["demo"], ["run", "office"], ["flower", "cifar10"], ["table", "office"], ["report", str(folder / "nowhere")], []])
    args = command + [w for _ in range(rng.randrange(1, 4)) for w in (rng.choice(OPTIONS), rng.choice(WORDS))]
    if command and command[0] in ("demo", "run", "flower", "table"):
        args += ["--out", str(folder / "out")]

    def call():
        kept = cli.run_demo, cli._filled
        cli.run_demo, cli._filled = (lambda *a: Table(["a"], [["b"]])), (lambda *a: {})
        try:
            code = cli.main(args)
        except SystemExit as stop:
            code = stop.code
        finally:
            cli.run_demo, cli._filled = kept
        if code not in (0, 1, 2):
            raise AssertionError(f"exit code {code}")

    return f"fedl2p {args}", call


def partition_case(rng, folder):
    labels = torch.tensor([rng.randrange(rng.choice([1, 3, 10])) for _ in range(rng.choice([0, 1, 5, 60]))], dtype=torch.int64)
    n, alpha, seed = rng.choice([-1, 0, 1, 1, 1, 3, 60, 61]), 0.5 if rng.random() < 0.5 else rng.choice([0.0, 1e-320, 1e-300, 1e-6, 0.1, 1000.0, 1e300, float("nan"), float("inf"), -1.0]), rng.choice([0, 1, 2**31])

    def call():
        parts = lda_partition(labels, n, alpha, seed)
        assert sorted(torch.cat(parts).tolist()) == list(range(len(labels)))

    return f"lda_partition({len(labels)} labels, {n}, {alpha}, {seed})", call


@cache
def model():
    from fedl2p.bn import mix_bn

    return mix_bn(small_cnn(width=2), verbose=False)


def client_case(rng, folder):
    n = rng.choice([0, 1, 2, 9])
    fine = n, torch.zeros(n, 1, 8, 8), torch.zeros(n, dtype=torch.int64), 0.2
    x = rng.choice([torch.zeros(n, 1, 8, 8), torch.full((n, 1, 8, 8), float("nan")), torch.full((n, 1, 8, 8), 1e38), torch.zeros(n), torch.zeros(n, 3, 8, 8), torch.zeros(n + 1, 1, 8, 8), None, torch.zeros(n, 1, 8, 8, dtype=torch.int64)])
    y = rng.choice([torch.zeros(n, dtype=torch.int64), torch.full((n,), 99), torch.full((n,), -1), torch.zeros(n), None, torch.zeros(n, 1, dtype=torch.int64)])
    share = rng.choice([-1, 0, 0.2, 0.99, 1, 2, float("nan")])
    x, y, share = (good if rng.random() < 0.6 else bad for good, bad in zip(fine[1:], (x, y, share), strict=True))
    return f"client {getattr(x, 'shape', None)} {getattr(y, 'shape', None)} {share}", lambda: check(make_client("a", Data(x, y), share=share), model(), ["train", "val"])


CELL = {
    "dataset": "office", "alpha": 1000.0, "epochs": 5, "pretraining": "imagenet", "method": "fedl2p", "seed": 0, "scale": "smoke", "pools": ["seen"], "seconds": 1.0, "pretraining_seconds": 2.0, "differs": "",
    "start": "00", "settings": {"lr": 0.1, "estimator": "ift", "hidden": 16}, "machine": {"device": "cpu", "cores": 2}, "layers": {"beta": ["bn"], "eta": ["w", "b"], "sizes": [30, 10]},
    "clients": [{"pool": "seen", "client": f"c{i}", "domain": f"d{i % 2}", "right": 5, "n": 10, "loss": 1.0, "beta": [0.5], "eta": [0.1, 0.2], "xi": [float(i)], "feature_stats": [1.0, 2.0]} for i in range(3)],
    "rounds": [{"round": 1, "val_loss": 1.0, "failed": {}, "diverging": 0, "beta": [0.5], "eta": [0.1, 0.2]}],
}


def record_case(rng, folder):
    home = folder / "office" / "smoke" / "imagenet-alpha1000-e5"
    home.mkdir(parents=True)
    (home / "none-seed0.json").write_text(json.dumps({**CELL, "method": "none", "rounds": []}))
    path = home / "fedl2p-seed0.json"
    if rng.random() < 0.7:
        path.write_text(json.dumps(damaged_json(CELL, rng, rng.choice([1, 1, 3]))))
    else:
        path.write_bytes(damaged_bytes(json.dumps(CELL).encode(), rng))

    def call():
        assert report_cases(folder)  # the undamaged cell, whatever the other is
        if cell := read_cell(path):
            study_table("office", "smoke", folder)
            assert all(0 <= r["right"] <= r["n"] for r in cell["clients"])

    return "records", call


@cache
def policy_bytes(recipe):
    import tempfile

    config = Config(hidden=4) if recipe == "ours" else Config.paper(hidden=4)
    with tempfile.TemporaryDirectory() as home:
        FedL2P(model(), config).save(Path(home, "p"))
        return Path(home, "p").read_bytes()


def rewritten(raw, rng, path):
    """A safetensors file whose header or tensors were changed by somebody who knows how to, with a hash that fits or none."""
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    notes = {k: v for k, v in header["__metadata__"].items() if k != "sha256"}
    from safetensors.torch import load

    tensors = load(raw)
    what = rng.random()
    if what < 0.6:
        name = rng.choice(sorted(notes))
        inner = notes[name]
        try:
            notes[name] = json.dumps(damaged_json(json.loads(inner), rng))
        except ValueError:
            notes[name] = str(rng.choice(ODD))
        if rng.random() < 0.2:
            del notes[name]
    else:
        name = rng.choice(sorted(tensors))
        t = tensors.pop(name)
        new = rng.choice([t.double(), t.flatten(), t * float("nan"), t[:0] if t.dim() else t, None, torch.full_like(t, 1e30) if t.is_floating_point() else t])
        if new is not None:
            tensors[name] = new.contiguous()
    save_tensors(path, tensors, notes)


def policy_case(rng, folder):
    raw, path = policy_bytes(rng.choice(["ours", "paper"])), folder / "p.safetensors"
    if rng.random() < 0.5:
        path.write_bytes(damaged_bytes(raw, rng))
    else:
        rewritten(raw, rng, path)

    def call():
        policy = FedL2P.load(model(), path)
        n = len(policy.metanets.signature.bn_layers)
        with torch.no_grad():
            made = policy.metanets(Profile(torch.ones(n), torch.ones(2 * len(policy.metanets.signature.layers)), torch.ones(2)))
        assert made.beta.isfinite().all() and made.eta.isfinite().all()

    return "policy", call


@cache
def checkpoint_bytes():
    import tempfile

    config = Config.paper(hidden=4)
    state = untrained(model(), config).state_dict()
    with tempfile.TemporaryDirectory() as home:
        save_course(Path(home), SETTINGS, Course(state, state, [{"round": 1, "val_loss": 0.5}]))
        return Path(home, "checkpoint.safetensors").read_bytes()


def checkpoint_case(rng, folder):
    path, like = folder / "checkpoint.safetensors", untrained(model(), Config.paper(hidden=4)).state_dict()
    path.write_bytes(damaged_bytes(checkpoint_bytes(), rng))
    if rng.random() < 0.5:
        rewritten(checkpoint_bytes(), rng, path)

    def call():
        course = load_course(folder, SETTINGS, torch.device("cpu"), like)
        if course:
            assert all(t.isfinite().all() for t in course.now.values()) and course.tired(3) in (True, False)
            save_checkpoint(folder / "again", SETTINGS, course.now, {"round": 1})
            load_checkpoint(folder / "again", SETTINGS)

    return "checkpoint", call


@cache
def fitted_bytes():
    """A folder by `fit`, with what three clients tried."""
    import tempfile

    from fedl2p.digits import digits_federation

    clients = digits_federation(5, 0, size=30).seen[:3]
    with tempfile.TemporaryDirectory() as home:
        FedL2P(small_cnn(width=2), Config(epochs=1, splits=1, choosing_rounds=2, rounds=1)).fit(clients, home, Runner(0))
        return {path.relative_to(home): path.read_bytes() for path in sorted(Path(home).rglob("*.safetensors"))}


def fitted_case(rng, folder):
    files = fitted_bytes()
    spoilt = rng.choice(sorted(files))
    for name, raw in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(raw)
    if rng.random() < 0.3:
        (folder / spoilt).write_bytes(damaged_bytes(files[spoilt], rng))
    else:
        rewritten(files[spoilt], rng, folder / spoilt)

    def call():
        [case] = report_cases(folder)
        assert case.parts
        cells = [cell for part in case.parts if isinstance(part, Table) for row in part.rows for cell in row[2:]]  # the name of a client may be "nan"
        assert not [cell for cell in cells if re.search(r"\b(nan|inf)\b", cell)]

    return f"fitted {spoilt}", call


def file_case(rng, folder):
    kind, path = rng.choice(["npz", "npy", "wav", "list"]), folder / "file"
    if kind == "npz":
        np.savez(path.with_suffix(".npz"), x=np.zeros((3, 4)), key=np.array("k"))
        path = path.with_suffix(".npz")
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        return kind, lambda: read_npz(path)
    if kind == "npy":
        np.save(path.with_suffix(".npy"), np.zeros((3, 4)))
        path = path.with_suffix(".npy")
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        return kind, lambda: load_npy(path)
    if kind == "wav":
        import wave

        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(bytes(200))
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        return kind, lambda: read_wav(path, 16000)
    import pickle

    path.write_bytes(damaged_bytes(pickle.dumps((["a/b.png"] * 3, ["bike"] * 3), protocol=rng.randrange(5)), rng))
    return kind, lambda: read_list(path)


def message_case(rng, folder):
    try:
        from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
    except ImportError:
        return "message", lambda: None
    from fedl2p.client import learn_client
    from fedl2p.federated import refusal
    from fedl2p.flower import _read
    from fedl2p.metanet import signature
    from fedl2p.runner import Task

    config = Config.paper(hidden=4, keep="lowest")
    state = dict(untrained(model(), config).state_dict())
    nothing = Data(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    work = rng.choice(["learn", "score", "train", "choose", "validate"])
    task = Task(learn_client, model(), config, state, Client("a", nothing, nothing, nothing), 1)
    mine = signature(model())
    metrics = {"num-examples": 3} | {
        "learn": {"val_loss": 1.0, "diverging": 0}, "validate": {"val_loss": 1.0, "diverging": 0}, "choose": {"size": 1.0, "gain": 0.1}, "train": {},
        "score": {"right": 1, "n": 2, "loss": 0.5, "mixes": 1, "distance": 0.0, "beta": [0.5] * len(mine.bn_layers), "eta": [0.1] * len(mine.tensors)},
    }[work]
    for _ in range(rng.randrange(3)):
        metrics[rng.choice([*metrics, "more"])] = rng.choice(ODD)
    arrays = ArrayRecord({"w": _array(rng)}) if rng.random() < 0.5 else ArrayRecord({k: _array(rng, t) for k, t in state.items()})
    content = {"metrics": rng.choice([metrics, MetricRecord({}), ConfigRecord({"a": 1})]) if rng.random() < 0.3 else metrics, "arrays": arrays}
    if rng.random() < 0.1:
        content.pop(rng.choice(sorted(content)))

    def call():
        from fedl2p.runner import attempt

        outcome = attempt(lambda: _read(work, task, content))  # as the server does: the reason becomes a warning
        failure = outcome.failure or (None if work == "score" else refusal(outcome.value, state))
        require(not failure, "message", "one that can be used", failure and failure.reason)

    return "message", call


def _array(rng, t=None):
    from flwr.app import Array

    if t is not None and rng.random() < 0.9:
        return Array(t.detach().numpy())
    what = rng.randrange(3)
    if what == 0:
        return Array(np.full(3, np.nan, dtype=np.float32))
    if what == 1:
        return Array("float32", (10**9,), "numpy.ndarray", b"no array")
    return Array(np.zeros((2, 2), dtype=np.float32))


class Two(nn.Module):
    "Answers with a pair."

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x.flatten(1)), x


class Shifted(nn.BatchNorm1d):
    "A batch norm with a forward of its own."

    def forward(self, x):
        return super().forward(x) + 1


NETWORKS = {
    "identity": nn.Identity, "half precision": lambda: nn.Linear(2, 2).half(), "no norms": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    "a norm alone": lambda: nn.BatchNorm1d(3, affine=False), "a pair": Two, "other sizes": lambda: nn.Sequential(nn.Flatten(), nn.Linear(63, 10)),
    "frozen": lambda: small_cnn(width=2).requires_grad_(False), "an own norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Shifted(8), nn.Linear(8, 10)),
    "groups": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 10)), "one number": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 1)),
    "three outputs too few": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 7)), "NaN": lambda: with_nan(small_cnn(width=2)), "lazy": lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(10)),
}


def with_nan(network):
    with torch.no_grad():
        network.head.weight[0, 0] = float("nan")
    return network


def network_case(rng, folder):
    """Models, most of which cannot be personalized: asked for a strategy, and to follow one."""
    name, config = rng.choice(sorted(NETWORKS)), rng.choice([Config(epochs=1), Config.paper(hidden=4, epochs=1)])
    x = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(rng.randrange(9)))
    client = Client("a", *(Data(x, torch.arange(6) + 4) for _ in range(3)))

    def call():
        tuned = FedL2P(NETWORKS[name](), config).personalize(client)
        with torch.no_grad():
            assert F.cross_entropy(tuned(client.test.x), client.test.y).isfinite()

    return f"a model: {name}", call


KINDS = [settings_case, run_case, options_case, partition_case, client_case, record_case, policy_case, checkpoint_case, fitted_case, file_case, message_case, network_case]
warnings.simplefilter("ignore")
