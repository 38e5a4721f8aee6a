"""Tables of results: numbers by hand, and nothing to show."""

import math

from fedl2p.cli import main
from fedl2p.core import write_json
from fedl2p.studies.published import Condition
from fedl2p.studies.runs import (
    Cell,
)
from fedl2p.studies.tables import collect, comparison, markdown, results, summarise, table


def test_table_before_any_result(tmp_path, capsys):
    assert main(["table", "office", "--out", str(tmp_path / "none")]) == 0
    assert "Nothing of ours at scale small yet" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_table_numbers(tmp_path):
    """Means and deviations by hand; a diverged seed; seeds of different pools."""
    row = Condition("speech", None, 5, "fedavg")
    gone = {"seen": None, "unseen": None}
    values = {("ft-c", 0): {"seen": 0.5, "unseen": 0.4}, ("ft-c", 1): {"seen": 0.7, "unseen": 0.4}, ("fedl2p", 0): gone, ("fedl2p", 1): gone, ("none", 0): {"seen": 0.2, "unseen": 0.1}, ("none", 1): {"seen": 0.3, "unseen": 0.1}, ("ft-i-best", 1): {"seen": 0.9, "unseen": 0.9}}
    for (method, seed), accuracy in values.items():
        path = Cell(row, method, seed).path(tmp_path, "small")
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {k: v for k, v in row._asdict().items() if k != "pool"}
        clients = [{"client": f"c{i}", "pool": pool, "domain": "", "n": 10, "accuracy": value + 0.1 * i} for pool, value in accuracy.items() for i in (0, 1) if value]
        write_json(path, {**about, "method": method, "seed": seed, "accuracy": accuracy, "clients": clients, "seconds": 1.0, "pretraining_seconds": 0.0, "differs": "made up", "machine": {"device": "cpu", "cores": 2}})
    found = collect(list(results(tmp_path, "small")))
    assert found[row]["ft-c"] == {0: 50.0, 1: 70.0} and found[row._replace(pool="unseen")]["ft-c"] == {0: 40.0, 1: 40.0}
    assert all(math.isnan(found[row._replace(pool=pool)]["fedl2p"][0]) for pool in ("seen", "unseen"))
    text = table("speech", "small", tmp_path)
    assert "| 5 | seen | ours | 25.0 ± 7.1 | **60.0 ± 14.1** | — | — | — | diverges | 90.0 (1) |" in text
    assert "| 5 | unseen | ours | 10.0 ± 0.0 | **40.0 ± 0.0** |" in text
    assert "87.77 ± 0.47" in text  # the paper's, right below, as printed
    assert "| speech, fedavg, e 5 | +35.0 ± 0.0 | 2 |" in comparison("speech", "small", tmp_path, "ft-c", ("none",))  # (30 + 40) / 2 on both clients


def test_table_without_an_unseen_pool():
    rows = summarise([[{"method": "A", "pool": "seen", "accuracy": 0.5, "n": 2}]])
    assert markdown(rows).splitlines()[2] == "| A | 50.0 |"
