"""FedL2P: federated learning to personalize. Names are imported when first used: `import fedl2p` alone is quick."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["FedL2P", "Config", "Client", "Data", "make_client", "Strategy", "mix_bn", "pretrain"]

if TYPE_CHECKING:
    from .bn import mix_bn
    from .config import Config
    from .data import Client, Data, make_client
    from .learner import FedL2P
    from .pretraining import pretrain
    from .strategy import Strategy
else:
    _HOMES = {
        "FedL2P": "learner", "Config": "config", "Client": "data", "Data": "data", "make_client": "data",
        "Strategy": "strategy", "mix_bn": "bn", "pretrain": "pretraining",
    }

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(import_module(f".{_HOMES[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def command() -> int:
    """The `fedl2p` command. Its imports take seconds, in which somebody may press Ctrl-C."""
    try:
        from .cli import main
    except KeyboardInterrupt:
        print("\nstopped before it began", file=sys.stderr)
        return 130
    return main()
