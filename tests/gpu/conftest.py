from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .common import REHEARSAL, why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    if reason is None:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real device, or in a rehearsal the fake one."""
    if not REHEARSAL:
        yield
        return
    from . import rehearsal

    with rehearsal.running(monkeypatch):
        yield
