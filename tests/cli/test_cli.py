"""The command line: each sub-command does its work and says what it found."""

import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from faststep import _C
from faststep.cli import demo, main, plots
from faststep.cli.console import ProgressBar, table
from programs import Programs

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str) -> int:
    return main(list(arguments))


def test_info_as_a_program() -> None:
    command = [sys.executable, "-m", "faststep", "info"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = dict(line.split("  ", 1) for line in output.splitlines())
    assert torch.__version__ in lines["torch"]
    cuda = lines["CUDA in faststep"].strip()
    if (Path(_C.__file__).parent / "kernels.fatbin").exists():
        assert cuda.startswith(("kernels loaded on device 0", "kernels that cannot be used here"))
    else:
        assert cuda.startswith("none: this package was built without nvcc")
    assert re.search(rf"^instruction set +{_C.cpu_info()['isa']}\b", output, re.MULTILINE)


def test_info_of_a_build_without_kernels(tmp_path: Path, programs: Programs) -> None:
    """As a machine without nvcc or GPU makes it, or FASTSTEP_CUDA=0."""
    package = Path(_C.__file__).parent
    without = shutil.ignore_patterns("kernels.fatbin", "__pycache__")
    shutil.copytree(package, tmp_path / "faststep", ignore=without)
    done = programs.faststep(tmp_path, "info")
    lines = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert str(tmp_path) in lines["faststep"]
    assert lines["CUDA in faststep"].strip() == (
        "none: this package was built without nvcc or where no GPU was seen; "
        "FASTSTEP_CUDA=1 pip install . builds kernels for all GPUs"
    )


def test_info_as_json_names_what_was_not_usable(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    cpu = _C.cpu_info()
    for level in {*cpu["compiled"], *cpu["supported"]}:
        assert level in facts["instruction set"]
    if cpu["threads"] == "torch_parallel_for":
        assert f"{torch.get_num_threads()} threads" in facts["threads"]
    else:
        assert "calling thread only" in facts["threads"]


@pytest.mark.parametrize("level", [*_C.cpu_info()["supported"]])
def test_info_reports_a_forced_instruction_set(
    level: str, programs: Programs, tmp_path: Path
) -> None:
    done = programs.faststep(tmp_path, "info", "--json", FASTSTEP_CPU=level)
    expected = f"{level}, forced by FASTSTEP_CPU={level};"
    assert json.loads(done.stdout)["instruction set"].startswith(expected)


def test_demo_trains_in_both_ways_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "new folder" / "demo.png"
    assert run("demo", "--steps", "1", "--output", str(plot), "--only", "table") == 0
    captured = capsys.readouterr()
    assert plot.read_bytes().startswith(PNG)
    assert "2/2" in captured.err
    assert captured.out.count("An MLP learns a table: 160 steps") == 1
    for row in ("data", "forward", "backward", "clip", "step", "whole step"):
        line = rf"^{row} +[\d.]+ +[\d.]+ +[\d.]+x$"
        assert len(re.findall(line, captured.out, re.MULTILINE)) == 1, row
    gaps = re.findall(r"between the losses: (\S+) in the second step, (\S+) at most", captured.out)
    ((first, most),) = gaps
    assert float(first) < 1e-6
    assert float(most) < 1e-3  # 160 steps let roundings grow, on each CPU in another way
    losses = re.findall(r"Loss with [a-z ]+: (\S+) -> (\S+)", captured.out)
    assert len(losses) == 2
    assert all(float(last) < float(first) for first, last in losses)


def test_demo_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("demo", "--steps", "1") == 1
    assert 'pip install "faststep[demo]"' in capsys.readouterr().err


def test_demo_without_pillow_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "PIL" else "")
    assert run("demo", "--no-plot", "--only", "table", "images") == 1
    assert 'images needs PIL: pip install "faststep[demo]"' in capsys.readouterr().err


def test_demo_of_a_script_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tabular.py").write_text("raise SystemExit('no rows')")
    monkeypatch.setattr(demo, "SCRIPTS", tmp_path)
    assert run("demo", "--no-plot", "--only", "table") == 1
    assert "tabular.py failed:\nno rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--output", "plot.pdf"), "must end in .png"),
        (("demo", "--no-plot", "--steps", "0"), "--steps: must be at least 1, not 0"),
        (("plan",), "there is neither a FACTORY"),
        (("plan", "model.py"), "'model.py' is not FILE.py:FUNCTION"),
        (("plan", "model.py:f", "--plot", "plot.txt"), "must end in .png"),
        (("plan", "model.py:f", "--tflops", "inf"), "--tflops: must be positive, not inf"),
        (("convert", "a", "b", "--image-size", "0"), "--image-size: must be at least 1, not 0"),
        (("doctor", "no.py"), "there is no file 'no.py'"),
        (("doctor", "-"), "there is no file '-'"),
        (("doctor", "--minutes", "1"), "there is no script"),
        (("doctor", "--minutes", "0", "train.py"), "--minutes: must be positive"),
        (("doctor", "--only", "speed", "train.py"), "'speed' is none of"),
        (("doctor", "--json", "nowhere/answer.json", "train.py"), "nowhere/answer.json"),
        (("doctor", "--html", ".", "train.py"), "argument --html"),
        (("run", "--accumulate", "0", "train.py"), "must be at least 1, not 0"),
        (("run", "--threads", "0", "train.py"), "must be at least 1, not 0"),
        (("run", "--workers", "-1", "train.py"), "must be at least 0, not -1"),
        (("run", "--workers", "two", "train.py"), "invalid int value"),
        (("run", "--autocast", "fp8", "train.py"), "invalid choice"),
        (("run", "--only", "optims", "train.py"), "'optims' is none of optim, amp, clip, data, lo"),
        (("run", "--only", "clip"), "there is no script"),
        (("run", "-O", "train.py"), "-O is an option of Python: python -O -m faststep run"),
        (("run", "-u", "train.py"), "-u is an option of Python: python -u -m faststep run"),
        (("run", "-Werror", "train.py"), "-Werror is an option of Python: python -Werror -m fasts"),
        (("run", "--log", "none/log.jsonl", "train.py"), "none/log.jsonl' cannot be written: No"),
        (("run", "--with", "other.json", "train.py"), "'other.json' is no file of `doctor --save`"),
    ],
)
def test_wrong_arguments(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 2, as that of argparse."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('it runs')")
    (tmp_path / "other.json").write_text("[]")
    status: object = None
    try:
        status = run(*arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_table_aligns_and_writes_markdown() -> None:
    rows = [["a", "1"], ["bcde", "23456"]]
    assert table(["x", "y"], rows).splitlines() == [
        "x         y",
        "----  -----",
        "a         1",
        "bcde  23456",
    ]
    assert table(["x", "y"], rows, markdown=True).splitlines()[1] == "| ---- | ----: |"


def test_progress_writes_a_line_per_tenth_into_a_file() -> None:
    stream = io.StringIO()
    progress = ProgressBar(40, stream)
    for done in range(1, 41):
        progress.show(done, "note")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("[" + "#" * 28 + "] 40/40")


@pytest.mark.parametrize(
    ("value", "shown"), [(2543.0, "2,543"), (12.21, "12.2"), (0.309, "0.31"), (0.0, "0.00")]
)
def test_numbers_of_the_plot_have_no_exponent(value: float, shown: str) -> None:
    assert plots.plain(value) == shown


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")
def test_the_plot_of_the_demo_takes_what_one_run_did_not_have(tmp_path: Path) -> None:
    taken = {"whole step, ms": 2543.0, "clip, ms": 0.0, "page faults per step": 12034.0}
    runs = [("torch", [3.0, 2.0], taken), ("faststep run", [3.0, 2.0], dict.fromkeys(taken, 0.0))]
    plots.plot_trainings(tmp_path / "plot.png", {"a model": runs}, "The machine was busy.")
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)
