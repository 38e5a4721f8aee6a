"""fedl2p.studies.published: the published tables."""

import math

import pytest

from fedl2p.studies.published import PAPER_METHODS, TABLES, TITLES, Condition, read_entry, read_table

COUNTS = {"cifar10": (8, 48), "pretraining": (12, 24), "cifar10c": (4, 20), "office": (1, 5), "domainnet": (4, 20),
          "speech": (4, 22), "ablation": (13, 78), "fomaml": (5, 15), "mixed": (2, 0)}
ENTRIES = [(study, c, m, entry) for study, table in TABLES.items() for c, row in table.items() for m, entry in row.items()]


def test_nothing_is_missing():
    assert {study: (len(table), sum(map(len, table.values()))) for study, table in TABLES.items()} == COUNTS
    assert TITLES.keys() == TABLES.keys()
    assert {m for _, _, m, _ in ENTRIES} == PAPER_METHODS.keys()


def test_conditions_are_of_the_paper():
    for _, c, _, _ in ENTRIES:
        assert c.dataset in ("cifar10", "cifar10c", "office", "domainnet", "speech")
        assert (c.alpha is None) == (c.dataset == "speech") and c.alpha in (1000, 1, 0.5, 0.1, None)
        assert c.epochs in (5, 15) and c.pool in ("seen", "unseen")
        assert c.pretraining in ("fedavg", "perfedavg", "fedbabu", "imagenet")
        assert (c.pretraining == "imagenet") == (c.dataset in ("office", "domainnet"))


def test_entries_are_percentages():
    diverged = [(c.alpha, m) for _, c, m, (mean, _) in ENTRIES if math.isnan(mean)]
    assert diverged == [(1.0, "fedl2p-lr-g"), (0.5, "fedl2p-lr-g"), (0.1, "fedl2p-lr-g")]
    for _, _, m, (mean, sd) in ENTRIES:
        assert math.isnan(mean) or 2 < mean < 90
        assert (sd is None) == (m == "none" or math.isnan(mean))
        assert sd is None or 0 <= sd < 26


def test_tables_agree_where_they_overlap_but_once():
    printed = {}
    for _, c, m, entry in ENTRIES:
        printed.setdefault((c, m), set()).add(entry)
    assert {key: entries for key, entries in printed.items() if len(entries) > 1} == {
        (Condition("cifar10c", 0.5, 15, "fedavg"), "fedl2p"): {(76.78, 0.22), (76.82, 0.19)}
    }


def test_looking_numbers_up():
    c = Condition("cifar10", 1000, 15, "perfedavg")
    assert TABLES["pretraining"][c]["fedl2p"] == (47.58, 0.01) and c not in TABLES["cifar10"]
    unseen = Condition("speech", None, 5, "fedavg", "unseen")
    assert TABLES["speech"][unseen]["none"] == (81.62, None) and "l2p" not in TABLES["speech"][unseen]


def test_faulty_text_is_refused():
    header = "dataset alpha epochs pretraining ft-c\n"
    for rows in ("speech - 5 fedavg", "speech - 5 fedavg 1.0 2.0", "speech - 5 fedavg many", "speech - 5 fedavg 1.0\n" * 2):
        with pytest.raises(ValueError):
            read_table(header + rows)
    assert read_entry("2.98±0.0") == (2.98, 0.0)
