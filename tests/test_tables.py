"""Tables of results: numbers by hand, cells of older versions, and nothing to show."""

import json
import math

import pytest

from fedl2p.cli import main
from fedl2p.core import markdown
from fedl2p.storage import write_json
from fedl2p.studies.cells import Cell
from fedl2p.studies.comparisons import comparison, differences, evidence, gaps, looking, paired
from fedl2p.studies.published import TABLES, Condition
from fedl2p.studies.tables import (
    accuracies,
    accuracy_table,
    both_pools,
    collect,
    fold,
    groups,
    label,
    read_cell,
    results,
    sampling_error,
    study_table,
    summarise,
    titles,
)

SPEECH = Condition("speech", None, 5, "fedavg")


def test_table_before_any_result(tmp_path, capsys):
    assert main(["table", "office", "--out", str(tmp_path / "none")]) == 0
    assert "Nothing of ours at scale small yet" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def write_cell(out, method, seed, rights, condition=SPEECH, **more):
    """A cell with two clients in each pool, of 10 samples each; `rights`: pool -> how many of each client's are right."""
    path = Cell(condition, method, seed).path(out, "small")
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {k: v for k, v in condition._asdict().items() if k != "pool"} | {"method": method, "seed": seed, "scale": "small"}
    cost = {"seconds": 1.0, "pretraining_seconds": 0.0, "differs": "made up", "machine": {"device": "cpu", "cores": 2}}
    clients = [{"client": f"c{i}", "pool": pool, "domain": "", "n": 10, "right": right}
               for pool, counts in rights.items() for i, right in enumerate(counts)]
    write_json(path, {**about, **({"pools": list(rights)} if rights else {}), "clients": clients, **cost, **more})
    return path


def test_table_numbers(tmp_path):
    """Means and deviations by hand; a diverged seed; seeds of different pools."""
    gone = {"seen": [], "unseen": []}
    rights = {
        ("ft-c", 0): {"seen": [4, 6], "unseen": [3, 5]}, ("ft-c", 1): {"seen": [6, 8], "unseen": [3, 5]},
        ("fedl2p", 0): gone, ("fedl2p", 1): gone,
        ("none", 0): {"seen": [1, 3], "unseen": [0, 2]}, ("none", 1): {"seen": [2, 4], "unseen": [0, 2]},
        ("ft-i-best", 1): {"seen": [8, 10], "unseen": [8, 10]},
    }
    for (method, seed), counts in rights.items():
        write_cell(tmp_path, method, seed, counts)
    by_condition, unseen = collect(results(tmp_path, "small")), SPEECH._replace(pool="unseen")
    assert by_condition[SPEECH]["ft-c"] == {0: 50.0, 1: 70.0} and by_condition[unseen]["ft-c"] == {0: 40.0, 1: 40.0}
    assert all(math.isnan(by_condition[condition]["fedl2p"][0]) for condition in (SPEECH, unseen))
    five, fifteen = study_table("speech", "small", tmp_path).tables
    assert five.head == ["speech, e 5", "seen", "unseen"] and fifteen.head == ["speech, e 15", "seen", "unseen"]
    assert five.rows[:6] == [
        ["no fine-tuning", "25.0 ± 7.1", "10.0"],  # nothing depends on the seed in the unseen pool
        ["FT (BN C)", "**60.0 ± 14.1**", "**40.0**"],
        ["FedL2P", "diverges", "diverges"],
        ["FT (BN I), best rate", "90.0 (1)", "90.0 (1)"],  # another seed, so it is not the best
        ["seeds", "2", "2"],
        ["test set ±", "10.0", "10.0"],
    ]
    assert five.rows[-1] == ["paper: FedL2P", "87.77 ± 0.47", "87.85 ± 0.18"]  # as printed
    assert ["paper: L2P", "64.79 ± 1.84", "—"] in five.rows
    assert all(row[0].startswith("paper: ") for row in fifteen.rows) and not five.notes and fifteen.notes
    [by_pairs] = comparison("speech", "small", tmp_path, "ft-c", ("none",)).tables
    assert by_pairs.head == ["speech, e 5: FT (BN C) minus", "seen", "unseen"]
    assert by_pairs.rows[0] == ["no fine-tuning", "**+35.0 ± 5.0 / 0.0**", "**+30.0 ± 0.0 / 0.0**"]  # seeds: 30 and 40; clients: 35 and 35


def test_cells_of_older_versions(tmp_path):
    """They hold the share of right answers instead of their number, and accuracies instead of the names of pools."""
    old = {"seen": 0.428571, "unseen": 0.857143}  # 3 and 6 of 7, with six digits
    clients = [{"client": "c0", "pool": pool, "domain": "", "n": 7, "accuracy": accuracy} for pool, accuracy in old.items()]
    path = write_cell(tmp_path, "ft-c", 2, {}, accuracy=old, clients=clients)
    cell = read_cell(path)
    assert [(r["right"], r["n"], r["method"], r["seed"]) for r in cell["clients"]] == [(3, 7, "ft-c", 2), (6, 7, "ft-c", 2)]
    assert not any("accuracy" in r for r in cell["clients"])
    by_condition = collect(results(tmp_path, "small"))
    assert by_condition[SPEECH] == {"ft-c": {2: pytest.approx(300 / 7, abs=1e-4)}}
    assert by_condition[SPEECH._replace(pool="unseen")] == {"ft-c": {2: pytest.approx(600 / 7, abs=1e-4)}}
    write_cell(tmp_path, "fedl2p", 2, {}, accuracy={"seen": None, "unseen": None}, diverged="all clients failed")
    assert math.isnan(collect(results(tmp_path, "small"))[SPEECH]["fedl2p"][2])


def test_clients_of_other_seeds_are_other_clients(tmp_path):
    """Where each seed has clients of its own, no mean is taken over those that share a name."""
    for seed in (0, 1):
        write_cell(tmp_path, "ft-c", seed, {"seen": [4 + seed, 6]}, new_clients=True)
        write_cell(tmp_path, "none", seed, {"seen": [4, 4]}, new_clients=True)
    names = {r["client"] for cell in results(tmp_path, "small") for r in cell["clients"]}
    assert names == {f"c{i} of seed {seed}" for i in (0, 1) for seed in (0, 1)}
    [table] = comparison("speech", "small", tmp_path, "ft-c", ("none",)).tables
    assert table.rows == [["no fine-tuning", "**+12.5 ± 2.5 / 4.8**"], ["seeds", "2"], ["clients", "4"]]  # clients: 0, 20, 10 and 20 points; seeds: 10 and 15


def test_a_row_of_a_method_has_a_value_for_each_seed():
    rows = summarise([
        {"method": "none", "pool": "seen", "seed": 0, "right": 1, "n": 2}, {"method": "none", "pool": "seen", "seed": 0, "right": 1, "n": 6},
        {"method": "none", "pool": "seen", "seed": 1, "right": 2, "n": 2}, {"method": "none", "pool": "unseen", "seed": 1, "right": 0, "n": 2},
    ])
    assert rows == {"none": {"seen": [0.25, 1.0], "unseen": [0.0]}}


def test_table_without_an_unseen_pool():
    rows = summarise([{"method": "A", "pool": "seen", "seed": 0, "right": 1, "n": 2}])
    assert markdown(accuracy_table(rows)).splitlines()[2] == "| A | 50.0 |"
    assert accuracy_table(rows, {"A": "a label"}).rows == [["a label", "50.0"]]


def test_clients_of_a_seed_share_what_was_learned(tmp_path):
    """Means by seed of -2.5, +0.3 and -0.3 points are an error of 0.85 over seeds, however much the clients of a seed agree."""
    for seed, right in enumerate((475, 503, 497)):
        clients = [{"client": f"c{i}", "pool": "seen", "domain": "", "n": 1000} for i in (0, 1)]
        write_cell(tmp_path, "fedl2p", seed, {"seen": []}, clients=[c | {"right": right} for c in clients])
        write_cell(tmp_path, "fedl2p-start", seed, {"seen": []}, clients=[c | {"right": 500} for c in clients])
    found = paired(results(tmp_path, "small"), SPEECH, "fedl2p", "fedl2p-start")
    assert found == pytest.approx((-2.5 / 3, ((6.43 - 2.5**2 / 3) / 2 / 3) ** 0.5, 0.0, 3, 2), abs=1e-6)
    assert str(found) == "-0.8 ± 0.9 / 0.0"
    [table] = comparison("speech", "small", tmp_path, others=("fedl2p-start",)).tables
    assert table.rows == [["FedL2P before learning", "-0.8 ± 0.9 / 0.0"], ["seeds", "3"], ["clients", "2"]]


def test_seeds_may_score_other_clients(tmp_path):
    """Each client counts once in the mean, each seed once in its error."""
    for seed, rights in enumerate(({"c0": 6, "c1": 5}, {"c1": 9, "c2": 9})):
        clients = [{"client": name, "pool": "seen", "domain": "", "n": 10} for name in rights]
        write_cell(tmp_path, "ft-c", seed, {"seen": []}, clients=[c | {"right": rights[c["client"]]} for c in clients])
        write_cell(tmp_path, "none", seed, {"seen": []}, clients=[c | {"right": 5} for c in clients])
    found = paired(results(tmp_path, "small"), SPEECH, "ft-c", "none")
    # clients gain 10, (0 + 40) / 2 and 40 points; seeds 5 and 40
    assert found == pytest.approx((70 / 3, 17.5, (1400 / 3 / 2 / 3) ** 0.5, 2, 3))


def test_one_seed_or_one_client_has_no_error(tmp_path):
    write_cell(tmp_path, "ft-c", 0, {"seen": [7], "unseen": [4, 6]})
    write_cell(tmp_path, "none", 0, {"seen": [5], "unseen": [4, 4]})
    [table] = comparison("speech", "small", tmp_path, "ft-c", ("none",)).tables
    assert table.rows == [["no fine-tuning", "+20.0 ± — / —", "+10.0 ± — / 10.0"], ["seeds", "1", "1"], ["clients", "1", "2"]]
    [table] = study_table("speech", "small", tmp_path, ["none", "ft-c"], having=["none"]).tables
    assert table.rows[:4] == [["no fine-tuning", "50.0", "40.0"], ["FT (BN C)", "**70.0**", "**50.0**"], ["seeds", "1", "1"], ["test set ±", "—", "10.0"]]
    write_cell(tmp_path, "ft-c", 1, {"seen": [7], "unseen": [4, 7]})
    write_cell(tmp_path, "none", 1, {"seen": [5], "unseen": [4, 4]})
    [table] = study_table("speech", "small", tmp_path, ["none", "ft-c"], having=["none"]).tables
    assert table.rows[1:3] == [["FT (BN C)", "**70.0**", "**52.5 ± 3.5**"], ["seeds", "2", "2"]]
    write_cell(tmp_path, "fedl2p", 1, {"seen": [7], "unseen": [4, 7]})
    [table] = comparison("speech", "small", tmp_path, "ft-c", ("none", "fedl2p")).tables
    assert [row[1] for row in table.rows] == ["**+20.0 ± 0.0 / —**", "+0.0 ± — / —", "1 to 2", "1"]


def test_sampling_error_of_a_test_set():
    """Clients are what is drawn: of 10 and 30 samples, 9 and 15 right, with residuals of 3 about a share of 0.6."""
    a, b = {"client": "a", "right": 9, "n": 10}, {"client": "b", "right": 15, "n": 30}
    assert sampling_error([a, b]) == pytest.approx(100 * (2 * 18) ** 0.5 / 40)
    seeds = [a | {"right": 8}, a | {"right": 10}, b | {"right": 15}]  # a in two seeds, with the mean of before
    assert sampling_error(seeds) == pytest.approx(sampling_error([a, b]))
    assert sampling_error([a, a]) is None and sampling_error([]) is None
    assert sampling_error([a, b | {"right": 27}]) == 0  # the same share for both


@pytest.mark.parametrize(("more", "note"), [
    ({}, "speech: data and pretrained model are those of seed 0 in every seed: the SD is that of learning and fine-tuning alone."),
    ({"new_clients": False, "settings": {"scored": None}}, "every seed: the SD is that of learning and fine-tuning alone."),
    ({"settings": {"scored": 2}}, "those of seed 0 in every seed, but each scores other clients: the SD contains that draw."),
    ({"new_clients": True}, "speech: each seed has clients and a pretrained model of its own: the SD contains both."),
])
def test_notes_say_what_the_deviation_is_made_of(tmp_path, more, note):
    for seed in (0, 1):
        write_cell(tmp_path, "none", seed, {"seen": [4, 6]}, **more)
    assert note in study_table("speech", "small", tmp_path).tables[-1].notes[-1]


def test_l2p_has_no_unseen_clients_and_did_not_diverge():
    about = {"dataset": "speech", "alpha": None, "epochs": 15, "pretraining": "fedavg", "seed": 0, "pools": ["seen", "unseen"]}
    records = [{"method": "l2p", "pool": "seen", "seed": 0, "client": "a", "right": 3, "n": 4}]
    done, lost = ({**about, "method": "l2p", "clients": clients} for clients in (records, []))
    seen, unseen = (Condition("speech", None, 15, "fedavg", pool) for pool in ("seen", "unseen"))
    assert collect([done]) == {seen: {"l2p": {0: 75.0}}}
    assert all(math.isnan(collect([lost])[row]["l2p"][0]) for row in (seen, unseen))


def test_every_study_has_narrow_tables_and_loses_no_number(tmp_path):
    """Each condition of the paper is in one column, with all its methods; new label shifts do not make a table wider."""
    for study, paper in TABLES.items():
        parts = study_table(study, "small", tmp_path).tables
        assert max(len(row) for table in parts for row in (table.head, *table.rows)) <= 6
        printed = [text for table in parts for row in table.rows for text in row[1:] if text != "—"]
        assert len(printed) == sum(len(entries) for entries in paper.values())
    shifts = [Condition("cifar10", float(alpha), 15, "fedavg") for alpha in range(9, 0, -1)]
    assert [len(group) for group in groups(shifts)] == [4, 4, 1] and [c for group in groups(shifts) for c in group] == shifts


def test_titles_of_columns_say_what_differs():
    row = Condition("cifar10", 0.5, 15, "fedavg")
    assert titles([row, row._replace(alpha=1000.0)], "points") == ("cifar10, e 15", ["alpha 0.5", "alpha 1000"])
    assert titles([row], "points") == ("cifar10, alpha 0.5, e 15", ["points"])
    assert titles(both_pools(SPEECH), "points") == ("speech, e 5", ["seen", "unseen"])
    others = [row, row._replace(pretraining="fedbabu"), SPEECH]
    assert titles(others, "points")[1] == ["cifar10, fedavg, alpha 0.5, e 15", "cifar10, fedbabu, alpha 0.5, e 15", "speech, fedavg, e 5"]
    assert [label(c) for c in both_pools(SPEECH)] == ["speech, e 5", "speech, e 5, unseen"]


def test_a_folded_table_is_inside_details(tmp_path):
    write_cell(tmp_path, "none", 0, {"seen": [5, 5]})
    table = accuracies(results(tmp_path, "small"), [SPEECH], ("none", "l2p"))
    assert table.rows == [["no fine-tuning", "**50.0**"], ["seeds", "1"], ["test set ±", "0.0"]]  # L2P is nowhere
    whole = study_table("speech", "small", tmp_path)
    text = fold("Older results", table, whole)._repr_markdown_()
    assert text.startswith("<details><summary>Older results</summary>\n\n| speech, e 5 |") and text.endswith("</details>\n")
    assert str(whole) in text and whole._repr_markdown_() == str(whole)


def test_nothing_to_compare(tmp_path):
    cells = results(tmp_path, "small")
    assert differences(cells, [SPEECH], "fedl2p", ("none",)).rows == [] and evidence(cells, [SPEECH]).rows == []
    [table] = comparison("speech", "small", tmp_path).tables
    assert table.rows == [] and table.notes == ["Not run yet."] and looking(cells).rows == []
    five, fifteen = study_table("speech", "small", tmp_path, ("fedl2p-ours",), having=("fedl2p",)).tables
    assert [row[0] for row in five.rows] == [row[0] for row in fifteen.rows] and five.rows[0] == ["paper: no fine-tuning", "82.11", "81.62"]
    assert gaps(cells, [SPEECH], ("none",), (0,)).rows == [["speech, e 5", "all 1 cells", "not known"]]


def test_hours_of_gaps(tmp_path):
    """By the same method on the same data; a variant of FedL2P takes as long as FedL2P, and others say that they are not counted."""
    write_cell(tmp_path, "fedl2p", 0, {"seen": [5]})
    path = next(tmp_path.rglob("fedl2p-seed0.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 3600.0}))  # with five epochs
    cells, fifteen = results(tmp_path, "small"), SPEECH._replace(epochs=15)
    assert gaps(cells, [fifteen], ("fedl2p-bn",), (0, 1)).rows == [["speech, e 15", "all 2 cells", "6.00"]]
    assert gaps(cells, [fifteen], ("fedl2p-bn", "none"), (0,)).rows == [["speech, e 15", "all 2 cells", "more than 3.00"]]


def test_evidence_takes_the_best_plain_strategy_of_each_row(tmp_path):
    """The bar is the plain strategy with the highest accuracy over shared seeds; verdicts are counted in the notes."""
    rights = {"fedl2p-ours": [8, 8], "ft-g-best": [5, 6], "ft-i-best": [6, 6], "fedl2p": [2, 2]}
    for seed in (0, 1):
        for method, right in rights.items():
            write_cell(tmp_path, method, seed, {"seen": right, "unseen": right[::-1]} if method != "ft-i-best" else {"seen": right})
    table = evidence(results(tmp_path, "small"), both_pools(SPEECH))
    assert table.rows == [
        ["speech, e 5", "BN I: +20.0 ± 0.0 / 0.0, ahead", "not run", "+60.0 ± 0.0 / 0.0, ahead", "2 / 2"],
        ["speech, e 5, unseen", "BN G: +25.0 ± 0.0 / 5.0, ahead", "not run", "+60.0 ± 0.0 / 0.0, ahead", "2 / 2"],
    ]
    assert "ahead 2, level 0, behind 0, one seed 0" in table.notes[1]
