"""What users expect of any program: its version, a pipe that closes, and no files unasked for."""

import argparse
from pathlib import Path

import pytest

import faststep
from faststep.cli import main, plots
from programs import MAIN, Programs

SHORT_DEMO = ("demo", "--steps", "1", "--only", "table")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"faststep {faststep.__version__}\n"


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
def test_a_reader_that_leaves_ends_the_program_quietly(
    buffered: bool, programs: Programs, tmp_path: Path
) -> None:
    """As `python -m faststep info --json | head -1`; the status is that of SIGPIPE."""
    unread = f"""
import os, sys
receive, send = os.pipe()
os.dup2(send, 1)
os.close(receive), os.close(send)
sys.stdout.reconfigure(write_through={not buffered})
"""
    done = programs.run(unread + MAIN, str(tmp_path), "info", "--json")
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.parametrize("given", ["absolute", "none", "relative"])
def test_plots_go_to_the_users_cache(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing appears where the user stands."""
    home, here, cache = tmp_path / "home", tmp_path / "here", tmp_path / "cache"
    home.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    if given == "none":
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache) if given == "absolute" else "cache")
    parser = argparse.ArgumentParser()
    plots.add_arguments(parser, "demo.png")
    folder = (cache if given == "absolute" else home / ".cache") / "faststep"
    assert plots.plot_path(parser.parse_args([]), "demo.png") == folder / "demo.png"
    assert folder.is_dir()
    assert list(here.iterdir()) == []


def test_a_cache_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(SHORT_DEMO) == 1
    assert "the plot's folder cannot be made" in capsys.readouterr().err
