"""Transforms of images on a CUDA device: the bits of the CPU, in one launch."""

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from data.image_lists import FLIP, bits, generator, images
from faststep import _C
from faststep.data import DataLoader
from faststep.data import transforms as T  # noqa: N812
from faststep.data.deliver import copies
from leaks.test_leaks import assert_no_growth, assert_references_stay, failing

from . import fake, late

pytestmark = pytest.mark.usefixtures("machine")


def test_many_batches_while_the_device_is_behind(machine: fake.Machine) -> None:
    """Samples are copied from pinned memory that is not used again too early."""
    machine.lag(30)
    x, compose = images(5, 3, 12, 14), T.Compose([T.RandomResizedCrop(9), FLIP])
    used, again = generator(), generator()
    got = [compose(fake.claim(x), generator=used) for _ in range(12)]
    machine.lag(0)
    machine.synchronize()
    for result in got:
        assert bits(fake.plain(result)) == bits(compose(x, generator=again))


def arguments(ordinal: int = 0) -> list[Any]:
    """Of a good call."""
    words = [0, 0, 4, 4, 2, 2] + [0] * 11
    samples, factors = torch.tensor([words, words], dtype=torch.int32), (1.0, 2.0, 3.0)
    x = fake.claim(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), ordinal)
    out = fake.claim(torch.zeros(2, 3, 2, 2), ordinal)
    buffer = fake.allocated([34], torch.int32, ordinal)
    return [x, out, samples, factors, factors, buffer]


def test_references_memory_and_errors() -> None:
    right = arguments()
    cases = [(lambda: _C.transform_images(*right), right)]
    host = fake.plain(right[5])
    assert host.dtype == torch.int32
    for place, bad in (
        *((1, fake.plain(right[1])), (1, arguments(1)[1]), (2, fake.claim(right[2]))),
        *((2, right[2] + 3), (5, None), (5, host), (5, arguments(1)[5])),
        *((5, fake.claim(host[:33])), (5, fake.claim(host.float()))),
    ):
        wrong = [*right[:place], bad, *right[place + 1 :]]
        cases.append((failing(_C.transform_images, *wrong), wrong))
    for call, kept in cases:
        assert_references_stay(call, kept)
    assert_no_growth(*(call for call, _ in cases))


def test_a_second_device(machine: fake.Machine) -> None:
    x, compose = images(3, 1, 5, 5), T.Compose([FLIP])
    got = compose(fake.claim(x, 1), generator=generator())
    machine.synchronize()
    assert got.device == torch.device("cuda", 1)
    assert bits(fake.plain(got)) == bits(compose(x, generator=generator()))


def test_a_captured_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faststep.data.transforms.compose.is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        T.Compose([FLIP])(fake.claim(images(3, 1, 5, 5)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_transforms_on_the_device(
    workers: int, machine: fake.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batches as on the host, whatever was copied ahead; also after a resume."""
    """The same images as on the host, whatever was copied ahead; also after a resume."""
    monkeypatch.setattr(copies, "_copiers", {})
    late.start(monkeypatch, machine)
    x = images(22, 3, 9, 9)
    compose = T.Compose([T.RandomCrop(6), FLIP])

    def loader(**options: Any) -> DataLoader[Any]:
        torch.default_generator.manual_seed(7)
        data = TensorDataset(x)
        return DataLoader(data, 4, True, num_workers=workers, transforms=compose, **options)

    def rest_of(batches: DataLoader[Any]) -> tuple[list[Any], list[Any]]:
        """Their bits, and the states after each."""
        got, states = [], []
        for (image,) in batches:
            machine.synchronize()
            assert image.device == torch.device("cuda", 0)
            got.append(bits(fake.plain(image)))
            states.append((batches.state_dict(), torch.get_rng_state()))
        return got, states

    want = [bits(image) for (image,) in loader()]
    got, states = rest_of(loader(device="cuda"))
    assert got == want
    again = loader(device="cuda")
    torch.set_rng_state(states[2][1])
    again.load_state_dict(states[2][0])
    assert rest_of(again)[0] == want[3:]
    machine.lag(0)
