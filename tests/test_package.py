"""The package as a package: imports, version, and the tool that keeps the notebooks."""

import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import fedl2p

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(p.stem for p in (ROOT / "fedl2p").glob("*.py") if p.stem not in ("__init__", "_modidx"))


def python(code, **kwargs):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kwargs)


@pytest.mark.parametrize("module", MODULES)
def test_each_module_imports_alone_and_lightly(module):
    if module == "flower":
        pytest.importorskip("flwr", reason='the extra "flower" is not installed')
    heavy = {"torchvision", "torchaudio", "matplotlib", "fastcore", "nbdev", "sklearn", "ray", *(["flwr"] if module != "flower" else [])}
    done = python(f"import sys, fedl2p.{module}; found = {heavy} & set(sys.modules); assert not found, found")
    assert done.returncode == 0, done.stderr


def test_import_of_the_package_is_quick():
    done = python("import sys, fedl2p; assert 'torch' not in sys.modules; print(fedl2p.__version__)")
    assert done.returncode == 0, done.stderr


def test_version_and_typing():
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    assert fedl2p.__version__ == config["DEFAULT"]["version"]
    assert (ROOT / "fedl2p" / "py.typed").exists()


@pytest.fixture
def clone(tmp_path):
    for name in ("nbs", "fedl2p", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("settings.ini", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def notebooks(clone, *args):
    return subprocess.run([sys.executable, clone / ".ci" / "notebooks.py", *args], capture_output=True, text=True, cwd=clone)


def test_notebooks_are_in_order(clone):
    done = notebooks(clone, "check")
    assert done.returncode == 0, done.stdout


def test_the_check_finds_faults(clone):
    from execnb.nbio import read_nb, write_nb

    (clone / "fedl2p" / "orphan.py").write_text("x = 1\n")
    nb = read_nb(clone / "nbs" / "00_bn.ipynb")
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    write_nb(nb, clone / "nbs" / "00_bn.ipynb")
    nb = read_nb(clone / "nbs" / "01_profile.ipynb")
    nb.cells[1].source = "# no badge"
    write_nb(nb, clone / "nbs" / "01_profile.ipynb")
    done = notebooks(clone, "check")
    assert done.returncode == 1
    assert "orphan.py has no notebook" in done.stdout
    assert "00_bn.ipynb stores no outputs" in done.stdout
    assert "01_profile.ipynb needs the install cell first" in done.stdout


def test_owner_and_branch_come_from_settings_alone(clone):
    settings = (clone / "settings.ini").read_text()
    (clone / "settings.ini").write_text(settings.replace("user = fedl2p", "user = somebody").replace("branch = main", "branch = next"))
    assert notebooks(clone, "check").returncode == 1
    assert notebooks(clone, "sync").returncode == 0
    assert notebooks(clone, "check").returncode == 0
    text = "".join(p.read_text() for p in [*clone.glob("nbs/*.ipynb"), clone / "README.md"])
    assert "somebody/fedl2p" in text and "github/fedl2p/fedl2p" not in text and "github.com/fedl2p/fedl2p" not in text


def test_sync_of_what_is_in_step_changes_nothing(clone):
    before = {p: p.read_bytes() for p in clone.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert notebooks(clone, "sync").returncode == 0
    assert all(p.read_bytes() == data for p, data in before.items())


def test_a_wrong_command_shows_the_usage(clone):
    done = notebooks(clone, "tidy")
    assert done.returncode == 1 and "notebooks.py run" in done.stderr


def test_a_failing_notebook_is_not_stored(clone):
    from execnb.nbio import read_nb, write_nb

    path = clone / "nbs" / "digits.ipynb"
    nb = read_nb(path)
    nb.cells[3].source = "1 / 0"
    write_nb(nb, path)
    before = path.read_bytes()
    done = notebooks(clone, "run", "nbs/digits.ipynb")
    assert done.returncode == 1 and "division by zero" in done.stderr and path.read_bytes() == before
