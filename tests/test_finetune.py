"""One loop for every strategy: against PyTorch's optimizer, frozen tensors, statistics, odd clients."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedl2p.bn import bn_layers, mix_bn, set_beta
from fedl2p.core import evaluating, generator
from fedl2p.data import Data
from fedl2p.digits import digits_federation, fit, small_cnn
from fedl2p.evaluation import Score, as_module, baselines, evaluate, score_client
from fedl2p.finetune import Tuning, batches, client_buffers, crop_flip, finetune, loss_on
from fedl2p.hypergrad import fomaml, ift, unrolled
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


def test_where_statistics_start(model, client):
    start = client_buffers(model, "zero-one")
    assert start["bn1.running_mean"].abs().max() == 0 and (start["bn1.running_var"] == 1).all()
    ordinary = client_buffers(model)
    assert torch.equal(ordinary["bn1.running_mean"], model.bn1.pretrained_mean) and torch.equal(ordinary["bn1.running_var"], model.bn1.pretrained_var)
    assert not [name for name in start if name.endswith("beta")]
    with pytest.raises(ValueError, match="statistics must be one of zero-one, pretrained, precise, got 'none'"):
        client_buffers(model, "none")


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_precise_statistics_are_those_of_the_fine_tuned_network(model, client, beta):
    """As if the whole data were one batch in training, without dropout, and the running mean took all of it."""
    strategy = Strategy(torch.full((3,), beta), bn_c(model, 0.05).eta)
    tuned = finetune(model, strategy, client.train, Tuning(epochs=2, statistics="precise"))
    running = finetune(model, strategy, client.train, Tuning(epochs=2, statistics="pretrained"))
    assert all(torch.equal(tuned.path.end[name], w) for name, w in running.path.end.items())  # training does not depend on it
    once = as_module(model, tuned).train()
    for layer in bn_layers(once).values():
        layer.momentum = 1.0
    once(client.train.x)
    for name, layer in bn_layers(once).items():
        torch.testing.assert_close(tuned.buffers[f"{name}.running_mean"], layer.running_mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tuned.buffers[f"{name}.running_var"], layer.running_var, rtol=1e-4, atol=1e-5)


def test_precise_statistics_take_one_pass_and_no_steps_where_nothing_moves(model, client):
    calls, data = [], client.train
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    finetune(model, bn_c(model, 0.0), data, Tuning(statistics="precise"))
    assert len(calls) == 1
    finetune(model, bn_g(model, 0.0), data, Tuning(statistics="precise"))
    assert len(calls) == 1  # beta is 0: nobody will ask for the client's statistics
    hook.remove()


def test_pretrained_statistics_are_ordinary_fine_tuning(client):
    """FT (BN C) with running statistics from the pretrained ones is what torch does with an ordinary network."""
    plain = fit(small_cnn(width=4), client.test.x, client.test.y, epochs=2)
    mixed = mix_bn(plain, verbose=False)
    tuned = as_module(mixed, finetune(mixed, bn_c(mixed, 0.05), client.train, Tuning(epochs=4, batch_size=len(client.train))))
    optimizer = torch.optim.SGD(plain.train().parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(client.train.x), client.train.y).backward()
        optimizer.step()
    torch.testing.assert_close(tuned(client.test.x), plain.eval()(client.test.x), rtol=1e-3, atol=1e-4)


def test_statistics_move_by_a_tenth(model, client):
    tuned = finetune(model, bn_c(model, 0.0), client.train, Tuning(epochs=3, batch_size=40, statistics="zero-one"))
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
    assert torch.equal(tuned.state["conv1.weight"], plain.conv1.weight) and not torch.equal(tuned.state["conv2.weight"], plain.conv2.weight)
    assert "conv1.weight" not in tuned.path.end and len(tuned.hyper["eta"]) == len(list(plain.parameters())) - 1
    assert torch.equal(as_module(mixed, tuned).conv1.weight, plain.conv1.weight)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused_before_anything_starts(client, dtype):  # A8
    model = mix_bn(small_cnn(width=4), verbose=False).to(dtype)
    with pytest.raises(ValueError, match=rf"^parameters must be float32 or float64, since lower precision loses small steps, got {dtype} \('conv1.weight'\); use model.float\(\)$"):
        finetune(model, bn_c(model, 0.1), client.train)
    finetune(model.double(), bn_c(model, 0.1), Data(client.train.x.double(), client.train.y), Tuning(epochs=1))


def test_a_test_set_that_leaves_one_over_works_with_batch_statistics(client):  # A6
    model = mix_bn(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)), verbose=False)
    data = Data(client.train.x[:33], client.train.y[:33])
    assert evaluate(model, finetune(model, bn_i(model, 0.01), data, Tuning(epochs=1)), data).n == 33
    with pytest.raises(ValueError, match="input must have more than one value per channel in mode 'batch'"):
        evaluate(model, finetune(model, bn_i(model, 0.01), data, Tuning(epochs=1)), data[:1])


def test_personalize_on(model, client):
    """Which samples a client that is tested fine-tunes on; to validate, it is always those for training."""
    seen = []
    spy = model.register_forward_hook(lambda module, args, out: seen.append(len(args[0])) if module.training else None)
    for on, n in (("train", len(client.train)), ("train+val", len(client.train) + len(client.val))):
        for held_out in (True, False):
            seen.clear()
            score_client(model, bn_c(model, 0.1), client, Tuning(epochs=1, personalize_on=on), held_out=held_out)
            assert sum(seen) == (n if held_out else len(client.train))
    spy.remove()


class Dropping(nn.Module):
    "Dropout by a layer, and by a function, which nobody can find in a list of modules."

    def __init__(self):
        super().__init__()
        self.body, self.bn, self.head = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(F.dropout(self.bn(self.body(F.dropout(x.flatten(1), 0.2, self.training))).tanh(), 0.5, self.training))


@pytest.fixture(scope="module")
def dropping():
    torch.manual_seed(0)
    return mix_bn(Dropping().double(), verbose=False)


@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("hvp", ["exact", "central"])
def test_unrolled_meets_the_masks_of_the_first_pass(dropping, client, every, hvp):  # A3
    data = Data(client.train.x.double(), client.train.y)
    strategy = Strategy(torch.full((1,), 0.4, dtype=torch.float64), torch.full((6,), 0.3, dtype=torch.float64))
    tuning, numbers = Tuning(epochs=3, batch_size=16), lambda: generator(0, "masks")
    tuned = finetune(dropping, strategy, data, tuning, numbers(), full=True, every=every)

    def val_loss(weights, hyper):
        with evaluating(dropping):
            return loss_on(dropping, lambda: data, dict(tuned.buffers), training=False)(weights, hyper)

    torch.manual_seed(every + 100)  # whatever the rest of the program has drawn
    slope = unrolled(tuned.path, val_loss, val_loss, tuned.hyper, hvp=hvp)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(slope.values(), unrolled(tuned.path, val_loss, val_loss, tuned.hyper, hvp=hvp).values(), strict=True))
    hyper = {k: t.clone().requires_grad_() for k, t in tuned.hyper.items()}  # autograd's graph through all steps
    weights = {name: w.detach().requires_grad_() for name, w in dropping.named_parameters()}
    for loss in tuned.path.steps:
        slopes = torch.autograd.grad(loss(weights, hyper), list(weights.values()), create_graph=True)
        weights = {k: w - e * g for (k, w), e, g in zip(weights.items(), hyper["eta"], slopes, strict=True)}
    for name, t in tuned.path.end.items():
        torch.testing.assert_close(weights[name], t)
    for name, exact in zip(hyper, torch.autograd.grad(val_loss(weights, hyper), list(hyper.values())), strict=True):
        torch.testing.assert_close(slope[name], exact, rtol=1e-8 if hvp == "exact" else 1e-4, atol=1e-10 if hvp == "exact" else 1e-6)


def test_dropout_leaves_the_global_generator_alone(dropping, client):
    data = Data(client.train.x.double(), client.train.y)
    state = torch.get_rng_state()
    first, second = (finetune(dropping, bn_c(dropping, 0.1), data, Tuning(epochs=2), generator(0, "x")) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first.path.end[k], t) for k, t in second.path.end.items())
    other = finetune(dropping, bn_c(dropping, 0.1), data, Tuning(epochs=2), generator(0, "y"))
    assert not torch.equal(other.path.end["head.weight"], first.path.end["head.weight"])


FROZEN = {"body": ("body",), "head": ("head",), "batch norm": ("bn",), "all but the body": ("bn", "head")}


@pytest.mark.parametrize("modules", FROZEN.values(), ids=FROZEN)
def test_hypergradients_of_a_model_that_is_partly_frozen(client, modules):  # A1
    """unrolled against finite differences, ift against its closed form, all over the tensors that may move."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(flat=nn.Flatten(), body=nn.Linear(64, 4), bn=nn.BatchNorm1d(4), act=nn.Tanh(), head=nn.Linear(4, 10))).double()
    for name in modules:
        getattr(model, name).requires_grad_(False)
    model, data = mix_bn(model, verbose=False), Data(client.train.x.double(), client.train.y)
    val = Data(client.val.x.double(), client.val.y)
    eta = torch.linspace(0.1, 0.4, 6, dtype=torch.float64)
    tunable = torch.tensor([p.requires_grad for p in model.parameters()])
    tuning = Tuning(epochs=3, batch_size=40)

    def run(beta, eta):
        return finetune(model, Strategy(beta, eta), data, tuning, generator(0, "frozen"), full=True, every=1)

    beta = torch.tensor([0.4], dtype=torch.float64)
    tuned = run(beta, eta)
    assert tuned.path.end.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    frozen_buffers = dict(tuned.buffers)  # running statistics count as constants, as the estimators take them
    train_loss, val_loss = (loss_on(model, lambda d=d: d, frozen_buffers, training=False) for d in (data, val))

    def after(beta, eta):
        with torch.no_grad():
            return val_loss(run(beta, eta).path.end, {"beta": beta}).item()

    with evaluating(model):
        slope = unrolled(tuned.path, train_loss, val_loss, tuned.hyper)
        implicit = ift(tuned.path, train_loss, val_loss, tuned.hyper, psi=0.05, terms=4)
        h = 1e-5
        for i, k in enumerate(tunable.nonzero().flatten()):
            step = h * torch.eye(6, dtype=torch.float64)[k]
            assert slope["eta"][i].item() == pytest.approx((after(beta, eta + step) - after(beta, eta - step)) / (2 * h), rel=1e-4, abs=1e-9)
        assert slope["beta"].item() == pytest.approx((after(beta + h, eta) - after(beta - h, eta)) / (2 * h), rel=1e-4)
        for k in (~tunable).nonzero().flatten():
            assert after(beta, eta + h * torch.eye(6, dtype=torch.float64)[k]) == after(beta, eta)
        # The closed form: H, v and mixed derivatives written out over the tunable weights.
        names, shapes = list(tuned.path.end), [w.shape for w in tuned.path.end.values()]
        sizes = [s.numel() for s in shapes]
        flat = torch.cat([w.flatten() for w in tuned.path.end.values()])

        def unflat(w):
            return {n: t.view(s) for n, t, s in zip(names, w.split(sizes), shapes, strict=True)}

        def of(loss):
            return lambda w, b: loss(unflat(w), {"beta": b})

        hessian, mixed = torch.autograd.functional.hessian(of(train_loss), (flat, beta))[0]
        v, direct = torch.autograd.functional.jacobian(of(val_loss), (flat, beta))
        p = sum(v @ torch.linalg.matrix_power(torch.eye(len(flat), dtype=torch.float64) - 0.05 * hessian, j) for j in range(5))
        g = torch.cat([t.flatten() for t in tuned.path.gradient.values()])
        torch.testing.assert_close(implicit["beta"], direct - p @ mixed)
        torch.testing.assert_close(implicit["eta"], torch.stack([t.sum() for t in ((p @ hessian) * g).split(sizes)]))


def test_nobody_computes_a_gradient_that_nobody_uses(client):  # A1
    """The backward pass of a frozen body never runs: not in fine-tuning, not for any estimator."""
    ran = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, slope):
            ran.append(1)
            return slope

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

        def forward(self, x):
            return self.head(Watched.apply(self.body(x.flatten(1))))

    model = Model()
    model.body.requires_grad_(False)
    tuned = finetune(model, bn_g(model, 0.1), client.train, Tuning(epochs=2), full=True)
    losses = [loss_on(model, lambda: client.val, dict(tuned.buffers), training=False)] * 2
    for estimate in (ift, unrolled, fomaml):
        assert estimate(tuned.path, *losses, tuned.hyper)["eta"].shape == (2,)
    assert not ran
    model.body.requires_grad_(True)
    finetune(model, bn_g(model, 0.1), client.train, Tuning(epochs=2))
    assert ran
