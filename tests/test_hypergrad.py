"""fedl2p.hypergrad against autograd through everything, `higher`, closed forms and finite differences."""

import math
import warnings

import higher
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fedl2p import hypergrad
from fedl2p.bn import beta_buffers, bn_layers, mix_bn
from fedl2p.data import Data
from fedl2p.digits import digits, small_cnn
from fedl2p.finetune import Tuning, finetune
from fedl2p.hypergrad import NeumannDiverges, add, curvature, descend, dot, dots, fomaml, gradient, ift, unrolled
from fedl2p.metanet import MetaNets
from fedl2p.profile import profile
from fedl2p.strategy import bn_c

quick = settings(max_examples=15, deadline=None)


def close(a, b, tol=1e-10):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def naive(steps, start, val_loss, hyper, last=None):
    """Autograd through all steps at once, or through the last ones."""
    h, w = ({k: t.detach().requires_grad_() for k, t in d.items()} for d in (hyper, start))
    for t, loss in enumerate(steps):
        if last is not None and t == len(steps) - last:
            w = {k: v.detach().requires_grad_() for k, v in w.items()}
        g = torch.autograd.grad(loss(w, h), list(w.values()), create_graph=True)
        w = {k: v - e * d for (k, v), e, d in zip(w.items(), h["eta"], g, strict=True)}
        if last is not None and t < len(steps) - last:
            w = {k: v.detach().requires_grad_() for k, v in w.items()}
    slopes = torch.autograd.grad(val_loss(w, h), list(h.values()), allow_unused=True)
    return {k: torch.zeros_like(t) if g is None else g for (k, t), g in zip(h.items(), slopes, strict=True)}


def bowl(seed, n=4, curve=(0.5, 2.0)):
    """A quadratic with a known minimum that a hyperparameter moves: L_T = (w - M c)' A (w - M c) / 2."""
    gen = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    q, _ = torch.linalg.qr(random(n, n))
    A = q @ torch.diag(torch.linspace(*curve, n, dtype=torch.float64)) @ q.T
    M, target = random(n, 2), random(n)

    def train_loss(w, h):
        x = torch.cat(list(w.values())) - M @ h["c"]
        return x @ A @ x / 2

    def val_loss(w, h):
        return (torch.cat(list(w.values())) - target).pow(2).sum() / 2 + (h["c"] ** 2).sum()

    start = {"a": random(n // 2), "b": random(n - n // 2)}
    hyper = {"eta": torch.tensor([0.3, 0.2], dtype=torch.float64), "c": random(2)}
    minimum = M @ hyper["c"]
    truth = M.T @ (minimum - target) + 2 * hyper["c"]
    return train_loss, val_loss, start, hyper, A, truth


def mlp(seed, batch=8, steps=5):
    """A small smooth network with batches."""
    gen = torch.Generator().manual_seed(seed)
    x, y = torch.randn(40, 5, generator=gen, dtype=torch.float64), torch.randint(0, 3, (40,), generator=gen)
    start = {name: 0.5 * torch.randn(shape, generator=gen, dtype=torch.float64) for name, shape in {"w1": (5, 6), "b1": (6,), "w2": (6, 3)}.items()}

    def loss_on(rows, decay=True):
        def loss(w, h):
            out = F.cross_entropy(torch.tanh(x[rows] @ w["w1"] + w["b1"]) @ w["w2"], y[rows])
            return out + h["decay"] * sum(t.pow(2).sum() for t in w.values()) if decay else out
        return loss

    losses = [loss_on(torch.randint(0, 20, (batch,), generator=gen)) for _ in range(steps)]
    hyper = {"eta": torch.tensor([0.5, 0.1, 0.3], dtype=torch.float64), "decay": torch.tensor(0.01, dtype=torch.float64)}
    return losses, loss_on(slice(0, 20)), loss_on(slice(20, 40), decay=False), start, hyper


def by_higher(steps, start, val_loss, hyper):
    h = {k: t.clone().requires_grad_() for k, t in hyper.items()}

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            for k, t in start.items():
                self.register_parameter(k, nn.Parameter(t.clone()))

        def forward(self, loss):
            return loss({k: getattr(self, k) for k in start}, h)

    model = Holder()
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=1.0)
    with higher.innerloop_ctx(model, optimizer, override={"lr": list(h["eta"])}) as (inner, step):
        for loss in steps:
            step.step(inner(loss))
        return dict(zip(h, torch.autograd.grad(inner(val_loss), list(h.values())), strict=True))


# --- products ------------------------------------------------------------------------------------------------


@quick
@given(seed=st.integers(0, 1000), hvp=st.sampled_from(["exact", "central", "forward"]))
def test_products_of_a_quadratic(seed, hvp):
    train_loss, _, start, hyper, A, _ = bowl(seed)
    v = {k: torch.randn_like(t) for k, t in start.items()}
    here = curvature(train_loss, start, hyper, hvp)
    by_weights, by_hyper = here.product(v)
    tol = 1e-10 if hvp == "exact" else 1e-5
    close(torch.cat(list(by_weights.values())), A @ torch.cat(list(v.values())), tol)
    expected = torch.autograd.functional.jacobian(lambda c: torch.cat(list(gradient_with_graph(train_loss, start, c).values())), hyper["c"])
    close(by_hyper["c"], torch.cat(list(v.values())) @ expected, tol)
    close(here.gradient(), gradient(train_loss, start, hyper)[0])


def gradient_with_graph(loss, weights, c):
    w = {k: t.detach().requires_grad_() for k, t in weights.items()}
    return dict(zip(w, torch.autograd.grad(loss(w, {"c": c}), list(w.values()), create_graph=True), strict=True))


def test_unknown_words():
    train_loss, val_loss, start, hyper, _, _ = bowl(0)
    path = descend([train_loss], start, hyper)
    with pytest.raises(ValueError, match="hvp must be one of exact, central, forward, got 'fast'"):
        ift(path, train_loss, val_loss, hyper, hvp="fast")
    with pytest.raises(ValueError, match="solver must be one of neumann, cg, got 'lu'"):
        ift(path, train_loss, val_loss, hyper, solver="lu")


# --- unrolled ------------------------------------------------------------------------------------------------


@quick
@given(seed=st.integers(0, 1000), steps=st.integers(1, 12), every=st.integers(0, 5))
def test_unrolled_is_autograd_through_everything_and_higher(seed, steps, every):
    losses, train_loss, val_loss, start, hyper = mlp(seed, steps=steps)
    ours = unrolled(descend(losses, start, hyper, every), train_loss, val_loss, hyper)
    close(ours, naive(losses, start, val_loss, hyper), 1e-10)
    close(ours, by_higher(losses, start, val_loss, hyper), 1e-10)


@quick
@given(seed=st.integers(0, 1000), steps=st.integers(1, 9), every=st.integers(0, 4), last=st.integers(1, 12))
def test_truncation_is_autograd_through_the_last_steps(seed, steps, every, last):
    losses, train_loss, val_loss, start, hyper = mlp(seed, steps=steps)
    ours = unrolled(descend(losses, start, hyper, every), train_loss, val_loss, hyper, last=last)
    close(ours, naive(losses, start, val_loss, hyper, last=min(last, steps)), 1e-10)


@pytest.mark.parametrize("hvp, tol", [("central", 1e-6), ("forward", 1e-5)])
def test_unrolled_by_differences(hvp, tol):
    losses, train_loss, val_loss, start, hyper = mlp(1)
    path = descend(losses, start, hyper)
    close(unrolled(path, train_loss, val_loss, hyper, hvp=hvp), unrolled(path, train_loss, val_loss, hyper), tol)


def test_unrolled_is_the_finite_difference_of_the_procedure():
    losses, train_loss, val_loss, start, hyper = mlp(2)
    ours = unrolled(descend(losses, start, hyper), train_loss, val_loss, hyper)

    def run(h):
        return val_loss(descend(losses, start, h).end, h)

    for key, t in hyper.items():
        for i in range(t.numel()):
            up, down = ({**hyper, key: t + d * torch.eye(max(t.numel(), 1), dtype=t.dtype)[i].view_as(t)} for d in (1e-6, -1e-6))
            close((run(up) - run(down)) / 2e-6, ours[key].view(-1)[i], 1e-7)


# --- implicit ------------------------------------------------------------------------------------------------


@quick
@given(seed=st.integers(0, 1000))
def test_implicit_is_right_at_a_minimum(seed):
    train_loss, val_loss, start, hyper, _, truth = bowl(seed)
    path = descend([train_loss] * 600, start, hyper)
    close(ift(path, train_loss, val_loss, hyper, solver="cg", terms=4)["c"], truth, 1e-6)
    close(ift(path, train_loss, val_loss, hyper, psi=0.9, terms=200, scaled=True)["c"], truth, 1e-6)
    close(unrolled(path, train_loss, val_loss, hyper)["c"], truth, 1e-6)


@quick
@given(seed=st.integers(0, 1000), psi=st.floats(0.01, 0.5), terms=st.integers(0, 6))
def test_algorithm_2_word_for_word(seed, psi, terms):
    losses, train_loss, val_loss, start, hyper = mlp(seed)
    path = descend(losses, start, hyper)
    names, sizes = list(start), [t.numel() for t in start.values()]

    def unflatten(flat):
        return {k: p.view_as(start[k]) for k, p in zip(names, flat.split(sizes), strict=True)}

    end = torch.cat([path.end[k].flatten() for k in names])
    H = torch.autograd.functional.hessian(lambda f: train_loss(unflatten(f), hyper), end)
    p = v = torch.autograd.functional.jacobian(lambda f: val_loss(unflatten(f), hyper), end)
    v0 = v
    for _ in range(terms):
        v = v - psi * v @ H
        p = p + v
    g = torch.cat([path.gradient[k].flatten() for k in names])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, scaled = (ift(path, train_loss, val_loss, hyper, psi=psi, terms=terms, scaled=s) for s in (False, True))
    eta = torch.stack([part.sum() for part in ((p @ H) * g).split(sizes)])
    mixed = 2 * end  # of the decay: d/d(decay) of its gradient
    close(ours["eta"], eta, 1e-8)
    close(ours["decay"], -(p @ mixed), 1e-8)
    close(scaled["eta"], psi * eta, 1e-8)
    last = v - psi * v @ H  # the sum telescopes
    close(eta, torch.stack([part.sum() for part in ((v0 - last) / psi * g).split(sizes)]), 1e-8)


@quick
@given(seed=st.integers(0, 1000), steps=st.integers(1, 10))
def test_for_learning_rates_a_solved_implicit_gradient_is_minus_the_first_order_one(seed, steps):
    train_loss, val_loss, start, hyper, _, _ = bowl(seed)
    path = descend([train_loss] * steps, start, hyper)
    close(ift(path, train_loss, val_loss, hyper, solver="cg", terms=4)["eta"], -fomaml(path, train_loss, val_loss, hyper)["eta"], 1e-7)


@pytest.mark.parametrize("hvp, tol", [("central", 1e-6), ("forward", 1e-4)])
def test_implicit_by_differences(hvp, tol):
    losses, train_loss, val_loss, start, hyper = mlp(3)
    path = descend(losses, start, hyper)
    close(ift(path, train_loss, val_loss, hyper, hvp=hvp), ift(path, train_loss, val_loss, hyper), tol)


def test_a_diverging_series_is_reported_once_and_a_converging_one_is_not():
    train_loss, val_loss, start, hyper, _, _ = bowl(0, curve=(0.5, 8.0))
    path = descend([train_loss] * 3, start, {**hyper, "eta": hyper["eta"] / 10})
    message = r"diverges: psi must be < 0\.\d+, perhaps far less, got 0.5; the Hessian has an eigenvalue of at least \d"
    with pytest.warns(NeumannDiverges, match=message) as caught:
        ift(path, train_loss, val_loss, hyper, psi=0.5, terms=30)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ift(path, train_loss, val_loss, hyper, psi=0.2, terms=30)


def test_conjugate_gradients_stop_where_the_hessian_is_not_positive():
    train_loss, val_loss, start, hyper, _, _ = bowl(0, curve=(-1.0, -0.1))
    with pytest.warns(RuntimeWarning, match="not positive definite"):
        ift(descend([train_loss], start, hyper), train_loss, val_loss, hyper, solver="cg")


# --- first order ---------------------------------------------------------------------------------------------


def test_fomaml_is_one_step_of_truncation_without_second_derivatives():
    losses, train_loss, val_loss, start, hyper = mlp(4)
    path = descend(losses, start, hyper)
    val = lambda w, h: val_loss(w, h) + 3 * h["decay"]  # noqa: E731
    ours = fomaml(path, train_loss, val, hyper)
    close(ours["eta"], unrolled(path, train_loss, val, hyper, last=1)["eta"])
    close(ours["decay"], torch.tensor(3.0, dtype=torch.float64))


# --- what is refused, and what is left alone -----------------------------------------------------------------


@pytest.mark.parametrize("estimator", [ift, fomaml, unrolled])
def test_no_silent_nan_and_no_silent_zero(estimator):
    train_loss, val_loss, start, hyper, _, _ = bowl(0)
    path = descend([train_loss] * 3, start, hyper)
    with pytest.raises(FloatingPointError, match="the validation loss is nan; lower the learning rates eta"):
        estimator(path, train_loss, lambda w, h: val_loss(w, h) * torch.nan, hyper)
    with pytest.raises(ValueError, match="hyper\\['unused'\\] has no influence"):
        estimator(path, train_loss, val_loss, {**hyper, "unused": torch.zeros(3)})
    empty = estimator(path, train_loss, val_loss, {**hyper, "beta": torch.zeros(0)})  # a model without batch norms
    assert empty["beta"].shape == (0,)


def test_a_training_loss_that_explodes():
    train_loss, val_loss, start, hyper, _, _ = bowl(0)
    with pytest.raises(FloatingPointError, match=r"the loss of step \d+ is (inf|nan)"):
        descend([train_loss] * 3000, start, {**hyper, "eta": 50 * hyper["eta"]})
    with pytest.raises(FloatingPointError, match="the training loss is inf"):
        ift(descend([train_loss], start, hyper), lambda w, h: train_loss(w, h) / 0.0, val_loss, hyper)


def test_a_huge_but_finite_series_does_not_come_back_as_infinity():
    train_loss, val_loss, start, hyper, _, _ = bowl(0)
    path = descend([train_loss], start, hyper)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(FloatingPointError, match="the hypergradient of .* is not finite; lower the learning rates eta, or psi"):
            ift(path, train_loss, val_loss, hyper, psi=1e100, terms=6)


def test_wrong_eta_and_no_steps():
    train_loss, _, start, hyper, _, _ = bowl(0)
    with pytest.raises(ValueError, match=r"shape of hyper\['eta'\] must be \[2\], a rate for each tensor, got \[5\]"):
        descend([train_loss], start, {**hyper, "eta": torch.zeros(5)})
    with pytest.raises(ValueError, match=r"shape of hyper\['eta'\] must be \[2\], a rate for each tensor, got None"):
        descend([train_loss], start, {"c": hyper["c"]})
    with pytest.raises(ValueError, match="number of steps must be >= 1, got 0"):
        descend([], start, hyper)


@pytest.mark.parametrize("estimator", [ift, fomaml, unrolled])
def test_inputs_are_left_alone_and_results_are_plain(estimator):
    train_loss, val_loss, start, hyper, _, _ = bowl(0)
    hyper = {k: t.clone().requires_grad_() for k, t in hyper.items()}  # as they come from meta-nets
    before = {k: t.clone() for k, t in start.items()}
    slopes = estimator(descend([train_loss] * 3, start, hyper), train_loss, val_loss, hyper)
    assert all(torch.equal(start[k], before[k]) and not start[k].requires_grad for k in start)
    assert list(slopes) == list(hyper) and all(not t.requires_grad and t.shape == hyper[k].shape for k, t in slopes.items())
    assert all(t.grad is None for t in hyper.values())


def test_no_validation_gradient_means_no_hypergradient():
    train_loss, _, start, hyper, _, _ = bowl(0)
    path = descend([train_loss], start, hyper)
    flat = lambda w, h: 0.0 * sum(t.sum() for t in w.values()) + 0.0 * h["c"].sum()  # noqa: E731
    for hvp in ("exact", "central", "forward"):
        assert all((t == 0).all() for t in ift(path, train_loss, flat, hyper, hvp=hvp).values())


def test_nothing_to_multiply_in_single_precision():
    w = {"a": torch.ones(3)}
    for hvp in ("exact", "central", "forward"):
        by_weights, _ = curvature(lambda w, h: w["a"].pow(3).sum(), w, {}, hvp).product({"a": torch.zeros(3)})
        assert (by_weights["a"] == 0).all()


def test_parameters_of_a_model_may_be_given_as_they_are():
    net = nn.Linear(2, 2)
    x = torch.randn(5, 2)
    loss = lambda w, h: functional_call(net, w, x).pow(2).mean()  # noqa: E731
    path = descend([loss] * 2, dict(net.named_parameters()), {"eta": torch.full((2,), 0.1)})
    assert not path.end["weight"].requires_grad
    for hvp in ("exact", "central"):
        unrolled(path, loss, loss, {"eta": torch.full((2,), 0.1)}, hvp=hvp)


def test_small_algebra():
    a, b = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([3.0])}, {"x": torch.tensor([1.0, 1.0]), "y": torch.tensor([2.0])}
    assert dot(a, b) == 9 and dots(a, b).tolist() == [3, 6] and add(a, b, -1.0)["y"].item() == 1


# --- all the way to the meta-nets ----------------------------------------------------------------------------


def test_one_backward_pass_reaches_lambda():
    """Estimate at (beta, eta), then one backward through the meta-nets: the same as autograd through everything."""
    torch.manual_seed(0)
    model = small_cnn(width=2)
    for name in ("relu1", "relu2", "relu3"):
        setattr(model, name, nn.Tanh())
    model = mix_bn(model, verbose=False).double().eval()
    x, y = torch.rand(24, 1, 8, 8, dtype=torch.float64), torch.randint(0, 10, (24,))
    metanets = MetaNets.for_model(model, lr=0.1).double()
    client = profile(model, x)
    start = {k: p.detach() for k, p in model.named_parameters()}

    def loss_on(rows):
        return lambda w, h: F.cross_entropy(functional_call(model, {**w, **beta_buffers(model, h["beta"])}, x[rows]), y[rows])

    steps, val_loss = [loss_on(slice(0, 8)), loss_on(slice(8, 16))], loss_on(slice(16, 24))
    strategy = metanets(client)
    hyper = {"beta": strategy.beta, "eta": strategy.eta}
    slopes = unrolled(descend(steps, start, hyper), steps[0], val_loss, hyper)
    torch.autograd.backward([strategy.beta, strategy.eta], [slopes["beta"], slopes["eta"]])
    ours = {k: p.grad.clone() for k, p in metanets.named_parameters()}

    metanets.zero_grad()
    strategy, w = metanets(client), {k: t.clone().requires_grad_() for k, t in start.items()}
    h = {"beta": strategy.beta, "eta": strategy.eta}
    for loss in steps:
        g = torch.autograd.grad(loss(w, h), list(w.values()), create_graph=True)
        w = {k: t - e * d for (k, t), e, d in zip(w.items(), h["eta"], g, strict=True)}
    val_loss(w, h).backward()
    assert len(bn_layers(model)) == 3
    close(ours, {k: p.grad for k, p in metanets.named_parameters()}, 1e-10)


class Looks(TorchDispatchMode):
    "Counts how often a number is read out of a tensor: on a GPU, Python would wait for it each time."

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def test_no_step_waits_for_the_device(monkeypatch):
    """Off the CPU, losses are looked at sixteen at a time, and nothing else is. Here a CPU plays the GPU."""
    x, y = digits()
    model = mix_bn(small_cnn(width=2), verbose=False)
    data, strategy, read = Data(x[:8], y[:8]), bn_c(model, 0.01), torch.Tensor.tolist

    def looks(epochs):
        with Looks() as mode:
            monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (setattr(mode, "count", mode.count + 1), read(t))[1])
            finetune(model, strategy, data, Tuning(epochs=epochs))
        return mode.count

    assert looks(20) - looks(10) == 10  # on a CPU, one look a step: so that one that diverges ends at once
    monkeypatch.setattr(hypergrad, "_LOOK", {})
    assert looks(64) - looks(32) == 2


def test_a_loss_that_is_not_finite_is_named_by_its_step(monkeypatch):
    """Also if it is seen some steps later."""
    losses = [lambda w, h: (w["a"] ** 2).sum(), lambda w, h: (w["a"] * math.inf).sum(), lambda w, h: (w["a"] ** 2).sum()]
    for look in ({"cpu": 1}, {}):
        monkeypatch.setattr(hypergrad, "_LOOK", look)
        with pytest.raises(FloatingPointError, match="^the loss of step 1 is inf; lower the learning rates eta"):
            descend(losses, {"a": torch.ones(2)}, {"eta": torch.tensor([0.1])})
