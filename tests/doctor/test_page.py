"""The doctor's page as a browser shows it."""

import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from faststep.cli.doctor import report
from faststep.cli.doctor_page import COLOURS, page
from faststep.doctor import Answer, Finding, Trial

PHONE = (400, 1900)  # pixels
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")


def answer() -> Answer:
    found: dict[str, Any] = {
        "steps": [0.01, 0.012, 0.011], "threads": 2, "cores": 2, "peak": 200 << 20, "cpu": 1.9,
        "allocated": [1 << 20, 3 << 20, 2 << 20], "losses": [2.0, 1.0, float("nan"), 0.5],
        "machine": {"copy": 1e10, "operations": 5e8, "convolutions": 0, "fp32": 1e11, "bf16": 2e11},
        "gpu": None,
        "switched": {"nothing": [1.0, 0.99, 1.01]}, "optimizers": [{"moved": 1 << 20}],
    }  # fmt: skip
    trials = [
        Trial("num_workers=2", {}, 1.9, 1.8, 2.0, "same bits", 1 << 20, [2.0, 1.0, 0.7, 0.5]),
        Trial("autocast to bf16", {}, 1.2, 1.1, 1.3, "changes training", 0, [2.1, 1.1, 0.8, 0.6]),
    ]
    long = "train_with_a_very_long_name/" * 8 + "train.py:21"
    findings = [
        Finding("starved-loader", 1.9, long, "the loop waits <for> its DataLoader & more"),
        Finding("memory-creep", 1.0, None, "'total' keeps the graph of every step"),
    ]
    phases = {"data": 0.5, "forward": 0.2, "backward": 0.2, "optimizer": 0.1}
    notes = ["other programs used 1.0 of 2 cores meanwhile"]
    verdict = "starved-loader, 1.90x to gain"
    return Answer(verdict, phases, findings, trials, trials[0], found, ["2 threads"], notes)


def screenshot(folder: Path, text: str, *options: str) -> Any:
    image = pytest.importorskip("PIL.Image")
    (folder / "page.html").write_text(text)
    size = ",".join(map(str, PHONE))
    command = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *(f"--user-data-dir={folder / 'profile'}", f"--window-size={size}", *options),
        *(f"--screenshot={folder / 'page.png'}", f"file://{folder / 'page.html'}"),
    ]
    subprocess.run(command, capture_output=True, check=True, timeout=300)
    return image.open(folder / "page.png").convert("RGB")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("is_dark", [False, True])
def test_the_page_is_readable_on_a_phone(tmp_path: Path, is_dark: bool) -> None:
    """The bar has its phases' colours and widths, and nothing runs out of the screen."""
    shown = screenshot(tmp_path, page(answer()), *(["--force-dark-mode"] if is_dark else []))
    assert shown.size == PHONE
    ground = shown.getpixel((2, 2))
    assert (sum(ground) < 200) is is_dark
    pixels = Counter(zip(*[iter(shown.tobytes())] * 3, strict=True))
    bar = [pixels[tuple(bytes.fromhex(colour[1:]))] for colour in COLOURS[:4]]
    assert bar[0] > 1.8 * bar[1] > 1.8 * bar[3] > 0
    right = [shown.getpixel((PHONE[0] - 1, y)) for y in range(PHONE[1])]
    assert set(right) == {ground}
    written = [y for y in range(PHONE[1]) if any(
        shown.getpixel((x, y)) != ground for x in range(0, PHONE[0], 3))]  # fmt: skip
    assert 600 < max(written) < PHONE[1] - 10


def test_both_reports_say_all() -> None:
    text, html = report(answer()), page(answer())
    for said in (
        *("starved-loader", "memory-creep", "train.py:21", "num_workers=2", "1.80 to 2.00"),
        *("same bits", "changes training", "nothing", "GFLOP/s", "copies 10 GB/s", "2 threads"),
        *("other programs used", "optimizer"),
    ):
        assert said in text, said
        assert said in html, said
    assert "waits &lt;for&gt; its DataLoader &amp; more" in html
    assert "nan" not in html
    assert html.count("<polyline") == 3  # losses
    assert "http" not in html
    assert "<script" not in html
