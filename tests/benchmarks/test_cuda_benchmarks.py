"""What the CUDA benchmarks rest on, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cuda_contenders
import cuda_contest
import cuda_images
import cuda_report
import cuda_timing
import cuda_works
from contenders import OURS
from plots import draw
from programs import Programs
from workloads import INIT_SCALE, Arena, Work, count_elements


def test_shapes_of_llama() -> None:
    shapes = cuda_works.llama_1b()
    assert len(shapes) == 146
    assert count_elements(shapes) == 1_235_814_400


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("cuda chain", torch.float32),
        ("cuda clip", torch.bfloat16),
        ("cuda adamw", torch.float32),
        ("cuda unaligned", torch.bfloat16),
    ],
)
def test_every_contender_does_the_same_step(family: str, dtype: torch.dtype) -> None:
    work = Work(family, "", ((33,), (4, 5)), dtype=dtype)
    scale = INIT_SCALE if family == "cuda chain" else 1.0
    expected = Arena(work)
    for p in expected.parameters:
        p.grad.div_(scale)
    off = 8 if family == "cuda unaligned" else 0
    assert {p.grad.data_ptr() % 16 for p in expected.parameters} == {off}
    if family not in ("cuda adamw", "cuda unaligned"):
        torch.nn.utils.clip_grad_norm_(expected.parameters, 1.0)
    torch.optim.AdamW(expected.parameters, lr=1e-4, fused=True).step()
    contenders = cuda_contenders.cuda_contenders_of(work)
    assert contenders[0].name == OURS
    for contender in contenders:
        if contender.name == cuda_contenders.COMPILED:
            continue  # needs a minute
        arena = Arena(work)
        round_ = contender.build(arena.parameters)
        arena.refill()
        round_()
        for p, q in zip(expected.parameters, arena.parameters, strict=True):
            rtol = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
            torch.testing.assert_close(q, p, rtol=rtol, atol=1e-8)


def test_every_contender_transforms_the_images() -> None:
    """Into as many pixels, of about the same mean and deviation; crops differ."""
    x = torch.randint(0, 256, (32, 3, 24, 24), generator=torch.Generator().manual_seed(0))
    ramp = torch.arange(24.0).view(1, 1, 1, 24) * 8
    x = (x * 0.05 + ramp).to(torch.uint8)
    found = {name: round_() for name, round_ in cuda_images.image_rounds(x).items()}
    ours = found[OURS]
    assert len(found) == 3
    for name, got in found.items():
        assert got.shape == (32, 3, cuda_images.SIZE, cuda_images.SIZE), name
        assert got.dtype == torch.float32
        assert abs(float(got.mean() - ours.mean())) < 0.15, name
        assert 0.8 < float(got.std() / ours.std()) < 1.25, name


def test_kernels_are_told_from_copies_and_ranges() -> None:
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    listed = [
        (cpu, "Optimizer.step#AdamW.step"),
        (cuda, "Optimizer.step#AdamW.step"),
        (cpu, "cuLaunchKernel"),
        (cuda, "fst_begin"),
        (cuda, "fst_update"),
        (cuda, "Memcpy HtoD (Pinned -> Device)"),
        (cuda, "Memset (Device)"),
    ]
    events = [SimpleNamespace(device_type=kind, name=name) for kind, name in listed]
    assert cuda_timing.kernels_among(events) == 2


def test_contenders_that_do_not_fit_are_left_out_from_the_end() -> None:
    work = Work("cuda chain", "", ((100,),))
    timer = cuda_timing.HostTimer()
    timer.free_bytes = lambda: work.bytes_needed(2)
    outcome = cuda_contest.run_cuda_contest(work, timer, cuda_contest.Budget(60.0, 1), 0.0, 2, 2)
    assert [len(times) for times in outcome.seconds.values()] == [2, 2]
    assert list(outcome.seconds) == list(outcome.names[:2])
    assert list(outcome.absent) == list(outcome.names[2:])
    assert all("GiB with those before it" in reason for reason in outcome.absent.values())
    timer.free_bytes = lambda: 0
    outcome = cuda_contest.run_cuda_contest(work, timer, cuda_contest.Budget(60.0, 1), 0.0)
    assert not outcome.seconds
    assert OURS in outcome.absent


def test_time_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(cuda_contest.time, "monotonic", lambda: now[0])
    budget = cuda_contest.Budget(100.0, 4)
    assert budget.next_work() == 25.0
    now[0] = 70.0
    assert budget.next_work() == 10.0
    few, many = Work("cuda clip", "", ((1,),) * 10), Work("cuda clip", "", ((1,),) * 5000)
    assert budget.refuse_to_compile(few) is None
    assert "5000 tensors would take 2000 s" in budget.refuse_to_compile(many)
    budget.compiled(few, 100.0)
    assert "10 tensors would take 100 s" in budget.refuse_to_compile(few)


def test_goals_and_plot_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_report, "TINY", False)
    work = Work("cuda chain", "ResNet-50, fp32", ((1_000_000,),))
    names = (OURS, cuda_works.FUSED, cuda_works.FOREACH)
    outcome = cuda_contest.CudaOutcome(
        work,
        dict(zip(names, ([1e-3], [2e-3], [2.5e-3]), strict=True)),
        copy_rate=40e9,
        order=names,
        host={name: [1e-4] for name in names},
        whole={name: [2e-3] for name in names},
        launches={OURS: 4, cuda_works.FUSED: 40, cuda_works.FOREACH: None},
    )
    rows = [line.split("  ") for line in cuda_report.cuda_goals([outcome]).splitlines()[2:]]
    measured = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[-4:] for row in measured] == [
        [cuda_works.FUSED, "1.60x", "2.00x", "reached"],
        [cuda_works.FOREACH, "3.00x", "2.50x", "missed"],
        ["copy on the device", "0.90x", "0.80x", "missed"],
        ["4 launches", "1.00x", "1.00x", "reached"],
    ]
    details = cuda_report.cuda_tables([outcome])
    assert [line.split()[-1] for line in details.splitlines()[-3:]] == ["4", "40", "-"]
    saved = tmp_path / "run.json"
    saved.write_text(json.dumps(cuda_report.cuda_json([outcome])))
    drawn = draw(saved)
    assert drawn.stat().st_size > 10_000
    assert math.isfinite(json.loads(saved.read_text())["works"][0]["copy_rate"])


@pytest.mark.parametrize("rehearsal", [True, False])
def test_one_work_from_end_to_end(programs: Programs, rehearsal: bool) -> None:
    code = f"import os, pytest; os.chdir({str(Path(__file__).parents[2])!r})\n"
    code += "raise SystemExit(pytest.main(['-rs', 'benchmarks/gpu', '-k', 'cuda_adamw and 300']))"
    fake = str(int(rehearsal))
    done = programs.run(code, FASTSTEP_FAKE_GPU=fake, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout[-3000:]
    if rehearsal:
        assert "300 x 1024, fp32" in done.stdout
        assert "not judged: rehearsal" in done.stdout
        assert "1 passed" in done.stdout
    else:
        assert "torch finds no CUDA device" in done.stdout
        assert "passed" not in done.stdout


class Event:
    """torch.cuda.Event by the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.mark.filterwarnings("ignore")  # the profiler says that there is no CUDA
def test_clocks_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (12, 34))
    kind = cuda_timing.CudaTimer
    monkeypatch.setattr(kind, "device", "cpu")
    timer = kind(1 << 16)
    assert timer.free_bytes() == 12
    assert math.isnan(timer.take_rate())
    timer.copy()
    assert timer.take_rate() > 1e6

    def round_() -> None:
        calls.append("round")
        time.sleep(0.01)

    calls.clear()
    host, whole = timer.host_and_whole(round_)
    assert 0.01 <= host <= whole
    assert calls == ["synchronize", "round", "synchronize"]
    assert 0.01 <= timer.device_seconds(round_, 1e-4) < 10  # not milliseconds
    assert timer.launches(round_) is None
