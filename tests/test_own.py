"""A user with a model and clients of their own: from a folder to a shipped model; what fit says; odd models; other losses."""

import logging
import re
import runpy
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedl2p import Client, Config, Data, FedL2P, make_client
from fedl2p.bn import bn_layers
from fedl2p.cli import main
from fedl2p.digits import fit as train
from fedl2p.digits import small_cnn
from fedl2p.folders import class_names, clients_from_folder, data_from_files, images_in
from fedl2p.hypergrad import NoSecondDerivative, curvature
from fedl2p.loaders import ToTensor
from fedl2p.losses import with_loss
from fedl2p.measure import count_flops
from fedl2p.runner import Runner, bar
from fedl2p.selector import Selector
from fedl2p.shapes import write_shapes
from fedl2p.watch import to_csv, to_tensorboard

ROOT = Path(__file__).resolve().parent.parent
QUICK = Config(epochs=1, splits=1, choosing_rounds=1)
HERE = Runner(0)


def blobs(n=3, size=30, classes=3, shape=(4,), seed=0):
    """Clients with clouds of points, each shifted its own way."""
    rng = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, *shape, generator=rng)
    clients = []
    for i in range(n):
        y = torch.arange(size) % classes
        clients.append(make_client(f"c{i}", Data(centres[y] * (1 + i) + torch.randn(size, *shape, generator=rng), y)))
    return clients


def mlp(*middle, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), *(middle or [nn.BatchNorm1d(8)]), nn.ReLU(), nn.Linear(8, 3)).eval()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Four looks, seven classes, a network trained on one look; clients that are seen, and others."""
    root = write_shapes(tmp_path_factory.mktemp("shapes"), each=18)
    classes, look = class_names(root), ToTensor(16)
    other = write_shapes(tmp_path_factory.mktemp("photos"), each=30, seed=1, looks=("photo",))
    photos = data_from_files(images_in(other / "photo"), classes, look, lazy=False)
    network = small_cnn(classes=7, width=8)
    network.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    torch.manual_seed(0)
    nn.init.kaiming_normal_(network.conv1.weight)
    model = train(network, photos.x, photos.y, epochs=15)
    clients = clients_from_folder(root, look, clients_each=3, test_share=0.4)
    return model, [c for i, c in enumerate(clients) if i % 3], clients[::3], root


def test_a_policy_is_not_worse_than_the_best_plain_strategy_of_its_own_trials(drawn, tmp_path, capsys):
    model, seen, unseen, root = drawn
    policy = FedL2P(model, Config(epochs=4, splits=2)).fit(seen, runner=Runner(0, progress=bar))
    said = capsys.readouterr().err
    assert "8 clients x" in said and "1 at a time: about" in said and "best single strategy for all: " in said
    assert re.search(r"8/8 .*loss \d", said)  # on the bar of the trials
    assert repr(policy).startswith("FedL2P(model of 3 batch norms and 11 tensors, start='trials', fitted by trials of 8 clients")
    selector = policy.metanets
    assert isinstance(selector, Selector)
    plain = selector.candidates[int(selector.common.argmax())]
    assert policy.trials["common"] == str(plain) in policy.gained.rows[1][0]
    assert policy.trials["common_loss"] < policy.trials["none_loss"]  # which the best of all candidates cannot exceed
    common = FedL2P(model, policy.config)  # the same selector that does not look
    common.metanets.load_state_dict({**selector.state_dict(), "last": torch.zeros_like(selector.last)})
    pairs = [(p.score.accuracy, c.score.accuracy) for some in (seen, unseen) for p, c in zip(policy.score(some, HERE), common.score(some, HERE), strict=True)]
    gains = torch.tensor([p - c for p, c in pairs], dtype=torch.float64)
    assert gains.mean() >= 0, gains
    before = sum((model(c.test.x).argmax(1) == c.test.y).double().mean().item() for c in [*seen, *unseen]) / len(pairs)
    assert sum(p for p, _ in pairs) / len(pairs) > before + 0.1

    # The rest of the way, by the command line.
    policy.save(tmp_path / "policy.safetensors")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "network.py").write_text(f"""
import torch
from torch import nn
from fedl2p.digits import small_cnn
def model():
    network = small_cnn(classes=7, width=8)
    network.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    network.load_state_dict(torch.load({str(tmp_path / "weights.pt")!r}, weights_only=True))
    return network
""")
    args = ["personalize", "--policy", tmp_path / "policy.safetensors", "--model", tmp_path / "network.py", "--data", root / "sketch", "--size", "16", "--out", tmp_path / "mine.safetensors"]
    assert main(list(map(str, args))) == 0, capsys.readouterr().err
    assert "differ from the common strategy" in capsys.readouterr().out and (tmp_path / "mine.safetensors").exists()
    assert main([*map(str, args), "--classes", "circle"]) == 1
    assert "must be one of the classes circle" in capsys.readouterr().err
    args[4] = tmp_path / "weights.pt"
    assert main(list(map(str, args))) == 1 and "model must be a Python file" in capsys.readouterr().err


@pytest.mark.slow
def test_out_of_the_box(drawn):
    """With the defaults, on the test samples of all clients: no plain method is better, at whatever rate it chooses."""
    model, seen, unseen, _ = drawn
    policy = FedL2P(model).fit(seen)
    best = policy.compare([*seen, *unseen], rates=(0.3, 0.1, 0.03, 0.01))
    assert all(best.gain("policy", method)[0] >= 0 for method in best.scores), best


@pytest.mark.slow
def test_the_example(tmp_path, capsys):
    """On a folder with other names than its own."""
    looks = {"photo": "amazon", "cartoon": "dslr", "sketch": "webcam"}
    for look in write_shapes(tmp_path, each=20, looks=tuple(looks)).iterdir():
        look.rename(tmp_path / looks[look.name])
    runpy.run_path(str(ROOT / "examples" / "own_clients.py"))["main"](str(tmp_path), "amazon")
    said = capsys.readouterr().out
    assert "FedL2P(model of 2 batch norms" in said and "| policy |" in said and "Client 'dslr-3'" in said and "% right" in said


def test_personalized_models_are_plain_and_explained():
    clients, plain = blobs(), mlp()
    policy = FedL2P(plain, QUICK).fit(clients, runner=HERE)
    mine = policy.personalize(clients[0])
    assert not bn_layers(mine) and mine.state_dict().keys() == plain.state_dict().keys()
    right = (mine(clients[0].test.x).argmax(1) == clients[0].test.y).sum()
    assert right == policy.score(clients[:1], HERE)[0].score.right
    explained = policy.explain(clients[0])
    assert [row[0] for row in explained.table.rows] == ["`0`", "`1`", "`3`"] and "Client 'c0': " in str(explained)
    explained.plot()
    paper = FedL2P(plain, Config.paper(rounds=1, epochs=1)).fit(clients, runner=HERE)
    assert "differ from the common" in paper.explain(clients[0].train).summary and "1 round)" in repr(paper)


def test_compare_takes_any_metric_and_choice_of_rates():
    clients = blobs()
    policy = FedL2P(mlp(), QUICK).fit(clients, runner=HERE)
    compared = policy.compare(clients, rates=(0.1,), runner=HERE)
    assert {r.id: 100 * r.score.accuracy for r in policy.score(clients, HERE)} == pytest.approx(compared.scores["policy"])
    assert list(compared.scores) == ["no fine-tuning", "FT (BN C)", "FT (BN G)", "FT (BN I)", "head only", "policy"]
    assert compared.rates == dict.fromkeys(["FT (BN C)", "FT (BN G)", "FT (BN I)", "head only"], 0.1)
    lowest = policy.compare(clients, rates=(0.1,), metric=lambda out, y: -F.cross_entropy(out, y).item(), title="minus loss", runner=HERE)
    assert "minus loss" in str(lowest) and all(v < 0 for v in lowest.scores["policy"].values())


def test_rounds_can_be_raised_and_watched(tmp_path):
    clients, model = blobs(2), mlp()
    settings = {"epochs": 1, "fraction": 0.7, "seed": 3, "estimator": "fomaml", "meta_lr_scale": 1e-2}
    for make in (Config.paper, lambda rounds, **more: Config(rounds=rounds, splits=1, choosing_rounds=1, **more)):
        records, folder = [], tmp_path / make.__name__
        whole = FedL2P(model, make(rounds=4, **settings)).fit(clients, runner=HERE)
        FedL2P(model, make(rounds=2, **settings)).fit(clients, folder, HERE)
        more = FedL2P(model, make(rounds=4, **settings)).fit(clients, folder, HERE, [records.append, to_csv(tmp_path / "rounds.csv")])
        assert more.history == whole.history and [r["round"] for r in records] == [3, 4, 5]
        assert all(torch.equal(t, whole.metanets.state_dict()[k]) for k, t in more.metanets.state_dict().items())
        assert len((tmp_path / "rounds.csv").read_text().splitlines()) == 4
        with pytest.raises(ValueError, match="rounds was 4 and is 3"):
            FedL2P(model, make(rounds=3, **settings)).fit(clients, folder, HERE)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    to_tensorboard(tmp_path)({"round": 1, "val_loss": 0.5, "beta": [0.0, 1.0]})
    assert [p for p in tmp_path.iterdir() if "tfevents" in p.name]


def test_nobody_answers(recwarn):
    class Broken(nn.Sequential):
        def forward(self, x):
            if torch.is_grad_enabled():
                raise ArithmeticError("no gradients today")
            return super().forward(x)

    with pytest.raises(RuntimeError, match="all of its|no client answered in any round"):
        FedL2P(Broken(*mlp()), Config.paper(rounds=1, fraction=0.4)).fit(blobs(), runner=HERE)


def test_logging_takes_the_place_of_printing(caplog, capsys):
    clients = blobs()
    with caplog.at_level(logging.INFO, logger="fedl2p"):
        FedL2P(mlp(), QUICK).fit(clients, runner=HERE)
    assert "'stage': 'trials'" in caplog.text and capsys.readouterr() == ("", "")


def test_constant_predictions_are_told(capsys):
    model = mlp()
    with torch.no_grad():
        model[-1].bias.copy_(torch.tensor([1e4, 0.0, 0.0]))  # no rate moves it that far
        model[-1].weight.zero_()
    with pytest.warns(RuntimeWarning, match="predicts class 0 for all of its samples|diverges under the strategy"):
        FedL2P(model, Config.paper(rounds=1, epochs=1, lr=1e-6, meta_lr_bn=0.0, meta_lr_lr=0.0, meta_lr_scale=0.0)).fit(blobs(), runner=Runner(0, progress=bar))
    said = capsys.readouterr().err
    assert "almost nothing was learned" in said and re.search(r"learning to personalize.*1/1 .*loss \d", said)


def test_other_losses_are_used_everywhere():
    seen = set()

    def smooth(out, y):
        seen.add(type(out))
        return 10 * F.cross_entropy(out, y, label_smoothing=0.2)

    clients = blobs()
    ours = FedL2P(mlp(), QUICK, smooth).fit(clients, runner=HERE)
    plain = FedL2P(mlp(), QUICK).fit(clients, runner=HERE)
    assert seen and ours.trials["none_loss"] > 5 * plain.trials["none_loss"]
    assert ours.score(clients, HERE)[0].score.loss > plain.score(clients, HERE)[0].score.loss
    assert not hasattr(ours.personalize(clients[0]), "_loss") or not vars(ours.personalize(clients[0]))["_loss"]
    assert not hasattr(mlp(), "_loss")
    theirs = FedL2P(with_loss(mlp(), smooth), QUICK).fit(clients, runner=HERE)  # attached before
    assert theirs.trials == ours.trials


@pytest.mark.parametrize("config", [QUICK, Config.paper(epochs=1, rounds=1, fraction=1.0)])
@pytest.mark.parametrize(("loss", "message"), [
    (nn.CrossEntropyLoss(reduction="none"), r"loss must return a tensor of one number, the mean over samples, got shape \[\d+\]"),
    (nn.CrossEntropyLoss(reduction="sum"), r"loss must be a mean over samples, got \d+\.?\d* for \d+ samples and \d+"),
    (lambda out, y: torch.tensor(1.0), "loss must be computed from the outputs, got a tensor without a gradient"),
    (lambda out, y: 1.0, "loss must return a tensor of one number, the mean over samples, got <class 'float'>"),
])
def test_a_loss_that_is_no_mean_is_refused(config, loss, message):
    """In one sentence, where a sum would only have made all rates larger."""
    with pytest.warns(RuntimeWarning, match=message), pytest.raises(RuntimeError, match="all"):
        FedL2P(mlp(), config, loss=loss).fit(blobs(), runner=HERE)


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8)], ids=["LayerNorm", "GroupNorm"])
def test_models_without_batch_norm_learn_rates_only(norm, capsys):
    clients = blobs()
    policy = FedL2P(mlp(norm()), QUICK).fit(clients, runner=Runner(0, progress=bar))
    assert "so only learning rates can be learned" in capsys.readouterr().err
    assert policy.strategy(clients[0]).beta.numel() == 0
    policy.personalize(clients[0])


def test_an_operation_without_second_derivatives_is_no_reason_to_leave_clients_out():
    weights, hyper = {"w": torch.randn(3, 2, dtype=torch.float64)}, {"eta": torch.tensor([0.1]), "beta": torch.tensor([0.3], dtype=torch.float64)}
    x, v = torch.randn(5, 3, dtype=torch.float64), {"w": torch.randn(3, 2, dtype=torch.float64)}

    def loss(w, h):
        return F.hardsigmoid(x @ w["w"]).square().mean() * (1 + h["beta"].sum())

    with pytest.warns(NoSecondDerivative, match="hardsigmoid_backward"):
        curved, mixed = curvature(loss, weights, hyper).product(v)
    other, other_mixed = curvature(loss, weights, hyper, "central").product(v)
    assert torch.equal(curved["w"], other["w"]) and torch.equal(mixed["beta"], other_mixed["beta"])
    with pytest.warns(NoSecondDerivative) as told:
        policy = FedL2P(mlp(nn.BatchNorm1d(8), nn.Hardsigmoid()), Config.paper(rounds=2, epochs=1, fraction=1.0)).fit(blobs(), runner=HERE)
    assert len([w for w in told if issubclass(w.category, NoSecondDerivative)]) == 1  # not for each client of each round
    assert not any(r["failed"] for r in policy.history)


def test_attention_is_differentiated_twice_by_differences():
    """The backward pass of its fused kernel has no derivative."""
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.norm, self.end = nn.Linear(4, 32), nn.LayerNorm(32), nn.Linear(32, 3)

        def forward(self, x):
            q = self.norm(self.start(x)).view(len(x), 4, 2, 4).transpose(1, 2)
            return self.end(F.scaled_dot_product_attention(q, q, q).flatten(1))

    torch.manual_seed(0)
    with pytest.warns(NoSecondDerivative, match="derivative for aten::_scaled_dot_product_.*is not implemented"):
        policy = FedL2P(Attention().eval(), Config.paper(rounds=1, epochs=1, fraction=1.0)).fit(blobs(), runner=HERE)
    assert not any(r["failed"] for r in policy.history)


def test_a_frozen_body_costs_no_backward_pass_and_shows_rate_0():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(32 * 16, 3)).eval()
    [client] = blobs(1, shape=(1, 6, 6))
    whole, forward = FedL2P(model, QUICK), count_flops(lambda: model(client.samples("train+val").x))
    frozen = FedL2P(model.requires_grad_(False), QUICK)
    frozen.model[-1].requires_grad_(True)
    for policy in (whole, frozen):
        policy.metanets.common.data[0] = 1.0  # everything at rate 1, as if it had learned that
    costs = [count_flops(lambda p=p: p.personalize(client)) for p in (whole, frozen)]
    assert costs[1] < 2.5 * forward and costs[0] > 4 * forward, (costs, forward)  # the frozen one: a pass for the profile, one for the step
    assert (frozen.strategy(client).eta != 0).tolist()[:-2] == [False] * 6


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "resnet10t"])
def test_timm_models(name, recwarn):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3).eval()
    [client] = blobs(1, size=12, shape=(3, 32, 32))
    policy = FedL2P(model, Config.paper(rounds=1, epochs=1, fraction=1.0, neumann_terms=1)).fit([client], runner=HERE)
    assert not policy.history[0]["failed"]
    mine = policy.personalize(client)
    plain = timm.create_model(name, num_classes=3).eval()
    plain.load_state_dict(mine.state_dict())
    assert torch.allclose(plain(client.test.x), mine(client.test.x), atol=1e-5)
    assert torch.equal(mine(client.test.x).argmax(1) == client.test.y, plain(client.test.x).argmax(1) == client.test.y)
    if name.startswith("mobilenet"):
        assert [w for w in recwarn if issubclass(w.category, NoSecondDerivative)]


def test_a_users_script_passes_a_type_checker(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\nignore_missing_imports = true\n[mypy-torch.*]\nfollow_imports = skip\n")  # torch takes a minute
    script = tmp_path / "own_clients.py"
    extra = "\n\nresults = FedL2P(network(3)).score([])\nright: int = results[0].score.right\nwrong: str = results[0].score.right\n"
    script.write_text((ROOT / "examples" / "own_clients.py").read_text() + extra)
    command = [sys.executable, "-m", "mypy", "--config-file", tmp_path / "mypy.ini", "--cache-dir", tmp_path / "cache", "--follow-imports", "silent", script]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
    assert said.count("error:") == 1 and 'expression has type "int", variable has type "str"' in said, said


def test_what_a_client_is_stays(recwarn):
    client = Client("a", *[Data(torch.rand(3, 4), torch.tensor([0, 1, 2]))] * 3)
    assert repr(client) == "Client('a', 3 to train, 3 to validate, 3 to test)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FedL2P(mlp(), QUICK)


def test_help_shows_what_parameters_mean():
    assert "Args:\n    root: folder with root/<client or domain>/<class>/<image>\n" in (clients_from_folder.__doc__ or "")
    assert "    transform: from a Pillow image to a tensor\n" in (clients_from_folder.__doc__ or "")  # without its noqa
    assert "Returns:\n    in alphabetical order" in (class_names.__doc__ or "")
    assert "Attributes:\n    size: width and height\n" in (ToTensor.__doc__ or "")


@pytest.mark.parametrize(("wrong", "words"), [({"lr": "0.1"}, "lr must be a number, got '0.1'"), ({"epochs": 1.5}, "epochs must be a whole number, got 1.5"), ({"halving": 1}, "halving must be true or false, got 1"), ({"looks_at": "xi"}, "looks_at must be a list, got 'xi'")])
def test_settings_of_wrong_types_are_refused_by_name(wrong, words):
    with pytest.raises(ValueError, match=words):
        Config(**wrong)


def test_a_comparison_says_who_is_not_in_it():
    clients = blobs()
    policy = FedL2P(mlp(), QUICK).fit(clients, runner=HERE)
    odd = replace(clients[0], id="odd", test=Data(clients[0].test.x * float("nan"), clients[0].test.y))
    with pytest.warns(RuntimeWarning, match="client 'odd'"):
        compared = policy.compare([*clients, odd], rates=(0.1,), runner=HERE)
    assert compared.lost == 1 and "odd" not in compared.scores["policy"]
    assert f"Test samples of {len(clients)} of {len(clients) + 1} clients (the others failed), each" in str(compared)
