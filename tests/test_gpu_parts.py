"""What `make gpu` does without a GPU: the order of the parts, their limits, results and report."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from gpu.counters import kernel_rows, table_of
from gpu.parts import BENCH, PARTS, SKIPPED, TESTS, Part, chosen
from gpu.run_parts import Runner, main, sources_of, summary_of

ROOT = Path(__file__).parents[1]


def part(name: str, code: str, limit: int = 30, **kwargs: Any) -> Part:
    """A part that is a program of Python."""
    kwargs.setdefault("needs", ())
    return Part(name, TESTS, limit, ("{python}", "-c", code), **kwargs)


def runner(folder: Path, parts: list[Part], **kwargs: Any) -> Runner:
    return Runner(folder / "parts", folder, parts=parts, **kwargs)


def statuses(of: Runner) -> dict[str, str]:
    found = {p.name: of.result(p.name) for p in of.parts}
    return {name: result["status"] for name, result in found.items() if result}


GOOD = part("good", "print('all is well')")
BAD = part("bad", "print('before'); raise SystemExit(3)")
CRASH = part("crash", "import os; os.abort()")
HANGS = part("hangs", "print('still here'); import time; time.sleep(60)", limit=1)
SKIPS = part("skips", f"print('no tool'); raise SystemExit({SKIPPED})")


def test_all_go_on_when_one_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [BAD, HANGS, SKIPS, CRASH, GOOD]
    run = runner(tmp_path, parts)
    start = time.monotonic()
    assert run.run(parts) == 1
    assert time.monotonic() - start < 30
    assert statuses(run) == {
        "bad": "failed",
        "hangs": "timed out",
        "skips": "skipped",
        "crash": "failed",
        "good": "passed",
    }
    results = {p.name: run.result(p.name) for p in parts}
    assert results["bad"]["exit"] == 3
    assert results["bad"]["summary"] == "exit status 3; before"
    assert results["skips"]["summary"] == "no tool"
    assert results["crash"]["exit"] == -signal.SIGABRT
    assert results["hangs"]["summary"].startswith("stopped after 1 s; last line:")
    log = (tmp_path / "parts/hangs.log").read_text()
    assert "still here" in log
    assert re.search(r'File "<string>", line 1', log), "no stack of the part that hung"
    said = capsys.readouterr().out
    assert re.search(r"^failed +bad ", said, re.MULTILINE)
    assert "    | before" in said


def test_success_is_all_passed_or_skipped(tmp_path: Path) -> None:
    assert runner(tmp_path, [GOOD, SKIPS]).run([GOOD, SKIPS]) == 0


def test_processes_of_a_part_end_with_it(tmp_path: Path) -> None:
    """One that is left behind, by a part that ends and by a part that is stopped."""
    grandchild = "import time; time.sleep(60)"
    code = f"""
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", {grandchild!r}]).pid, flush=True)
time.sleep({{}})
"""
    parts = [part("leaves", code.format(0)), part("stopped", code.format(60), limit=2)]
    runner(tmp_path, parts).run(parts)
    for one in parts:
        pid = int((tmp_path / f"parts/{one.name}.log").read_text().split()[0])
        end = time.monotonic() + 5
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state in "ZX":
                break
            time.sleep(0.05)
        else:
            assert not os.path.exists(f"/proc/{pid}"), f"{one.name} left a process"


def test_nothing_is_run_on_a_build_that_failed(tmp_path: Path) -> None:
    build = part("build", "raise SystemExit(1)")
    after = part("after", "print('ran')", needs=("build",))
    run = runner(tmp_path, [build, after])
    assert run.run([build, after]) == 1
    assert statuses(run) == {"build": "failed", "after": "not run"}
    assert run.result("after")["summary"] == "build has not passed"
    assert not (tmp_path / "parts/after.log").exists()


def test_the_time_of_all_together(tmp_path: Path) -> None:
    parts = [part("long", "import time; time.sleep(60)"), GOOD]
    run = runner(tmp_path, parts, budget=6.0)
    assert run.run(parts) == 1
    assert statuses(run) == {"long": "timed out", "good": "not run"}
    assert run.result("good")["summary"] == "the time is over"
    assert run.result("long")["seconds"] < 30


def counted(tmp_path: Path, name: str, code: str = "") -> Part:
    """A part that notes each of its runs."""
    return part(name, f"open({str(tmp_path / name)!r}, 'a').write('x'); {code}")


def runs(tmp_path: Path, name: str) -> int:
    path = tmp_path / name
    return len(path.read_text()) if path.exists() else 0


def test_resume_keeps_what_is_done(tmp_path: Path) -> None:
    first = counted(tmp_path, "first")
    second = counted(tmp_path, "second", "raise SystemExit(1)")
    third = counted(tmp_path, "third")
    parts = [first, second, third]
    assert runner(tmp_path, parts).run([first, second]) == 1
    assert runner(tmp_path, parts).run(parts, resume=True) == 1  # the failure is a result, too
    assert [runs(tmp_path, p.name) for p in parts] == [1, 1, 1]
    assert runner(tmp_path, parts).run([second, third]) == 1
    assert [runs(tmp_path, p.name) for p in parts] == [1, 2, 2]


def test_resume_runs_what_was_interrupted_or_of_other_sources(tmp_path: Path) -> None:
    one, two = counted(tmp_path, "one"), counted(tmp_path, "two")
    run = runner(tmp_path, [one, two])
    assert run.run([one, two]) == 0
    path = tmp_path / "parts/one.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "status": "running"}))
    assert run.result("one")["status"] == "interrupted"
    assert runner(tmp_path, [one, two]).run([one, two], resume=True) == 0
    assert (runs(tmp_path, "one"), runs(tmp_path, "two")) == (2, 1)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/new.c").write_text("int x;")
    run = runner(tmp_path, [one, two])
    run.run([one], resume=True)
    assert (runs(tmp_path, "one"), runs(tmp_path, "two")) == (3, 1)
    assert "out of date: two" in (tmp_path / "parts/report.md").read_text()


def test_sources_are_told_apart(tmp_path: Path) -> None:
    for folder in ("csrc", "cuda"):
        (tmp_path / folder).mkdir()
    (tmp_path / "csrc/a.c").write_text("1")
    before = sources_of(tmp_path)
    (tmp_path / "cuda/notes.txt").write_text("no source")
    assert sources_of(tmp_path) == before
    (tmp_path / "csrc/a.c").rename(tmp_path / "csrc/b.c")
    assert sources_of(tmp_path) != before


def test_a_signal_ends_the_run_with_a_report(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from pathlib import Path
from gpu.parts import Part
from gpu.run_parts import Runner
sleeps = Part("sleeps", "tests", 60, ("{{python}}", "-c", "import time; time.sleep(60)"), ())
after = Part("after", "tests", 60, ("{{python}}", "-c", ""), ())
folder = Path({str(tmp_path)!r})
raise SystemExit(Runner(folder / "parts", folder, parts=[sleeps, after]).run([sleeps, after]))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    result = tmp_path / "parts/sleeps.json"
    end = time.monotonic() + 30
    while not result.exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "stopped by SIGTERM" in said
    assert json.loads(result.read_text())["status"] == "interrupted"
    assert "| sleeps | interrupted |" in (tmp_path / "parts/report.md").read_text()


def test_report_and_archive(tmp_path: Path) -> None:
    figures = "import sys; open(sys.argv[1] + '.md', 'w').write('# Heading\\n\\n| a table |\\n')"
    info = part("info", "print('Some GPU, 132 multiprocessors')")
    shows = Part("shows", BENCH, 30, ("{python}", "-c", figures, "{files}"), ())
    parts = [info, BAD, shows, GOOD]
    results = tmp_path / "kept"
    run = runner(tmp_path, parts, results=results)
    assert run.run([info, BAD, shows]) == 1
    report = (results / "report.md").read_text()
    assert report == (tmp_path / "parts/report.md").read_text()
    assert "2 passed, 1 failed, 1 not run." in report
    assert "Some GPU, 132 multiprocessors" in report
    assert "| bad | failed | 0 | 30 | exit status 3; before |" in report
    assert "## bad: the end of its log\n\n```\nbefore\n```" in report
    assert "## shows: what it wrote\n\n### Heading\n\n| a table |" in report
    assert len(json.loads((results / "report.json").read_text())) == 3
    assert sorted(p.name for p in results.iterdir()) == ["parts.tar.gz", "report.json", "report.md"]
    with tarfile.open(results / "parts.tar.gz") as archive:
        assert {"bad.log", "bad.json", "shows.md", "report.md"} <= set(archive.getnames())


def test_what_a_log_says() -> None:
    start = "tests/gpu/test_a.py::test_b PASSED\n"
    assert summary_of(f"{start}===== 3 passed, 1 skipped in 0.1s =====\n") == (
        "3 passed, 1 skipped in 0.1s",
        False,
    )
    assert summary_of("=== 1 failed, 2 skipped in 1.00s ===")[1] is False
    skipped = "SKIPPED [2] tests/gpu/test_a.py: torch finds no CUDA device\n"
    assert summary_of(f"{skipped}===== 2 skipped in 0.1s =====\n") == (
        "torch finds no CUDA device",
        True,
    )
    assert summary_of("=== 5 deselected in 0.1s ===")[1] is False
    assert summary_of("one\n  two  \n\n") == ("two", False)
    assert summary_of("") == ("no output", False)


def test_the_table_has_every_test_once() -> None:
    """Those of a file with several parts are chosen by words of their names."""
    assert len({p.name for p in PARTS}) == len(PARTS)
    files = sorted((ROOT / "tests/gpu").glob("test_*.py"))
    files += sorted((ROOT / "benchmarks/gpu").glob("test_*.py"))
    named = [word for p in PARTS for word in p.command if word.endswith(".py")]
    assert set(named) == {str(path.relative_to(ROOT)) for path in files}
    several = {word for word in named if named.count(word) > 1}
    assert several == {"tests/gpu/test_sanitizer.py", "benchmarks/gpu/test_cuda_works.py"}


@pytest.mark.parametrize(
    "file", ["tests/gpu/test_sanitizer.py", "benchmarks/gpu/test_cuda_works.py"]
)
def test_parts_of_a_file_share_its_tests_out(file: str) -> None:
    whole = {name: text for name, text in os.environ.items() if name != "FASTSTEP_EVERY"}
    parts = [p.command[p.command.index("-k") + 1] for p in PARTS if file in p.command]
    code = (
        "import sys, pytest\n"
        "for words in ['', *sys.argv[2:]]:\n"
        "    print('==')\n"
        "    assert pytest.main(['--collect-only', '-q', sys.argv[1], '-k', words]) == 0"
    )
    command = [sys.executable, "-c", code, file, *parts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=whole)
    assert done.returncode == 0, done.stdout + done.stderr
    _, every, *found = (
        [line for line in text.splitlines() if "::" in line] for text in done.stdout.split("==\n")
    )
    assert len(found) == len(parts) > 1
    assert sorted(itertools.chain(*found)) == sorted(every)


def test_parts_that_are_asked_for() -> None:
    names = [p.name for p in PARTS]
    assert names.index("build") == 0
    assert names.index("bits") < names.index("race") < names.index("memcheck")
    assert names.index("memcheck") < names.index("counters") < names.index("bench-gpt2")
    assert [p.name for p in chosen(["race", "bits"], "")] == ["bits", "race"]
    only = [p.name for p in chosen([], BENCH)]
    assert only[:3] == ["build", "info", "bench-gpt2"]
    assert not any(p.kind == BENCH for p in chosen([], TESTS))
    with pytest.raises(ValueError, match="no part wrong; there are build, info, bits"):
        chosen(["wrong"], "")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [p.name for p in PARTS]
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "no part nothing" in capsys.readouterr().err


def test_a_machine_without_a_gpu_fails(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpu.run_parts", "--folder", str(tmp_path), "info"],
        cwd=ROOT / "tests",
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert re.search(r"^failed +info .*(no CUDA device|no CUDA kernels)", done.stdout, re.MULTILINE)


COUNTERS = """==PROF== Connected to process 1
launch AdamW, 1 x 64
"ID","Kernel Name","gpu__time_duration.sum","launch__grid_size",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio"
"","","ns","","inst","inst","inst"
"0","fst_begin(fst_begin_launch)","1,500","264","7.25","0.5","99"
"1","fst_update(fst_update_launch)","2500","132","n/a","1.5",""
"""


def test_counters_as_a_table() -> None:
    rows = kernel_rows(COUNTERS.replace('"n/a"', '""'))
    assert [row["Kernel Name"] for row in rows] == [
        "fst_begin(fst_begin_launch)",
        "fst_update(fst_update_launch)",
    ]
    lines = table_of(rows, ["AdamW, 1 x 64", "the same"]).splitlines()
    assert lines[2] == (
        "| fst_begin | AdamW, 1 x 64 | 1.5 | - | - | - | - | 264 "
        "| long scoreboard 7.25, math pipe throttle 0.5 |"
    )
    assert lines[3].startswith("| fst_update | the same | 2.5 |")
    assert " |  | " in table_of(rows, ["one label"]).splitlines()[2]
    assert kernel_rows("nothing") == []


NCU = """#!{python}
import sys
assert sys.argv[1:3] == ["--clock-control", "none"]
print({said!r})
raise SystemExit({status})
"""


@pytest.mark.parametrize(
    ("said", "status", "expected", "line"),
    [
        (COUNTERS.replace('"n/a"', '""'), 0, 0, "2 launches"),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", 1, SKIPPED, "may not read the counters"),
        ("==ERROR== something else", 1, 1, "exit status 1, 0 kernels"),
        ("nothing was profiled", 0, 1, "exit status 0, 0 kernels"),
        (None, 0, SKIPPED, "ncu is missing"),
    ],
)
def test_counters_of_a_stand_in(
    tmp_path: Path, said: str | None, status: int, expected: int, line: str
) -> None:
    if said is None and os.path.exists("/usr/local/cuda/bin/ncu"):
        pytest.skip("ncu is there")
    if said is not None:
        ncu = tmp_path / "ncu"
        ncu.write_text(NCU.format(python=sys.executable, said=said, status=status))
        ncu.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "gpu.counters", str(tmp_path / "counters")],
        cwd=ROOT / "tests",
        env={**os.environ, "PATH": str(tmp_path), "CUDA_HOME": "", "CUDA_PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    assert line in done.stdout
    assert (tmp_path / "counters.md").exists() is (expected == 0)
