"""One loop for every strategy: against PyTorch's optimizer, frozen tensors, statistics, odd clients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedl2p.bn import mix_bn, set_beta
from fedl2p.core import generator
from fedl2p.data import Data
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.finetune import (
    Score,
    Tuning,
    as_module,
    baselines,
    batches,
    client_buffers,
    crop_flip,
    evaluate,
    finetune,
    score_client,
)
from fedl2p.strategy import Strategy, bn_c, bn_g, bn_i, head_only


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(width=4), verbose=False)


@pytest.fixture(scope="module")
def client():
    return digits_federation(5, 0, size=62).seen[1]


def test_batches_cover_each_epoch():
    parts = batches(10, 3, 4, torch.Generator().manual_seed(0))
    assert [len(p) for p in parts] == [4, 4, 2] * 3
    for epoch in range(3):
        assert torch.cat(parts[3 * epoch:3 * epoch + 3]).sort().values.tolist() == list(range(10))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_equals_torch_with_a_rate_for_each_tensor(model, client, beta):
    rates = [0.01 * (k + 1) for k in range(len(list(model.parameters())))]
    strategy = Strategy(torch.full((3,), beta), torch.tensor(rates))
    tuned = finetune(model, strategy, client.train, Tuning(epochs=2, batch_size=16), generator("x"))
    copy = set_beta(mix_bn(model, verbose=False), beta).train()
    optimizer = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(copy.parameters(), rates, strict=True)])
    for part in batches(len(client.train), 2, 16, generator("x")):
        optimizer.zero_grad()
        F.cross_entropy(copy(client.train.x[part]), client.train.y[part]).backward()
        optimizer.step()
    expected = copy.state_dict()
    for name, value in tuned.state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    score = evaluate(model, tuned, client.test)
    torch.testing.assert_close(score.loss, F.cross_entropy(copy.eval()(client.test.x), client.test.y).item(), rtol=1e-4, atol=1e-5)


def test_the_model_is_left_alone(model, client):
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for strategy in baselines(model, 0.1).values():
        score_client(model, strategy, client, Tuning(epochs=1))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(m.training for m in model.modules())
    model.eval()


def test_frozen_tensors_stay_and_get_no_gradient(model, client):
    tuned = finetune(model, head_only(model, 0.1), client.train, Tuning(epochs=1))
    assert set(tuned.path.gradient) == {"head.weight", "head.bias"}
    for name, w in model.named_parameters():
        assert torch.equal(tuned.path.end[name], w) == (not name.startswith("head"))
    full = finetune(model, head_only(model, 0.1), client.train, Tuning(epochs=1), full=True)
    assert set(full.path.gradient) == {name for name, _ in model.named_parameters()}
    assert full.path.gradient["conv1.weight"].abs().sum() > 0
    assert all(torch.equal(full.path.end[k], tuned.path.end[k]) for k in tuned.path.end)


def test_statistics_start_as_the_paper_has_them_or_exact(model, client):
    start = client_buffers(model, client.train.x)
    assert start["bn1.running_mean"].abs().max() == 0 and (start["bn1.running_var"] == 1).all()
    exact = client_buffers(model, client.train.x, "exact")
    inside = model.conv1(client.train.x)
    torch.testing.assert_close(exact["bn1.running_mean"], inside.mean((0, 2, 3)).detach())
    torch.testing.assert_close(exact["bn1.running_var"], inside.var((0, 2, 3)).detach())
    assert not [name for name in start if name.endswith("beta")]
    with pytest.raises(ValueError, match="statistics must be one of running, exact, got 'none'"):
        client_buffers(model, client.train.x, "none")


def test_statistics_move_by_a_tenth(model, client):
    tuned = finetune(model, bn_c(model, 0.0), client.train, Tuning(epochs=3, batch_size=40))
    inside = model.conv1(client.train.x)
    torch.testing.assert_close(tuned.buffers["bn1.running_mean"], (1 - 0.9**3) * inside.mean((0, 2, 3)).detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", [bn_c, bn_g, bn_i])
@pytest.mark.parametrize("n", [1, 33])
def test_one_sample_or_a_last_batch_of_one(model, client, strategy, n):
    data = Data(client.train.x[:1].repeat(n, 1, 1, 1), client.train.y[:1].repeat(n))
    score = evaluate(model, finetune(model, strategy(model, 0.01), data, Tuning(epochs=2)), data)
    assert score.loss == score.loss and score.n == n


def test_one_class(model, client):
    same = Data(client.train.x, torch.full_like(client.train.y, 3))
    assert evaluate(model, finetune(model, bn_c(model, 0.1), same, Tuning(epochs=20)), same).accuracy > 0.9


def test_a_model_that_diverges_has_no_right_answers(model, client):
    assert score_client(model, bn_g(model, 1e6), client) == Score(0, float("inf"), len(client.test))


def test_no_batch_norm_at_all(client):
    plain = mix_bn(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), verbose=False)
    strategy = bn_g(plain, 0.1)
    assert strategy.beta.shape == (0,)
    trained, still = (evaluate(plain, finetune(plain, s, client.train), client.train).loss for s in (strategy, bn_g(plain, 0.0)))
    assert trained < still


def test_dropout_is_repeatable_and_the_global_generator_untouched(client):
    dropped = mix_bn(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 10)), verbose=False)
    state = torch.get_rng_state()
    a, b, c = (finetune(dropped, bn_c(dropped, 0.1), client.train, generator=generator(key)).path.end["1.weight"] for key in ("a", "a", "b"))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_as_module_and_evaluate_agree_for_each_baseline(model, client):
    for strategy in baselines(model, 0.05).values():
        tuned = finetune(model, strategy, client.train, Tuning(epochs=1))
        module = as_module(model, tuned)
        assert not module.training
        right = module(client.test.x).argmax(1) == client.test.y
        score = evaluate(model, tuned, client.test)
        assert score.right == right.sum() and score.accuracy == right.double().mean().item()


def test_wrong_arguments(model, client):
    with pytest.raises(ValueError, match="^epochs must be >= 1, got 0$"):
        finetune(model, bn_g(model, 0.1), client.train, Tuning(epochs=0))
    with pytest.raises(ValueError, match="^number of samples must be >= 1, got 0$"):
        evaluate(model, finetune(model, bn_g(model, 0.1), client.train, Tuning(epochs=1)), client.test[:0])
    with pytest.raises(ValueError, match="^batch_size must be >= 1, got 0$"):
        finetune(model, bn_g(model, 0.1), client.train, Tuning(batch_size=0))
    with pytest.raises(ValueError, match="eta must be 11 numbers, one for each parameter of the model, got 2"):
        finetune(model, Strategy(torch.zeros(3), torch.zeros(2)), client.train)


def test_a_tensor_frozen_by_hand_stays_frozen(client):
    plain = small_cnn(width=4)
    plain.conv1.weight.requires_grad_(False)
    mixed = mix_bn(plain, verbose=False)
    tuned = finetune(mixed, bn_g(mixed, 0.1), client.train, Tuning(epochs=1))
    assert torch.equal(tuned.path.end["conv1.weight"], plain.conv1.weight) and not torch.equal(tuned.path.end["conv2.weight"], plain.conv2.weight)


def test_tied_weights_become_a_module(client):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.head(self.b(self.a(x.flatten(1)).relu()).relu())

    tied = mix_bn(Tied(), verbose=False)
    tuned = finetune(tied, bn_g(tied, 0.1), client.train, Tuning(epochs=1))
    module = as_module(tied, tuned)
    assert module.a.weight is module.b.weight and torch.equal(module.b.weight, tuned.path.end["a.weight"])


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 1), st.integers(0, 10))
@settings(max_examples=25, deadline=None)
def test_crop_flip_is_torchvisions_crop_and_flip(down, right, mirrored, seed):
    from torchvision.transforms import functional as tv

    x = torch.randn(2, 3, 6, 9, generator=torch.Generator().manual_seed(seed))
    ours = crop_flip(x, torch.tensor([[down, 4], [right, 4], [mirrored, 0]]))
    theirs = tv.crop(tv.pad(x[0], 4), down, right, 6, 9)
    assert torch.equal(ours[0], tv.hflip(theirs) if mirrored else theirs)
    assert torch.equal(ours[1], x[1])


def test_augmented_finetuning_depends_on_its_generator_only():
    model, data = mix_bn(small_cnn(), verbose=False), Data(torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 10)
    ends = []
    for seed, augment in ((3, "crop-flip"), (3, "crop-flip"), (4, "crop-flip"), (3, "none")):
        tuning, numbers = Tuning(2, 8, augment=augment), torch.Generator().manual_seed(seed)
        ends.append(finetune(model, bn_c(model, 0.05), data, tuning, numbers).state["conv1.weight"])
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2]) and not torch.equal(ends[0], ends[3])
