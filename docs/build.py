"""Builds the site from the notebooks, with the outputs that they store, and from the modules. It needs no network.

    pip install -e ".[docs]" && python docs/build.py     then open docs/_build/html/index.html
"""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NBS, LIB = ROOT / "nbs", ROOT / "fedl2p"
SOURCE, HTML = HERE / "_build" / "source", HERE / "_build" / "html"
SHELVES = {"The course": "[0-9]*.ipynb", "The library": "library/*.ipynb", "The studies": "studies/*.ipynb", "Results": "experiments/*.ipynb"}


# --- notebooks as pages --------------------------------------------------------------------------------------


def page(path: Path) -> str:
    """A notebook for readers: without hidden cells and directives, its Colab badge as a link in words."""
    nb = json.loads(path.read_text(encoding="utf-8"))
    cells = []
    for cell in nb["cells"]:
        source = "".join(cell["source"])
        if re.search(r"^#\|\s*(hide|default_exp)", source, re.M):
            continue
        if re.search(r"^#\|\s*echo:\s*false", source, re.M):
            cell["metadata"]["tags"] = ["remove-input"]
        if cell["cell_type"] == "code":
            cell["outputs"] = [o for o in cell["outputs"] if o.get("name") != "stderr"]  # progress bars
            source = re.sub(r"^#\|.*\n?", "", source, flags=re.M)
        else:
            source = re.sub(r"\[!\[Open in Colab\]\([^)]*\)\]\(([^)]*)\)", r"[Open in Colab](\1)", source)
            source = re.sub(r"\]\(\.\./flower/README\.md\)", "](../flower.md)", source).replace("](../docs/", "](")
        cells.append({**cell, "source": source})
    nb["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    return json.dumps({**nb, "cells": cells})


# --- modules as pages ----------------------------------------------------------------------------------------


def comment(lines: list[str], number: int, column: int = 0) -> str:
    """The comment at the end of a line of code."""
    found = re.search(r"(?:^|\s)#\s?(.*)$", lines[number - 1][column:])
    return re.sub(r"^noqa\b[^;]*;?\s*|\|", "", found[1]).strip() if found else ""


def row(lines: list[str], name: str, node: ast.AST, hint: ast.expr | None, default: ast.expr | None) -> str:
    """A parameter or field: name, type, default, and what its comment says."""
    last = default or hint or node
    kind = f"`{ast.unparse(hint)}`".replace("|", "\\|") if hint else ""
    value = f"`{ast.unparse(default)}`".replace("|", "\\|") if default else ""
    return f"| `{name}` | {kind} | {value} | {comment(lines, last.end_lineno, last.end_col_offset)} |"


def table(rows: list[str]) -> str:
    return "\n".join(["| name | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n" if rows else ""


def function(lines: list[str], node: ast.FunctionDef, title: str) -> str:
    """A function or method from its docments."""
    args = [a for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs] if a.arg not in ("self", "cls")]
    plain = [*node.args.posonlyargs, *node.args.args]
    defaults = dict(zip([a.arg for a in plain[len(plain) - len(node.args.defaults):]], node.args.defaults, strict=True))
    defaults |= {a.arg: d for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d}
    rows = [row(lines, a.arg, a, a.annotation, defaults.get(a.arg)) for a in args]
    returns = ""
    if node.returns and ast.unparse(node.returns) != "None":
        said = comment(lines, node.returns.end_lineno, node.returns.end_col_offset)
        returns = f"Returns `{ast.unparse(node.returns)}`" + (f": {said}" if said else "") + "\n"
    return "\n".join([title, ast.get_docstring(node) or "", "", table(rows), returns])


def class_(lines: list[str], node: ast.ClassDef) -> str:
    """A class: its fields, and its public methods."""
    fields = [row(lines, s.target.id, s, s.annotation, s.value) for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
    parts = [f"## {node.name}\n\n{ast.get_docstring(node) or ''}\n\n{table(fields)}"]
    for s in node.body:
        if isinstance(s, ast.FunctionDef) and (s.name == "__init__" or not s.name.startswith("_")):
            name = node.name if s.name == "__init__" else f"{node.name}.{s.name}"
            parts.append(function(lines, s, f"### {name}(...)\n"))
    return "\n".join(parts)


def reference(path: Path) -> str:
    """The public names of a module."""
    text = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    notebook = re.search(r"File to edit: (?:\.\./)+nbs/(\S+)\.ipynb", text)
    said = ast.get_docstring(tree) or ""
    link = f"Explained and tested in [{notebook[1]}](../{notebook[1]}.ipynb)." if notebook else ""
    public = [n for n in tree.body if not getattr(n, "name", "_").startswith("_")]
    parts = [class_(lines, n) if isinstance(n, ast.ClassDef) else function(lines, n, f"## {n.name}(...)\n") for n in public]
    return "\n\n".join([f"# {module}", said, link, *parts]) + "\n"


# --- the site ------------------------------------------------------------------------------------------------


def toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def gather() -> None:
    """All pages, in `docs/_build/source`."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(NBS / "images", SOURCE / "images")
    trees = []
    for caption, pattern in SHELVES.items():
        names = [p.relative_to(NBS) for p in sorted(NBS.glob(pattern))]
        for name in names:
            (SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
            (SOURCE / name).write_text(page(NBS / name), encoding="utf-8")
        first = ["results"] if caption == "Results" else []
        trees.append(toctree(caption, first + [name.with_suffix("").as_posix() for name in names]))
    modules = [p for p in sorted(LIB.rglob("*.py")) if p.name not in ("__init__.py", "_modidx.py")]
    (SOURCE / "api").mkdir()
    for path in modules:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        (SOURCE / "api" / f"{name}.md").write_text(reference(path), encoding="utf-8")
    names = [f"api/{'.'.join(p.relative_to(ROOT).with_suffix('').parts)}" for p in modules]
    trees += [toctree("Reference", names), toctree("More", ["notation", "flower", "changelog"])]
    about = (NBS / "flower" / "README.md").read_text(encoding="utf-8")
    (SOURCE / "flower.md").write_text(about.replace("](../library/", "](library/"), encoding="utf-8")
    for path in (HERE / "results.md", HERE / "notation.md", ROOT / "CHANGELOG.md"):
        said = path.read_text(encoding="utf-8")
        (SOURCE / path.name.lower()).write_text(said.replace("](../nbs/", "]("), encoding="utf-8")
    index = json.loads(page(NBS / "index.ipynb"))
    index["cells"].append({"cell_type": "markdown", "id": "contents", "metadata": {}, "source": "\n".join(trees)})
    (SOURCE / "index.ipynb").write_text(json.dumps(index), encoding="utf-8")


def lost(folder: Path) -> list[str]:
    """Links inside the site that lead to no page, or to no place on it."""
    pages = {p: p.read_text(encoding="utf-8") for p in sorted(folder.rglob("*.html"))}
    names = {p: {*re.findall(r'\b(?:id|name)="([^"]+)"', text)} for p, text in pages.items()}
    wrong = []
    for path, text in pages.items():
        for link in dict.fromkeys(re.findall(r'<a\b[^>]*?href="([^"]*)"', text)):
            if re.match(r"[a-z]+:", link) or link in ("", "#"):
                continue
            where, _, place = unquote(link).partition("#")
            target = (path.parent / where.partition("?")[0]).resolve() if where else path.resolve()
            if not target.exists() or (place and target in names and place not in names[target]):
                wrong.append(f"{path.relative_to(folder).as_posix()}: {link}")
    return wrong


def main() -> None:
    gather()
    shutil.rmtree(HTML, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", str(HERE), "-b", "html", "-d", str(HERE / "_build" / "trees"), str(SOURCE), str(HTML)]
    if code := subprocess.run(command).returncode:
        sys.exit(code)
    if wrong := lost(HTML.resolve()):
        sys.exit("links that lead nowhere:\n" + "\n".join(wrong))
    print(f"open {HTML / 'index.html'}")


if __name__ == "__main__":
    main()
