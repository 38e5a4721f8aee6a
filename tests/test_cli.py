"""The command line: options that are wrong or unknown, its help, its tables, its progress in a log."""

import sys
from pathlib import Path

import pytest

from fedl2p.cli import main, personalize, plain_lines, show
from fedl2p.core import Table, markdown


@pytest.mark.parametrize("wrong, words", [
    (["--clients", "7"], "clients must be a multiple of 5, >= 5, got 7"),
    (["--clients", "2000"], "402 clients a domain need 5 to 1397 images"),
    (["--unseen", "-5"], "unseen must be 0 or a multiple of 5, got -5"),
    (["--alpha", "0"], "alpha must be > 0 and finite, got 0.0"),
    (["--seeds", "1", "1"], "seeds must be different whole numbers >= 0, at least one, got (1, 1)"),
    (["--seeds"], "seeds must be different whole numbers >= 0, at least one, got ()"),
    (["--seeds", "-1"], "seeds must be different whole numbers >= 0, at least one, got (-1,)"),
    (["--seed", "3"], "seed must be left out (the demo has --seeds), got 3"),
    (["--workers", "-1"], "workers must be >= 0 or None, got -1"),
    (["--limit", "0"], "limit must be > 0 or None, got 0.0"),
    (["--pretraining-rounds", "0"], "pretraining_rounds must be >= 1, got 0"),
    (["--rounds", "0"], "rounds must be >= 1, got 0"),
    (["--device", "tpu"], "device must be one of auto, ... on this machine, got 'tpu'"),
    (["--fraction", "2"], "fraction must be in (0, 1], got 2.0"),
    (["--lr", "0"], "lr must be > 0 and finite, got 0.0"),
])
def test_wrong_options_are_explained_and_leave_nothing(wrong, words, tmp_path, capsys):
    try:
        code = main(["demo", "--out", str(tmp_path / "out"), *wrong])
    except SystemExit as stop:  # tyro's way
        code = stop.code
    said = " ".join(capsys.readouterr().err.split())
    assert code in (1, 2) and all(part in said for part in words.split("...")) and "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("args", [["demos"], ["demo", "--round", "3"], ["demo", "--rounds", "many"], ["demo", "--estimator", "magic"], []])
def test_what_the_command_line_does_not_know(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said and "tyro" not in said and "dummy" not in said


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    said = capsys.readouterr().out
    for option in ("--seeds", "--rounds", "--alpha", "--device", "--out", "--workers", "--estimator"):
        assert option in said
    assert main(["--version"]) == 0


@pytest.mark.parametrize("command, text", [("demo", "passes of fine-tuning"), ("personalize", "policy file, written by"),
                                           ("table", "scale of our results"), ("report", "folder for the page")])
def test_help_shows_the_comment_after_each_parameter(command, text, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert text in " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("error, words", [(MemoryError(), "fedl2p: not enough memory"), (MemoryError("3 GB"), "fedl2p: not enough memory (3 GB)")])
def test_too_little_memory_is_said_in_one_line(error, words, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("fedl2p.cli.write_report", fail)
    assert main(["report", "folder"]) == 1
    assert capsys.readouterr().err.strip() == words


def test_lines_for_a_log(capsys):
    assert list(plain_lines(iter("abc"), "x", 103, 100)) == list("abc")
    assert capsys.readouterr().err.splitlines() == ["x: 103/103"]


def test_a_table_is_markdown_in_a_file_and_drawn_in_a_terminal(capsys, monkeypatch):
    table = Table(["method", "accuracy"], [["none", "25.0 ± 7.1"], ["FT (BN C)", "**60.0**"]], notes=["A note."])
    show(table)
    assert capsys.readouterr().out == markdown(table) + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(table)
    drawn = capsys.readouterr().out
    assert all(text in drawn for text in ("method", "accuracy", "none", "25.0 ± 7.1", "FT (BN C)", "60.0", "A note."))
    assert "**" not in drawn and "---:" not in drawn


@pytest.mark.parametrize("out", ["mine.foo", "nowhere/mine.pt"])
def test_where_a_model_cannot_be_written_is_said_before_any_work(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"out must be a file \.safetensors, \.pt, \.pt2, \.onnx in a folder that exists, got '{out}'"):
        personalize(Path("policy"), "network.py", Path("images"), Path(out))
