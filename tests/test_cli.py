"""The command line: options that are wrong or unknown, its help, its progress in a log."""

import pytest

from fedl2p.cli import main, plain_lines


@pytest.mark.parametrize("wrong, words", [
    (["--clients", "7"], "clients is 7"), (["--alpha", "0"], "alpha is 0.0"), (["--seeds", "1", "1"], "seeds is (1, 1)"), (["--seeds"], "seeds is ()"), (["--workers", "0"], "workers is 0"),
    (["--rounds", "0"], "rounds is 0"), (["--device", "tpu"], "device is 'tpu'"), (["--seed", "3"], "takes its seeds from --seeds"), (["--fraction", "2"], "fraction is 2.0"), (["--unseen", "-5"], "unseen -5"), (["--seeds", "-1"], "seeds is (-1,)"), (["--lr", "0"], "lr is 0.0")])
def test_wrong_options_are_explained_and_leave_nothing(wrong, words, tmp_path, capsys):
    try:
        code = main(["demo", "--out", str(tmp_path / "out"), *wrong])
    except SystemExit as stop:  # tyro's way
        code = stop.code
    said = " ".join(capsys.readouterr().err.split())
    assert code in (1, 2) and words in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("args", [["demos"], ["demo", "--round", "3"], ["demo", "--rounds", "many"], ["demo", "--estimator", "magic"], []])
def test_what_the_command_line_does_not_know(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    said = capsys.readouterr().out
    for option in ("--seeds", "--rounds", "--alpha", "--device", "--out", "--workers", "--estimator"):
        assert option in said
    assert main(["--version"]) == 0


def test_lines_for_a_log(capsys):
    assert list(plain_lines(iter("abc"), "x", 103, 100)) == list("abc")
    assert capsys.readouterr().err.splitlines() == ["x: 103/103"]
