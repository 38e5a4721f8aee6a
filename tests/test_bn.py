"""fedl2p.bn against PyTorch's own layers, and where they have none to offer."""

import copy
import io
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, jvp, stack_module_state, vmap

from fedl2p.bn import MixBatchNorm, beta_buffers, bn_layers, bn_mode, mix, mix_bn, normalize, set_beta

LAYERS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def close(a, b, tol=1e-5):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def net(dims=2):
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    return nn.Sequential(conv(2, 3, 3), LAYERS[dims](3), nn.ReLU(), nn.Sequential(conv(3, 4, 1), LAYERS[dims](4)))


def images(dims=2, n=6):
    return torch.randn(n, 2, *[5] * dims)


def trained(model, x, steps=3):
    """Move the running statistics of a plain model away from their start."""
    model.train()
    for _ in range(steps):
        model(x * 2 + 1)
    return model


def output_and_gradients(layer, x):
    x = x.clone().requires_grad_()
    out = layer(x)
    parameters = [x, *layer.parameters()]
    return out, *torch.autograd.grad((out * torch.arange(out.numel()).view_as(out).sin()).sum(), parameters)


# --- against nn.BatchNorm ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    dims=st.integers(1, 3),
    n=st.integers(1, 5),
    channels=st.integers(1, 4),
    size=st.integers(2, 4),
    affine=st.booleans(),
    momentum=st.sampled_from([None, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 100),
)
def test_beta_one_in_training_is_batch_norm(dims, n, channels, size, affine, momentum, seed):
    torch.manual_seed(seed)
    x = torch.randn(n, channels, *[size] * dims, dtype=torch.float64) * 3 + 1
    plain = LAYERS[dims](channels, affine=affine, momentum=momentum).double()
    mixing = mix_bn(plain, beta=1.0, verbose=False)
    for _ in range(3):
        x = x * 1.5 - 1
        for ours, theirs in zip(output_and_gradients(mixing, x), output_and_gradients(plain, x), strict=True):
            close(ours, theirs, 1e-8)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        close(getattr(mixing, name), getattr(plain, name), 1e-8)
    close(mixing.eval()(x), plain.eval()(x), 1e-8)


@settings(max_examples=25, deadline=None)
@given(dims=st.integers(1, 3), affine=st.booleans(), training=st.booleans(), seed=st.integers(0, 100))
def test_beta_zero_is_the_frozen_layer(dims, affine, training, seed):
    torch.manual_seed(seed)
    x = torch.randn(5, 3, *[4] * dims, dtype=torch.float64) * 3 + 1
    plain = trained(LAYERS[dims](3, affine=affine).double(), x).eval()
    mixing = mix_bn(plain, beta=0.0, verbose=False).train(training)
    for ours, theirs in zip(output_and_gradients(mixing, x + 1), output_and_gradients(plain, x + 1), strict=True):
        close(ours, theirs, 1e-8)


def test_evaluation_mixes_pretrained_with_running():
    x = images()
    mixing = mix_bn(trained(net(), x), verbose=False)[1].train()
    mixing(torch.randn(8, 3, 4, 4) * 5)
    set_beta(mixing, 0.3).eval()
    z = torch.randn(2, 3, 4, 4)
    mean, var = mix(mixing.pretrained_mean, mixing.running_mean, 0.3), mix(mixing.pretrained_var, mixing.running_var, 0.3)
    close(mixing(z), normalize(z, mean, var, mixing.weight, mixing.bias, mixing.eps))
    before = mixing.running_mean.clone()
    mixing(z)
    assert torch.equal(mixing.running_mean, before)  # evaluation tracks nothing


@given(share=st.floats(0, 1), old=st.floats(-10, 10), new=st.floats(-10, 10))
def test_a_mixture_lies_between(share, old, new):
    value = mix(torch.tensor(old), torch.tensor(new), share).item()
    assert min(old, new) - 1e-4 <= value <= max(old, new) + 1e-4


def test_modes():
    x = images() * 4 - 2
    plain = trained(net(), images())
    mixed = mix_bn(plain, beta=0.7, verbose=False)
    with bn_mode(mixed, "pretrained"):
        for training in (True, False):
            close(mixed.train(training)(x), plain.eval()(x))
    with bn_mode(mixed, "batch"):
        for training in (True, False):
            close(mixed.train(training)(x), plain.train()(x))
    assert all(layer.mode == "mix" and layer.num_batches_tracked == 0 for layer in bn_layers(mixed).values())
    with pytest.raises(RuntimeError, match="inside"), bn_mode(mixed, "batch"):
        raise RuntimeError("inside")
    assert all(layer.mode == "mix" for layer in bn_layers(mixed).values())
    with pytest.raises(ValueError, match="^mode must be one of mix, batch, pretrained, got 'local'$"), bn_mode(mixed, "local"):
        pass


@pytest.mark.parametrize("training", [True, False])
def test_without_running_statistics_a_layer_stays(training, capsys):
    plain = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False), nn.BatchNorm2d(2)).train(training)
    mixed = mix_bn(plain, beta=float(training))
    assert capsys.readouterr().err == "mix_bn: 1 batch-norm layers mix; 1 without running statistics are left as they are\n"
    assert list(bn_layers(mixed)) == ["1"]
    close(mixed(x := images()), plain(x))


def test_channels_last_stays_channels_last():
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    layer = MixBatchNorm(8, beta=0.5)
    out = layer(x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    close(out, MixBatchNorm(8, beta=0.5)(x.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_input_keeps_single_precision_statistics(dtype):
    layer = MixBatchNorm(3, beta=1.0)
    x = (torch.randn(64, 3, 4, 4) + 50).to(dtype)
    out = layer(x)
    assert out.dtype == dtype and layer.running_mean.dtype == torch.float32
    close(layer.running_mean, 0.1 * x.float().mean((0, 2, 3)))


# --- derivatives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_first_and_second_derivatives(training):
    layer = MixBatchNorm(2).double().train(training)
    layer.pretrained_mean, layer.pretrained_var = torch.rand(2).double(), torch.rand(2).double() + 0.5
    layer.running_mean, layer.running_var = torch.rand(2).double(), torch.rand(2).double() + 0.5

    def out(x, weight, bias, beta):
        buffers = dict(layer.named_buffers())
        return functional_call(layer, {**buffers, "weight": weight, "bias": bias, "beta": beta}, x)

    inputs = [t.double().requires_grad_() for t in (torch.randn(3, 2, 2), torch.rand(2) + 0.5, torch.randn(2), torch.tensor(0.4))]
    assert torch.autograd.gradcheck(out, inputs)
    assert torch.autograd.gradgradcheck(out, inputs)


def test_forward_over_reverse_reaches_beta():
    mixed, x = mix_bn(trained(net(), images()).double(), verbose=False).eval(), images().double()

    def loss(beta):
        return functional_call(mixed, beta_buffers_unchecked(mixed, beta), x).pow(2).sum()

    def beta_buffers_unchecked(model, beta):  # inside a transform no value can be looked at
        return {f"{name}.beta": b for name, b in zip(bn_layers(model), beta, strict=True)}

    beta, tangent = torch.tensor([0.3, 0.6]).double(), torch.tensor([1.0, -2.0]).double()
    _, hvp = jvp(grad(loss), (beta,), (tangent,))
    close(hvp, torch.autograd.functional.hessian(loss, beta) @ tangent, 1e-8)


def test_vmap_over_clients_equals_a_loop():
    mixed = mix_bn(trained(net(), images()), verbose=False).train()
    betas, x = torch.rand(4, 2), torch.randn(4, 6, 2, 5, 5)

    def step(beta, x):
        state = {**dict(mixed.named_buffers()), **beta}
        return functional_call(mixed, state, x), {name: state[name] for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked")}

    outs, states = vmap(step)(beta_buffers(mixed, betas), x)
    for i in range(4):
        alone = set_beta(copy.deepcopy(mixed), betas[i])
        close(outs[i], alone(x[i]))
        close(states["1.running_mean"][i], alone[1].running_mean)
        close(states["1.running_var"][i], alone[1].running_var)
        assert states["1.num_batches_tracked"][i] == 1
    assert mixed[1].num_batches_tracked == 0  # the shared model is as it was


def test_vmap_over_stacked_models():
    models = [mix_bn(trained(net(), images()), beta=0.5, verbose=False).eval() for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    x = images()
    outs = vmap(lambda p, b: functional_call(models[0], {**p, **b}, x))(parameters, buffers)
    for model, out in zip(models, outs, strict=True):
        close(out, model(x))


def test_functional_call_leaves_the_model_alone():
    mixed = mix_bn(net(), beta=0.5, verbose=False).train()
    state = dict(mixed.named_buffers())
    start = {name: t.clone() for name, t in state.items()}
    functional_call(mixed, state, images())
    assert all(torch.equal(t, start[name]) for name, t in mixed.named_buffers())
    assert not torch.equal(state["1.running_mean"], start["1.running_mean"])


# --- one sample, nothing, nonsense ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1), (1, 3, 1, 1)])
@pytest.mark.parametrize("mode", ["mix", "pretrained"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_value_per_channel(shape, mode, momentum):
    layer = MixBatchNorm(3, momentum=momentum, beta=0.8)
    layer.mode = mode
    x = torch.randn(shape, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert torch.equal(layer.running_var, torch.ones(3)) and torch.equal(layer.running_mean, torch.zeros(3))
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1), (1, 3, 1, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_statistics_of_one_value_are_refused(shape, training):
    """Every input would give the same output."""
    layer = MixBatchNorm(3, name="bn").train(training)
    layer.mode = "batch"
    with pytest.raises(ValueError, match=rf"^input must have more than one value per channel in mode 'batch', got shape {re.escape(str(list(shape)))} \(layer 'bn'\)$"):
        layer(torch.randn(shape))
    assert layer(torch.randn(2, 3, 4)).isfinite().all()


@pytest.mark.parametrize(
    "beta, message",
    [
        (1.2, r"^beta must be in \[0, 1\], got 1.2 \(layer '1'\)$"),
        ([0.2, -0.1], r"^beta must be in \[0, 1\], got -0.1 \(layer '3.1'\)$"),
        (torch.tensor([[0.2, 0.4], [0.5, 1.5]]), r"^beta must be in \[0, 1\], got 1.5 \(layer '3.1'\)$"),
        (float("nan"), r"^beta must be in \[0, 1\], got nan \(layer '1'\)$"),
        ([0.1, 0.2, 0.3], r"^beta must be 2 numbers, one for each of the layers \['1', '3.1'\], got 3$"),
        (torch.zeros(5, 3), "^beta must be 2 numbers, .*, got 3$"),
    ],
)
def test_wrong_beta_names_the_layer(beta, message):
    mixed = mix_bn(net(), verbose=False)
    for act in (beta_buffers, set_beta, lambda _, beta: mix_bn(net(), beta, verbose=False)):
        with pytest.raises(ValueError, match=message):
            act(mixed, beta)


def test_wrong_shape_of_beta_in_a_call_names_the_layer():
    mixed = mix_bn(net(), verbose=False)
    with pytest.raises(ValueError, match=r"^beta must be one number, got shape \[4\] \(layer '3.1'\)$"):
        functional_call(mixed, {"3.1.beta": torch.zeros(4)}, images())


@pytest.mark.parametrize("x", [torch.zeros(2, 4, 5, 5), torch.zeros(3), torch.zeros(()), torch.zeros(2, 3, dtype=torch.int64)])
def test_wrong_input_names_the_layer(x):
    with pytest.raises(ValueError, match=r"^input must be floats of shape \[N, 3, ...\], got torch.* of shape .* \(layer 'body.bn'\)$"):
        MixBatchNorm(3, name="body.bn")(x)


def test_an_empty_batch_is_refused_where_it_has_to_be():
    layer = MixBatchNorm(3, name="bn", beta=0.5)
    with pytest.raises(ValueError, match=r"^input must not be empty, .*, got shape \[0, 3, 2, 2\] \(layer 'bn'\)$"):
        layer(torch.zeros(0, 3, 2, 2))
    assert layer.eval()(torch.zeros(0, 3, 2, 2)).shape == (0, 3, 2, 2)


def test_unknown_mode_of_a_layer():
    layer = MixBatchNorm(3)
    layer.mode = "global"
    with pytest.raises(ValueError, match="^mode must be one of mix, batch, pretrained, got 'global'$"):
        layer(torch.zeros(2, 3))


# --- any model -----------------------------------------------------------------------------------------------


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: a batch norm that drops and activates as well."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class Scaled(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("make", [lambda: net(1), lambda: net(2), lambda: net(3)])
def test_conversion_keeps_predictions(make, capsys):
    dims = make()[0].weight.dim() - 2
    plain = trained(make(), images(dims)).eval()
    mixed = mix_bn(plain)
    assert capsys.readouterr().err == "mix_bn: 2 batch-norm layers mix\n"
    assert not mixed.training and list(bn_layers(mixed)) == ["1", "3.1"]
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in mixed.modules())
    close(mixed(x := images(dims)), plain(x))
    with torch.no_grad():
        mixed[0].weight.zero_()
    assert plain[0].weight.abs().sum() > 0 and type(plain[1]) is LAYERS[dims]  # a copy, and the original untouched


@pytest.mark.parametrize("name, count", [("resnet18", 20), ("mobilenet_v3_small", 34), ("densenet121", 121), ("shufflenet_v2_x0_5", 56), ("vgg11", 0)])
def test_torchvision_models(name, count):
    import torchvision

    torch.manual_seed(0)
    plain = torchvision.models.get_model(name, num_classes=3).eval()
    mixed = mix_bn(plain, verbose=False)
    assert len(bn_layers(mixed)) == count
    close(mixed(x := torch.randn(1, 3, 64, 64)), plain(x), 1e-4)


def test_norms_that_activate():
    plain = trained(nn.Sequential(NormAct(2)), images()).eval()
    mixed = mix_bn(plain, verbose=False)
    close(mixed(x := images()), plain(x))
    assert (mixed(x) == 0).any()  # the ReLU is still there
    assert mixed.load_state_dict(plain.state_dict()).missing_keys == []


def test_norms_with_an_unknown_forward_are_refused():
    with pytest.raises(ValueError, match="batch-norm layer '1' is a Scaled with a forward of its own"):
        mix_bn(nn.Sequential(nn.Identity(), Scaled(2)))


def test_sync_batch_norm_is_batch_norm():
    plain = nn.SyncBatchNorm.convert_sync_batchnorm(trained(net(), images())).eval()
    mixed = mix_bn(plain, verbose=False)
    assert len(bn_layers(mixed)) == 2
    close(mixed(x := images()), plain(x))


def test_lazy_layers():
    lazy = nn.Sequential(nn.Conv2d(2, 3, 1), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match="LazyModule"):  # torch's own message says what to do
        mix_bn(lazy)
    lazy(images())
    assert len(bn_layers(mix_bn(lazy, verbose=False))) == 1


def test_no_batch_norm_is_fine(capsys):
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.InstanceNorm2d(3))
    mixed = mix_bn(plain)
    assert capsys.readouterr().err == "mix_bn: 0 batch-norm layers mix\n"
    assert beta_buffers(mixed, 0.5) == {} and beta_buffers(mixed, torch.zeros(0)) == {}
    close(mixed(x := images()), plain(x))


def test_a_single_layer_and_twice_the_same():
    root = mix_bn(nn.BatchNorm2d(2), beta=0.25, verbose=False)
    assert isinstance(root, MixBatchNorm) and list(beta_buffers(root, 0.5)) == ["beta"]
    shared = nn.BatchNorm2d(2)
    mixed = mix_bn(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}), verbose=False)
    assert mixed["a"] is mixed["b"][0] and len(bn_layers(mixed)) == 1
    again = mix_bn(mixed, beta=1.0, verbose=False)
    assert len(bn_layers(again)) == 1 and again["a"].beta == 1
    assert mix_bn(again, verbose=False)["a"].beta == 1  # beta stays unless one is given


def test_a_plain_model_is_not_taken_for_a_mixing_one():
    plain = net()
    message = "model has batch norms that cannot mix: 1, 3.1; convert it with mix_bn first"
    for act in (lambda: set_beta(plain, 0.5), lambda: beta_buffers(plain, 0.5)):
        with pytest.raises(ValueError, match=message):
            act()
    with pytest.raises(ValueError, match=message), bn_mode(plain, "batch"):
        pass
    with pytest.raises(ValueError, match=r"^beta must be 0 numbers, one for each of the layers \[\], got 5$"):
        beta_buffers(nn.Linear(2, 2), torch.zeros(5))


def test_set_beta_stores_numbers_and_no_history():
    mixed = mix_bn(net(), verbose=False)
    set_beta(mixed, torch.tensor([0.2, 0.4], requires_grad=True) * 2)
    assert not mixed[1].beta.requires_grad
    copy.deepcopy(mixed)


def test_missing_children_and_flags_survive():
    plain = net().double()
    plain.extra = None
    plain.register_module("gone", None)
    plain[1].weight.requires_grad_(False)
    plain[3].eval()
    mixed = mix_bn(plain, verbose=False)
    assert mixed[1].training and not mixed[3][1].training
    assert not mixed[1].weight.requires_grad and mixed[1].beta.dtype == torch.float64


# --- state ---------------------------------------------------------------------------------------------------


def test_pretrained_weights_load_before_or_after_conversion():
    pretrained = trained(net(), images()).eval()
    before = mix_bn(pretrained, verbose=False)
    after = mix_bn(net(), verbose=False)
    after(images())  # moves a client's statistics, which a new pretrained model makes meaningless
    assert str(after.load_state_dict(pretrained.state_dict())) == "<All keys matched successfully>"
    for a, b in zip(before.state_dict().values(), after.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    old = {k: v for k, v in pretrained.state_dict().items() if "num_batches_tracked" not in k}  # files of before torch 0.4.1
    after.load_state_dict(old)
    close(after.eval()(x := images()), pretrained(x))


def test_own_state_round_trip():
    mixed = mix_bn(trained(net(), images()), beta=[0.2, 0.9], verbose=False).train()
    mixed(images())
    buffer = io.BytesIO()
    torch.save(mixed.state_dict(), buffer)
    buffer.seek(0)
    other = mix_bn(net(), verbose=False)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for a, b in zip(mixed.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(clone):
    mixed = mix_bn(trained(net(), images()), beta=0.3, verbose=False).train()
    mixed(images())
    other = clone(mixed)
    close(other.eval()(x := images()), mixed.eval()(x))
    set_beta(other, 1.0)
    assert mixed[1].beta == pytest.approx(0.3)


def test_num_batches_tracked_starts_anew_and_is_a_count():
    plain = trained(nn.Sequential(nn.BatchNorm2d(2, momentum=None)), images(), steps=50)
    mixed = mix_bn(plain, verbose=False).train()
    x = images() + 7
    mixed(x)  # with the 50 batches of pretraining in the count, this batch would weigh 1/51
    close(mixed[0].running_mean, x.mean((0, 2, 3)))
    assert mixed[0].num_batches_tracked.dtype == torch.int64 and mixed[0].num_batches_tracked == 1
    assert "0.num_batches_tracked" not in dict(mixed.named_parameters())


def test_device_and_type_move_together():
    mixed = mix_bn(net(), verbose=False).double()
    assert {b.dtype for name, b in mixed.named_buffers() if "tracked" not in name} == {torch.float64}
    assert beta_buffers(mixed, torch.tensor([0.1, 0.2]))["1.beta"].dtype == torch.float64


def test_repr_tells_beta_and_mode():
    assert "beta=0.5, mode='mix'" in repr(MixBatchNorm(3, beta=0.5))
