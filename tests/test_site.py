"""The site: pages made from notebooks and modules, and, where it was built (`.ci/run docs`), how it looks in a browser."""

import ast
import json
import sys
import time
from pathlib import Path

import pytest
from test_report import CHROMIUM, browser

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "docs" / "_build" / "html"
sys.path.insert(0, str(ROOT / "docs"))

import build  # noqa: E402


def test_pages_have_no_hidden_cells_directives_or_progress(tmp_path):
    code = {"cell_type": "code", "metadata": {}, "outputs": [{"name": "stderr", "text": "50%"}, {"name": "stdout", "text": "1"}]}
    cells = [{**code, "source": ["#| hide\n", "secret"]}, {**code, "source": ["#| export\n", "x = 1"]}, {**code, "source": ["#| echo: false\n", "y"]},
             {"cell_type": "markdown", "metadata": {}, "source": "[![Open in Colab](badge.svg)](https://colab/x)"}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}))
    exported, silent, text = json.loads(build.page(tmp_path / "a.ipynb"))["cells"]
    assert exported["source"] == "x = 1" and [o["name"] for o in exported["outputs"]] == ["stdout"]
    assert silent["metadata"]["tags"] == ["remove-input"]
    assert text["source"] == "[Open in Colab](https://colab/x)"


def test_the_reference_is_made_from_docments():
    lines = ["def mix(", "    old: Tensor, # value at 0", "    share: float | None = 0.5, # in [0, 1]", ") -> Tensor: # between them", '    "A weighted mean."']
    said = build.function(lines, ast.parse("\n".join(lines)).body[0], "## mix(...)\n")
    assert "A weighted mean." in said and "Returns `Tensor`: between them" in said
    assert "| `old` | `Tensor` |  | value at 0 |" in said
    assert "| `share` | `float \\| None` | `0.5` | in [0, 1] |" in said


def test_every_module_has_a_reference_that_names_its_notebook():
    for path in build.LIB.rglob("*.py"):
        if path.name not in ("__init__.py", "_modidx.py"):
            said = build.reference(path)
            assert "Explained and tested in [" in said and "## " in said, path


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a><a href="https://x.y/">4</a>')
    (tmp_path / "b.html").write_text('<p id="there">')
    assert build.lost(tmp_path) == ["a.html: b.html#gone", "a.html: c.html"]


@pytest.mark.skipif(not HTML.exists(), reason="the site is not built: .ci/run docs")
def test_tables_that_cells_show_are_tables():
    pages = [path for path in HTML.rglob("*.html") if "_static" not in path.parts]
    assert not [path.name for path in pages if "<p>|" in path.read_text()]
    cells = json.loads((ROOT / "nbs/experiments/found.ipynb").read_text())["cells"]
    shown = sum("text/markdown" in output.get("data", {}) for cell in cells for output in cell.get("outputs", []))
    assert (HTML / "experiments" / "found.html").read_text().count("<table") == shown > 5


@pytest.mark.skipif(not HTML.exists(), reason="the site is not built: .ci/run docs")
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome here; on Debian: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("name", ["index", "07_hypergrad", "05_finetune", "api/fedl2p.finetune", "experiments/policy"])
def test_a_page_in_a_browser(name, width):
    with browser() as send:
        target = send("Target.createTarget", url="about:blank")["targetId"]
        session = send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        send("Emulation.setDeviceMetricsOverride", session, width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        send("Page.navigate", session, url=(HTML / f"{name}.html").as_uri())

        def value(expression):
            return send("Runtime.evaluate", session, expression=expression, returnByValue=True)["result"].get("value")

        loaded = "document.readyState == 'complete' && [...document.images].every(i => i.complete || i.loading == 'lazy')"
        rendered = "document.querySelectorAll('.math').length == document.querySelectorAll('mjx-container').length"
        deadline = time.monotonic() + 300
        while not value(f"{loaded} && {rendered}"):
            assert time.monotonic() < deadline, "the page or its equations did not load"
            time.sleep(0.1)
        assert value("[...document.images].every(i => i.naturalWidth > 0)"), "a picture is missing"
        assert value("document.documentElement.scrollWidth") <= width, "something sticks out"
        if name == "07_hypergrad":
            assert value("document.querySelectorAll('mjx-container').length") > 20
