"""Does the race of the trials choose what the full table would? Share of equal choices, regret and cost.

    python tests/bench/race.py FOLDER [DATASET ALPHA SEED CLIENTS] [--data DATA]     e.g. FOLDER digits 0.5 0 30, or FOLDER cifar10 0.5 0 10

Every candidate of every client is fine-tuned to the end and judged at each rung of the race, in each split: some seconds a client
on digits, half a minute on CIFAR-10. These tables are kept in FOLDER, one file a condition; without further arguments, only those that
are there are read: `python tests/bench/race.py tests/bench/race` shows ours. On each table the race is run again by its rule, and by rules
that keep more candidates: those that it would have stopped are not looked at later. How often the full table itself changes its mind if one of its splits is
left out says how much equality there is to ask for.
For the first client that is new, the race of `trial_losses` itself must agree. On digits, policies are learned from both, too: what
they recommend is what a client gets, and a policy learns from the losses of all candidates, also of those that stopped early.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from looking import learned

from fedl2p.bn import mix_bn
from fedl2p.config import Config
from fedl2p.halving import _go_on, _heats, _tracks, rungs, trial_losses
from fedl2p.policy import profile_of
from fedl2p.pretraining import pretrain
from fedl2p.runner import Runner
from fedl2p.selector import candidates, choice_of, inputs_of
from fedl2p.studies.cells import drawn
from fedl2p.studies.settings import DIGITS, setting

MODELS = Path(__file__).parents[2] / "nbs/experiments/policy"  # which come with the repository


def full_table(model, config, data, id) -> list[list[list[float]]]:
    "Losses [rung, split, candidate] of all candidates, none of which stops."
    everybody, table = range(len(candidates())), [[[0.0] * len(candidates()) for _ in range(config.splits)] for _ in rungs(config)]
    worst = 2 * math.log(10)
    heats = _heats(_tracks(model, config, data), config, everybody, range(config.splits), id)
    for r, epoch in enumerate(rungs(config)):
        heats, losses = _go_on(config, heats, epoch, everybody)
        for k in range(config.splits):
            table[r][k] = [round(min(losses[i][k], worst) if math.isfinite(losses[i][k]) else worst, 5) for i in everybody]
    return table


OURS = (18, 6)  # how many of 54 go on after the first and the second rung
MORE = ((27, 9), (36, 18), (40, 27))


def choices(table, keep: tuple[int, int] = OURS) -> tuple[int, int]:
    "What the race chooses, and what the full table says."
    means = torch.tensor(table).mean(1)
    alive = list(range(means.shape[1]))
    for rung, n in zip(means, (*keep, 1), strict=True):
        alive = sorted(alive, key=lambda i: (rung[i].item(), i))[:n]
    return alive[0], int(means[-1].argmin())


def raced_losses(table) -> torch.Tensor:
    "The losses that the race tells, as `trial_losses` does: those that stopped early improve as the others did."
    means = torch.tensor(table).mean(1)
    alive, found, worst = list(range(means.shape[1])), [], 2 * math.log(10)
    for rung in means:
        found.append({i: rung[i].item() for i in alive})
        alive = sorted(alive, key=lambda i: (rung[i].item(), i))[: math.ceil(len(alive) / 3)]
    losses, last = means[0].clone(), found[-1]
    for own in found:
        falls = sum(last.values()) / max(sum(own[i] for i in last), 1e-12)
        for i, loss in own.items():
            losses[i] = worst if loss >= worst - 1e-5 else min(falls * loss, worst)  # tables have five digits
    return losses


def full_losses(table) -> torch.Tensor:
    return torch.tensor(table)[-1].mean(0)


def recommended(alpha: float, seed: int, tables: dict) -> tuple[float, float]:
    "How often a policy that learned from the race recommends to a client of the digits what one from full tables does, and the regret."
    everybody = DIGITS.clients(alpha, seed)
    model = mix_bn(pretrain(DIGITS.model(seed), everybody.pretraining, replace(DIGITS.recipe, seed=seed), Runner(0)), verbose=False)
    config = replace(DIGITS.config.ours(), seed=seed)
    inputs = {c.id: inputs_of(profile_of(model, config, c.samples("train+val"), (seed, "learning", 1, c.id))) for c in [*everybody.seen, *everybody.unseen]}

    def answers(losses) -> dict[str, int]:
        clients = [replace(c, kept={"losses": losses(tables[c.id]), "inputs": inputs[c.id]}) for c in everybody.seen]
        state, _ = learned(clients, config.looks_at)
        return {id: choice_of(state, x) for id, x in inputs.items()}

    raced, full = answers(raced_losses), answers(full_losses)
    regret = statistics.mean((full_losses(tables[id])[raced[id]] - full_losses(tables[id])[full[id]]).item() for id in inputs)
    return statistics.mean(raced[id] == full[id] for id in inputs), regret


def without_a_split(table) -> float:
    "How often the full table chooses the same if one of its splits is left out."
    last = torch.tensor(table)[-1]
    fewer = [torch.cat([last[:k], last[k + 1:]]).mean(0).argmin() for k in range(len(last))]
    return statistics.mean(float(choice == last.mean(0).argmin()) for choice in fewer)


def cost(config, keep: tuple[int, int] = OURS) -> float:
    "Gradients of the race, as a share of the full table's."
    done, steps = 0, 0
    for epoch, n in zip(rungs(config), (len(candidates()), *keep), strict=True):
        steps, done = steps + n * (epoch - done), epoch
    return steps / (len(candidates()) * config.epochs)


def measured(folder: Path, dataset: str, alpha: float, seed: int, n: int, data: Path) -> Iterator[str]:
    "Ids of some clients, whose tables are made now if they are not there."
    how = setting(dataset, "small", data)
    own = seed if how.new_clients else 0  # as in the studies
    config, everybody = replace(how.config.ours(), seed=seed), how.clients(alpha, own)
    here = folder / f"{dataset}-alpha{alpha:g}-seed{own}.safetensors"
    known = MODELS / dataset / "small/pretrained" / f"fedavg-alpha{alpha:g}.safetensors"
    if known.exists() and not here.exists():
        here.write_bytes(known.read_bytes())
    model = mix_bn(pretrain(how.model(own), everybody.pretraining, replace(how.recipe, seed=own), Runner(0), here), verbose=False)
    path = folder / f"{dataset}-alpha{alpha:g}-e{config.epochs}-seed{seed}.json"
    kept = json.loads(path.read_text()) if path.exists() else {"ratio": cost(config), "tables": {}}
    for number, client in enumerate(drawn([*everybody.seen, *everybody.unseen], n, seed)):
        if client.id not in kept["tables"]:
            samples = client.samples("train+val")
            table = full_table(model, config, samples, client.id)
            if number == 0:
                raced = int(trial_losses(model, config, samples, client.id).argmin())
                if raced != choices(table)[0]:
                    raise AssertionError(f"{client.id}: trial_losses chooses {raced}, the table says {choices(table)[0]}")
            kept["tables"][client.id] = table
            path.write_text(json.dumps(kept))
        yield client.id


def report(folder: Path) -> None:
    "A row for each condition of which there are tables."
    print("| condition | clients | race chooses the same (within one error) | full table less a split does | regret in loss | gradients, race / full |")
    print("|---|--:|--:|--:|--:|--:|")
    missed = []
    for condition in sorted(folder.glob("*.json")):
        kept = json.loads(condition.read_text())
        equal, close, regret, again = 0, 0, [], []
        for name, table in sorted(kept["tables"].items()):
            raced, full = choices(table)
            if raced != full:
                means = torch.tensor(table).mean(1)
                ranks = ", ".join(str(int((rung < rung[full]).sum()) + 1) for rung in means)
                missed.append(f"- {condition.stem}, {name}: {candidates()[full]} (rank at each rung {ranks}), chosen {candidates()[raced]}")
            more = [split[raced] - split[full] for split in table[-1]]
            error = statistics.stdev(more) / math.sqrt(len(more))  # of the difference, from split to split
            equal, close = equal + (raced == full), close + (statistics.mean(more) <= error)
            regret.append(statistics.mean(more))
            again.append(without_a_split(table))
        n = len(kept["tables"])
        print(f"| {condition.stem} | {n} | {100 * equal / n:.0f}% ({100 * close / n:.0f}%) "
              f"| {100 * statistics.mean(again):.0f}% | {statistics.mean(regret):.4f} | {kept['ratio']:.2f} |")
    print("\n| condition | " + " | ".join(f"{a}, then {b}" for a, b in (OURS, *MORE)) + " |\n|---|" + "--:|" * (1 + len(MORE)))
    for condition in sorted(folder.glob("*.json")):
        tables, config = [*json.loads(condition.read_text())["tables"].values()], Config(epochs=int(re.search(r"-e(\d+)-", condition.stem)[1]))
        found = [(statistics.mean(raced == full for raced, full in (choices(t, keep) for t in tables)), cost(config, keep)) for keep in (OURS, *MORE)]
        print(f"| {condition.stem} | " + " | ".join(f"{100 * equal:.0f}% for {price:.2f}" for equal, price in found) + " |")
    print("\n| condition | policies recommend the same | regret in loss |\n|---|--:|--:|")
    for condition in sorted(folder.glob("digits-*.json")):
        alpha, seed = re.fullmatch(r"digits-alpha(.+)-e\d+-seed(\d+)", condition.stem).groups()
        same, regret = recommended(float(alpha), int(seed), json.loads(condition.read_text())["tables"])
        print(f"| {condition.stem} | {100 * same:.0f}% | {regret:.4f} |")
    print("\n<details><summary>What the race missed, of all candidates</summary>\n")
    print("\n".join(missed) + "\n\n</details>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("condition", nargs="*")
    parser.add_argument("--data", type=Path, default=Path("data"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.condition:
        dataset, alpha, seed, n = given.condition
        for id in measured(given.folder, dataset, float(alpha), int(seed), int(n), given.data):
            print(id, file=sys.stderr, flush=True)
    report(given.folder)


if __name__ == "__main__":
    main()
