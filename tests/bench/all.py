"""All benchmarks that take minutes, as one table of ratios: `python tests/bench/all.py [PART ...]` (parts: steps overhead trials hypergradients frozen runner workers target).

Ratios are of processor time within one run, the median of turns that the rivals take one after the other, so that the speed of the
machine and what else it does cancel as far as they can; arithmetic is counted, not timed. `runner` and `workers` are by the clock; `workers` wants a
machine of its own, and runs only if it is asked for. What takes longer has a script of its own: `race.py` (the race against the full table), `hypergrad.py` (memory and time of every
estimator, also of ResNet-18), `lazy_memory.py` (peak memory for 40, 400 and 4,000 clients), `demo.py` (seconds and memory of the demo), `engines.py`
(side by side or in a loop), `looking.py` (what selectors look at), `office.py` (photographs by the loader), `resnet18.py` (the paper's network).
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fedl2p.bn import mix_bn
from fedl2p.config import Config
from fedl2p.core import State, seeded
from fedl2p.cost import budget, meta_gradients
from fedl2p.data import Client, Data
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.finetune import Tuning, finetune
from fedl2p.halving import trial_losses
from fedl2p.learner import FedL2P
from fedl2p.many import CHUNK, pick_engine, run_race, start_race
from fedl2p.measure import count_flops
from fedl2p.policy import policy, profile_of, untrained, with_state
from fedl2p.pretraining import pretrain
from fedl2p.runner import Runner, Task, _pack
from fedl2p.scoring import score_all, score_strategies
from fedl2p.strategy import bn_c, head_only
from fedl2p.studies.cells import drawn
from fedl2p.studies.models import resnet18, small_resnet
from fedl2p.studies.settings import DIGITS, Setting, setting
from fedl2p.trials import run_trials

DATA = Path(os.environ.get("FEDL2P_DATA", "data"))  # for CIFAR-10
MODELS = Path(__file__).parents[2] / "nbs/experiments/policy"  # which come with the repository
Row = tuple[str, str, str]  # what, how much, in which unit


def ratios(turns: int, **rivals: Callable[[], object]) -> dict[str, float]:
    "Processor time of each, in units of the first: they take turns, after one that does not count."
    taken = []
    for _ in range(turns + 1):
        taken.append({})
        for name, work in rivals.items():
            start = time.process_time()
            work()
            taken[-1][name] = time.process_time() - start
    first = next(iter(rivals))
    return {name: median(turn[name] / turn[first] for turn in taken[1:]) for name in rivals}


def plain_steps(model: nn.Module, data: Data, steps: int) -> None:
    "What everybody writes: a copy of the network, its own batch norms, an optimizer."
    own = deepcopy(model).train()
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(own(data.x), data.y).backward()
        optimizer.step()


def steps() -> Iterator[Row]:
    "One step of fine-tuning: alone, and one of 24 strategies by each engine."
    numbers = torch.Generator().manual_seed(0)
    networks = {
        "digits": (small_cnn(), (1, 8, 8), 20), "CIFAR-10, small": (small_resnet("cifar", stride=2), (3, 32, 32), 4),
        "speech, small": (small_resnet("speech", 12), (1, 40, 101), 2), "ResNet-18, 32 pixels": (resnet18("cifar", 10), (3, 32, 32), 1),
    }
    for name, (network, shape, n) in networks.items():
        data = Data(torch.randn(32, *shape, generator=numbers), torch.randint(10, (32,), generator=numbers))
        model, tuning = mix_bn(network, verbose=False), Tuning(epochs=n)
        strategy = bn_c(model, 1e-3)
        rivals = {"plain": partial(plain_steps, network, data, n), "ours": partial(finetune, model, strategy, data, tuning)}
        if "ResNet" not in name:  # copies of which do not pay
            for engine in ("loop", "vmap"):
                race = start_race(model, [strategy] * CHUNK, data, tuning, torch.Generator().manual_seed(0), engine)
                rivals[engine] = partial(run_race, model, race, "mix", n)
        found = ratios(1 if "ResNet" in name else 3, **rivals)
        yield f"step of fine-tuning, {name}", f"{found['ours']:.2f}", "steps of plain PyTorch"
        for engine in ("loop", "vmap"):
            if engine in found:
                mark = ", the choice of auto" if pick_engine(model) == engine else ""
                yield f"step of one of {CHUNK} strategies by {engine}, {name}{mark}", f"{found[engine] / CHUNK:.2f}", "steps of plain PyTorch"


def overhead() -> Iterator[Row]:
    "What a step of fine-tuning does beside arithmetic, as a share of its time; the rest of its distance to plain PyTorch is arithmetic."
    data, n = Data(torch.randn(32, 1, 8, 8), torch.arange(32) % 10), 20
    model = mix_bn(small_cnn(), verbose=False).train()
    nothing = copy(model)
    nothing.__dict__["forward"] = lambda x: x  # an attribute of this copy alone
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def often(work: Callable[[], object]) -> Callable[[], object]:
        return lambda: [work() for _ in range(n)]

    def seed() -> None:
        with seeded(0):
            pass

    rivals = {"step": partial(finetune, model, bn_c(model, 1e-3), data, Tuning(epochs=n)), "weights put into the network and taken out": often(lambda: functional_call(nothing, state, (data.x,))), "the mode of the network": often(model.train), "a seed for dropout": often(seed)}
    for name, share in list(ratios(5, **rivals).items())[1:]:
        yield f"Python of a step, digits: {name}", f"{share:.2f}", "steps of ours"


def trials() -> Iterator[Row]:
    "The race against the full table."
    client, model, config = digits_federation(5, 0).seen[-1], mix_bn(small_cnn(), verbose=False), Config(epochs=5)
    full = replace(config, halving=False)
    took = ratios(1, full=lambda: trial_losses(model, full, client.samples("train+val"), "x"), race=lambda: trial_losses(model, config, client.samples("train+val"), "x"))
    for epochs in (5, 15):
        race, table = (budget(model, Config(epochs=epochs, halving=halving)).gradients for halving in (True, False))
        yield f"race of the trials, e = {epochs}: {race:,.0f} gradients a client", f"{race / table:.2f}", "full tables"
    yield "race of the trials on digits, e = 5, time", f"{took['race']:.2f}", "full tables"


def hypergradients() -> Iterator[Row]:
    "By counted arithmetic."
    functions = meta_gradients(mix_bn(small_cnn(), verbose=False).eval(), digits_federation(5, 0).seen[0], Config.paper(epochs=1))
    one = count_flops(functions["gradient"])
    for name, function in functions.items():
        if name != "gradient":
            yield f"hypergradient, {name}", f"{count_flops(function) / one:.1f}", "gradients"


def frozen() -> Iterator[Row]:
    "A strategy that moves the head alone, with and without a pass through the body in each step."
    client, tuning = digits_federation(5, 0).seen[0], Tuning(statistics="precise")
    networks = {"digits": (small_cnn(), client.train), "CIFAR-10, small": (small_resnet("cifar", stride=2), Data(torch.rand(40, 3, 32, 32), torch.arange(40) % 10))}
    for name, (network, data) in networks.items():
        model = mix_bn(network, verbose=False)
        short = partial(finetune, model, head_only(model, 0.1), data, tuning)

        def long(short=short):
            with patch("fedl2p.finetune.without_body", lambda *_: None):
                short()

        yield f"head alone, features once, {name}, arithmetic", f"{count_flops(short) / count_flops(long):.2f}", "of features in each step"
        yield f"head alone, features once, {name}, time", f"{ratios(3, long=long, short=short)['short']:.2f}", "of features in each step"


def nothing(model, settings, state, client, number):
    "A task without any work."


def runner() -> Iterator[Row]:
    "What travels to a worker."
    client, model = digits_federation(5, 0).seen[0], mix_bn(small_cnn(), verbose=False)
    task = Task(nothing, model, Config(), untrained(model, Config()).state_dict(), client, 1)
    yield "model and settings, once a worker", f"{len(_pack(task[1:3])) / 1000:.0f}", "kB"
    yield "policy and client, with each task", f"{len(_pack((task.work, *task[3:]))) / 1000:.0f}", "kB"
    many = [task] * 200
    list(Runner(1).run_all(many[:1]))  # the process starts
    start = time.perf_counter()
    list(Runner(1).run_all(many))
    yield "an empty task in another process, by the clock", f"{1000 * (time.perf_counter() - start) / len(many):.2f}", "ms"


def workers() -> Iterator[Row]:
    "Trials of eight clients with one and with two processes, by the clock; processes have started before."
    clients, model, config = digits_federation(10, 0).seen[:8], mix_bn(small_cnn(), verbose=False), Config(epochs=5)
    taken = {}
    for n in (1, 2):
        run_trials(model, replace(config, epochs=1, splits=1), clients[:n], Runner(n))
        start = time.perf_counter()
        run_trials(model, config, clients, Runner(n))
        taken[n] = time.perf_counter() - start
    yield "trials of eight clients, two workers against one", f"{taken[1] / taken[2]:.2f}", "times as fast"


def target() -> Iterator[Row]:
    "Gradients until the paper's recipe has its lowest mean validation loss, and gradients of ours, which learns once."
    everybody = DIGITS.clients(0.5, 0)
    model = pretrain(DIGITS.model(0), everybody.pretraining, DIGITS.recipe, Runner(0))
    yield from _race_to_target("digits", DIGITS, model, everybody.seen, everybody.seen, (1, 2, 4, 8, 15, 30), (1, 5, 20))
    if not (DATA / "cifar10.npz").exists():
        yield "CIFAR-10, small: left out", "0", f"there is no {DATA / 'cifar10.npz'}"
        return
    how = setting("cifar10", "small", DATA)
    seen, file = how.clients(0.5, 0).seen, MODELS / "cifar10/small/pretrained/fedavg-alpha0.5.safetensors"
    model = pretrain(how.model(0), seen, how.recipe, Runner(0), file)  # which reads it
    yield from _race_to_target("CIFAR-10, small", how, model, seen, drawn(seen, 40, 1), (1, 2, 4, 7, 10), (1, 5))


def _race_to_target(name: str, how: Setting, pretrained: nn.Module, seen: list[Client], judges: list[Client], rounds: tuple[int, ...], tries: tuple[int, ...]) -> Iterator[Row]:
    "The mean validation loss of some clients, after more and more rounds of the paper's recipe, and after trials of more and more clients."
    model = mix_bn(pretrained, verbose=False)

    def judged(learner: FedL2P, state: State) -> float:
        return mean(score_all(score_held_back, model, learner.config, state, judges, Runner(0)))

    spent, paper, asked = dict[int, float](), dict[int, float](), how.config.rounds
    start = judged(FedL2P(model, how.config), untrained(model, how.config).state_dict())
    yield f"paper's recipe, {name}, before any round: mean validation loss {start:.3f}", "0", "gradients, all clients"
    with TemporaryDirectory() as folder:
        for n in rounds:  # each goes on where the one before stopped
            learner = FedL2P(model, replace(how.config, rounds=n, patience=rounds[-1])).fit(seen, folder, Runner(0))
            paper[n], spent[n] = judged(learner, learner.last_state), len(seen) * budget(model, learner.config).gradients
            yield f"paper's recipe, {name}, {n} rounds: mean validation loss {paper[n]:.3f}", f"{spent[n]:,.0f}", "gradients, all clients"
    best, config = min(paper, key=lambda n: paper[n]), how.config.ours()
    for n in tries:
        ours = FedL2P(model, config).fit(seen[:: len(seen) // n], runner=Runner(0))
        work, loss = n * budget(model, config).gradients, judged(ours, ours.metanets.state_dict())
        yield f"our recipe, {name}, {n} clients try: mean validation loss {loss:.3f}", f"{work:,.0f}", "gradients, all clients"
        yield f"the same, against the paper's best {paper[best]:.3f} after {best} rounds; against all its {asked} rounds", f"{work / spent[best]:.2f}; {work / spent[asked]:.2f}", "of its gradients"


def score_held_back(model: nn.Module, config: Config, state: State, client: Client, number: int = 0) -> float:
    "Validation loss of a client that fine-tunes on its training samples as a policy says."
    with torch.no_grad():
        strategy = policy(with_state(model, config, state), profile_of(model, config, client.train, ("bench", client.id)), config)
    return score_strategies(model, config, {"": strategy}, client, held_out=False)[""].score.loss


PARTS = {f.__name__: f for f in (steps, overhead, trials, hypergradients, frozen, runner, workers, target)}


if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(PARTS):
        sys.exit(f"parts must be some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    print("| what | how much | unit |\n|---|--:|---|", flush=True)
    for part in sys.argv[1:] or [part for part in PARTS if part != "workers"]:
        for row in PARTS[part]():
            print("| " + " | ".join(row) + " |", flush=True)
