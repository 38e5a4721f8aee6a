"""The losses of trials are those of plain fine-tuning, one candidate and one split after the other, whatever runs side by side."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedl2p import halving
from fedl2p.bn import mix_bn
from fedl2p.config import Config
from fedl2p.core import evaluating, generator
from fedl2p.data import Client, Data, check
from fedl2p.evaluation import evaluate
from fedl2p.finetune import finetune
from fedl2p.halving import trial_losses
from fedl2p.losses import loss_name, with_loss
from fedl2p.metanet import signature
from fedl2p.selector import candidates, strategy_of

SIZE, CLASSES = 6, 4
CONFIG = Config(epochs=2, batch_size=8, halving=False)


def samples(n, size=SIZE):
    numbers = torch.Generator().manual_seed(3)
    y = torch.randint(CLASSES, (n,), generator=numbers)
    return Data(torch.randn(n, size, generator=numbers) + y[:, None], y)


def network(*end, norms=True):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(SIZE, 10), *[nn.BatchNorm1d(10)] * norms, nn.ReLU(), nn.Linear(10, CLASSES), *end)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(x.view(len(x), -1, 2))[0][:, -1])


class Careful(nn.Module):
    """Looks at the values of its input."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        return self.layers(x / 255 if x.max() > 100 else x)


def plainly(model, config, data, worst):
    """A candidate and a split at a time."""
    names, like, losses = signature(model), next(model.parameters()), []
    n, order = max(1, round(config.held_back * len(data))), torch.randperm(len(data), generator=generator(config.seed, "trials", "x"))
    for candidate in candidates(bool(names.bn_layers)):
        strategy, own = strategy_of(candidate, names, like), []
        for k in range(config.splits):
            mine = order.roll(-n * k)
            try:
                tuned = finetune(model, strategy, data[mine[n:]], config.tuning, generator(config.seed, "trial", k, "x"))
                loss = evaluate(model, tuned, data[mine[:n]]).loss
            except FloatingPointError:
                loss = math.nan
            except ValueError:  # a batch of one sample has no statistics
                assert strategy.bn == "batch"
                loss = math.nan
            own.append(min(loss, worst) if math.isfinite(loss) else worst)
        losses.append(statistics.mean(own))
    return torch.tensor(losses)


def one_hot(out, y):
    return F.mse_loss(out, F.one_hot(y, CLASSES).to(out))


@pytest.mark.parametrize("model, n, changes", [
    (network(), 30, {}), (network(), 30, {"statistics": "pretrained"}), (network(), 30, {"statistics": "zero-one"}),
    (network(), 30, {"engine": "loop"}), (network(), 30, {"batch_size": 1}), (network(), 13, {}), (network(), 5, {}), (network(), 2, {}),
    (network(norms=False), 30, {}), (network(nn.Dropout(0.5)), 30, {}), (Careful(), 30, {}), (Recurrent(), 12, {}),
    (with_loss(network(), one_hot), 30, {}), (with_loss(network(), nn.CrossEntropyLoss(label_smoothing=0.3)), 30, {}),
    (with_loss(network(nn.LogSoftmax(1)), nn.NLLLoss()), 30, {}),
    (with_loss(network(nn.Softmax(1)), lambda out, y: F.nll_loss(out.log(), y)), 30, {}),
    (with_loss(network(nn.Softmax(1)), lambda out, y: -out.gather(1, y[:, None]).mean()), 30, {}),
], ids=str)
def test_trials_are_plain_fine_tuning(model, n, changes):
    model, data, config = mix_bn(model, verbose=False), samples(n), replace(CONFIG, **changes)
    check(Client("x", data, data, data), model)
    with torch.no_grad(), evaluating(model):
        worst = halving._worst(model, data)
    losses = trial_losses(model, config, data, "x")
    torch.testing.assert_close(losses, plainly(model, config, data, worst), atol=1e-4, rtol=1e-4)
    assert len(losses.unique()) > len(losses) / 3  # candidates differ


def test_a_negative_loss_has_a_bound_above_it():
    """Equal scores cost 0 or less under these losses: twice that would be the loss of every candidate."""
    for end, loss in ((nn.LogSoftmax(1), nn.NLLLoss()), (nn.Softmax(1), lambda out, y: -out.gather(1, y[:, None]).mean())):
        model, data = with_loss(network(end), loss).eval(), samples(30)
        with torch.no_grad():
            assert halving._worst(model, data) > loss(model(data.x), data.y) + 0.1


def calls(monkeypatch):
    """How many splits ran side by side, at each start of a heat."""
    seen, real = [], halving._heats
    monkeypatch.setattr(halving, "_heats", lambda tracks, config, alive, splits, id: seen.append(len(splits)) or real(tracks, config, alive, splits, id))
    return seen


@pytest.mark.parametrize("model, room, side_by_side", [
    (network(), None, [3]), (network(), 30 * SIZE - 1, [1, 1, 1]),  # copies of large samples cost more than they save
    (network(nn.Dropout(0.5)), None, [1, 1, 1]), (with_loss(network(), one_hot), None, [3, 1, 1, 1]), (Recurrent(), None, [3, 1, 1, 1, 1]),
], ids=["small", "large", "dropout", "one_hot", "LSTM"])
def test_splits_run_side_by_side_only_if_that_pays_and_works(model, room, side_by_side, monkeypatch):
    model, data = mix_bn(model, verbose=False), samples(30)
    config = replace(CONFIG, epochs=4, halving=True)
    whole, seen = trial_losses(model, replace(config, engine="loop"), data, "x"), calls(monkeypatch)
    if room:
        monkeypatch.setattr(halving, "SMALL_DATA", room)
    torch.testing.assert_close(trial_losses(model, config, data, "x"), whole, atol=1e-4, rtol=1e-4)
    assert seen[:len(side_by_side)] == side_by_side


def test_an_error_that_is_not_about_running_side_by_side_is_told(monkeypatch):
    def wrong(out, y):
        raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="^my own"):
        trial_losses(with_loss(mix_bn(network(), verbose=False), wrong), CONFIG, samples(30), "x")


def test_losses_with_other_settings_have_other_names():
    losses = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.4),
              nn.CrossEntropyLoss(weight=torch.arange(4.0)), nn.CrossEntropyLoss(weight=torch.ones(4)), lambda out, y: out.mean(), lambda out, y: -out.mean()]
    names = [loss_name(with_loss(network(), loss)) for loss in losses]
    assert len({*names}) == len(losses) and not any(" at 0x" in name for name in names)
    assert names[1] == loss_name(with_loss(network(), nn.CrossEntropyLoss(label_smoothing=0.1)))


@pytest.mark.parametrize("loss, words", [
    (nn.CrossEntropyLoss(ignore_index=1), "loss must be finite, got nan for 5 samples"),
    (lambda out, y: 1e-9 * F.cross_entropy(out, y, reduction="sum"), "loss must be a mean over samples"),
])
def test_losses_that_are_refused(loss, words):
    data = Data(torch.randn(5, SIZE), torch.ones(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=words):
        check(Client("x", data, data, data), with_loss(network(), loss))
    good = with_loss(network(), lambda out, y: 1e-9 * F.cross_entropy(out, y))
    check(Client("x", data, data, data), good)


@pytest.mark.parametrize("loss, words", [("ce", "loss must be a function of outputs and labels, got 'ce'"), (nn.CrossEntropyLoss, "got the class CrossEntropyLoss; call it")])
def test_what_is_no_loss(loss, words):
    with pytest.raises(ValueError, match=words):
        with_loss(network(), loss)
