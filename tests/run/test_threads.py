"""How many threads `faststep run` lets torch have."""

import os
from pathlib import Path

import pytest
import torch

from faststep.run import cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight processors, two for each core, all of which may be used."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for number in range(8):
        folder = tmp_path / f"devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    return tmp_path


def grouped(root: Path, membership: str, files: dict[str, str]) -> int:
    (root / "cgroup").write_text(membership)
    for name, text in files.items():
        path = root / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cores.cores(root, root)


def test_cores_are_physical_and_those_of_the_affinity(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cores.cores(machine / "nothing", machine) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4})
    assert cores.cores(machine / "nothing", machine) == 2
    assert cores.cores(machine / "nothing", machine / "nothing") == 3


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n"}, 2),
        ("0::/a\n", {"a/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/a\n", {"a/cpu.max": "900000 100000\n"}, 4),
        (
            "3:cpu,cpuacct:/a\n2:memory:/b\n",
            {"cpu/a/cpu.cfs_quota_us": "200000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            2,
        ),
        (
            "3:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            4,
        ),
    ],
)
def test_control_groups_limit_them(
    machine: Path, membership: str, files: dict[str, str], expected: int
) -> None:
    assert grouped(machine, membership, files) == expected


@pytest.mark.parametrize(
    ("variables", "by_torchrun", "expected"),
    [
        ({}, False, 4),
        ({"OMP_NUM_THREADS": "1"}, False, 7),
        ({"MKL_NUM_THREADS": "3"}, True, 7),
        ({"LOCAL_WORLD_SIZE": "2"}, False, 2),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, True, 2),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, False, 7),
        ({"LOCAL_WORLD_SIZE": "9"}, False, 1),
    ],
)
def test_a_variable_of_the_user_holds_and_ranks_share(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], by_torchrun: bool, expected: int
) -> None:
    for name in (*cores.VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    now = [7]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))
    monkeypatch.setattr(cores, "cores", lambda process, system: 4)
    monkeypatch.setattr(cores, "_is_torchruns", lambda: by_torchrun)
    said = cores.fit_threads()
    assert now == [expected]
    assert said.startswith(f"{expected} thread" + "s" * (expected > 1))
