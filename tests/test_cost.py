"""What things cost: wrong arguments, models left as they were, counts of operations and bytes."""

from dataclasses import replace

import pytest
import torch

from fedl2p.bn import mix_bn
from fedl2p.config import Config
from fedl2p.cost import communication, costs, flops, meta_gradients
from fedl2p.data import Client, Data
from fedl2p.digits import small_cnn
from fedl2p.measure import count_flops
from fedl2p.metanet import MetaNets
from fedl2p.studies.models import small_resnet


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(width=4), verbose=False).eval()


@pytest.fixture(scope="module")
def client():
    numbers = torch.Generator().manual_seed(0)
    data = Data(torch.rand(15, 1, 8, 8, generator=numbers), torch.randint(10, (15,), generator=numbers))
    return Client("a", data[:10], data[10:], data[:0])


@pytest.fixture(scope="module")
def functions(model, client):
    return meta_gradients(model, client, Config.paper(epochs=1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flops(small_cnn(), torch.empty(0, 1, 8, 8)), "number of samples must be >= 1, got 0"),
        (lambda: flops(small_cnn(), [1]), "x must be a tensor .*, got 'list'"),
        (lambda: flops(small_cnn(), torch.rand(2, 1, 8, 8)), "batch norms that cannot mix"),
        (lambda: communication(small_cnn(), clients=0), "^clients must be >= 1, got 0"),
        (lambda: communication(small_cnn(), pretraining_rounds=0), "pretraining_rounds must be >= 1, got 0"),
        (lambda: communication(small_cnn(), pretraining_clients=0), "pretraining_clients must be >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_client_without_validation_samples_is_refused(model, client):
    with pytest.raises(ValueError, match="val is empty"):
        meta_gradients(model, replace(client, val=client.val[:0]))


def test_estimates_are_finite_and_leave_the_model_alone(model, functions):
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.train()
    estimates = {name: run() for name, run in functions.items()}
    assert model.training
    model.eval()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    for name, estimate in estimates.items():
        parts = estimate[0] if name == "gradient" else estimate
        assert all(t.isfinite().all() for t in parts.values())
    assert estimates["FO-MAML"].keys() == estimates["IFT exact"].keys() == {"beta", "eta"}
    assert estimates["HF-MAML"].keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("terms", [0, 1, 3])
def test_differences_cost_whole_gradients(model, client, terms):
    functions = meta_gradients(model, client, Config.paper(epochs=1, neumann_terms=terms))
    one = count_flops(functions["gradient"])
    assert count_flops(functions["IFT central"]) == (1 + 2 * (terms + 1)) * one
    assert count_flops(functions["IFT forward"]) == (2 + terms + 1) * one
    assert count_flops(functions["IFT exact"]) >= (2 + 2 * (terms + 1)) * one


def test_the_batch_size_is_what_counts_not_the_number_of_samples(model, client, functions):
    double = meta_gradients(model, client, Config.paper(epochs=1, batch_size=64))
    assert count_flops(double["gradient"]) == 2 * count_flops(functions["gradient"])


def test_flops_scale_with_epochs_and_images(model, client):
    work = flops(model, client.train.x, Config.paper(epochs=2))
    assert flops(model, client.train.x, Config.paper(epochs=6))["fine-tuning"] == 3 * work["fine-tuning"]
    assert flops(model, client.train.x.repeat(2, 1, 1, 1), Config.paper(epochs=2))["profiling"] == 2 * work["profiling"]
    assert work["share"] == (work["profiling"] + work["meta-nets"]) / work["fine-tuning"]


def test_bytes_are_those_of_the_tensors_that_travel():
    plain = small_resnet()
    sent = communication(plain, Config.paper(rounds=10, fraction=0.1), clients=50, pretraining_rounds=20, pretraining_clients=4)
    assert sent == communication(mix_bn(plain, verbose=False), Config.paper(rounds=10, fraction=0.1), 50, 20, 4)
    assert sent["lambda"] == 4 * sum(p.numel() for p in MetaNets.for_model(plain, 1e-3).parameters())
    assert sent["model"] == sum(t.numel() * t.element_size() for t in plain.state_dict().values())
    assert sent["a round"] == 2 * 5 * sent["lambda"] and sent["all rounds"] == 10 * sent["a round"]
    assert sent["pretraining"] == 2 * 20 * 4 * sent["model"] and sent["model once"] == 50 * sent["model"]


def test_each_estimator_has_its_costs(model, client, functions):
    measured = costs(model, client, Config.paper(epochs=1), repeats=1, memory=False)
    assert {name: cost.flops for name, cost in measured.items()} == {name: count_flops(f) for name, f in functions.items()}
    assert measured["gradient"].ratio == 1 and all(c.seconds > 0 and c.megabytes is None for c in measured.values())
