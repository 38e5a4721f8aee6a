"""Keeps the notebooks as the project wants them.

    python .ci/notebooks.py run nbs/00_bn.ipynb ...   run top to bottom and store the outputs
    python .ci/notebooks.py run-fast nbs/...          the same, but cells marked `#| slow` keep the outputs that they have
    python .ci/notebooks.py sync                      install cells, numbers, badges, links, last lines; README.md and its pictures
    python .ci/notebooks.py lengths                   words and lines of each lesson, beside the bounds
    python .ci/notebooks.py check                     what neither nbdev nor ruff looks at; exits 1 and names each fault
"""

import base64
import os
import re
import sys
import time
from configparser import ConfigParser
from pathlib import Path

import course
from execnb.nbio import mk_cell, read_nb, write_nb

ROOT = Path(__file__).resolve().parent.parent
NBS, LIB, IMAGES = ROOT / "nbs", ROOT / "fedl2p", ROOT / "nbs" / "images"
_config = ConfigParser(delimiters=["="])
_config.read(ROOT / "settings.ini", encoding="utf-8")
SETTINGS = _config["DEFAULT"]
OWNER, BRANCH = "{user}/{repo}".format(**SETTINGS), SETTINGS["branch"]
COLAB = f"https://colab.research.google.com/github/{OWNER}/blob/{BRANCH}/"
# The course in reading order: lesson 7 is nbs/07_hypergrad.ipynb, and its title begins with "07 hypergrad:".
ORDER = ("bn", "data", "digits", "profile", "strategy", "finetune", "metanet", "hypergrad", "rates",
         "federated", "client", "learner", "trials", "clusters")
LESSONS = [f"{number:02}_{name}" for number, name in enumerate(ORDER)]
PAGES = ("library", "studies")  # folders of notebooks that have no number
WIDEST = 6  # columns of a table that a phone can show


def notebooks() -> list[Path]:
    return sorted(p for p in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def first_cell(path: Path) -> str:
    """The hidden first cell: on Colab it installs the package, and leaves Colab's torch alone; some also need result files."""
    flower = " " + SETTINGS["flower_requirements"] if path.stem in ("flower", "node", "simulated", "simulation") else ""
    packages = " ".join(f'"{p}"' for p in (SETTINGS["colab_requirements"] + flower).split())
    results = f"""
    !git clone -q --depth 1 --branch {BRANCH} https://github.com/{OWNER} /content/{SETTINGS["repo"]}
    %cd /content/{SETTINGS["repo"]}/{path.parent.relative_to(ROOT).as_posix()}""" if path.parent.name == "experiments" or lesson(path) == "trials" else ""
    return f"""#| hide
import sys

if "google.colab" in sys.modules:  # on Colab install the package, and keep the torch that is there
    %pip install -q --no-deps git+https://github.com/{OWNER}@{BRANCH}
    %pip install -q {packages}{results}"""


def badge(path: Path) -> str:
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({COLAB}{path.relative_to(ROOT).as_posix()})"


def heading(path: Path) -> str:
    """What the title of a lesson or page begins with; nothing for other notebooks."""
    return f"# {path.stem.replace('_', ' ')}:" if path.stem in LESSONS or path.parent.name in PAGES else ""


def lesson(path: Path) -> str:
    """The name of a lesson without its number; nothing for other notebooks."""
    return path.stem.partition("_")[2] if path.stem in LESSONS else ""


def last_line(path: Path) -> str:
    """Where to go from here: along the course, or back to the index; nothing for other notebooks."""
    if path.stem not in LESSONS:
        return "**Back to** [the index](../index.ipynb)" if path.parent.name in PAGES else ""
    at = LESSONS.index(path.stem)
    steps = {"Previous": LESSONS[:at][-1:], "Next": LESSONS[at + 1 :][:1] or ["index"]}
    return " · ".join(f"**{word}:** [{name}]({name}.ipynb)" for word, names in steps.items() for name in names)


# --- run -----------------------------------------------------------------------------------------------------


def run(path: Path, slow: bool) -> None:
    """Run one notebook and store its outputs; cells for a GPU keep what they have where there is none."""
    import torch
    from execnb.shell import CaptureShell

    os.chdir(path.parent)
    skip = ([] if torch.cuda.is_available() else ["cuda"]) + ([] if slow else ["slow"])
    nb, start = read_nb(path), time.time()
    kept = [c for c in nb.cells if not any(re.search(rf"^#\|\s*{flag}", c.source, re.M) for flag in skip)]
    shell = CaptureShell(path=path.parent)
    shell.run_cell("%matplotlib inline")
    for cell in kept:
        if cell.cell_type == "code":
            cell.outputs = []  # execnb leaves the old ones where a cell has none
        shell.cell(cell)
        if any(o.output_type == "error" for o in cell.get("outputs", [])):
            sys.exit(f"{path.name}: a cell failed\n\n{cell.source}\n\n{cell.outputs[-1].evalue}")
    write_nb(nb, path)
    print(f"{path.name}: {time.time() - start:.0f} s")


# --- sync ----------------------------------------------------------------------------------------------------


def end_with(nb, line: str) -> None:
    """Make a line the last one of the text, in place of an older one like it."""
    end = max(i for i, c in enumerate(nb.cells) if not c.source.startswith("#| hide")) + 1
    if nb.cells[end - 1].cell_type != "markdown":
        nb.cells.insert(end, mk_cell("", "markdown", id="last-line"))
        end += 1
    cell = nb.cells[end - 1]
    text = re.sub(r"^(\*\*(Previous|Next|Back to)\b|Next: ).*$", "", cell.source, flags=re.M).strip()
    cell.source = f"{text}\n\n{line}".strip()


def sync(path: Path) -> None:
    """Write what depends on settings.ini and on the order of the course into one notebook: first cell, title, links, last line."""
    nb = read_nb(path)
    install, title = nb.cells[0], nb.cells[1]
    install.source = first_cell(path)
    title.source = re.sub(r"^\[!\[Open in Colab\].*$", lambda _: badge(path), title.source, flags=re.M)
    if heading(path):
        title.source = re.sub(r"^# (\d+ )?\w+:", heading(path), title.source)
    if name := lesson(path):
        title.source = re.sub(r"\n\n!\[The method.*", "", title.source)
        title.source = title.source.replace(badge(path), f"{badge(path)}\n\n![{course.ALT}](images/method-{name}.svg)")
    for cell in nb.cells:
        cell.source = re.sub(r"https://colab\.research\.google\.com/github/[\w.-]+/[\w.-]+/blob/[\w.-]+/(?=nbs)", COLAB, cell.source)
    if line := last_line(path):
        end_with(nb, line)
    if lesson(path):
        course.with_solutions(nb)
    write_nb(nb, path)


def readme() -> str:
    """README.md: what index.ipynb says and stores, with its links seen from the root."""
    parts = []
    for cell in read_nb(NBS / "index.ipynb").cells:
        if re.search(r"^#\|\s*hide", cell.source, re.M):
            continue
        if cell.cell_type == "markdown":
            parts.append(re.sub(r"\]\((?=images/|[\w/]+\.ipynb\))", "](nbs/", cell.source).replace("](../", "]("))
            continue
        if not re.search(r"^#\|\s*echo:\s*false", cell.source, re.M):
            parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if output.get("name") == "stderr" or "image/png" in data:  # progress bars; pictures are files, see `figures`
                continue
            text = "".join(output.get("text") or data.get("text/markdown") or data.get("text/plain") or "").rstrip()
            parts.append(text if "text/markdown" in data else f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def figures() -> dict[Path, bytes]:
    """Pictures of cells labelled `#| label: fig-...`, as files that index.ipynb and README.md can show."""
    pictures = {}
    for path in notebooks():
        for cell in read_nb(path).cells:
            label = re.search(r"^#\|\s*label:\s*(fig-[\w-]+)", cell.source, re.M)
            for output in cell.get("outputs", []) if label else []:
                if png := output.get("data", {}).get("image/png"):
                    pictures[IMAGES / f"{label[1]}.png"] = base64.b64decode("".join(png))
    return pictures


# --- check ---------------------------------------------------------------------------------------------------


def lost_links(path: Path, text: str) -> list[str]:
    """Links of a page that lead to no file of ours, on Colab or beside it."""
    links = {link: path.parent / link for link in re.findall(r"\]\(([\w./-]+\.\w+)[#)]", text)}
    links |= {link: ROOT / link for link in re.findall(rf"{re.escape(COLAB)}([^)#\s]+)", text)}
    return [f"{path.relative_to(ROOT).as_posix()} has a link to {link}, which is not there" for link, file in links.items() if not file.exists()]


def wide_tables(path: Path, text: str) -> list[str]:
    """Tables in Markdown with too many columns, unless they are folded."""
    open_text = re.sub(r"<details\b.*?</details>", "", text, flags=re.S)
    rules = re.findall(r"^\|?((?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?\s*)?)$", open_text, re.M)
    counts = [rule.strip().strip("|").count("|") + 1 for rule in rules]
    advice = f"at most {WIDEST}, or fold it into <details>"
    return [f"{path.relative_to(ROOT).as_posix()} has a table of {n} columns: {advice}" for n in counts if n > WIDEST]


def faults_of(path: Path) -> list[str]:
    """Everything wrong with one notebook."""
    name, nb, advice = path.relative_to(ROOT), read_nb(path), ": python .ci/notebooks.py sync"
    outputs = [o for c in nb.cells for o in c.get("outputs", [])]
    text = "\n".join(c.source for c in nb.cells if c.cell_type == "markdown")
    wrong = {
        f"{name} stores no outputs: python .ci/notebooks.py run {name}": not outputs,
        f"{name} stores an error": any(o.output_type == "error" for o in outputs),
        f"{name} needs the install cell first, then a title with its Colab badge" + advice: badge(path) not in nb.cells[1].source or nb.cells[0].source != first_cell(path),
        f"{name} needs a title that begins with '{heading(path)}'" + advice: not text.startswith(heading(path)),
        f"{name} needs a last line: {last_line(path)}" + advice: last_line(path) not in text,
    }
    shown = "\n\n".join([text, *("".join(o.get("data", {}).get("text/markdown", "")) for o in outputs)])
    found = [fault for fault, is_so in wrong.items() if is_so] + lost_links(path, text) + wide_tables(path, shown)
    if name_of := lesson(path):
        found += course.length_faults(name_of, course.lengths(path)) + [f"{name}: {fault}" for fault in course.exercise_faults(nb)]
    return found


def faults() -> list[str]:
    """Everything wrong with notebooks, modules and links, in words."""
    wrong = [fault for path in notebooks() for fault in faults_of(path)]
    for name in sorted({path.stem for path in NBS.glob("*.ipynb")} ^ {*LESSONS, "index"}):
        wrong.append(f"nbs/{name}.ipynb is a file or in ORDER of .ci/notebooks.py, but not both")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(NBS.rglob("*.md"))):
        said = path.read_text(encoding="utf-8")
        wrong += lost_links(path, said) + wide_tables(path, said)
    cells = [c.source for path in notebooks() for c in read_nb(path).cells]
    modules = {m[1] for source in cells for m in re.finditer(r"^#\|\s*default_exp\s+(\S+)", source, re.M)}
    for path in sorted(LIB.rglob("*.py")):
        module = path.relative_to(LIB).with_suffix("").as_posix().replace("/", ".")
        if path.name not in ("__init__.py", "_modidx.py") and module not in modules:
            wrong.append(f"{path.relative_to(ROOT)} has no notebook that exports it")
    return wrong


def main(command: str = "", *names: str) -> None:
    if command in ("run", "run-fast") and names:
        if len(names) == 1:
            return run(Path(names[0]).resolve(), slow=command == "run")
        for name in names:  # each in a new process: no state flows from one notebook into the next
            if os.spawnl(os.P_WAIT, sys.executable, sys.executable, __file__, command, name):
                sys.exit(1)
    elif command == "sync" and not names:
        for path in notebooks():
            sync(path)
        (ROOT / "README.md").write_text(readme(), encoding="utf-8")
        for path, picture in (figures() | course.drawings(IMAGES)).items():
            path.write_bytes(picture)
    elif command == "lengths" and not names:
        print(course.length_table([NBS / f"{name}.ipynb" for name in LESSONS]))
    elif command == "check" and not names:
        wrong = faults()
        print(*wrong or [f"{len(notebooks())} notebooks: outputs, titles, links, tables and modules in order"], sep="\n")
        sys.exit(bool(wrong))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
