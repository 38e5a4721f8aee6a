"""Settings: the paper's, what is refused, and what fine-tuning takes from them."""

import pytest

from fedl2p.config import Config
from fedl2p.finetune import Tuning


def test_defaults_are_the_papers():
    c = Config.paper()
    assert (c.lr, c.epochs, c.batch_size, c.rounds, c.fraction, c.meta_steps) == (1e-3, 15, 32, 500, 0.1, 3)
    assert (c.meta_lr_bn, c.meta_lr_lr, c.meta_lr_scale, c.clip, c.neumann_terms, c.psi, c.patience) == (1e-3, 1e-3, 1e-4, 1.0, 3, 0.1, 50)
    assert (c.estimator, c.scaled, c.statistics, c.learn, c.hidden) == ("ift", False, "zero-one", "both", 100)
    with pytest.raises(AttributeError):
        c.lr = 1.0


NAN = float("nan")


WRONG = [
    ({"estimator": "adam"}, "estimator must be one of ift, fomaml, unrolled, got 'adam'"),
    ({"hvp": "none"}, "hvp must be one of exact, central, forward, got 'none'"),
    ({"learn": "all"}, "learn must be one of both, bn, lr, got 'all'"),
    ({"statistics": "mean"}, "statistics must be one of zero-one, pretrained, precise, got 'mean'"),
    ({"augment": "flip"}, "augment must be one of none, crop-flip, got 'flip'"),
    ({"keep": "best"}, "keep must be one of lowest, paired, after, got 'best'"),
    ({"inputs": "whitened"}, "inputs must be one of raw, standard, got 'whitened'"),
    ({"epochs": 0}, "epochs must be >= 1, got 0"),
    ({"rounds": 0}, "rounds must be >= 1, got 0"),
    ({"meta_steps": 0}, "meta_steps must be >= 1, got 0"),
    ({"fraction": 0.0}, "fraction must be in (0, 1], got 0.0"),
    ({"fraction": NAN}, "fraction must be in (0, 1], got nan"),
    ({"beta": 2.0}, "beta must be in [0, 1], got 2.0"),
    ({"lr": NAN}, "lr must be > 0 and finite, got nan"),
    ({"lr": -1.0}, "lr must be > 0 and finite, got -1.0"),
    ({"clip": 0.0}, "clip must be > 0 and finite, got 0.0"),
    ({"psi": 0.0}, "psi must be > 0 and finite, got 0.0"),
    ({"neumann_terms": -1}, "neumann_terms must be >= 0, got -1"),
    ({"last": 0}, "last must be >= 1 or None, got 0"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_settings(wrong, message):
    with pytest.raises(ValueError) as caught:
        Config.paper(**wrong)
    assert str(caught.value) == message


def test_settings_of_fine_tuning():
    config = Config.paper(epochs=2, batch_size=7, statistics="precise", augment="crop-flip", fill=[-1.0], personalize_on="train")
    assert config.tuning == Tuning(2, 7, "precise", "crop-flip", (-1.0,), "train")
    assert Config.paper().tuning == Tuning(15, 32, "zero-one", "none", (0.0,), "train+val")
