"""Figures that ranks tell each other, as long as there is a store."""

from typing import Any

import pytest

from faststep.doctor.peers import Peers, of_torchrun
from faststep.doctor.runs import free_ports

LINE: dict[str, Any] = {"rank": 1, "step": 5, "phases": {"data": 0.5}}


def test_lines_come_until_the_store_is_gone() -> None:
    """Phases are averaged over the newest lines."""
    [port] = free_ports(1)
    said: list[str] = []
    hosts = [Peers("127.0.0.1", port, is_host=True, ranks=3)]
    other: Any = Peers("127.0.0.1", port, is_host=False, ranks=3, say=said.append)
    assert hosts[0].told() == []
    other.show({**LINE, "phases": {"data": 1.0}})
    other.show({**LINE, "step": 6})
    assert len(other.told()) == 1  # an answer: the store has taken what was sent before
    [line] = hosts[0].told()
    assert (line["step"], line["phases"]) == (6, {"data": 0.75})
    hosts.clear()
    for step in range(10):  # what is sent first may not come back as an error
        other.show({**LINE, "step": step})
    assert other.told() == []
    [text] = said
    assert text.startswith("no more figures of other ranks: ")


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_ranks_that_torchrun_has_not_started(
    monkeypatch: pytest.MonkeyPatch, rank: str, lines: int
) -> None:
    said: list[str] = []
    assert of_torchrun(said.append) is None
    assert said == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert of_torchrun(said.append) is None
    assert len(said) == lines
