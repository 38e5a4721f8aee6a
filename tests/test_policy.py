"""Lambda as a function and as tensors: where it starts, what it looks at, what a configuration makes of it."""

from dataclasses import replace

import pytest
import torch

from fedl2p.bn import mix_bn
from fedl2p.config import Config
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.policy import personal_profile, policy, profile_of, untrained, with_state

PAPER = Config.paper(lr=0.05)


@pytest.fixture(scope="module")
def client():
    return digits_federation(5, 5, size=30).seen[0]


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(width=4), verbose=False)


def moved(state):
    return {name: t + 0.1 for name, t in state.items()}


def test_one_meta_net_is_replaced_by_constants(model, client):
    metanets, known = untrained(model, PAPER), profile_of(model, PAPER, client.train, ("x",))
    both = policy(metanets, known, PAPER)
    lr, bn = (policy(metanets, known, replace(PAPER, learn=learn, beta=1.0)) for learn in ("lr", "bn"))
    assert lr.beta.tolist() == [1, 1, 1] and torch.equal(lr.eta, both.eta)
    assert set(bn.eta.tolist()) == {torch.tensor(0.05).item()} and torch.equal(bn.beta, both.beta)
    assert [t.requires_grad for t in (lr.beta, lr.eta, bn.beta, bn.eta)] == [False, True, True, False]


@pytest.mark.parametrize("config", [PAPER, replace(PAPER, inputs="standard"), Config()], ids=["raw", "standard", "trials"])
def test_a_state_makes_the_policy_that_it_came_from(model, config):
    state = moved(untrained(model, config).state_dict())
    again = with_state(model, config, state).state_dict()
    assert again.keys() == state.keys() and all(torch.equal(t, state[name]) for name, t in again.items())


def test_untrained_keeps_what_was_known_before_hypergradients(model):
    """Mean and deviation of the inputs, and what trials chose; not what rounds learned."""
    for config, learned in {replace(PAPER, inputs="standard"): ("bn_net", "lr_net", "eta_scale"), Config(): ("beta_offset", "eta_offset")}.items():
        new, state = untrained(model, config).state_dict(), moved(untrained(model, config).state_dict())
        for name, t in untrained(model, config, state).state_dict().items():
            assert torch.equal(t, new[name] if name.startswith(learned) else state[name]), name


def test_the_same_client_has_the_same_profile_each_time(model, client):
    config = replace(PAPER, augment="crop-flip")
    first, again, other = (personal_profile(model, config, client.train, id).xi for id in ("a", "a", "b"))
    assert torch.equal(first, again) and not torch.equal(first, other)
