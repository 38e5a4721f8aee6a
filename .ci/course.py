"""What belongs to the course as a whole: how long its lessons are, the figure above each of them, and their exercises."""

import re
from pathlib import Path

from execnb.nbio import mk_cell, read_nb

# --- lengths -------------------------------------------------------------------------------------------------

BOUNDS = {"words": 2500, "lines": 250, "longest": 40}  # what can be read in one sitting
EXERCISES = 3  # a lesson: one to compute, one to build, one to explore
# Lessons that are still over a bound, and by how much they may be: smaller is welcome, larger is a fault.
OVER: dict[str, dict[str, int]] = {}


def lengths(path: Path) -> dict[str, int]:
    """Words of prose, lines of code and the longest exported cell of a notebook, and its exercises.

    Not counted: tables, formulas and folded solutions among the words; hidden cells, exercises, comments and empty lines among the code.
    """
    words = lines = longest = exercises = 0
    for cell in read_nb(path).cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"```.*?```|<details>.*?</details>|\$\$.*?\$\$", "", cell.source, flags=re.S)
            words += sum(len(line.split()) for line in text.splitlines() if not line.startswith(("|", "[![", "![")))
        elif found := checks(cell):
            exercises += len(found)
        elif cell.cell_type == "code" and not re.search(r"^#\|\s*hide", cell.source, re.M):
            code = [line for line in cell.source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
            lines += len(code)
            if re.search(r"^#\|\s*export", cell.source, re.M):
                longest = max(longest, len(code))
    return {"words": words, "lines": lines, "longest": longest, "exercises": exercises}


def length_faults(name: str, has: dict[str, int]) -> list[str]:
    """In which way a lesson is too long, in words."""
    allowed = {key: OVER.get(name, {}).get(key, bound) for key, bound in BOUNDS.items()}
    units = {"words": "words of prose", "lines": "lines of code", "longest": "lines in an exported cell"}
    wrong = [f"{name} has {has[key]} {units[key]}, more than {allowed[key]}" for key in BOUNDS if has[key] > allowed[key]]
    for key in OVER.get(name, {}):
        if has[key] <= BOUNDS[key]:
            wrong.append(f"{name} is within the bound of {units[key]} again: take it out of OVER in .ci/course.py")
    return wrong


def length_table(lessons: list[Path]) -> str:
    """The lengths of all lessons, one a line."""
    rows = [f"{'lesson':16}{'words':>8}{'lines':>8}{'longest':>9}{'exercises':>11}"]
    for path in lessons:
        has = lengths(path)
        mark = "  over" if any(has[key] > bound for key, bound in BOUNDS.items()) else ""
        rows.append(f"{path.stem:16}{has['words']:8}{has['lines']:8}{has['longest']:9}{has['exercises']:11}{mark}")
    return "\n".join([*rows, f"{'bound':16}{BOUNDS['words']:8}{BOUNDS['lines']:8}{BOUNDS['longest']:9}{EXERCISES:11}"])


# --- exercises -----------------------------------------------------------------------------------------------

SOLUTIONS = "#| hide\n# Made by sync from the folded solutions: each stub fails its check, and each solution passes it."


def checks(cell) -> list[str]:
    """What a cell asks the reader to write: `check_fold(fold)` is the check of `fold`."""
    return re.findall(r"^def check_(\w+)\(", cell.source, re.M) if cell.cell_type == "code" and "# check_" in cell.source else []


def exercise_faults(nb) -> list[str]:
    """Exercises without a stub, a folded solution or a line that calls the check."""
    wrong = []
    for cell, after in zip(nb.cells, [*nb.cells[1:], None], strict=True):
        for name in checks(cell):
            if f"def {name}(" not in cell.source or f"# check_{name}({name})" not in cell.source:
                wrong.append(f"exercise {name}: its cell needs a stub, def {name}(...), and the line # check_{name}({name})")
            if after is None or after.cell_type != "markdown" or f"def {name}(" not in after.source or "<details>" not in after.source:
                wrong.append(f"exercise {name}: the cell after it needs a folded solution, <details> with def {name}(...)")
    return wrong


def solutions(nb) -> str | None:
    """A cell that runs every stub and every folded solution against its check; None if there are no exercises."""
    parts = []
    for cell, after in zip(nb.cells, [*nb.cells[1:], None], strict=True):
        for name in checks(cell):
            [code] = re.findall(r"```python\n(.*?)```", after.source, re.S)[:1]
            parts.append(f'try:\n    check_{name}({name})\nexcept AssertionError as error:\n    assert str(error), "check_{name} does not say what is wrong"\n'
                         f'else:\n    raise RuntimeError("the stub of {name} passes its check")\n\n{code.rstrip()}\n\ncheck_{name}({name})')
    return "\n\n".join([SOLUTIONS, *parts]) if parts else None


def with_solutions(nb) -> None:
    """Bring the hidden cell with the solutions, behind the last line, into step."""
    nb.cells[:] = [c for c in nb.cells if not c.source.startswith(SOLUTIONS)]
    if source := solutions(nb):
        end = max(i for i, c in enumerate(nb.cells) if not c.source.startswith("#| hide")) + 1
        cell = mk_cell(source, "code", id="solutions")
        cell["execution_count"] = None  # as nbdev_clean leaves it
        nb.cells.insert(end, cell)


# --- the figure ----------------------------------------------------------------------------------------------

BOXES = {  # name: (column, row, title, what it is)
    "data": (0, 0, "client data", "a few samples"),
    "profile": (1, 0, "profile", "statistics ξ, x"),
    "metanets": (2, 0, "meta-nets λ", "two small networks"),
    "strategy": (2, 1, "strategy", "ratios β, rates η"),
    "finetuning": (1, 1, "fine-tuning", "weights θ → θ′"),
    "hypergradient": (0, 1, "hypergradient", "of validation loss"),
    "average": (1, 2, "average", "λ of many clients"),
}
LIT = {  # lesson: the boxes that it is about
    "bn": ["strategy"], "data": ["data"], "digits": ["data"], "profile": ["profile"], "strategy": ["strategy"], "finetune": ["finetuning"],
    "metanet": ["metanets"], "hypergrad": ["hypergradient"], "rates": ["hypergradient"], "federated": ["average"],
    "client": ["profile", "metanets", "strategy", "finetuning", "hypergradient"], "learner": list(BOXES),
    "trials": ["metanets", "strategy", "finetuning", "average"], "clusters": ["profile", "metanets", "strategy"],
}
ARROWS = [  # corners of each, in pixels
    "148,44 168,44", "306,44 326,44", "396,76 396,102", "328,136 308,136", "170,136 150,136",
    "80,168 80,228 168,228", "306,228 486,228 486,44 468,44",
]
ALT = "The method: client data, profile, meta-nets, strategy, fine-tuning, hypergradient, average, and back to the meta-nets"


def figure(lit: list[str]) -> str:
    """The whole method as SVG, with some of its boxes lit; readable on light and on dark pages, and on a phone."""
    style = ('<style>text{font-family:system-ui,sans-serif;text-anchor:middle;fill:#1f2937}.t{font-size:15.5px;font-weight:600}.s{font-size:13px}'
             'polyline{fill:none;stroke:#808a99;stroke-width:2.5;marker-end:url(#head)}rect{rx:8;stroke:#808a99;stroke-width:1.5;fill:#eef1f5}'
             '.lit{fill:#ffd166;stroke:#b7791f;stroke-width:2.5}</style>')
    head = ('<defs><marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
            '<path d="M0 0L10 5L0 10z" fill="#808a99"/></marker></defs>')
    parts = [f'<polyline points="{points}"/>' for points in ARROWS]
    for name, (column, row, title, what) in BOXES.items():
        x, y = 12 + 158 * column, 12 + 92 * row
        mark = ' class="lit"' if name in lit else ""
        parts.append(f'<rect{mark} x="{x}" y="{y}" width="136" height="64"/>'
                     f'<text class="t" x="{x + 68}" y="{y + 28}">{title}</text><text class="s" x="{x + 68}" y="{y + 49}">{what}</text>')
    size = 'viewBox="0 0 500 272" width="500" height="272"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{ALT}</title>\n{style}{head}\n' + "\n".join(parts) + "\n</svg>\n"


def drawings(images: Path) -> dict[Path, bytes]:
    """The figure for README, and for each lesson, as files."""
    return {images / "method.svg": figure([]).encode()} | {images / f"method-{name}.svg": figure(lit).encode() for name, lit in LIT.items()}
