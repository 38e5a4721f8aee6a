"""What the selector can choose from, how it chooses, and its file."""

import json
import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from torch import nn

from fedl2p.bn import mix_bn
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.evaluation import evaluate
from fedl2p.finetune import finetune
from fedl2p.metanet import MetaNets, signature
from fedl2p.profile import Profile, describe_labels, profile
from fedl2p.selector import (
    FAR,
    LOOKS,
    SELECTOR,
    Candidate,
    Selector,
    candidates,
    inputs_of,
    scores_of,
    size_of,
    standardised,
    strategy_of,
)
from fedl2p.strategy import GRID, bn_c, bn_g, bn_i, bn_only, body_only, head_only

HALF = GRID[::2]


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(width=4), verbose=False)


@pytest.fixture(scope="module")
def federation():
    return digits_federation(5, 0, size=30)


def profile_with(selector, inputs):
    "A profile from the numbers that a selector is to see."
    n = len(selector.signature.bn_layers)
    return Profile((inputs[:n].exp() - 1e-6), inputs[n:-2], inputs[-2:])


def trained(model, **options):
    "A selector that has an opinion on everybody."
    selector, numbers = Selector.for_model(model, **options), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in selector.parameters():
            p.copy_(torch.randn(p.shape, generator=numbers))
        selector.center.copy_(torch.randn(len(selector.center), generator=numbers))
        selector.deviation.copy_(torch.rand(len(selector.deviation), generator=numbers) + 0.5)
        selector.reach.fill_(0.8)
    return selector


# --- candidates -----------------------------------------------------------------------------------------------


PLAIN = {
    "bn_c": (bn_c, GRID), "bn_g": (bn_g, GRID), "bn_i": (bn_i, GRID),
    "head_only": (head_only, HALF), "head_only, own statistics": (lambda m, lr: head_only(m, lr, 1.0), HALF),
    "body_only": (body_only, HALF), "body_only, own statistics": (lambda m, lr: body_only(m, lr, 1.0), HALF),
    "bn_only": (bn_only, HALF), "none": (lambda m, lr: bn_g(m, 0.0), (0.0,)), "none, own statistics": (lambda m, lr: bn_c(m, 0.0), (0.0,)),
}


def found(model, strategy):
    "The candidates that are this strategy, number by number."
    names, like = signature(model), next(model.parameters())
    made = {c: strategy_of(c, names, like) for c in candidates(bool(names.bn_layers))}
    return [c for c, s in made.items() if s.bn == strategy.bn and torch.equal(s.beta, strategy.beta) and torch.equal(s.eta, strategy.eta)]


@pytest.mark.parametrize("name", PLAIN)
def test_every_plain_strategy_is_a_candidate(model, name):
    """So what a policy gains is not gained by a finer grid than that of plain fine-tuning."""
    make, rates = PLAIN[name]
    for lr in rates:
        [candidate] = found(model, make(model, lr))
        assert candidate.lr == lr


def test_candidates_are_all_different(model):
    names, like = signature(model), next(model.parameters())
    made = [strategy_of(c, names, like) for c in candidates()]
    keys = {(s.bn, *s.beta.tolist(), *s.eta.tolist()) for s in made}
    assert len(keys) == len(made) == len(candidates()) == 3 * 8 + 2 * 2 * 4 + 2 + 4 + 8
    assert len({str(c) for c in candidates()}) == len(made)


def test_a_model_without_batch_norms_has_no_ratios_to_try():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    own = candidates(norms=False)
    assert {c.who for c in own} == {"all", "head", "body", "none"} and {c.beta for c in own} == {0.0} and len(own) == 8 + 2 * 4 + 1
    for make, rates in ((bn_g, GRID), (head_only, HALF), (body_only, HALF), (lambda m, lr: bn_g(m, 0.0), (0.0,))):
        assert all(len(found(net, make(net, lr))) == 1 for lr in rates)
    selector = Selector.for_model(net)
    assert selector.candidates == own
    strategy = selector(profile(net, torch.rand(9, 1, 8, 8)))
    assert strategy.beta.shape == (0,) and strategy.eta.shape == (4,)


def test_a_strategy_fits_the_models_type(model):
    names = signature(model)
    like = torch.zeros(1, dtype=torch.float64)
    strategy = strategy_of(Candidate("head", 1.0, 0.1), names, like)
    assert strategy.beta.dtype == strategy.eta.dtype == torch.float64
    assert [name for name, lr in zip(names.tensors, strategy.eta, strict=True) if lr] == ["head.weight", "head.bias"]
    with pytest.raises(ValueError, match="^who must be one of all, head, body, bn, batch, none, got 'tail'"):
        strategy_of(Candidate("tail", 1.0, 0.1), names, like)


def test_candidates_in_words():
    assert str(Candidate("all", 0.5, 0.03)) == "all at rate 0.03, beta 0.5"
    assert str(Candidate("none", 1.0, 0.0)) == "nothing moves, beta 1"
    assert str(Candidate("batch", 1.0, 0.1)) == "batch at rate 0.1, batch's statistics"


# --- what it looks at -----------------------------------------------------------------------------------------


def test_inputs_are_logarithms_features_and_labels(model, federation):
    x, y = federation.seen[0].train.x, federation.seen[0].train.y
    known = replace(profile(model, x), labels=describe_labels(y))
    inputs = inputs_of(known)
    assert torch.equal(inputs[:3], (known.xi + 1e-6).log()) and torch.equal(inputs[3:-2], known.feature_stats) and torch.equal(inputs[-2:], known.labels)
    assert inputs_of(profile(model, x))[-2:].tolist() == [0, 0]  # who says nothing of labels


@pytest.mark.parametrize("looks_at", [(), ("xi",), ("features",), ("labels",), LOOKS])
def test_it_looks_at_what_it_is_told_to(model, looks_at):
    selector = trained(model, looks_at=looks_at)
    state, inputs = dict(selector.state_dict()), selector.center.clone()
    parts = {"xi": slice(0, 3), "features": slice(3, -2), "labels": slice(-2, None)}
    for look, part in parts.items():
        other = inputs.clone()
        other[part] += 1
        assert torch.equal(scores_of(state, other), scores_of(state, inputs)) == (look not in looks_at)
    assert selector.distance(inputs + 100) > 10 if looks_at else selector.distance(inputs + 100) == 0
    with pytest.raises(ValueError, match="^looks_at must be one of xi, features, labels, got 'name'"):
        Selector.for_model(model, looks_at=("name",))


def test_a_selector_at_its_start_tells_nobody_apart(model, federation):
    selector = Selector.for_model(model)
    chosen = {selector.choice(profile(model, c.train.x)) for c in federation.seen}
    assert chosen == {candidates()[0]} and not selector.last.any()


def test_inputs_are_clamped(model):
    """Nothing was learned beyond three deviations, so nothing changes there."""
    selector = trained(model)
    state = dict(selector.state_dict())
    away = [scores_of(state, selector.center + d * selector.deviation) for d in (0.0, 2.9, 3.0, 3.1, 1e6)]
    assert not torch.equal(away[0], away[1]) and not torch.equal(away[1], away[2])
    for scores in away[3:]:
        torch.testing.assert_close(scores, away[2], rtol=0, atol=1e-4)


def test_size_is_in_deviations(model):
    selector = trained(model, looks_at=LOOKS)
    state = dict(selector.state_dict())
    z = torch.linspace(-2, 2, len(selector.center))
    inputs = selector.center + z * selector.deviation
    torch.testing.assert_close(standardised(state, inputs), z, rtol=0, atol=1e-5)
    assert size_of(state, inputs).item() == pytest.approx(z.square().mean().sqrt().item(), abs=1e-5)


# --- choices --------------------------------------------------------------------------------------------------


def test_far_clients_get_the_common_strategy(model):
    """From twice the most distant seen client on; and the strategy says how far it is."""
    selector = trained(model)
    direction = torch.randn(len(selector.center), generator=torch.Generator().manual_seed(2)) * selector.mask
    direction *= (selector.mask.sum() / direction.square().sum()).sqrt() * selector.deviation  # of size 1
    common = selector.candidates[int(selector.common.argmax())]
    own = []
    for distance in (0.2, 1.0, FAR - 0.01, FAR + 0.01, 20.0):
        known = profile_with(selector, selector.center + distance * selector.reach * direction)
        strategy = selector(known)
        assert strategy.distance == pytest.approx(distance, rel=1e-3)
        own.append(selector.choice(known))
        assert torch.equal(strategy.eta, selector.refined(own[-1]).eta) and strategy.bn == selector.refined(own[-1]).bn
    assert own[3:] == [common] * 2 and common not in own[:3]


def test_a_profile_of_something_else_is_refused(model):
    selector = trained(model)
    for bad in (math.nan, math.inf):
        inputs = selector.center.clone()
        inputs[4] = bad
        with pytest.raises(ValueError, match="^profile must be finite"):
            selector(profile_with(selector, inputs))
    with pytest.raises(ValueError, match="^number of inputs must be 19, as for the model that this selector was made for, got 18"):
        selector(Profile(torch.ones(2), torch.ones(14), torch.ones(2)))


def test_offsets_are_bounded(model):
    """A rate moves by a factor of ten at most, beta by a half, and what is frozen stays frozen."""
    selector = Selector.for_model(model)
    for offset, factor, beta in ((1e6, 10.0, 0.5), (-1e6, 0.1, -0.5), (0.0, 1.0, 0.0)):
        with torch.no_grad():
            selector.beta_offset.fill_(offset)
            selector.eta_offset.fill_(offset)
        for c in selector.candidates:
            base, refined = strategy_of(c, selector.signature, selector.common), selector.refined(c)
            torch.testing.assert_close(refined.eta, factor * base.eta)
            assert torch.equal(refined.eta == 0, base.eta == 0) and refined.bn == base.bn
            shifted = base.beta if base.bn == "batch" else (base.beta + beta).clamp(0, 1)
            torch.testing.assert_close(refined.beta, shifted)


def test_gradients_flow_to_the_offsets_only(model, federation):
    """Also where beta is at its end, since the clamp is straight through."""
    selector = trained(model)
    with torch.no_grad():
        selector.beta_offset.fill_(0.3)
        selector.eta_offset.fill_(0.0)
    for c in (Candidate("all", 1.0, 0.1), Candidate("head", 0.0, 0.1)):
        selector.zero_grad()
        strategy = selector.refined(c)
        (strategy.beta.sum() + strategy.eta.sum()).backward()
        assert selector.beta_offset.grad.all() and torch.equal(selector.eta_offset.grad != 0, strategy.eta != 0)
        assert all(p.grad is None for name, p in selector.named_parameters() if "offset" not in name)


def test_a_choice_can_be_followed(model, federation):
    selector, client = trained(model), federation.seen[0]
    with torch.no_grad():
        selector.eta_offset.zero_()
    strategy = selector(profile(model, client.train.x))
    assert evaluate(model, finetune(model, strategy, client.train), client.test).n == len(client.test)


# --- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_selector_comes_back_from_its_file(model, federation, tmp_path, dtype):
    selector, path = trained(model, hidden=7, looks_at=("xi", "labels")).to(dtype), tmp_path / "selector.safetensors"
    selector.save(path, note="mine")
    again = Selector.load(path, model)
    assert all(torch.equal(t, again.state_dict()[k]) and again.state_dict()[k].dtype == t.dtype for k, t in selector.state_dict().items())
    assert (again.hidden, again.looks_at, again.candidates, again.signature) == (7, ("xi", "labels"), selector.candidates, selector.signature)
    for client in federation.seen:
        a, b = (s(profile(model, client.train.x)) for s in (selector, again))
        assert torch.equal(a.beta, b.beta) and torch.equal(a.eta, b.eta) and (a.bn, a.distance) == (b.bn, b.distance)


def test_the_file_names_what_it_chooses_from(model, tmp_path):
    path = tmp_path / "selector.safetensors"
    Selector.for_model(model).save(path, note="mine")
    with safe_open(path, framework="pt") as file:
        header, names = file.metadata(), set(file.keys())
    assert header["format"] == SELECTOR and header["note"] == "mine"
    assert [Candidate(*c) for c in json.loads(header["candidates"])] == list(candidates())
    assert json.loads(header["tensors"]) == [name for name, _ in model.named_parameters()]
    assert names == {"common", "first", "first_bias", "last", "beta_offset", "eta_offset", "center", "deviation", "reach", "mask"}


def test_files_of_other_models_and_policies_are_refused(model, tmp_path):
    path = tmp_path / "selector.safetensors"
    Selector.for_model(model).save(path)
    with pytest.raises(ValueError, match="was learned for another model: 3 bn_layers in the file, 0 in the model"):
        Selector.load(path, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    with pytest.raises(ValueError, match="format of .* must be 'fedl2p metanets"):
        MetaNets.load(path, model)
    MetaNets.for_model(model, 0.1).save(path)
    with pytest.raises(ValueError, match="format of .* must be 'fedl2p selector 1'"):
        Selector.load(path, model)
    path.write_bytes(b"oops")
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        Selector.load(path, model)
    with pytest.raises(FileNotFoundError):
        Selector.load(tmp_path / "nothing", model)


def test_a_file_keeps_its_own_list(model, tmp_path):
    """Numbers in a file mean the candidates that it names, whatever the list of today is."""
    selector, path = trained(model), tmp_path / "selector.safetensors"
    selector.candidates = selector.candidates[::-1]
    selector.save(path)
    known = profile_with(selector, selector.center)
    assert Selector.load(path, model).choice(known) == selector.choice(known)


def test_seeds_and_copies(model):
    a, b, c = (Selector.for_model(model, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a.first, b.first) and not torch.equal(a.first, c.first)
    assert torch.equal(deepcopy(a).first, a.first)
