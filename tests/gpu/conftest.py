from collections.abc import Iterator

import pytest

from faststep.cli.info import collect

from .common import FAKE, REHEARSAL, what_is_missing


def pytest_report_header() -> list[str]:
    return [f"{title}: {text}" for title, text in collect().items()]


def pytest_collection_modifyitems() -> None:
    if FAKE == "0" and (missing := what_is_missing()) is not None:
        raise pytest.UsageError(f"FASTSTEP_FAKE_GPU=0 asks for a real device: {missing}")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real device, or in a rehearsal the fake one."""
    if not REHEARSAL:
        yield
        return
    from . import rehearsal

    with rehearsal.running(monkeypatch):
        yield
