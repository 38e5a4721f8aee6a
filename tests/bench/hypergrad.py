"""What hypergradients cost, in units of one gradient: `python tests/bench/hypergrad.py [small|resnet18]`.

Times are medians within one process, as ratios: a machine's speed cancels. Peak memory is that of a new process for each
row, above what the process had before, so that no row profits from what another one left allocated.
"""

import ctypes
import json
import math
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedl2p.bn import beta_buffers, bn_layers, mix_bn
from fedl2p.digits import digits, fit, small_cnn
from fedl2p.hypergrad import NeumannDiverges, descend, fomaml, gradient, ift, unrolled

warnings.simplefilter("ignore", NeumannDiverges)  # psi = 0.1 is too large for these networks; here we only measure


def pretrained(name: str, folder: Path) -> tuple[nn.Module, Tensor, Tensor]:
    """A network that knows digits, trained once and kept in `folder` for the processes that measure memory."""
    x, y = digits()
    if name == "small":
        model, size, training = small_cnn(), 8, {"epochs": 10}
    else:
        from torchvision.models import resnet18

        torch.manual_seed(0)
        model, size, training = resnet18(num_classes=10), 32, {"epochs": 6}
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()  # the stem for CIFAR
    x = F.interpolate(x, size=size, mode="bilinear").expand(-1, 1 if name == "small" else 3, -1, -1)
    file = folder / f"{name}.pt"
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
    else:
        torch.save(fit(model, x[:800], y[:800], **training).state_dict(), file)
    model = mix_bn(model, 0.5, verbose=False).train()
    for layer in bn_layers(model).values():
        layer.momentum = None
    with torch.no_grad():
        for part in x[:320].split(32):
            model(part)
    return model.eval(), x, y


def setting(name: str, folder: Path):
    """Losses in batches of 32, as functions of weights and hyperparameters."""
    model, x, y = pretrained(name, folder)

    def loss_on(i):
        images, labels = x[32 * i : 32 * i + 32].contiguous(), y[32 * i : 32 * i + 32]
        return lambda w, h: F.cross_entropy(functional_call(model, {**w, **beta_buffers(model, h["beta"])}, images), labels)

    weights = {k: p.detach() for k, p in model.named_parameters()}
    hyper = {"eta": torch.full((len(weights),), 1e-3), "beta": torch.full((len(bn_layers(model)),), 0.5)}
    return loss_on, weights, hyper


def naive(steps, weights, val_loss, hyper):
    """Autograd through all steps at once, for comparison."""
    h, w = ({k: t.detach().requires_grad_() for k, t in d.items()} for d in (hyper, weights))
    for loss in steps:
        g = torch.autograd.grad(loss(w, h), list(w.values()), create_graph=True)
        w = {k: t - e * d for (k, t), e, d in zip(w.items(), h["eta"], g, strict=True)}
    return dict(zip(h, torch.autograd.grad(val_loss(w, h), list(h.values())), strict=True))


def cases(name: str, folder: Path) -> dict:
    """Everything that is measured, as functions without arguments."""
    loss_on, weights, hyper = setting(name, folder)
    train_loss, val_loss = loss_on(5), loss_on(40)
    short = descend([loss_on(0), loss_on(1)], weights, hyper)
    runs = {
        "gradient": lambda: gradient(val_loss, weights, hyper),
        "fomaml": lambda: fomaml(short, train_loss, val_loss, hyper),
    }
    for terms in (1, 3, 10) if name == "small" else (3,):
        for hvp in ("exact", "central", "forward"):
            runs[f"ift Q={terms} {hvp}"] = lambda terms=terms, hvp=hvp: ift(short, train_loss, val_loss, hyper, terms=terms, hvp=hvp)
    for n in (4, 16, 64) if name == "small" else (4, 9):
        steps = [loss_on(i % 20) for i in range(n)]
        for label, every in (("all kept", 1), ("sqrt kept", math.isqrt(n))):
            runs[f"unrolled {n} steps, {label}"] = lambda s=steps, e=every: unrolled(descend(s, weights, hyper, e), train_loss, val_loss, hyper)
        if name == "small" or n == 4:
            runs[f"naive graph {n} steps"] = lambda s=steps: naive(s, weights, val_loss, hyper)
        if name == "small":
            runs[f"unrolled {n} steps, last 2"] = lambda s=steps, n=n: unrolled(descend(s, weights, hyper, n // 2), train_loss, val_loss, hyper, last=2)
    return runs


def peak_memory(name: str, folder: Path, case: str) -> float:
    """Megabytes that one case needs above what its process had before it."""
    runs = cases(name, folder)
    runs[case]()  # what libraries load and allocate on first use is not the estimator's
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: start the peak anew

    def peak() -> float:
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024

    before = peak()
    runs[case]()
    return peak() - before


def seconds(run, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def cosine(a, b) -> float:
    return F.cosine_similarity(torch.cat([a[k].flatten() for k in a]), torch.cat([b[k].flatten() for k in a]), dim=0).item()


def table(name: str) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        runs = cases(name, folder)
        memory, one = {}, seconds(runs["gradient"], 15)
        for case in runs:  # first, while this process is small
            done = subprocess.run([sys.executable, __file__, name, tmp, case], capture_output=True, text=True)
            memory[case] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else math.nan
        print(f"\n{name}, batch 32, {torch.get_num_threads()} thread(s): one gradient takes {one:.3f} s and {memory['gradient']:.0f} MB\n")
        print("| estimator | time in gradients | peak memory, MB | cosine to exact, beta | eta |\n|---|---|---|---|---|")
        for case, run in runs.items():
            # Gradients before and behind each row: the machine's speed may change in between.
            repeats = 1 if name == "resnet18" and "steps" in case else 5
            base, took, again = seconds(runs["gradient"], 5), seconds(run, repeats), seconds(runs["gradient"], 5)
            ratio = took / ((base + again) / 2)
            cosines = ["", ""]
            if case.startswith("ift"):
                exact, here = runs[" ".join(case.split()[:2]) + " exact"](), run()
                cosines = [f"{cosine({k: here[k]}, {k: exact[k]}):.4f}" for k in ("beta", "eta")]
            print(f"| {case} | {ratio:.1f} | {memory[case]:.0f} | {cosines[0]} | {cosines[1]} |", flush=True)


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "small"
    if chosen not in ("small", "resnet18"):
        sys.exit(__doc__)
    torch.set_num_threads(1 if chosen == "small" else 2)
    if len(sys.argv) == 4:
        print(json.dumps(peak_memory(chosen, Path(sys.argv[2]), sys.argv[3])))
    else:
        table(chosen)
