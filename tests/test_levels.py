"""The levels of the design: imports point to earlier modules only, and a name is exported by one module only."""

import ast
from collections import Counter
from importlib.util import resolve_name
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "fedl2p"
LEVELS = [
    "core",
    "storage losses bn data convolution hypergrad measure shapes",
    "loaders folders profile digits",
    "watch shipping strategy metanet selector",
    "frozen finetune evaluation many",
    "runner checkpoint federated robust config policy scoring",
    "pretraining client",
    "halving trials cost analysis explain worth comparing rounds learner",
    "clusters fitted",
    # Nothing before the studies may import them, since they come later.
    "node flower simulated " + " ".join(f"studies.{m}" for m in "files corruptions models published datasets settings methods cells contents runs tables comparisons demo simulation".split()),
    "cases report cli",
]
MODULES = [module for level in LEVELS for module in level.split()]
TREES = {m: ast.parse((PACKAGE / f"{m.replace('.', '/')}.py").read_text(encoding="utf-8")) for m in MODULES}


def imported(module):
    """What a module imports of ours, also inside of functions: modules, or names of the package itself."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = resolve_name("." * node.level + (node.module or ""), f"fedl2p.{module}".rpartition(".")[0])
            names = [home] if home.removeprefix("fedl2p.") in MODULES else [f"{home}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("fedl2p.") for name in names if name.partition(".")[0] == "fedl2p")


def test_every_module_has_a_level():
    files = {".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in PACKAGE.rglob("*.py")}
    assert files - {"__init__", "_modidx", "studies.__init__"} == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_to_earlier_modules_only(module):
    allowed = {"__version__", *MODULES[: MODULES.index(module)]}
    assert not set(imported(module)) - allowed


def test_a_name_is_exported_by_one_module_only():
    exports = {m: ast.literal_eval(node.value) for m, tree in TREES.items() for node in tree.body if ast.unparse(node).startswith("__all__ = ")}
    assert exports.keys() == set(MODULES)
    counts = Counter(name for names in exports.values() for name in names)
    assert not {name: [m for m in MODULES if name in exports[m]] for name, n in counts.items() if n > 1}
