"""The report of a folder: what is on it, hostile folders, and how it looks in a real browser at the widths of a phone and of a desktop."""

import base64
import contextlib
import html
import json
import os
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib

import pytest
import torch
from torch import nn

from fedl2p import Config, Data, FedL2P, make_client
from fedl2p.cases import cases
from fedl2p.cli import main
from fedl2p.report import STYLE, write_report
from fedl2p.runner import Runner
from fedl2p.storage import load_tensors, save_tensors
from fedl2p.studies.demo import Demo, run_demo

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "demo"
    config = Config.paper(lr=0.01, epochs=1, rounds=2, fraction=0.2)
    run_demo(Demo(config, seeds=(0,), clients=10, unseen=5, pretraining_rounds=3, out=out))
    return out


@pytest.fixture(scope="module")
def page(folder):
    return write_report([folder])


def cell(out, method, clients=(), **more):
    """A cell of a study, as `fedl2p.studies.contents.run_cell` writes it."""
    condition = {"dataset": "office", "alpha": 1000.0, "epochs": 5, "pretraining": "imagenet"}
    about = {"method": method, "seed": 0, "scale": "smoke", "pools": ["seen"]}
    made = {"settings": {"lr": 0.1, "estimator": "ift", "note": "<i>"}, "machine": {"device": "cpu"}}
    path = out / "office" / "smoke" / "imagenet-alpha1000-e5" / f"{method}-seed0.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**condition, **about, **made, "clients": list(clients), **more}))
    return path


def plain(n=4, domain="x", right=5):
    return [{"pool": "seen", "client": f"c{i}", "domain": f"{domain}{i % 2}", "right": right, "n": 10, "loss": 1.0} for i in range(n)]


def learned(n=4, eta=0.1, domain="x", beta=0.5):
    strategies = [{"beta": [beta], "eta": [eta, eta], "xi": [float(i)], "feature_stats": [1.0, float(i)]} for i in range(n)]
    return [record | strategy for record, strategy in zip(plain(n, domain), strategies, strict=True)]


LAYERS = {"beta": ["bn"], "eta": ["w", "b"], "sizes": [30, 10]}


def test_everything_is_on_the_page(page):
    text = page.read_text()
    methods = ("FedL2P (IFT)", "no fine-tuning", "FedL2P (ours)", "FT (BN C), precise statistics, best rate")
    numbers = ("Adjusted Rand Index", "Sparsity", "recipe", "torch")
    for expected in (*methods, *numbers, "Did the validation loss fall?", "Who gained over no fine-tuning"):
        assert expected in text, expected
    assert not re.search(r"(src|href)=.https?:|url\(", text)  # it needs nothing from elsewhere
    assert text.count("<img") == len(list(page.parent.glob("*.png"))) >= 6
    for png in page.parent.glob("*.png"):
        assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_style_is_not_escaped(page):
    """A browser reads &gt; as five characters there."""
    assert f"<style>{STYLE}</style>" in page.read_text()


def test_a_demo_is_a_folder_of_cells(folder):
    [case] = cases(folder)
    assert case.title == "digits, alpha 0.5, e 1, scale small" and case.main == "fedl2p-ift"
    methods = {r["method"] for r in case.records}
    assert methods == {"none", "ft-c-precise-best", "ft-g-best", "ft-i-best", "l2p", "fedl2p-ift", "fedl2p-ours"}
    assert len(case.of("fedl2p-ift", "seen")) == 10 and len(case.of("none", "unseen")) == 5
    assert [len(history) for history in case.rounds.values()] == [3]  # two rounds, and the last lambda judged


def test_the_pictures_of_a_demo_are_about_its_own_estimator(tmp_path):
    """And not about one of `more_methods`, be it a method of the paper's tables."""
    for method, estimator in {"none": "ift", "fedl2p-start": "ift", "fedl2p-fomaml": "fomaml", "fedl2p-ift": "ift"}.items():
        clients = learned() if method.startswith("fedl2p") else plain()
        cell(tmp_path, method, clients, layers=LAYERS, settings={"estimator": estimator})
    [case] = cases(tmp_path)
    assert case.main == "fedl2p-ift" and case.settings == {"estimator": "ift"}


def test_a_study_with_its_frozen_and_identical_clients(tmp_path):
    cell(tmp_path, "fedl2p", learned(eta=0.0), layers=LAYERS, rounds=[{"round": 1, "val_loss": None, "failed": {"c0": "x"}, "diverging": 0}])
    cell(tmp_path, "none", plain())
    text = write_report([tmp_path]).read_text()
    assert "1.00 to 1.00" in text and "all clients have the same numbers" in text and "failures of clients: 1" in text
    assert "nan" not in re.sub(r"base64,[^\"]*", "", text)


def test_one_client_a_domain_is_said(tmp_path):
    cell(tmp_path, "fedl2p", learned(n=2), layers=LAYERS)
    assert "each domain has only one client" in write_report([tmp_path]).read_text()


def test_a_part_of_a_study_is_a_folder_too(tmp_path):
    cell(tmp_path, "fedl2p", learned(), layers=LAYERS)
    [case] = cases(tmp_path / "office")
    assert case.main == "fedl2p" and len(case.of("fedl2p", "seen")) == 4


def test_a_cell_of_an_older_version_is_read(tmp_path):
    """It holds shares of right answers."""
    old = [{**{k: v for k, v in r.items() if k != "right"}, "accuracy": 0.7} for r in plain()]
    path = cell(tmp_path, "none", old, accuracy={"seen": 0.7})
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "pools"}))
    assert [r["right"] for r in cases(tmp_path)[0].records] == [7] * 4
    assert '<td class="number">70.0</td>' in write_report([tmp_path]).read_text()


def test_a_folder_of_an_older_demo_is_refused(tmp_path, capsys):
    """Its folders are called seed-0 and so on, and it has no cells."""
    (tmp_path / "seed-0").mkdir()
    for name in ("seed-0/l2p.json", "clients.jsonl", "config.json"):
        (tmp_path / name).write_text("{}\n")
    before = sorted(tmp_path.rglob("*"))
    words = f"{tmp_path} holds only results of an older version of the demo; run the demo again"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        cases(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"fedl2p: {words}\n" and sorted(tmp_path.rglob("*")) == before


def test_files_of_others_are_passed_over(tmp_path):
    """Their names may look like those of cells."""
    cell(tmp_path, "none", plain())
    for name, content in {"mine-seed1.json": "[1, 2]", "yours-seed1.json": '{"clients": []}'}.items():
        (tmp_path / name).write_text(content)
    assert [r["method"] for case in cases(tmp_path) for r in case.records] == ["none"] * 4


def test_a_diverged_cell_is_said(tmp_path):
    cell(tmp_path, "fedl2p", [], diverged="nobody is left")
    cell(tmp_path, "none", plain())
    assert "FedL2P, seed 0, has no result: nobody is left" in write_report([tmp_path]).read_text()
    (tmp_path / "office/smoke/imagenet-alpha1000-e5/none-seed0.json").unlink()
    assert "has no result" in write_report([tmp_path]).read_text()  # and nothing else


@pytest.mark.parametrize("odd", [
    {"fedl2p-fomaml": {"clients": learned(), "layers": LAYERS}, "none": {"clients": plain()}}, # FedL2P itself is missing
    {"l2p": {"clients": learned()}}, # without the names of layers
    {"of-my-own": {"clients": plain()}},
    {"fedl2p": {"clients": learned(domain="$x$ $"), "layers": LAYERS, "rounds": [{"round": 1, "val_loss": 1.0}]}},
    {"fedl2p": {"clients": learned(beta=float("nan")), "layers": LAYERS}},
    {"fedl2p": {"clients": learned(), "layers": {"beta": ["bn"], "eta": ["w", "b"]}}}, # from before sizes were noted
    {"fedl2p": {"clients": [], "rounds": []}},
], ids=range(7))
def test_odd_folders_make_a_page(tmp_path, odd):
    for method, content in odd.items():
        cell(tmp_path, method, **content)
    assert "no fine-tuning less no fine-tuning" not in write_report([tmp_path]).read_text()


def test_reading_changes_nothing(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("report"))
    before = sorted(copy.rglob("*"))
    cases(copy)
    assert sorted(copy.rglob("*")) == before
    damaged = next(copy.rglob("none-seed0.json"))
    damaged.write_text(damaged.read_text()[:50])
    with pytest.warns(RuntimeWarning, match="none-seed0.json is damaged"):
        assert "none" not in {r["method"] for case in cases(copy) for r in case.records}  # the rest is shown
    assert sorted(copy.rglob("*")) == before


@pytest.fixture
def small(tmp_path):
    """A folder with one cell, whose report has one picture."""
    cell(tmp_path / "small", "none", plain())
    return tmp_path / "small"


def names(out):
    return {path.name for path in out.iterdir()}


def test_pictures_of_an_earlier_report_go_and_those_of_others_stay(small, tmp_path):
    out = tmp_path / "out"
    cell(tmp_path / "more", "fedl2p", learned(), layers=LAYERS)
    cell(tmp_path / "more", "none", plain())
    first = names(write_report([tmp_path / "more"], out).parent)
    strangers = {"x-01.png": b"a holiday", "mine.png": b"x", "office-imagenet-99.png": b"y", "notes.html": b"z"}
    for name, content in strangers.items():
        (out / name).write_bytes(content)
    write_report([small], out)
    pictures = {name for name in names(out) - strangers.keys() if name.endswith(".png")}
    assert names(out) == {"report.html", "report.json", *pictures, *strangers} and 1 == len(pictures) < len(first) - 2
    assert json.loads((out / "report.json").read_text()) == {"format": "fedl2p report 1", "files": sorted({"report.html", *pictures})}
    assert {name: (out / name).read_bytes() for name in strangers} == strangers
    assert (out / "report.html").read_text().count("<img") == 1


def test_a_folder_of_others_is_fine_unless_a_name_is_taken(small, tmp_path):
    out = tmp_path / "site"
    out.mkdir()
    (out / "index.html").write_text("mine")
    (out / "x-01.png").write_text("mine")
    made = names(write_report([small], out).parent) - {"index.html", "x-01.png"}
    assert (out / "index.html").read_text() == (out / "x-01.png").read_text() == "mine"
    for name in made:
        other = tmp_path / f"other {name}"
        other.mkdir()
        (other / name).write_text("mine")
        with pytest.raises(ValueError, match=f"{re.escape(name)} (was not written by an earlier report|is not the list of an earlier report's files); move it, or choose another folder$"):
            write_report([small], other)
        assert names(other) == {name} and (other / name).read_text() == "mine"


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_report_is_not_written_through_links(small, tmp_path, capsys):
    (tmp_path / "theirs").mkdir()
    for target in (tmp_path / "theirs", tmp_path / "nowhere"):
        (small / "report").symlink_to(target)
        for more in ([], ["--out", f"{small}/report/"]):
            assert main(["report", str(small), *more]) == 1
            assert capsys.readouterr().err == f"fedl2p: out must be a folder and not a link, got '{small / 'report'}'\n"
        (small / "report").unlink()
    assert not names(tmp_path / "theirs") and not (tmp_path / "nowhere").exists()

    out = write_report([small]).parent
    for name in names(out):  # the manifest lists them, so they could be replaced
        (tmp_path / "theirs" / name).write_text("precious")
        kept = (out / name).read_bytes()
        (out / name).unlink()
        (out / name).symlink_to(tmp_path / "theirs" / name)
        with pytest.raises(ValueError, match=f"{re.escape(name)} (was not written by|is not the list of) an earlier report.*; move it, or choose another folder"):
            write_report([small])
        (out / name).unlink()
        (out / name).write_bytes(kept)
    assert {path.read_text() for path in (tmp_path / "theirs").iterdir()} == {"precious"}
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="out must be a folder and not a link, got '.*file'"):
        write_report([small], tmp_path / "file")


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_manifest_deletes_nothing_but_files_of_a_report(small, tmp_path):
    out = tmp_path / "report"
    (out / "sub").mkdir(parents=True)
    (out / "folder-01.png").mkdir()
    kept = [tmp_path / "x-01.png", tmp_path / "report.html", out / "sub" / "x-01.png", out / "policy.safetensors", out / "a-seed0.json", out / ".x-01.png.part"]
    for path in kept:
        path.write_text("precious")
    (out / "link-01.png").symlink_to(kept[0])
    (out / "old-01.png").write_text("of an earlier report")
    listed = ["../../x-01.png", "../x-01.png", str(kept[0]), "sub/x-01.png", "sub\\x-01.png", "..", ".", "", "policy.safetensors", "a-seed0.json", ".x-01.png.part",
              "folder-01.png", "link-01.png", "gone-01.png", "old-01.png", "x-01.png\n", "\0-01.png", 3, None, ["x-01.png"], {}]
    (out / "report.json").write_text(json.dumps({"format": "fedl2p report 1", "files": listed}))
    write_report([small], out)
    assert {path.read_text() for path in kept} == {"precious"} and (out / "folder-01.png").is_dir() and (out / "link-01.png").is_symlink()
    assert not (out / "old-01.png").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b'{"files": ["x-01.png"]}', b'{"format": "fedl2p report 1", "files": "x"}', b'{"format": "fedl2p report 1"}', b"\xff", b"[" * 100_000])
def test_a_manifest_of_somebody_else_is_refused(small, tmp_path, content):
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_bytes(content)
    (out / "x-01.png").write_bytes(b"x")
    with pytest.raises(ValueError, match="report.json is not the list of an earlier report's files; move it, or choose another folder"):
        write_report([small], out)
    assert names(out) == {"report.json", "x-01.png"} and (out / "report.json").read_bytes() == content


def test_a_report_that_broke_off_can_be_made_again(small, tmp_path, monkeypatch):
    cell(tmp_path / "more", "fedl2p", learned(), layers=LAYERS)
    out, replace = tmp_path / "out", os.replace
    for broken, source in ((2, tmp_path / "more"), (1, small), (3, tmp_path / "more")):
        calls = []

        def breaks(*paths, calls=calls, broken=broken):
            calls.append(paths)
            if len(calls) > broken:
                raise OSError("no space left on device")
            replace(*paths)

        monkeypatch.setattr(os, "replace", breaks)
        with pytest.raises(OSError, match="no space left"):
            write_report([source], out)
        monkeypatch.setattr(os, "replace", replace)
    write_report([small], out)
    assert len(names(out)) == 3  # page, picture and list


READS = """
import sys, time, warnings
warnings.simplefilter("always")
from fedl2p.cases import cases
start = time.process_time()  # of this process: waiting and other programs do not count
[case] = cases(sys.argv[1])
print(len(case.records), time.process_time() - start < 20)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such files")
def test_only_regular_files_are_read(small, tmp_path):
    """A pipe would wait for ever, and /dev/zero never ends."""
    odd = small / "office"
    os.mkfifo(odd / "a-seed0.json")
    (odd / "b-seed0.json").symlink_to("/dev/zero")
    (odd / "c-seed0.json").symlink_to(next(small.rglob("none-seed0.json")))
    (odd / "d-seed0.json").symlink_to(tmp_path / "nowhere")
    (odd / "e-seed0.json").mkdir()
    (odd / "loop").symlink_to(small)
    done = subprocess.run([sys.executable, "-c", READS, str(small)], capture_output=True, text=True, timeout=300)
    assert done.stdout == "4 True\n", done.stderr
    left_out = re.findall(r"RuntimeWarning: .*/(.-seed0.json) is left out: it is not a regular file", done.stderr)
    assert left_out == [f"{letter}-seed0.json" for letter in "abcde"]


def test_large_files_are_left_out(tmp_path, monkeypatch):
    paths = [cell(tmp_path, method, plain()) for method in ("fedl2p", "none", "plain")]
    size = max(path.stat().st_size for path in paths)
    large = cell(tmp_path, "large", plain(60))
    monkeypatch.setattr("fedl2p.cases.FILE_BYTES", size)
    with pytest.warns(RuntimeWarning, match="large-seed0.json is left out: more than"):
        assert len(cases(tmp_path)[0].records) == 12
    large.unlink()
    monkeypatch.setattr("fedl2p.cases._FOLDER_BYTES", 2 * size)
    with pytest.warns(RuntimeWarning, match="plain-seed0.json is left out: .*or more than .* with the files before it"):
        assert len(cases(tmp_path)[0].records) == 8


def test_nothing_in_a_folder_becomes_markup(tmp_path):
    folder = tmp_path / "<script>alert(2)"
    mine, theirs = ([{**r, "client": f"<script>{r['client']}", "right": right} for r in rows] for right, rows in ((4, learned(domain="<script>alert(1)</script>")), (5, plain())))
    cell(folder, "fedl2p", mine, layers={**LAYERS, "beta": ["<b>bn"]})
    cell(folder, "none", theirs)
    cell(folder, "<img src=x>", plain())
    text = write_report([folder, folder], tmp_path / "out").read_text()
    assert "<script" not in text and "<i>" not in text and "&lt;i&gt;" in text
    assert all(f"{start}{tmp_path}/&lt;script&gt;alert(2)" in text for start in ("<title>fedl2p report: ", "<p><b>A: ")) and "&lt;script&gt;c0 (-10.0)" in text
    assert "<img src=x" not in text and "<td>&lt;img src=x&gt;</td>" in text


def test_wrong_folders_are_named(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err == f"fedl2p: {tmp_path / 'nowhere'} holds no results: neither *-seed*.json of a study nor checkpoint.safetensors of FedL2P.fit\n"
    assert main(["report", str(tmp_path), str(tmp_path), str(tmp_path)]) == 1
    assert "folders must be one, or two to be shown side by side, got 3" in capsys.readouterr().err
    (tmp_path / "fedl2p-seed0.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 1
    assert "damaged" in capsys.readouterr().err


def test_the_command_prints_where_the_page_is(folder, tmp_path, capsys):
    assert main(["report", str(folder), str(folder), "--out", str(tmp_path / "two")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "two" / "report.html")


@contextlib.contextmanager
def browser():
    """A function that sends commands of the DevTools protocol to a headless Chromium through two pipes, and returns its answers."""
    ours, its = os.pipe(), os.pipe()  # each is a pair: to read from, to write to
    home = tempfile.mkdtemp()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={home}", "--remote-debugging-pipe"]
    # Chromium reads commands from descriptor 3 and writes answers to 4.
    process = subprocess.Popen(["bash", "-c", f'exec "$@" 3<&{ours[0]} 4>&{its[1]}', "bash", CHROMIUM, *options], pass_fds=(ours[0], its[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    os.close(ours[0])
    os.close(its[1])
    waiting, number = b"", 0

    def send(method, session=None, **params):
        nonlocal number, waiting
        number += 1
        os.write(ours[1], json.dumps({"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}).encode() + b"\0")
        deadline = time.monotonic() + 300
        while True:
            *whole, waiting = waiting.split(b"\0")
            for message in map(json.loads, whole):
                if message.get("id") == number:  # nothing else is asked before it comes
                    return message.get("result", {})
            assert select.select([its[0]], [], [], max(0, deadline - time.monotonic()))[0], f"{method}: Chromium does not answer"
            chunk = os.read(its[0], 65536)
            assert chunk, f"{method}: Chromium has ended"
            waiting += chunk

    try:
        yield send
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        os.close(ours[1])
        os.close(its[0])
        shutil.rmtree(home, ignore_errors=True)


def pixels(png):
    """Width, height, and the number of different bytes in the image data: an empty page has few."""
    width, height = struct.unpack(">II", png[16:24])
    data, at = b"", 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    return width, height, len(set(zlib.decompress(data)))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome here; on Debian: apt-get install chromium")
@pytest.mark.skipif(sys.platform == "win32", reason="Chromium's pipes need file descriptors")
@pytest.mark.parametrize(("name", "width", "height"), [("phone", 390, 844), ("desktop", 1440, 900)])
@pytest.mark.parametrize("two", [False, True])
def test_the_page_in_a_browser(folder, page, tmp_path, name, width, height, two):
    where = write_report([folder, folder], tmp_path / "two") if two else page
    with browser() as send:
        target = send("Target.createTarget", url="about:blank")["targetId"]
        session = send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        send("Emulation.setDeviceMetricsOverride", session, width=width, height=height, deviceScaleFactor=1, mobile=name == "phone")
        send("Emulation.setScrollbarsHidden", session, hidden=True)
        send("Page.navigate", session, url=where.resolve().as_uri())

        def value(expression):
            return send("Runtime.evaluate", session, expression=expression, returnByValue=True)["result"].get("value")

        deadline = time.monotonic() + 300
        while not value("document.readyState == 'complete' && [...document.images].length > 0 && [...document.images].every(i => i.complete && i.naturalWidth > 0)"):
            assert time.monotonic() < deadline, "the page did not load"
            time.sleep(0.1)
        assert value("document.documentElement.scrollWidth") <= width  # nothing sticks out
        assert value("Math.min(...[...document.images].map(i => i.getBoundingClientRect().width))") > 300  # or nobody could read them
        columns = value("new Set([...document.querySelectorAll('.beside > div')].map(d => Math.round(d.getBoundingClientRect().left))).size")
        assert columns == (2 if two and name == "desktop" else 1)
        shot = base64.b64decode(send("Page.captureScreenshot", session, format="png", captureBeyondViewport=True)["data"])
    (tmp_path / f"{name}.png").write_bytes(shot)  # pytest keeps it for a while, for whoever wants to look
    across, down, shades = pixels(shot)
    assert across == width and down > height and shades > 50


def federation(n=4):
    rng, y = torch.Generator().manual_seed(0), torch.arange(30) % 3
    clients = [make_client(f"c{i}", Data((1 + i) * torch.eye(3, 4)[y] + torch.randn(30, 4, generator=rng), y)) for i in range(n)]
    return clients, nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()


def test_a_folder_by_fit_shows_gains_recommendations_and_rounds(tmp_path, capsys):
    """Of either recipe, whole or half-way, without model or data; a damaged file is named."""
    clients, model = federation()
    policy = FedL2P(model, Config(epochs=1, splits=1, choosing_rounds=2, rounds=2)).fit(clients, tmp_path / "ours", Runner(0))
    FedL2P(model, Config.paper(epochs=1, rounds=2, fraction=1.0)).fit(clients, tmp_path / "paper", Runner(0))
    capsys.readouterr()
    assert main(["report", str(tmp_path / "ours")]) == 0
    text = (tmp_path / "ours" / "report" / "report.html").read_text()
    assert all(f"<td>{c.id}</td><td>{policy.explain(c).words}</td>" in html.unescape(text) for c in clients)
    assert policy.gained.rows[1][0] in html.unescape(text) and text.count("<img") == 2 and "2 rounds in total" in text
    text = write_report([tmp_path / "paper"]).read_text()
    assert "From the first round to the last, β moved" in text and "see `policy.explain(client)`" in text and text.count("<img") == 2
    assert write_report([tmp_path / "ours", tmp_path / "paper"], tmp_path / "both").read_text().count("<img") == 4
    path = tmp_path / "ours" / "checkpoint.safetensors"
    tensors, header = load_tensors(path, "fedl2p checkpoint 1")
    for names in (("chosen", "common_gain"), ("rounds", -1, "error")):
        info = json.loads(header["info"])
        del (info[names[0]] if names[0] == "chosen" else info["rounds"][-1])[names[-1]]
        save_tensors(path, tensors, {**header, "info": json.dumps(info)})
        with pytest.raises(ValueError, match=f"checkpoint.safetensors is damaged: {names[-1]} must be there"):
            cases(tmp_path / "ours")
    (tmp_path / "ours" / "checkpoint.safetensors").unlink()
    with pytest.raises(ValueError, match="ours holds only the trials of an unfinished fit; call fit with this folder again to continue"):
        cases(tmp_path / "ours")
    tensors, header = load_tensors(tmp_path / "paper" / "checkpoint.safetensors", "fedl2p checkpoint 1")
    save_tensors(tmp_path / "paper" / "checkpoint.safetensors", tensors, {**header, "settings": '{"seed": []}'})
    with pytest.raises(ValueError, match=r"checkpoint.safetensors is damaged: settings.seed must be a whole number, got \[\]"):
        cases(tmp_path / "paper")
    (tmp_path / "paper" / "checkpoint.safetensors").write_bytes(b"{")
    assert main(["report", str(tmp_path / "paper")]) == 1 and "is not a complete safetensors file" in capsys.readouterr().err
