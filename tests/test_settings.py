"""The settings of the studies: the paper's numbers, and the backbone that is there."""

import inspect

import made_up
import pytest
import torch

from fedl2p.studies import datasets
from fedl2p.studies import settings as studies_settings
from fedl2p.studies.corruptions import CORRUPTIONS
from fedl2p.studies.models import resnet18
from fedl2p.studies.settings import DATASETS, SCALES, setting


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with the backbone of the small scale."""
    root = tmp_path_factory.mktemp("world")
    made_up.backbone(root)
    return root


def test_papers_settings(monkeypatch):
    """Numbers of the paper's section 4.1 and its appendix, typed in from there; patience as in the authors' code."""
    for dataset, rounds, patience, lr, fraction in (
        ("cifar10", 500, 50, 1e-3, 0.1), ("cifar10c", 500, 100, 1e-3, 0.1), ("office", 100, 100, 1e-2, 1.0),
        ("domainnet", 100, 50, 1e-2, 0.1), ("speech", 100, 50, 1e-2, 0.1),
    ):
        how = setting(dataset, "paper", "data")
        c = how.config
        assert (c.rounds, c.patience, c.lr, c.fraction) == (rounds, patience, lr, fraction)
        assert (c.batch_size, c.epochs, c.meta_steps) == (32, 15, 3)
        assert (c.meta_lr_bn, c.meta_lr_lr, c.meta_lr_scale, c.clip) == (1e-3, 1e-3, 1e-4, 1.0)
        assert (c.neumann_terms, c.psi, c.hidden) == (3, 0.1, 100)
        assert (c.estimator, c.scaled, c.statistics) == ("ift", False, "zero-one")
        assert c.personalize_on == ("train+val" if dataset == "cifar10" else "train")
        assert (c.keep, c.hvp, c.learn) == ("lowest", "exact", "both")
        assert how.scored is None and not how.differs and not how.new_clients
        assert how.source == ("cifar10" if dataset == "cifar10c" else None)
    for dataset, final in (("cifar10", None), ("cifar10c", None), ("speech", 0.01)):
        recipe = setting(dataset, "paper", "data").recipe
        assert (recipe.rounds, recipe.epochs, recipe.lr, recipe.final_lr, recipe.fraction) == (500, 1, 0.1, final, 0.1)
        assert final or recipe.drops == (0.5, 0.75)  # rounds 250 and 375
        assert recipe.train_on == "train+val"  # as the authors' code
    assert setting("office", "paper", "data").recipe is None
    asked = {}
    for name in ("cifar10", "cifar10c", "office", "domainnet", "speech"):
        def record(*args, name=name, **kw):
            asked[name] = inspect.signature(getattr(datasets, name)).bind(*args, **kw)
            return (["ann"], ["tom"]) if name == "speech" else ["ann"]

        monkeypatch.setattr(studies_settings, name, record)
        federation = setting(name, "paper", "data").clients(0.5, 3)
        assert federation.pretraining is federation.seen and federation.seen == ["ann"]
        assert federation.unseen == (["tom"] if name == "speech" else [])
        asked[name].apply_defaults()
    wanted = {
        "cifar10": {"n_clients": 1000, "size": 50, "test_size": 10, "alpha": 0.5},
        "cifar10c": {"clients_each": 25, "severity": 3, "own": False, "size": None, "corruptions": CORRUPTIONS, "alpha": 0.5},
        "office": {"pixels": 224, "size": None},
        "domainnet": {"clients_each": 25, "pixels": 224, "size": None, "alpha": 0.5},
        "speech": {"n_seen": 250, "n_unseen": 50},
    }
    for name, arguments in wanted.items():
        assert {k: asked[name].arguments[k] for k in arguments} == arguments and asked[name].arguments["seed"] == 3
    for name in ("cifar10", "speech"):
        layers = setting(name, "paper", "data").model(0).modules()
        assert sum(isinstance(m, torch.nn.BatchNorm2d) for m in layers) == 20


def test_small_scale_takes_the_backbone_that_is_there(world):
    model = setting("office", "small", world).model(0)
    assert torch.equal(model.conv1.weight, resnet18("imagenet").conv1.weight.half().float())
    assert "fp16-derived" in setting("office", "small", world).differs
    assert "fp16-derived" not in setting("office", "small", world / "elsewhere").differs


@pytest.mark.parametrize("dataset", DATASETS[:5])
def test_smaller_scales_say_that_they_are(dataset):
    paper, small, smoke = (setting(dataset, scale, "data") for scale in SCALES)
    assert len({paper.differs, small.differs, smoke.differs}) == 3 and not paper.differs
    assert paper.config.rounds > small.config.rounds > smoke.config.rounds
    assert (paper.config.lr, paper.config.keep) != (small.config.lr, small.config.keep) or dataset in ("office", "domainnet")


def test_digits_are_the_demo():
    how = setting("digits", "small", "nowhere")
    assert (how.config.lr, how.config.epochs, how.config.rounds, how.config.fraction) == (0.01, 5, 15, 0.2)
    assert (how.recipe.method, how.recipe.rounds, how.recipe.fraction) == ("fedavg", 50, 0.5)
    assert how.new_clients and how.source is None and how.scored is None
    everybody = how.clients(0.5, 1)
    assert [len(pool) for pool in (everybody.pretraining, everybody.seen, everybody.unseen)] == [20, 20, 10]
    assert how.model(0)(everybody.seen[0].train.x[:2]).shape == (2, 10)


@pytest.mark.parametrize("dataset, scale, words", [
    ("mnist", "paper", "dataset must be one of cifar10, cifar10c, office, domainnet, speech, cifar10-mixed, digits, got 'mnist'"),
    ("office", "huge", "office: scale must be one of paper, small, smoke, got 'huge'"),
    ("digits", "paper", "digits: scale must be one of small, got 'paper'"),
])
def test_unknown_words_are_refused(dataset, scale, words):
    with pytest.raises(ValueError, match=words):
        setting(dataset, scale, "data")
