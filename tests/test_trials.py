"""Learning from trials: where the right strategy is known by construction, what travels and what stays, and runs that break off."""

import json
import math
import statistics
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedl2p import halving, trials
from fedl2p.bn import mix_bn
from fedl2p.client import learn_client, validate_client
from fedl2p.config import Config
from fedl2p.core import generator
from fedl2p.data import Client, Data
from fedl2p.digits import fit
from fedl2p.federated import Update, average
from fedl2p.halving import rungs, trial_losses
from fedl2p.learner import FedL2P
from fedl2p.many import judge_race, run_race, start_race
from fedl2p.measure import count_flops
from fedl2p.metanet import signature
from fedl2p.policy import untrained
from fedl2p.rounds import Course, _if_it_helps
from fedl2p.runner import Failure, Outcome, Runner, attempt
from fedl2p.selector import FAR, Selector, candidates, inputs_of, scores_of, strategy_of
from fedl2p.storage import load_tensors, save_tensors
from fedl2p.trials import (
    COMMON_ROUNDS,
    KEPT,
    NETWORK,
    choose_client,
    keep,
    kept_file,
    learn_to_choose,
    read_kept,
    recall,
    run_trials,
    try_client,
)

SIZE = 24  # numbers in a sample
CENTERS = torch.randn(4, SIZE, generator=generator("centers"))
WORST = 2 * math.log(4)


def draw(n, kind, id):
    """Four clouds. Two labels of five are wrong by chance, as in pretraining, so who learns much from a few samples learns
    what is wrong. The other kind sees everything inverted, with other names for the clouds, all of them right."""
    numbers = generator("made up", kind, id)
    truth = torch.randint(4, (n,), generator=numbers)
    x = CENTERS[truth] + torch.randn(n, SIZE, generator=numbers)
    guess = torch.randint(4, (n,), generator=numbers)
    wrong = torch.rand(n, generator=numbers) < 0.4
    return Data(1 - x, (truth + 1) % 4) if kind == "other" else Data(x, torch.where(wrong, guess, truth))


def made_up(kind, i, n=40):
    data = draw(n + 100, kind, i)
    held = n // 5
    return Client(f"{kind}-{i}", data[:n - held], data[n - held:n], data[n:], kind)


def network(*more):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(SIZE, 16), nn.BatchNorm1d(16), nn.ReLU(), *more, nn.Linear(16, 4))


@pytest.fixture(scope="module")
def model():
    data = draw(1000, "as ever", "pretraining")
    return mix_bn(fit(network(), data.x, data.y, epochs=8), verbose=False)


@pytest.fixture(scope="module")
def seen():
    return [made_up(kind, i) for kind in ("as ever", "other") for i in range(6)]


@pytest.fixture(scope="module")
def unseen():
    return [made_up(kind, i) for kind in ("as ever", "other") for i in range(6, 9)]


REAL = Config(epochs=4, batch_size=16, splits=2, choosing_rounds=30)
QUICK = Config(epochs=3, batch_size=16, splits=1, choosing_rounds=10)
BRIEF = replace(QUICK, epochs=1)


@pytest.fixture(scope="module", autouse=True)
def six_are_enough():
    """So that tests of looking at clients need not wait for the trials of twelve."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "ENOUGH", 6)
        yield


@pytest.fixture(scope="module")
def few(seen):
    return [*seen[:3], *seen[6:9]]


@pytest.fixture(scope="module")
def learner(model, seen):
    return FedL2P(model, REAL).fit(seen, runner=Runner(0))


@pytest.fixture(scope="module")
def tried(model, few):
    return run_trials(model, QUICK, few, Runner(0))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


def lam(learner):
    return dict(learner.metanets.state_dict())


def start(model, clients, config=QUICK):
    "A selector that knows mean and deviation of what it looks at."
    selector = untrained(model, config)
    inputs = torch.stack([c.kept["inputs"] for c in clients])
    selector.center.copy_(inputs.mean(0))
    selector.deviation.copy_(inputs.std(0).clamp(min=1e-6))
    return dict(selector.state_dict())


# --- a federation where the right strategy is known -----------------------------------------------------------


def test_who_must_not_move_does_not_and_who_must_does(learner, unseen):
    """By clients that nobody has seen, whose kind is written nowhere in what the policy gets to know."""
    rates = {c.id: learner.strategy(c).eta.max().item() for c in unseen}
    assert learner.trials["looks"] and learner.trials["gain"] > learner.trials["error"] > 0
    assert all(rate <= 0.03 if id.startswith("as ever") else rate >= 0.3 for id, rate in rates.items()), rates
    assert all(learner.strategy(c).distance < FAR for c in unseen)


def test_it_beats_the_best_strategy_for_all(model, learner, unseen):
    """Even the one that is best for exactly these clients by their test samples, which nobody can know."""
    names, like = signature(model), next(model.parameters())
    losses, right = torch.zeros(len(candidates())), torch.zeros(len(candidates()))
    for client in unseen:
        data = client.samples("train+val")
        for bn in ("mix", "batch"):
            some = [i for i, c in enumerate(candidates()) if (c.who == "batch") == (bn == "batch")]
            strategies = [strategy_of(candidates()[i], names, like) for i in some]
            race = start_race(model, strategies, data, REAL.tuning, generator(REAL.seed, "personalize", client.id))
            loss, good = judge_race(model, run_race(model, race, bn), bn, data, client.test)
            losses[some] += loss.nan_to_num(WORST) / len(unseen)
            right[some] += good / len(client.test) / len(unseen)
    own = learner.score(unseen, Runner(0))
    assert sum(r.score.loss for r in own) / len(own) < losses.min() - 0.05
    assert sum(r.score.accuracy for r in own) / len(own) > right.max()


def test_without_looking_all_get_the_best_on_average(model, tried, few):
    learner = FedL2P(model, replace(QUICK, looks_at=())).fit(tried, runner=Runner(0))
    best = torch.stack([c.kept["losses"] for c in tried]).mean(0).argmin()  # all have as many samples
    expected = strategy_of(candidates()[best], signature(model), next(model.parameters()))
    for client in few:
        strategy = learner.strategy(client)
        assert torch.equal(strategy.eta, expected.eta) and torch.equal(strategy.beta, expected.beta) and strategy.bn == expected.bn
    assert {k: learner.trials[k] for k in ("looks", "gain", "error")} == {"looks": False, "gain": 0.0, "error": 0.0}
    assert not lam(learner)["last"].any() and lam(learner)["common"].argsort(descending=True)[0] == best


def test_looking_is_dropped_if_it_does_not_help_others(model, tried):
    """Clients whose losses have nothing to do with their looks: by heart it could be learned, for others it is worth nothing."""
    n = len(candidates())
    blind = [replace(c, kept={**c.kept, "losses": torch.rand(n, generator=generator("blind", c.id))}) for c in tried]
    state, found = learn_to_choose(model, replace(QUICK, choosing_rounds=30), start(model, blind), blind)
    assert not found["looks"] and found["gain"] <= found["error"] and not state["last"].any()


def test_who_is_like_nobody_gets_the_common_strategy(learner, unseen):
    far = Data(unseen[-1].train.x * 50, unseen[-1].train.y)
    strategy, common = learner.strategy(far), learner.metanets.candidates[int(learner.metanets.common.argmax())]
    assert strategy.distance > FAR and torch.equal(strategy.eta, learner.metanets.refined(common).eta)


def test_a_policy_comes_back_from_its_file(model, learner, unseen, tmp_path):
    learner.save(tmp_path / "policy.safetensors")
    again = FedL2P.load(model, tmp_path / "policy.safetensors")
    assert same(lam(learner), lam(again)) and again.config == REAL
    for client in unseen:
        a, b = learner.strategy(client), again.strategy(client)
        assert torch.equal(a.eta, b.eta) and torch.equal(a.beta, b.beta) and (a.bn, a.distance) == (b.bn, b.distance)
    assert [r.score for r in again.score(unseen[:2], Runner(0))] == [r.score for r in learner.score(unseen[:2], Runner(0))]


# --- trials ---------------------------------------------------------------------------------------------------


def test_a_trial_is_fine_tuning_on_what_is_not_held_back(model, seen):
    """The mean over splits, each with other samples held back."""
    data, config = seen[0].samples("train+val"), replace(BRIEF, splits=3, halving=False)
    parts = [halving._split(data, config, k, "x") for k in range(3)]
    held = torch.cat([h.x[:, 0] for _, h in parts])
    assert all(len(t) == 28 and len(h) == 12 for t, h in parts) and len(held.unique()) == 36
    names, like, expected = signature(model), next(model.parameters()), []
    for i in (0, 30, 42, 52):
        s, losses = strategy_of(candidates()[i], names, like), []
        for k, (train, hold) in enumerate(parts):
            race = run_race(model, start_race(model, [s], train, config.tuning, generator(config.seed, "trial", k, "x")), s.bn)
            losses.append(judge_race(model, race, s.bn, train, hold)[0].clamp(max=WORST))
        expected.append(torch.cat(losses).mean())
    torch.testing.assert_close(trial_losses(model, config, data, "x")[[0, 30, 42, 52]], torch.stack(expected), rtol=0, atol=1e-4)


def counted(monkeypatch):
    "A list that gets the number of steps of each part of a race, of all candidates, also of those that share theirs."
    steps, go = [], halving._continued

    def run(heat, rows, n):
        steps.append(sum(map(len, rows)) * len(heat.held) * len(heat.race.steps[:n]))
        return go(heat, rows, n)

    monkeypatch.setattr(halving, "_continued", run)
    return steps


def test_who_takes_the_same_steps_takes_them_once(model, seen, monkeypatch):
    """With precise statistics, BN C and BN I differ in how they are judged. With running ones they are two candidates."""
    rows = []
    monkeypatch.setattr(halving, "run_race", lambda model, race, bn, n: rows.append(len(race.eta)) or run_race(model, race, bn, n))
    data = seen[0].samples("train+val")
    for kind, n in (("precise", 46), ("pretrained", 54)):
        trial_losses(model, replace(BRIEF, splits=2, statistics=kind), data, "x")
        assert sum(rows) == 2 * n
        rows.clear()
    losses = trial_losses(model, BRIEF, data, "x")
    tried = {str(c): losses[i] for i, c in enumerate(candidates())}
    assert (tried["all at rate 0.3, beta 1"] - tried["batch at rate 0.3, batch's statistics"]).abs() > 1e-3


def test_halving_finds_the_same_with_less_work(model, seen, monkeypatch):
    config, steps, hits = replace(REAL, splits=3), counted(monkeypatch), 0
    for client in seen[::4]:
        data = client.samples("train+val")
        quick = trial_losses(model, config, data, client.id)
        less = sum(steps)
        full = trial_losses(model, replace(config, halving=False), data, client.id)
        more = sum(steps) - less
        steps.clear()
        assert more == len(candidates()) * 3 * 4 * 2 > 2 * less  # three splits, four epochs of two batches
        assert full[quick.argmin()] < full.min() + 0.1
        hits += int(full[quick.argmin()] < full.min() + 0.01)  # the same, or one that is as good
    assert hits >= 2  # of three


def test_what_stopped_early_improves_as_those_that_went_on(model, seen, monkeypatch):
    """Its loss after one epoch is scaled by what the finalists gained since; a diverged one keeps its bound."""
    config, steps = replace(REAL, splits=2), counted(monkeypatch)
    data = seen[8].samples("train+val")
    losses = trial_losses(model, config, data, "x")
    assert rungs(config) == [1, 2, 4] and sum(steps) == 2 * 2 * (54 * 1 + 18 * 1 + 6 * 2)  # splits, batches an epoch
    full = trial_losses(model, replace(config, halving=False), data, "x")
    assert ((losses - full).abs() < 1e-4)[losses.argsort()[:3]].all()  # those that went on to the end
    one = trial_losses(model, replace(config, epochs=1), data, "x")  # what all had after the first rung
    diverged = torch.tensor(WORST)
    assert (one == diverged).any() and (losses[one == diverged] == diverged).all()
    falls = (losses / one)[one.argsort()[18:]]  # of those that stopped there
    falls = falls[falls < 0.999]  # the bound does not fall
    assert len(falls) > 20 and falls.max() - falls.min() < 1e-4


def test_large_networks_begin_each_rung_anew_with_the_same_result(model, seen, monkeypatch):
    data, config = seen[4].samples("train+val"), replace(REAL, splits=2)
    kept = trial_losses(model, config, data, "x")
    steps = counted(monkeypatch)
    monkeypatch.setattr(halving, "ROOM", 0)
    torch.testing.assert_close(trial_losses(model, config, data, "x"), kept, rtol=0, atol=1e-4)
    assert sum(steps) == 2 * 2 * (54 * 1 + 18 * 2 + 6 * 4)


def test_losses_are_bounded_whatever_comes(model, seen):
    """Pixels a trillion times too large: without the client's statistics all is lost, which is a loss like others, and no NaN."""
    data = seen[0].samples("train+val")
    pretrained = torch.tensor([c.beta == 0 for c in candidates()])
    for factor in (1e12, 1e30):
        losses = trial_losses(model, QUICK, Data(data.x * factor, data.y), "x")
        assert losses.isfinite().all() and losses.min() > 0 and losses.max() <= WORST + 1e-6
        assert torch.equal(losses[pretrained], torch.full((17,), WORST)) and losses.min() < WORST / 2
    plain = nn.Sequential(nn.Linear(SIZE, 8), nn.ReLU(), nn.Linear(8, 4))
    losses = trial_losses(plain, QUICK, Data(data.x * 1e30, data.y), "x")  # nothing normalises them here
    assert torch.equal(losses, torch.full((17,), WORST))


def test_a_wild_client_does_not_keep_others_from_learning(model, tried, few):
    wild = replace(few[0], id="wild", train=Data(few[0].train.x * 1e12, few[0].train.y), val=Data(few[0].val.x * 1e12, few[0].val.y))
    learner = FedL2P(model, QUICK).fit([*tried, wild], runner=Runner(0))
    assert all(t.isfinite().all() for t in lam(learner).values())
    assert sum(r.score.loss for r in learner.score(few, Runner(0))) / len(few) < math.log(4)


def test_what_a_client_keeps_does_not_travel(model, few):
    """Neither its losses nor what it looks like: the server gets a number of samples."""
    update = try_client(model, QUICK, {}, few[0], 0)
    assert update.state == {} and update.report == {} and update.weight == 40.0
    assert update.kept.keys() == {"losses", "inputs"} and update.kept["losses"].shape == (len(candidates()),)
    assert few[0].kept == {}


def test_only_lambda_travels_when_they_choose(model, tried):
    state = start(model, tried)
    for number in (1, COMMON_ROUNDS + 1):
        update = choose_client(model, QUICK, state, tried[0], number)
        assert {k: (t.shape, t.dtype) for k, t in update.state.items()} == {k: (t.shape, t.dtype) for k, t in state.items()}
        assert update.report.keys() == {"size", "gain"} and update.kept == {}
        moved = {k for k, t in update.state.items() if not torch.equal(t, state[k])}
        assert moved == ({"common"} if number == 1 else {"last"})  # which starts at 0, so `first` has no slope yet


def test_the_mean_of_the_clients_gradients_is_the_gradient_of_the_mean(model, tried):
    """So nobody has to show its losses. Clients count by their samples."""
    clients = [replace(c, train=c.train[:4 + 2 * i]) for i, c in enumerate(tried)]
    state = start(model, tried)
    numbers = torch.Generator().manual_seed(0)
    state |= {k: torch.randn(state[k].shape, generator=numbers) for k in ("common", *NETWORK)}
    weights = torch.tensor([float(len(c.train) + len(c.val)) for c in clients])
    for number, learned, rate in ((1, ("common",), len(candidates())), (COMMON_ROUNDS + 1, NETWORK, 1.0)):
        mean = average([choose_client(model, QUICK, state, c, number)[:2] for c in clients])
        own = {k: t.clone().requires_grad_(k in learned) for k, t in state.items()}
        scores = [own["common"] if number == 1 else scores_of(own, c.kept["inputs"]) for c in clients]
        losses = torch.stack([s.softmax(0) @ c.kept["losses"] for s, c in zip(scores, clients, strict=True)])
        ((weights * losses).sum() / weights.sum()).backward()
        for name, t in state.items():
            expected = t - rate * own[name].grad if name in learned else t
            torch.testing.assert_close(mean[name], expected.detach(), rtol=0, atol=1e-6)
            assert name not in learned or not torch.equal(mean[name], t)


def test_what_is_reported_is_size_and_gain(model, tried):
    state = start(model, tried)
    numbers = torch.Generator().manual_seed(0)
    state |= {k: torch.randn(state[k].shape, generator=numbers) for k in ("common", *NETWORK)}
    report, kept = choose_client(model, QUICK, state, tried[0], COMMON_ROUNDS + 1).report, tried[0].kept
    own = scores_of(state, kept["inputs"]).argmax()
    assert report["gain"] == pytest.approx((kept["losses"][state["common"].argmax()] - kept["losses"][own]).item())
    assert report["size"] == pytest.approx(trials.size_of(state, kept["inputs"]).item())


def test_the_reach_is_that_of_the_most_distant_client(model, tried):
    state, _ = learn_to_choose(model, QUICK, start(model, tried), tried)
    selector = Selector.for_model(model)
    selector.load_state_dict(state)
    distances = [selector.distance(c.kept["inputs"]) for c in tried]
    assert max(distances) == pytest.approx(1.0) and min(distances) < 1


def test_inputs_of_trials_are_those_of_the_profile(model, few):
    kept = try_client(model, QUICK, {}, few[1], 0).kept
    known = trials.profile_of(model, QUICK, few[1].samples("train+val"), ("any",))
    assert torch.equal(kept["inputs"], inputs_of(known))


@pytest.mark.parametrize("n", [1, 5])
def test_with_few_clients_there_is_one_strategy_for_all(model, tried, few, n):
    """Too few to find out whether looking helps those that it did not learn from."""
    learner = FedL2P(model, QUICK).fit(tried[:n], runner=Runner(0))
    assert learner.trials["looks"] is False and not lam(learner)["last"].any()
    assert len({tuple(learner.strategy(c).eta.tolist()) for c in few}) == 1


def test_twelve_clients_are_enough(model, tried, monkeypatch):
    """On Office-Caltech-10 eight clients let noise pass the check (tests/bench/office.py)."""
    monkeypatch.setattr(trials, "ENOUGH", 12)
    twelve = [replace(c, id=f"{c.id} {k}") for c in tried for k in range(2)]
    _, found = learn_to_choose(model, QUICK, start(model, tried), twelve)
    assert found["error"] > 0
    _, found = learn_to_choose(model, QUICK, start(model, tried), twelve[:11])
    assert found == {"looks": False, "gain": 0.0, "error": 0.0}


def test_tiny_clients_take_part(model, tried, few):
    """Of two samples, one is held back; candidates that need the statistics of that one lose, and not the client."""
    tiny = [replace(c, id=f"tiny-{i}", train=c.train[:1], val=c.val[:1]) for i, c in enumerate(few[:2])]
    learner = FedL2P(model, QUICK).fit([*tried, *tiny], runner=Runner(0))
    assert learner.trials["clients"] == len(tried) + len(tiny)
    assert all(t.isfinite().all() for t in lam(learner).values()) and len(learner.score(tiny, Runner(0))) == 2
    needy = [i for i, c in enumerate(candidates()) if c.who == "batch"]
    for client in run_trials(model, BRIEF, tiny, Runner(0)):
        losses = client.kept["losses"]
        assert (losses[needy] == WORST).all() and losses.min() < WORST
    five = [replace(few[0], train=few[0].train[:4], val=few[0].val[:1])]
    assert run_trials(model, replace(BRIEF, splits=3), five, Runner(0))[0].kept["losses"].isfinite().all()
    image = mix_bn(nn.Sequential(nn.Unflatten(1, (1, 4, 6)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)), verbose=False)
    assert run_trials(image, BRIEF, tiny, Runner(0))[1].kept["losses"].isfinite().all()


# --- other models ---------------------------------------------------------------------------------------------


def test_a_model_without_batch_norms(few):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(SIZE, 8), nn.ReLU(), nn.Linear(8, 4))
    learner = FedL2P(net, BRIEF).fit(few, runner=Runner(0))
    assert learner.strategy(few[0]).beta.shape == (0,) and len(learner.metanets.candidates) == len(candidates(norms=False))
    assert len(learner.score(few, Runner(0))) == len(few)


def test_a_model_that_is_frozen_by_hand(model, few):
    """In part, and as a whole: then statistics are all that there is to choose."""
    part, whole = deepcopy(model), deepcopy(model)
    part[0].weight.requires_grad_(False)
    whole.requires_grad_(False)
    for frozen in (part, whole):
        learner = FedL2P(frozen, BRIEF).fit(few[2:4], runner=Runner(0))
        tuned = learner.personalize(few[0])
        assert torch.equal(tuned[0].weight, model[0].weight)


def test_a_frozen_backbone_costs_what_its_head_costs(few, monkeypatch):
    """Without batch norms, whose statistics would be the client's: its features are computed once, and losses are the same."""
    net = nn.Sequential(nn.Linear(SIZE, 256), nn.ReLU(), nn.Linear(256, 4))
    net[0].requires_grad_(False)
    data, found, work = few[0].samples("train+val"), [], []
    for short in (True, False):
        if not short:
            monkeypatch.setattr(halving, "without_body", lambda *_: None)
        work.append(count_flops(lambda: found.append(trial_losses(net, QUICK, data, "x"))))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)
    assert work[0] < 0.5 * work[1]


def test_double_precision(model, few):
    def double(data):
        return Data(data.x.double(), data.y)

    clients = [replace(c, train=double(c.train), val=double(c.val), test=double(c.test)) for c in few]
    learner = FedL2P(deepcopy(model).double(), BRIEF).fit(clients, runner=Runner(0))
    assert all(t.isfinite().all() for t in lam(learner).values())
    assert learner.personalize(clients[0])(clients[0].test.x).dtype == torch.float64


def test_the_model_is_not_changed(few):
    """Neither its numbers, which a forward pass in training mode would move, nor its mode, nor the global random state."""
    net = mix_bn(network(nn.Dropout(0.5)), verbose=False).train()
    before, numbers = deepcopy(net.state_dict()), torch.get_rng_state()
    learner = FedL2P(net, BRIEF).fit(few[2:4], runner=Runner(0))
    learner.personalize(few[0])
    assert same(dict(net.state_dict()), before) and all(m.training for m in net.modules())
    assert torch.equal(torch.get_rng_state(), numbers)


# --- workers, order, files ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(model, few):
    learner = FedL2P(model, QUICK).fit(few, runner=Runner(0))
    assert learner.trials["looks"] and lam(learner)["last"].any()  # so that there is something to compare
    return learner


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_whatever_the_workers(model, few, whole, workers):
    there = FedL2P(model, QUICK).fit(few, runner=Runner(workers))
    assert same(lam(whole), lam(there)) and there.trials == whole.trials


def test_the_same_whatever_the_order(model, tried, whole):
    """Clients of a federation have no order: over Flower they come by their names."""
    for order in (tried[::-1], [tried[i] for i in (3, 0, 5, 1, 4, 2)]):
        there = FedL2P(model, QUICK).fit(order, runner=Runner(0))
        assert same(lam(whole), lam(there)) and there.trials == whole.trials


def test_other_seeds_and_names_are_other_trials(model, few):
    data = few[0].samples("train+val")
    first, *others = (trial_losses(model, replace(BRIEF, seed=seed), data, id) for seed, id in ((0, "a"), (1, "a"), (0, "b")))
    assert all((first - losses).abs().max() > 0.01 for losses in others)


class Watch:
    "Progress that notes how many clients had tried before."

    def __init__(self):
        self.shown = []

    def __call__(self, rounds, title, total, done):
        self.shown.append((title, total, done))
        return rounds


def test_trials_that_were_stopped_go_on(model, few, whole, tmp_path):
    """With only some clients' files left, the others try again, and the policy is the same to the bit."""
    def stop(outcomes, title, total, done):
        for i, outcome in enumerate(outcomes):
            if i == 2:
                raise KeyboardInterrupt
            yield outcome

    with pytest.raises(KeyboardInterrupt):
        FedL2P(model, QUICK).fit(few, tmp_path, Runner(0, progress=stop))
    assert len(list((tmp_path / "trials").iterdir())) == 2 and not (tmp_path / "checkpoint.safetensors").exists()
    watch = Watch()
    again = FedL2P(model, QUICK).fit(few, tmp_path, Runner(0, progress=watch))
    assert watch.shown == [("trials", 6, 2)] and same(lam(whole), lam(again)) and again.trials == whole.trials

    (tmp_path / "checkpoint.safetensors").unlink()
    for path in sorted((tmp_path / "trials").iterdir())[::2]:
        path.unlink()
    watch = Watch()
    again = FedL2P(model, QUICK).fit(few[::-1], tmp_path, Runner(0, progress=watch))
    assert watch.shown == [("trials", 6, 3)] and same(lam(whole), lam(again))


def refuse(tasks):
    raise AssertionError("nothing is left to do")


def test_a_finished_run_is_not_run_again(model, tried, few, whole, tmp_path):
    """What clients keep is no part of their fingerprint."""
    FedL2P(model, QUICK).fit(tried, tmp_path, Runner(0))
    again = FedL2P(model, QUICK).fit(few, tmp_path, Runner(transport=refuse))
    assert same(lam(whole), lam(again)) and (again.trials, again.history) == (whole.trials, [])


def test_a_second_fit_starts_anew(model, tried, whole):
    learner = FedL2P(model, QUICK).fit(tried[:3], runner=Runner(0))
    assert not same(lam(learner), lam(whole)) and same(lam(learner.fit(tried, runner=Runner(0))), lam(whole))


def test_other_settings_do_not_reuse_old_trials(model, few, tmp_path):
    """Those that trials depend on; a larger selector can learn from the same losses."""
    def done(**changes):
        watch, clients = Watch(), changes.pop("clients", few[:2])
        run_trials(changes.pop("model", model), replace(BRIEF, **changes), clients, Runner(0, progress=watch), tmp_path)
        return watch.shown[0][2] if watch.shown else len(clients)

    assert done() == 0 and done() == 2 and done(hidden=9, choosing_rounds=7, looks_at=(), rounds=3) == 2
    for change in ({"epochs": 2}, {"batch_size": 8}, {"statistics": "pretrained"}, {"splits": 2}, {"held_back": 0.2}, {"halving": False}, {"seed": 3}):
        assert done(**change) == 0, change
    other = deepcopy(model)
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    assert done(model=other) == 0
    assert done(clients=[few[0], replace(few[1], train=few[1].train[1:])]) == 1
    FedL2P(model, BRIEF).fit(few[:1], tmp_path / "run", Runner(0))
    with pytest.raises(ValueError, match="epochs was 1 and is 2"):
        FedL2P(model, replace(BRIEF, epochs=2)).fit(few[:1], tmp_path / "run", Runner(0))


def test_what_is_kept_comes_back_to_its_client(model, few, tmp_path):
    path = kept_file(tmp_path, model, QUICK, few[0])
    assert recall(path, few[0]) is few[0]
    keep(path, few[0], {})
    assert not path.exists()
    kept = {"losses": torch.rand(3), "inputs": torch.rand(2, dtype=torch.float64)}
    keep(path, few[0], kept)
    assert same(recall(path, few[0]).kept, kept) and load_tensors(path, KEPT)[1]["client"] == few[0].id
    assert kept_file(tmp_path, model, QUICK, few[1]) != path == kept_file(tmp_path, model, QUICK, replace(few[0], kept=kept))


def test_who_tried_before_does_not_try_again(model, tried, whole):
    """Also without a folder: `kept` is part of the client."""
    watch = Watch()
    again = FedL2P(model, QUICK).fit(tried, runner=Runner(0, progress=watch))
    assert not watch.shown and same(lam(again), lam(whole))


@pytest.mark.filterwarnings("ignore:round 1")
def test_a_client_that_fails_is_left_out(model, tried, few, whole, tmp_path):
    nan = few[0].train.x.clone()
    nan[0] = math.nan
    bad = replace(few[0], id="bad", train=Data(nan, few[0].train.y))
    with pytest.warns(RuntimeWarning, match="client 'bad' is left out: ValueError: client 'bad': train.x has 24 values"):
        learner = FedL2P(model, QUICK).fit([*tried, bad], tmp_path, Runner(0))
    assert same(lam(learner), lam(whole)) and learner.trials == whole.trials  # as if it had not been there
    assert not (tmp_path / "trials").exists()  # the others had tried before


def test_a_client_that_fails_in_its_trials_only(model, tried, few):
    """Without validation samples it has a profile, but nothing to try on; or its process dies."""
    def transport(tasks):
        died = Outcome(None, Failure("died", "its process died"))
        return iter([died if task.work is try_client and task.client.id == few[2].id else attempt(task.run) for task in tasks])

    with pytest.warns(RuntimeWarning, match=f"client '{few[2].id}' is left out: its process died"):
        learner = FedL2P(model, QUICK).fit([*tried[:2], few[2], *tried[3:], replace(tried[0], id="more")], runner=Runner(transport=transport))
    assert all(t.isfinite().all() for t in lam(learner).values()) and learner.trials
    empty = [replace(c, val=c.val[:0]) for c in few[:2]]
    with pytest.warns(RuntimeWarning, match="val is empty"), pytest.raises(RuntimeError, match="^all 2 clients failed; the last, .*val is empty"):
        run_trials(model, QUICK, empty, Runner(0))


# --- refinement by hypergradients -----------------------------------------------------------------------------


REFINED = replace(BRIEF, rounds=2, fraction=0.5)


@pytest.fixture(scope="module")
def refined(model, tried):
    return FedL2P(model, REFINED).fit(tried, runner=Runner(0))


def test_rounds_of_hypergradients_move_the_offsets_only(model, refined, whole):
    assert [r.get("final", False) for r in refined.history] == [False, False, True] and len(refined.history[0]["clients"]) == 3
    moved = {k for k, t in refined.last_state.items() if not torch.equal(t, lam(whole)[k])}
    assert moved and moved <= {"beta_offset", "eta_offset"} and refined.trials == whole.trials
    last = refined.history[-1]
    assert isinstance(last["refined"], bool) and last["refined"] == (last["gain"] > last["error"])
    assert last["refined"] or same(lam(refined), lam(whole))
    assert json.loads(json.dumps(refined.history)) == refined.history


def test_refinement_that_was_stopped_goes_on(model, tried, refined, tmp_path):
    """With the server's moments: a step of Adam depends on all that came before."""
    def stop(rounds, title, total, done):
        assert title == "learning to personalize (unrolled)"
        yield next(rounds)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FedL2P(model, REFINED).fit(tried, tmp_path, Runner(0, progress=stop))
    tensors, header = load_tensors(tmp_path / "checkpoint.safetensors", "fedl2p checkpoint 1")
    assert len(json.loads(header["info"])["rounds"]) == 1 and tensors["moments.count"] == 1
    again = FedL2P(model, REFINED).fit(tried[::-1], tmp_path, Runner(0))
    assert same(lam(again), lam(refined)) and same(again.last_state, refined.last_state) and again.history == refined.history
    finished = FedL2P(model, REFINED).fit(tried, tmp_path, Runner(transport=refuse))
    assert same(lam(finished), lam(refined)) and finished.history == refined.history and finished.trials == refined.trials


@pytest.mark.parametrize(("gains", "helps"), [
    ([1.0] * 6, True),
    ([3.0, -1.0, 3.0, -1.0, 3.0, 3.0], True),
    ([5.0, -0.1, -0.1, -0.1, -0.1, -0.1], False),  # on average, but by no more than a standard error
    ([-1.0] * 6, False),
    ([0.0] * 6, False),
])
def test_offsets_are_kept_if_they_help(model, tried, whole, gains, helps):
    by_id = dict(zip([c.id for c in tried], gains, strict=True))

    def transport(tasks):
        assert {task.work for task in tasks} == {validate_client} and {task.number for task in tasks} == {2}
        report = {"start_loss": 1.0, "diverging": 0}
        return iter([Outcome(Update(task.state, 8.0, report | {"val_loss": 1.0 - by_id[task.client.id]})) for task in tasks])

    start, moved = lam(whole), {k: t + 0.1 if "offset" in k else t for k, t in lam(whole).items()}
    course = Course(moved, moved, [{"round": 1, "val_loss": 0.5, "final": True}], trials=whole.trials)
    after = _if_it_helps(model, REFINED, course, tried, Runner(transport=transport))
    assert same(after.answer, moved if helps else start) and same(after.now, moved) and after.trials == whole.trials
    assert after.history == [course.history[0] | {"refined": helps, "gain": pytest.approx(sum(gains) / 6), "error": after.history[0]["error"]}]
    assert after.history[0]["error"] == pytest.approx(statistics.stdev(gains) / 6**0.5)


def test_all_are_asked_in_the_end(model, tried, whole):
    """The last lambda has the lowest loss on the clients of a round, by far; all others say that it does not help."""
    asked = []

    def say(task):
        return Outcome(Update(task.state, 8.0, {"val_loss": 2.0 if len(asked) == 2 else -10.0, "start_loss": 1.0, "diverging": 0}))

    def transport(tasks):
        if tasks[0].work is validate_client:
            asked.append(len(tasks))
            return iter([say(task) for task in tasks])
        return iter([attempt(task.run) for task in tasks])

    learner = FedL2P(model, REFINED).fit(tried, runner=Runner(transport=transport))
    assert asked == [3, 6] and learner.history[-1]["refined"] is False and learner.history[-1]["gain"] == -1.0
    assert same(lam(learner), lam(whole)) and not same(learner.last_state, lam(whole))


@pytest.mark.parametrize("keep", ["lowest", "after"])
def test_other_rules_do_not_know_what_helps(model, tried, keep):
    """Whether offsets help is a difference to the losses without them, which only the paired rule asks for."""
    with pytest.raises(ValueError, match=f"^keep must be 'paired' if trials are refined, got '{keep}'"):
        replace(REFINED, keep=keep)
    assert replace(QUICK, keep=keep).rounds == 0


def test_a_step_of_refinement_is_that_of_the_hypergradient(model, tried, whole):
    """A client sends its offsets a whole gradient further, clipped; the server's Adam makes a step of it."""
    state, config = lam(whole), replace(REFINED, clip=1e-3)
    moves = learn_client(model, config, state, tried[-1], 1)
    far = {k: (t - state[k]).abs().max().item() for k, t in moves.state.items()}
    assert {k for k, d in far.items() if d} <= {"beta_offset", "eta_offset"} and 0 < max(far.values()) <= 1.001e-3
    assert moves.report["start_loss"] == moves.report["val_loss"]  # all offsets are 0 until now


def test_a_folder_holds_trials_checkpoint_and_rounds(model, few, tmp_path):
    FedL2P(model, replace(REFINED, fraction=1.0)).fit(few[:2], tmp_path, Runner(0))
    names = {p.relative_to(tmp_path).parts[0] for p in tmp_path.rglob("*") if p.is_file()}
    assert names == {"trials", "checkpoint.safetensors", "rounds.jsonl"}
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 3
    kept = recall(kept_file(tmp_path / "trials", model, REFINED, few[0]), few[0]).kept
    assert same(kept, try_client(model, REFINED, {}, few[0], 0).kept)


@pytest.mark.parametrize("kept", [{}, {"losses": torch.ones(3)}, {"losses": torch.tensor([1.0, float("nan")]), "inputs": torch.ones(2)}, {"losses": torch.ones(2, 2), "inputs": torch.ones(2)}, {"losses": torch.ones(2, dtype=torch.int64), "inputs": torch.ones(2)}])
def test_trials_of_a_stranger_are_looked_at(kept, tmp_path):
    """Whoever writes a file with a fitting hash could have NaN enter lambda, or end learning in a KeyError."""
    path = tmp_path / "a.safetensors"
    save_tensors(path, {**kept, "more": torch.ones(1)}, {"format": KEPT, "client": "a"})
    with pytest.raises(ValueError, match="a.safetensors does not hold the trials of a client; delete it to make them again"):
        read_kept(path)


def test_heads_train_on_features_with_the_same_losses_and_less_work(model, seen, monkeypatch):
    """Candidates that move the head alone, at beta 0, have a race of their own; other candidates lose nothing by it."""
    data, config = seen[0].samples("train+val"), replace(BRIEF, epochs=4, splits=2, halving=False, statistics="precise", engine="loop")
    tracks = halving._tracks(model, config, data)
    assert {(candidates()[i].who, candidates()[i].beta) for i in tracks[0].tried} == {("head", 0.0)}
    assert sorted(i for track in tracks for i in track.tried) == [*range(len(candidates()))]
    assert len(halving._tracks(model, replace(config, augment="crop-flip"), data)) == 1  # images that change have no features to keep
    heads = [*tracks[0].tried]

    def work(tracks):
        heats = halving._heats(tracks, config, heads, range(config.splits), "x")
        return count_flops(lambda: halving._go_on(config, heats, config.epochs, heads))

    short, less = trial_losses(model, config, data, "x"), work(tracks)
    monkeypatch.setattr(halving, "without_body", lambda *_: None)
    [whole] = halving._tracks(model, config, data)
    torch.testing.assert_close(short, trial_losses(model, config, data, "x"), rtol=0, atol=1e-4)
    assert less < 0.3 * work([whole])
