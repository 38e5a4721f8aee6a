"""fedl2p.profile: Eq. 3 and the statistics behind it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Normal, kl_divergence

from fedl2p.bn import mix_bn
from fedl2p.digits import SHIFTS, digits, fit, shift, small_cnn
from fedl2p.profile import (
    Moments,
    input_moments,
    learnable_layers,
    moments,
    pretrained_statistics,
    profile,
    symmetric_kl,
)

means, variances = st.floats(-20, 20), st.floats(1e-3, 50)


def close(a, b, tol=1e-5):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def double(*values):
    return [torch.tensor(v, dtype=torch.float64) for v in values]


# --- the distance --------------------------------------------------------------------------------------------


@given(means, variances, means, variances)
def test_kl_is_that_of_torch_distributions(mp, vp, mq, vq):
    mp, vp, mq, vq = double(mp, vp, mq, vq)
    p, q = Normal(mp, vp.sqrt()), Normal(mq, vq.sqrt())
    close(symmetric_kl(mp, vp, mq, vq, eps=0), (kl_divergence(p, q) + kl_divergence(q, p)) / 2, 1e-7)


@given(means, st.floats(0, 50), means, st.floats(0, 50))
def test_kl_is_a_finite_symmetric_distance(mp, vp, mq, vq):
    mp, vp, mq, vq = (t.float() for t in double(mp, vp, mq, vq))
    value = symmetric_kl(mp, vp, mq, vq)
    assert value.isfinite() and value >= 0
    close(value, symmetric_kl(mq, vq, mp, vp))
    assert symmetric_kl(mp, vp, mp, vp) == 0


# --- moments -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(1, 4), st.floats(-1e3, 1e3), st.integers(0, 1000))
def test_moments_of_parts_are_moments_of_all(sizes, channels, offset, seed):
    x = torch.randn(sum(sizes), channels, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset
    merged = Moments(0, torch.zeros(channels).double(), torch.zeros(channels).double())
    for part in x.split(sizes):
        merged = merged.merge(moments(part))
    assert merged.n == len(x) * 3
    close(merged.mean, x.mean((0, 2)), 1e-9)
    close(merged.var, x.transpose(0, 1).flatten(1).var(1), 1e-7)
    close(merged.pool().mean[0], x.mean(), 1e-9)
    close(merged.pool().var[0], x.var(), 1e-7)


def test_one_value_has_no_variance():
    assert moments(torch.ones(1, 2)).var.tolist() == [0, 0]


# --- the profile ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    x, y = digits()
    return fit(small_cnn(width=4), x[:500], y[:500], epochs=3)


@settings(max_examples=20, deadline=None)
@given(batch_size=st.integers(1, 70), seed=st.integers(0, 1000), n=st.integers(1, 60))
def test_batch_size_and_order_do_not_matter(model, batch_size, seed, n):
    x = digits()[0][:n]
    shuffled = x[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]
    one, other = profile(model, x), profile(model, shuffled, batch_size=batch_size)
    close(one.xi, other.xi)
    close(one.feature_stats, other.feature_stats)


def test_against_all_activations_kept(model):
    x = shift(digits()[0][:100], "noisy")
    kept, p = {}, profile(model, x)
    hooks = [m.register_forward_pre_hook(lambda m, args, name=name: kept.update({name: args[0]})) for name, m in learnable_layers(model).items()]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    expected = [f(kept[name]) for name in learnable_layers(model) for f in (torch.mean, lambda t: (t.var() + 1e-5).sqrt())]
    close(p.feature_stats, torch.stack(expected))
    for xi, (name, (mean, var)) in zip(p.xi, pretrained_statistics(model).items(), strict=True):
        channels = kept[name].transpose(0, 1).flatten(1)
        close(xi, symmetric_kl(channels.mean(1), channels.var(1), mean, var).mean())


def test_shifted_clients_differ_from_clean_and_from_each_other(model):
    profiles = {kind: profile(model, shift(digits()[0][500:], kind)) for kind in SHIFTS}
    vectors = torch.stack([torch.cat([p.xi.log(), p.feature_stats]) for p in profiles.values()])
    distances = torch.cdist(vectors, vectors) + 9 * torch.eye(len(SHIFTS))
    assert distances.min() > 0.1
    for kind in SHIFTS[1:]:
        assert (profiles[kind].xi > profiles["clean"].xi).all()


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_beta_and_client_statistics_do_not_matter(model, beta):
    x = digits()[0][:64]
    mixed = mix_bn(model, beta=beta, verbose=False).train()
    mixed(x * 5)
    one, other = profile(model, x), profile(mixed, x)
    close(one.xi, other.xi)
    close(one.feature_stats, other.feature_stats)


def test_the_model_is_left_as_it_was(model):
    mixed = mix_bn(model, beta=0.5, verbose=False).train()
    mixed.bn2.eval()
    before, modes = {k: v.clone() for k, v in mixed.state_dict().items()}, [m.training for m in mixed.modules()]
    result = profile(mixed, digits()[0][:8])
    assert not result.xi.requires_grad
    assert modes == [m.training for m in mixed.modules()] and mixed.bn1.mode == "mix"
    assert all(torch.equal(before[k], v) for k, v in mixed.state_dict().items())
    assert not any(m._forward_pre_hooks for m in mixed.modules())


def test_hooks_go_away_when_the_forward_pass_raises(model):
    mixed = mix_bn(model, verbose=False).train()
    with pytest.raises(RuntimeError):
        profile(mixed, torch.zeros(2, 5, 8, 8))
    assert not any(m._forward_pre_hooks for m in mixed.modules())
    assert mixed.training and mixed.bn1.training and mixed.bn1.mode == "mix"


class Twice(nn.Module):
    def __init__(self, spare=False):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.spare = nn.ModuleDict({"aux": nn.Linear(2, 2)}) if spare else None

    def forward(self, x):
        return self.linear(input=self.linear(x))


def test_a_layer_called_twice_counts_twice_and_by_keyword():
    model, x = Twice(), torch.randn(10, 2)
    inner = model.linear(x)
    both = torch.cat([x, inner])
    close(profile(model, x, batch_size=3).feature_stats[0], both.mean().detach())


def test_a_layer_never_called_is_named():
    with pytest.raises(ValueError, match="never calls: spare.aux;"):
        profile(Twice(spare=True), torch.randn(3, 2))


def test_dead_channel_and_single_sample_are_finite():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))
    nn.init.zeros_(model[0].weight)
    p = profile(model, torch.randn(1, 1, 1, 1))
    assert p.xi.isfinite().all() and p.feature_stats.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_data_are_named(model, bad):
    x = digits()[0][:4].clone()
    x[1, 0, 3, 3] = bad
    with pytest.raises(ValueError, match="what enters layer 'conv1' is not finite"):
        profile(model, x)


def test_no_data(model):
    with pytest.raises(ValueError, match=r"^x must be a tensor \[N, ...\] of at least one sample, got an empty one$"):
        profile(model, torch.zeros(0, 1, 8, 8))
    with pytest.raises(ValueError, match=r"^x must be a tensor \[N, ...\] of at least one sample, got list$"):
        profile(model, [torch.zeros(1, 1, 8, 8)])
    with pytest.raises(ValueError, match="^batch_size must be >= 1, got 0$"):
        profile(model, torch.zeros(1, 1, 8, 8), batch_size=0)
    with pytest.raises(ValueError, match="^eps must be > 0, got -1$"):
        profile(model, torch.zeros(1, 1, 8, 8), eps=-1)


def test_layers_that_get_no_tensor_are_named():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="^layer '0.parametrizations.weight' must be called with a tensor first, got NoneType$"):
        profile(model, torch.randn(3, 2))


def test_unknown_names(model):
    with pytest.raises(ValueError, match="^names must be names of the model's modules, got conv9$"):
        input_moments(model, ["conv1", "conv9"], torch.zeros(1, 1, 8, 8))


def test_models_without_batch_norm_or_parameters():
    p = profile(nn.Sequential(nn.Linear(3, 2)), torch.randn(5, 3))
    assert (p.xi.shape, p.feature_stats.shape) == ((0,), (2,))
    p = profile(nn.ReLU(), torch.randn(5, 3))
    assert (p.xi.shape, p.feature_stats.shape) == ((0,), (0,))


def test_batch_norms_without_parameters_or_statistics():
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 1))
    assert list(pretrained_statistics(model)) == ["0"] and list(learnable_layers(model)) == ["1", "2"]
    p = profile(model, torch.randn(5, 3))
    assert (len(p.xi), len(p.feature_stats)) == (1, 4)


def test_attention_models():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    p = profile(model, torch.randn(3, 5, 8))
    assert len(p.feature_stats) == 2 * len(learnable_layers(model)) and p.feature_stats.isfinite().all()


@pytest.mark.parametrize("convert", [lambda m: m, lambda m: mix_bn(m, verbose=False)])
def test_resnet18_counts(convert):
    from torchvision.models import resnet18

    model = convert(resnet18())
    counts = len(pretrained_statistics(model)), len(learnable_layers(model)), len(list(model.parameters()))
    assert counts == (20, 41, 62)
    p = profile(model, torch.randn(2, 3, 32, 32))
    assert (len(p.xi), len(p.feature_stats)) == (20, 82)


def test_double_models_get_double_profiles(model):
    import copy

    p = profile(copy.deepcopy(model).double(), digits()[0][:10].double())
    assert p.xi.dtype == p.feature_stats.dtype == torch.float64


def test_the_size_of_batches_matters_to_untracked_batch_norms_only():  # A9
    torch.manual_seed(0)
    x = torch.randn(65, 6) * torch.arange(1, 66)[:, None]
    for tracked in (True, False):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=tracked), nn.ReLU(), nn.Linear(8, 3)).eval()
        whole, parts = profile(model, x, 65).feature_stats, profile(model, x, 32).feature_stats
        assert torch.allclose(whole, parts, rtol=1e-4) == tracked
