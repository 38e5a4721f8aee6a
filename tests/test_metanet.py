"""fedl2p.metanet: meta-nets, and policies on disk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from fedl2p.bn import mix_bn
from fedl2p.digits import small_cnn
from fedl2p.metanet import BNNet, LRNet, MetaNets, signature, straight_through_clamp
from fedl2p.profile import Profile, profile

floats = st.floats(-1e4, 1e4, width=32)


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(), verbose=False)


@pytest.fixture(scope="module")
def client(model):
    return profile(model, torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)))


# --- the clamp -----------------------------------------------------------------------------------------------


@given(st.lists(floats, min_size=1, max_size=5), floats, floats)
def test_straight_through_clamp(values, a, b):
    low, high = min(a, b), max(a, b)
    x = torch.tensor(values, requires_grad=True)
    out = straight_through_clamp(x, low, high)
    assert torch.equal(out, x.clamp(low, high))  # to the last bit: beta = 1 may not become 1.0000001
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones_like(x))


@settings(max_examples=30, deadline=None)
@given(st.floats(-1e3, 1e3), st.integers(0, 50))
def test_outputs_stay_in_their_ranges(scale, seed):
    generator = torch.Generator().manual_seed(seed)
    beta, factor = BNNet(4, generator=generator), LRNet(6, 5, generator=generator)
    assert 0 <= beta(torch.randn(4) * scale).min() and beta(torch.randn(4) * scale).max() <= 1
    out = factor(torch.randn(6) * scale * 1e4)
    assert out.min() >= 0 and out.max() <= 1000


# --- meta-nets -----------------------------------------------------------------------------------------------


def test_start_values(model, client):
    strategies = [MetaNets.for_model(model, lr=0.01, seed=seed)(client) for seed in range(100)]
    beta, factor = torch.stack([s.beta for s in strategies]), torch.stack([s.eta for s in strategies]) / 0.01
    assert abs(beta.mean() - 0.5) < 0.03 and abs(factor.mean() - 1) < 0.03
    assert beta.std() < 0.15 and factor.std() < 0.2
    nets = MetaNets.for_model(model, lr=0.01)
    assert torch.equal(nets.eta_scale, torch.full((11,), 0.01))
    for net, bias in ((nets.bn_net, 0.5), (nets.lr_net, 1.0)):
        linears = [m for m in net.modules() if isinstance(m, nn.Linear)]
        assert [m.out_features for m in linears[:2]] == [100, 100] and len(linears) == 3
        for m in linears:
            assert (m.bias == bias).all()
            expected = 0.1 * (2 / (m.in_features + m.out_features)) ** 0.5  # Xavier-normal with gain 0.1
            assert m.weight.std().item() == pytest.approx(expected, rel=0.25)


def test_resnet18_size():
    from torchvision.models import resnet18

    nets = MetaNets.for_model(resnet18(num_classes=10), lr=1e-3)
    assert sum(p.numel() for p in nets.parameters()) == 14_220 + 24_662 + 62


def test_seeds_and_the_global_random_state(model):
    before = torch.get_rng_state()
    a, b, c = (MetaNets.for_model(model, 0.1, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["lr_net.mlp.0.weight"], c["lr_net.mlp.0.weight"])


def test_learning_rates_may_become_negative(model, client):
    nets = MetaNets.for_model(model, lr=0.1)
    with torch.no_grad():
        nets.eta_scale.neg_()
    assert (nets(client).eta < 0).all()


def test_gradients_reach_all_of_lambda_also_through_the_clamp(model, client):
    nets = MetaNets.for_model(model, lr=0.1)
    with torch.no_grad():
        nets.bn_net.mlp[-1].bias.fill_(5.0)  # beta is far outside and clamped to 1
    s = nets(client)
    assert (s.beta == 1).all()
    torch.autograd.backward([s.beta, s.eta], [torch.ones(3), torch.ones(11)])
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in nets.parameters())


def test_many_clients_at_once(model, client):
    nets = MetaNets.for_model(model, lr=0.1)
    both = nets(Profile(torch.stack([client.xi, 2 * client.xi]), torch.stack([client.feature_stats, client.feature_stats])))
    assert both.beta.shape == (2, 3) and both.eta.shape == (2, 11)
    torch.testing.assert_close(both.beta[0], nets(client).beta)


def test_without_batch_norms():
    model = nn.Sequential(nn.Linear(3, 2))
    nets = MetaNets.for_model(model, lr=0.1)
    s = nets(profile(model, torch.randn(4, 3)))
    assert s.beta.shape == (0,) and s.eta.shape == (2,)


def test_profile_of_another_model(model):
    with pytest.raises(ValueError, match="^profile.xi must be 3 numbers, as for the model that these meta-nets were made for, got 7$"):
        MetaNets.for_model(model, lr=0.1)(Profile(torch.zeros(7), torch.zeros(14)))
    with pytest.raises(ValueError, match="^profile.feature_stats must be 14 numbers, .*, got 2$"):
        MetaNets.for_model(model, lr=0.1)(Profile(torch.zeros(3), torch.zeros(2)))


def test_profile_that_is_not_finite(model, client):
    with pytest.raises(ValueError, match="^profile.xi must be finite, got 3 of 3 numbers that are not$"):
        MetaNets.for_model(model, lr=0.1)(Profile(client.xi * float("nan"), client.feature_stats))


def test_double_models_and_profiles(model, client):
    nets = MetaNets.for_model(small_cnn().double(), lr=0.1)
    s = nets(Profile(client.xi.double(), client.feature_stats.double()))
    torch.testing.assert_close(s.eta, MetaNets.for_model(model, lr=0.1)(client).eta)


# --- on disk -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(model, tmp_path):
    nets = MetaNets.for_model(model, lr=0.1, hidden=20, seed=5)
    nets.save(tmp_path / "policy.safetensors")
    return nets, tmp_path / "policy.safetensors"


def test_round_trip(saved, model, client, tmp_path):
    nets, path = saved
    for target in (model, small_cnn()):
        again = MetaNets.load(path, target)
        assert all(torch.equal(a, b) for a, b in zip(nets.state_dict().values(), again.state_dict().values(), strict=True))
        assert torch.equal(again(client).eta, nets(client).eta)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    assert "conv1.weight" in header["tensors"] and "bn3" in header["bn_layers"] and header["fedl2p"]
    assert [p.name for p in tmp_path.iterdir()] == ["policy.safetensors"]


def test_another_model(saved):
    other = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    with pytest.raises(ValueError, match="was learned for another model: 3 bn_layers in the file, 1 in the model, first difference '1'"):
        MetaNets.load(saved[1], other)


def test_the_same_layers_in_another_order(tmp_path):
    a, b = nn.Module(), nn.Module()
    a.one, a.two = nn.Linear(2, 2), nn.Linear(2, 2)
    b.two, b.one = nn.Linear(2, 2), nn.Linear(2, 2)
    MetaNets.for_model(a, lr=0.1).save(tmp_path / "p")
    assert signature(a) != signature(b)
    with pytest.raises(ValueError, match="the same names in another order"):
        MetaNets.load(tmp_path / "p", b)


def test_double_policies_stay_double(model, tmp_path):
    MetaNets.for_model(model, lr=0.1).double().save(tmp_path / "p")
    assert MetaNets.load(tmp_path / "p", model).eta_scale.dtype == torch.float64
