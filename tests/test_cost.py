"""What things cost: wrong arguments, a process that measures and ends, models left as they were, figures and tables."""

import os
import sys
from dataclasses import replace

import pytest
import torch

from fedl2p.bn import mix_bn
from fedl2p.client import Config
from fedl2p.cost import PAPER, Cost, communication, costs, figures, flops, meta_gradients, table
from fedl2p.data import Client, Data
from fedl2p.digits import small_cnn
from fedl2p.measure import count_flops, peak_memory, seconds
from fedl2p.metanet import MetaNets
from fedl2p.studies.models import small_resnet

linux = pytest.mark.skipif(sys.platform != "linux", reason="peaks can be started anew on Linux only")


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
    return meta_gradients(model, client, Config(epochs=1))


# --- measure


@linux
def test_a_known_allocation_in_a_process_that_has_ended(tmp_path):
    def work():
        with open(tmp_path / "pids", "a") as file:
            file.write(f"{os.getpid()}\n")
        print("a function may print")
        torch.ones(10_000_000)

    assert peak_memory(work) == pytest.approx(40, abs=2)
    first, second = map(int, (tmp_path / "pids").read_text().split())
    assert first == second != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@linux
def test_a_function_that_fails_in_its_process_says_why():
    with pytest.raises(RuntimeError, match="process of its own: ZeroDivisionError: division by zero"):
        peak_memory(lambda: 1 / 0)


def test_memory_that_cannot_be_known_is_none(monkeypatch, tmp_path):
    assert peak_memory(lambda: None, "meta") is None
    monkeypatch.setattr("fedl2p.measure._RESET", tmp_path / "no such file")
    assert peak_memory(lambda: None) is None


def test_the_counter_ends_with_the_call():
    with pytest.raises(ZeroDivisionError):
        count_flops(lambda: 1 / 0)
    x = torch.ones(3, 4)
    assert count_flops(lambda: x @ x.T) == 2 * 3 * 3 * 4
    assert count_flops(lambda: x + x) == 0


def test_functions_take_turns_after_one_call_that_does_not_count():
    order = []
    found = seconds({name: lambda name=name: order.append(name) for name in "ab"}, repeats=2)
    assert "".join(order) == "ababab"
    assert list(found) == ["a", "b"] and found["a"].ratio == 1 and found["b"].seconds > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: seconds({}), "functions has 0 entries .* allowed are at least one"),
        (lambda: seconds({"a": int}, repeats=0), "repeats is 0; allowed are .* whole numbers from 1 on"),
        (lambda: peak_memory(3), "function is 3; allowed is a function"),
        (lambda: flops(small_cnn(), torch.empty(0, 1, 8, 8)), "x is empty; allowed is a tensor"),
        (lambda: flops(small_cnn(), [1]), "x is a list; allowed is a tensor"),
        (lambda: flops(small_cnn(), torch.rand(2, 1, 8, 8)), "batch norms that cannot mix"),
        (lambda: communication(small_cnn(), clients=0), "clients is 0; allowed are whole numbers from 1 on"),
        (lambda: communication(small_cnn(), pretraining_rounds=0), "pretraining_rounds is 0; allowed"),
        (lambda: communication(small_cnn(), pretraining_clients=0), "pretraining_clients is 0; allowed"),
        (lambda: table({}), "columns is empty; allowed is at least one"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- cost


def test_a_client_without_validation_samples_is_refused(model, client):
    with pytest.raises(ValueError, match="val is empty"):
        meta_gradients(model, replace(client, val=client.val[:0]))


def test_estimates_are_finite_and_leave_the_model_alone(model, functions):
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.train()
    found = {name: run() for name, run in functions.items()}
    assert model.training
    model.eval()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    for name, estimate in found.items():
        parts = estimate[0] if name == "gradient" else estimate
        assert all(t.isfinite().all() for t in parts.values())
    assert found["FO-MAML"].keys() == found["IFT exact"].keys() == {"beta", "eta"}
    assert found["HF-MAML"].keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("terms", [0, 1, 3])
def test_differences_cost_whole_gradients(model, client, terms):
    functions = meta_gradients(model, client, Config(epochs=1, neumann_terms=terms))
    one = count_flops(functions["gradient"])
    assert count_flops(functions["IFT central"]) == (1 + 2 * (terms + 1)) * one
    assert count_flops(functions["IFT forward"]) == (2 + terms + 1) * one
    assert count_flops(functions["IFT exact"]) >= (2 + 2 * (terms + 1)) * one


def test_the_batch_size_is_what_counts_not_the_number_of_samples(model, client, functions):
    double = meta_gradients(model, client, Config(epochs=1, batch_size=64))
    assert count_flops(double["gradient"]) == 2 * count_flops(functions["gradient"])


def test_flops_scale_with_epochs_and_images(model, client):
    work = flops(model, client.train.x, Config(epochs=2))
    assert flops(model, client.train.x, Config(epochs=6))["fine-tuning"] == 3 * work["fine-tuning"]
    assert flops(model, client.train.x.repeat(2, 1, 1, 1), Config(epochs=2))["profiling"] == 2 * work["profiling"]
    assert work["share"] == (work["profiling"] + work["meta-nets"]) / work["fine-tuning"]


def test_bytes_are_those_of_the_tensors_that_travel():
    plain = small_resnet()
    found = communication(plain, Config(rounds=10, fraction=0.1), clients=50, pretraining_rounds=20, pretraining_clients=4)
    assert found == communication(mix_bn(plain, verbose=False), Config(rounds=10, fraction=0.1), 50, 20, 4)
    assert found["lambda"] == 4 * sum(p.numel() for p in MetaNets.for_model(plain, 1e-3).parameters())
    assert found["model"] == sum(t.numel() * t.element_size() for t in plain.state_dict().values())
    assert found["a round"] == 2 * 5 * found["lambda"] and found["all rounds"] == 10 * found["a round"]
    assert found["pretraining"] == 2 * 20 * 4 * found["model"] and found["model once"] == 50 * found["model"]


def test_figures_have_the_papers_names(model, client):
    found = costs(model, client, Config(epochs=1), repeats=1, memory=False)
    sent, work = communication(model), flops(model, client.train.x)
    ours = figures(found, sent, sent, work)
    assert ours.keys() == PAPER.keys() and ours["IFT: peak memory, GB"] is None
    known = {name: Cost(2.0 * n, n, n, 500.0) for name, n in {"FO-MAML": 1, "HF-MAML": 3, "IFT exact": 10, "IFT exact, Q=0": 4}.items()}
    ours = figures(known, {"share": 0.01}, {"share": 0.002}, {"image": 4e9, "share": 0.02})
    assert list(ours.values()) == pytest.approx([2, 6, 20, 12, 3, 10, 60, 0.5, 1, 0.2, 2, 2])
    assert "| IFT / FO-MAML | 10 | 3 |" in table({"ours": ours, "paper": PAPER})
