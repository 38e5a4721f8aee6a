"""The package as a package: imports, public names, version, and the tools that keep the notebooks and run the checks."""

import ast
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from configparser import ConfigParser
from pathlib import Path

import pytest

import fedl2p

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(p for p in (ROOT / "fedl2p").rglob("*.py") if p.stem not in ("__init__", "_modidx"))
MODULES = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in FILES]
PUBLIC = {"FedL2P", "Config", "Client", "Data", "make_client", "Strategy", "mix_bn", "pretrain"}


def python(code, **kwargs):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kwargs)


ON_FLOWER = ("fedl2p.flower", "fedl2p.node", "fedl2p.simulated", "fedl2p.studies.simulation")
HEAVY = {"torchvision", "torchaudio", "matplotlib", "fastcore", "nbdev", "sklearn", "ray"}


@pytest.fixture(scope="module")
def imported():
    """What each module loads when it is imported alone: in a fork of a process that has nothing but torch, which takes seconds to load."""
    done = python(f"""
import os, sys, torch
for module in {MODULES}:
    if (child := os.fork()) == 0:
        try:
            __import__(module)
            said = "loads " + " ".join(sorted({HEAVY | {"flwr"}} & set(sys.modules)))
        except BaseException as error:
            said = f"{{type(error).__name__}}: {{error}}"
        os.write(1, f"{{module}} {{said}}\\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
""")
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("module", MODULES)
def test_each_module_imports_alone_and_lightly(module, imported):
    if module in ON_FLOWER:
        pytest.importorskip("flwr", reason='the extra "flower" is not installed')
    said, *loaded = imported[module].split()
    assert said == "loads" and not {*loaded} - ({"flwr"} if module in ON_FLOWER else set()), imported[module]


def test_import_of_the_package_is_quick():
    done = python("import sys, fedl2p; assert 'torch' not in sys.modules; print(fedl2p.__version__)")
    assert done.returncode == 0, done.stderr


def test_public_names_come_when_they_are_used():
    done = python(f"""
import sys, fedl2p
assert set(fedl2p.__all__) == {PUBLIC} <= set(dir(fedl2p)) and "__version__" in dir(fedl2p)
assert "torch" not in sys.modules
from fedl2p import FedL2P
from fedl2p.learner import FedL2P as home
assert FedL2P is home
for name in fedl2p.__all__:
    assert getattr(fedl2p, name).__name__ == name
assert sys.modules[fedl2p.pretrain.__module__].__name__ == "fedl2p.pretraining"
from fedl2p import *
assert mix_bn is fedl2p.mix_bn
""")
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_said_as_python_says_it():
    with pytest.raises(AttributeError, match="^module 'fedl2p' has no attribute 'FedL3P'$"):
        getattr(fedl2p, "FedL3P")  # noqa: B009
    with pytest.raises(ImportError, match="^cannot import name 'FedL3P' from 'fedl2p'"):
        from fedl2p import FedL3P  # noqa: F401


def test_a_type_checker_sees_the_public_names(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text("[mypy]\nignore_missing_imports = true\n[mypy-torch.*]\nfollow_imports = skip\n")  # torch takes a minute
    (tmp_path / "mine.py").write_text("import fedl2p\nfrom fedl2p import FedL2P\nmine: type[FedL2P] = FedL2P\nreveal_type(mine)\nreveal_type(fedl2p.Data)\nfedl2p.FedL3P\n")
    command = [sys.executable, "-m", "mypy", "--config-file", tmp_path / "mypy.ini", "--cache-dir", tmp_path / "cache", "--follow-imports", "silent", tmp_path / "mine.py"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
    assert '"type[fedl2p.learner.FedL2P]"' in said and "-> fedl2p.data.Data" in said, said
    assert 'mine.py:6: error: Module has no attribute "FedL3P"' in said and said.count("error:") == 1, said


@pytest.mark.parametrize("path", FILES, ids=MODULES)
def test_no_exported_line_is_longer_than_120_characters(path):
    cells = path.read_text(encoding="utf-8").split("\n# %% ")[2:]  # behind the docstring and nbdev's __all__
    assert cells and not [line for cell in cells for line in cell.splitlines() if len(line) > 120]


# Parameters of public functions, and of public methods, __init__ and __call__ of public classes, have a comment on their line, except:
AS_IN_TORCH = {"forward", "to"}  # PyTorch fixes what these methods take, and the docstring of the class says the rest
NO_COMMENT = {
    "fedl2p.convolution.NativeConv.convolve",  # takes what torch.conv2d takes
    "fedl2p.cli.demo", "fedl2p.cli.run", "fedl2p.cli.flower",  # --help would show it in place of what Demo and Run are
    "fedl2p.metanet.MetaNets.for_model", "fedl2p.metanet.MetaNets.save",  # the class has 40 lines, which is what a lesson
    "fedl2p.metanet.MetaNets.load",  # allows; __init__ and Selector have the same parameters, with comments
}


def uncommented(source):
    """Public functions and methods of a module -> their parameters that no comment describes; *args and **kwargs are left out."""
    comments = {t.start[0]: t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT}
    body, found = ast.parse(source).body, {}
    public = next(ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    functions = {n.name: n for n in body if isinstance(n, ast.FunctionDef) and n.name in public}
    for c in (n for n in body if isinstance(n, ast.ClassDef) and n.name in public):
        methods = [n for n in c.body if isinstance(n, ast.FunctionDef)]
        functions |= {f"{c.name}.{m.name}": m for m in methods if not m.name.startswith("_") or m.name in ("__init__", "__call__")}
    for name, f in functions.items():
        known, a, lines = [*f.args.posonlyargs, *f.args.args], f.args, source.splitlines()
        defaults = dict(zip(known[::-1], a.defaults[::-1], strict=False)) | {x: d for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d}
        last = {x: defaults.get(x, x).end_lineno for x in [*known, *a.kwonlyargs] if x.arg not in ("self", "cls") and x.arg[0] != "_"}
        said = {x: re.sub(r"^#\s*(noqa\b[^;]*;?)?\s*", "", comments.get(n, "")) for x, n in last.items()}
        alone = {x for x, n in last.items() if list(last.values()).count(n) == 1 and not lines[n - 1].lstrip().startswith("def ")}
        if missing := [x.arg for x in last if x not in alone or not said[x]]:
            found[name] = missing
    return found


@pytest.mark.parametrize(("path", "module"), list(zip(FILES, MODULES, strict=True)), ids=MODULES)
def test_public_parameters_have_comments(path, module):
    found = {f"{module}.{name}": missing for name, missing in uncommented(path.read_text(encoding="utf-8")).items()}
    allowed = {name for name in NO_COMMENT if name.startswith(f"{module}.")}
    assert allowed <= found.keys(), f"not needed in NO_COMMENT: {allowed - found.keys()}"
    found = {name: missing for name, missing in found.items() if name not in allowed and name.rpartition(".")[2] not in AS_IN_TORCH}
    assert not found, f"parameters without a comment: {found}"


def test_parameters_without_a_comment_are_found():
    source = """
__all__ = ["f", "C"]
def f(
    a, # what it is
    b: int = 1,  # noqa: B008, frozen
    c: tuple = (1,
        2), # two numbers
    d=3,  # noqa: B008; what it is
    *args, e, **kwargs): # of the end
    ...
def g(x): ...
class C:
    def __init__(self, x): ... # one line
    def _own(self, x): ...
    def two(self,
        x, y, # which of the two?
    ): ...
"""
    assert uncommented(source) == {"f": ["b"], "C.__init__": ["x"], "C.two": ["x", "y"]}


def test_version_and_typing():
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    assert fedl2p.__version__ == config["DEFAULT"]["version"]
    assert (ROOT / "fedl2p" / "py.typed").exists()


@pytest.fixture
def clone(tmp_path):
    for name in ("nbs", "fedl2p", ".ci", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("_build"))
    for name in ("settings.ini", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def notebooks(clone, *args):
    return subprocess.run([sys.executable, clone / ".ci" / "notebooks.py", *args], capture_output=True, text=True, cwd=clone)


def last_text(cells):
    """The last cell that a reader sees; the hidden solutions come behind it."""
    return [cell for cell in cells if cell.cell_type == "markdown"][-1]


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
    nb = read_nb(clone / "nbs" / "03_profile.ipynb")
    nb.cells[1].source = "# no badge"
    last_text(nb.cells).source = "See [a lesson](03_gone.ipynb#eq-3) and [another](01_data.ipynb#split)."
    write_nb(nb, clone / "nbs" / "03_profile.ipynb")
    (clone / "nbs" / "04_strategy.ipynb").rename(clone / "nbs" / "04_plan.ipynb")
    with open(clone / "README.md", "a") as file:
        file.write("[![Open in Colab](x)](https://colab.research.google.com/github/fedl2p/fedl2p/blob/main/nbs/gone.ipynb)")
    done = notebooks(clone, "check")
    assert done.returncode == 1
    assert "orphan.py has no notebook" in done.stdout
    assert "00_bn.ipynb stores no outputs" in done.stdout
    assert "03_profile.ipynb needs the install cell first" in done.stdout
    assert "03_profile.ipynb needs a title that begins with '# 03 profile:'" in done.stdout
    assert "03_profile.ipynb needs a last line: **Previous:** [02_digits](02_digits.ipynb) · **Next:** [04_strategy](04_strategy.ipynb)" in done.stdout
    assert "03_profile.ipynb has a link to 03_gone.ipynb, which is not there" in done.stdout and "link to 01_data.ipynb" not in done.stdout
    assert all(f"nbs/{name}.ipynb is a file or in ORDER of .ci/notebooks.py, but not both" in done.stdout for name in ("04_strategy", "04_plan"))
    assert "README.md has a link to nbs/gone.ipynb, which is not there" in done.stdout


def test_the_check_finds_tables_that_are_too_wide(clone):
    """In text and in outputs; six columns are allowed, and any number in a folded block."""
    from execnb.nbio import read_nb, write_nb

    six, seven = (f"{'| x ' * n}|\n{'|---' * n}|\n{'| 1 ' * n}|\n" for n in (6, 7))
    fold = "<details><summary>All columns</summary>\n\n{}\n</details>\n".format
    for name, text in {"cifar10": six + "\n" + fold(seven), "office": fold(six) + "\n" + seven}.items():
        path = clone / "nbs" / "experiments" / f"{name}.ipynb"
        nb = read_nb(path)
        code = next(cell for cell in nb.cells if cell.get("outputs"))
        code.outputs = [{"output_type": "display_data", "data": {"text/markdown": text.splitlines(keepends=True)}, "metadata": {}}]
        write_nb(nb, path)
    (clone / "docs" / "results.md").write_text(seven.replace("|---", "|--:"))
    done = notebooks(clone, "check")
    assert done.returncode == 1
    for name in ("nbs/experiments/office.ipynb", "docs/results.md"):
        assert f"{name} has a table of 7 columns: at most 6, or fold it into <details>" in done.stdout
    assert "cifar10.ipynb has a table" not in done.stdout


def test_the_check_finds_lessons_that_are_too_long_and_exercises_without_a_solution(clone):
    from execnb.nbio import mk_cell, read_nb, write_nb

    nb = read_nb(clone / "nbs" / "08_rates.ipynb")
    [solution] = [c for c in nb.cells if c.cell_type == "markdown" and "def disagree" in c.source]
    solution.source = solution.source.replace("def disagree", "def agree")
    nb.cells.insert(3, mk_cell("word " * 2500, "markdown", id="words"))
    nb.cells.insert(4, mk_cell("#| export\n" + "x = 1\n" * 251, "code", id="lines"))
    write_nb(nb, clone / "nbs" / "08_rates.ipynb")
    done = notebooks(clone, "check")
    assert done.returncode == 1
    for fault in ("words of prose, more than 2500", "lines of code, more than 250", "rates has 251 lines in an exported cell, more than 40"):
        assert fault in done.stdout
    assert "08_rates.ipynb: exercise disagree: the cell after it needs a folded solution" in done.stdout
    assert "08_rates" in notebooks(clone, "lengths").stdout


def test_stubs_fail_their_checks_and_solutions_pass_them(clone):
    """The hidden cell that sync makes, on a notebook with a wrong solution, with a check that lets a stub pass, and as it should be."""
    sys.path.insert(0, str(ROOT / ".ci"))
    from types import SimpleNamespace

    import course

    def run(solution, check):
        cells = [("code", f"def one():\n    ...\n\ndef check_one(one):\n    {check}\n\n# check_one(one)"),
                 ("markdown", f"<details><summary>A solution</summary>\n\n```python\ndef one(): return {solution}\n```\n</details>")]
        nb = SimpleNamespace(cells=[SimpleNamespace(cell_type=kind, source=source) for kind, source in cells])
        assert not course.exercise_faults(nb)
        names: dict = {}
        exec(nb.cells[0].source, names)
        exec(course.solutions(nb), names)

    run(1, 'assert one() == 1, "one() must be 1"')
    with pytest.raises(AssertionError, match="must be 1"):
        run(2, 'assert one() == 1, "one() must be 1"')
    with pytest.raises(RuntimeError, match="the stub of one passes its check"):
        run(1, "pass")
    with pytest.raises(AssertionError, match="does not say what is wrong"):
        run(1, "assert one() == 1")


def test_titles_and_last_lines_come_from_the_order(clone):
    from execnb.nbio import read_nb, write_nb

    tool = clone / ".ci" / "notebooks.py"
    tool.write_text(tool.read_text().replace('"bn", "data", "digits"', '"bn", "digits", "data"'))
    (clone / "nbs" / "01_data.ipynb").rename(clone / "nbs" / "02_data.ipynb")
    (clone / "nbs" / "02_digits.ipynb").rename(clone / "nbs" / "01_digits.ipynb")
    nb = read_nb(clone / "nbs" / "studies" / "runs.ipynb")
    nb.cells[-1].source += "\n**Next**: [tables](tables.ipynb), by hand."
    write_nb(nb, clone / "nbs" / "studies" / "runs.ipynb")
    assert notebooks(clone, "sync").returncode == 0
    first, data, runs = (read_nb(clone / "nbs" / name).cells for name in ("00_bn.ipynb", "02_data.ipynb", "studies/runs.ipynb"))
    assert last_text(first).source.endswith("\n\n**Next:** [01_digits](01_digits.ipynb)")
    assert data[1].source.startswith("# 02 data: ")
    assert last_text(data).source.endswith("\n\n**Previous:** [01_digits](01_digits.ipynb) · **Next:** [03_profile](03_profile.ipynb)")
    assert runs[-1].source.endswith("\n\n**Back to** [the index](../index.ipynb)") and "by hand" not in runs[-1].source


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

    path = clone / "nbs" / "02_digits.ipynb"
    nb = read_nb(path)
    nb.cells[3].source = "1 / 0"
    write_nb(nb, path)
    before = path.read_bytes()
    done = notebooks(clone, "run", "nbs/02_digits.ipynb")
    assert done.returncode == 1 and "division by zero" in done.stderr and path.read_bytes() == before


@pytest.mark.parametrize("ci", [False, True])
def test_a_developers_venv_is_left_alone(tmp_path, ci):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "README.md").write_text("Run all notebooks and tests:\n\n```bash\necho tested > log\n```\n")
    for name in ("bin/chromium", "bin/apt-get", ".venv/kept"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/log")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "CI": "true" if ci else ""}
    done = subprocess.run([tmp_path / ".ci" / "run", "tests"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text() == "tested\n" and (tmp_path / ".venv").exists() != ci
