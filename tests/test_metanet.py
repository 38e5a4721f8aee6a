"""fedl2p.metanet: strategies, meta-nets, and policies on disk."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from fedl2p.bn import mix_bn
from fedl2p.digits import small_cnn
from fedl2p.metanet import BNNet, LRNet, MetaNets, signature, straight_through_clamp
from fedl2p.profile import Profile, profile
from fedl2p.strategy import Strategy, bn_c, bn_g, bn_i, bn_only, body_only, eta_by_name, head_only

floats = st.floats(-1e4, 1e4, width=32)


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(), verbose=False)


@pytest.fixture(scope="module")
def client(model):
    return profile(model, torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)))


def rates(model, strategy):
    return {name for name, eta in eta_by_name(model, strategy).items() if eta != 0}


# --- strategies ----------------------------------------------------------------------------------------------


def test_baselines_tune_everything(model):
    for make, beta, bn in ((bn_c, 1, "mix"), (bn_g, 0, "mix"), (bn_i, 1, "batch")):
        s = make(model, lr=0.02)
        assert s.beta.tolist() == [beta] * 3 and s.bn == bn
        assert torch.equal(s.eta, torch.full((11,), 0.02))


def test_what_each_strategy_tunes(model):
    every = {name for name, _ in model.named_parameters()}
    head, norms = {"head.weight", "head.bias"}, {n for n in every if n.startswith("bn")}
    assert rates(model, head_only(model, 0.1)) == head
    assert rates(model, body_only(model, 0.1)) == every - head
    assert rates(model, bn_only(model, 0.1)) == norms
    assert rates(model, head_only(model, 0.1, head="conv3")) == {"conv3.weight"}


def test_strategies_are_the_same_before_and_after_conversion(model):
    for make in (bn_c, bn_g, bn_i, head_only, body_only, bn_only):
        a, b = make(small_cnn(), 0.1), make(model, 0.1)
        assert torch.equal(a.beta, b.beta) and torch.equal(a.eta, b.eta)


def test_wrong_words(model):
    with pytest.raises(ValueError, match="head is 'fc'; allowed are conv1, bn1, .*, head"):
        head_only(model, 0.1, head="fc")
    with pytest.raises(ValueError, match="bn is 'local'; allowed are mix, batch, pretrained"):
        Strategy(torch.zeros(3), torch.zeros(11), bn="local")
    with pytest.raises(ValueError, match="eta has 5 numbers; allowed are 11"):
        eta_by_name(model, Strategy(torch.zeros(3), torch.zeros(5)))
    with pytest.raises(ValueError, match="allowed are finite numbers"):
        eta_by_name(model, Strategy(torch.zeros(3), torch.full((11,), torch.inf)))
    with pytest.raises(ValueError, match="beta is 0.5; allowed is a tensor"):
        Strategy(0.5, torch.zeros(11))
    with pytest.raises(ValueError, match="lr is nan and beta 1.0; allowed are a finite number"):
        bn_c(model, float("nan"))
    with pytest.raises(ValueError, match=r"beta 5; allowed are a finite number, and one in \[0, 1\]"):
        head_only(model, 0.1, beta=5)
    with pytest.raises(ValueError, match="model has no parameters that this strategy would tune"):
        bn_only(nn.Linear(2, 2), 0.1)


def test_a_head_of_several_layers():
    net = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))})
    assert rates(net, head_only(net, 0.1, head="head")) == {n for n, _ in net.named_parameters() if n.startswith("head")}
    assert rates(net, body_only(net, 0.1, head="head")) == {"body.weight", "body.bias"}


def test_repr_is_short(model):
    text = repr(head_only(model, 0.1))
    assert text == "Strategy(bn='mix', beta [3] from 0 to 0, eta [11] from 0 to 0.1, frozen tensors 9)"
    assert "beta []" in repr(Strategy(torch.zeros(0), torch.ones(1)))


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
    with pytest.raises(ValueError, match="profile.xi has 7 numbers, 0 not finite; allowed are 3"):
        MetaNets.for_model(model, lr=0.1)(Profile(torch.zeros(7), torch.zeros(14)))
    with pytest.raises(ValueError, match="profile.feature_stats has 2 numbers, 0 not finite; allowed are 14"):
        MetaNets.for_model(model, lr=0.1)(Profile(torch.zeros(3), torch.zeros(2)))


def test_profile_that_is_not_finite(model, client):
    with pytest.raises(ValueError, match="profile.xi has 3 numbers, 3 not finite"):
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


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_truncated_files(saved, model, keep):
    data = saved[1].read_bytes()
    saved[1].write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        MetaNets.load(saved[1], model)


def test_files_of_something_else(model, tmp_path):
    text, tensors = tmp_path / "notes.txt", tmp_path / "model.safetensors"
    text.write_text("dear diary, today I pretrained a network, and tomorrow I shall personalize it")
    save_file(dict(model.state_dict()), tensors)
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        MetaNets.load(text, model)
    with pytest.raises(ValueError, match="is another kind of file; its format is None"):
        MetaNets.load(tensors, model)
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"path is {path}; there is no such file"):
            MetaNets.load(path, model)
    for path in (tmp_path / "no" / "folder", tmp_path, ""):
        with pytest.raises(FileNotFoundError, match="allowed is a file in a folder that exists"):
            MetaNets.for_model(model, lr=0.1).save(path)


def test_double_policies_stay_double(model, tmp_path):
    MetaNets.for_model(model, lr=0.1).double().save(tmp_path / "p")
    assert MetaNets.load(tmp_path / "p", model).eta_scale.dtype == torch.float64


def test_a_failed_save_leaves_the_old_file(saved, model, monkeypatch):
    nets, path = saved
    before = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        MetaNets.for_model(model, lr=0.5).save(path)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name]
