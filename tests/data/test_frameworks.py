"""Frameworks that make another loader of ours: what it got is kept, or the loss is an error."""

import copy
import types
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from faststep.data import DataLoader, prepare_loader, transforms

from .shapes import Streamed

IMAGES = torch.arange(20 * 3 * 6 * 6, dtype=torch.int64).to(torch.uint8).view(20, 3, 6, 6)


def new(**options: Any) -> DataLoader[Any]:
    dataset = TensorDataset(IMAGES, torch.arange(20))
    return DataLoader(dataset, **({"batch_size": 4, "shuffle": True} | options))


def flips() -> transforms.Compose:
    return transforms.Compose([transforms.RandomCrop(4), transforms.RandomHorizontalFlip()])


def epoch(loader: Any) -> list[Any]:
    torch.manual_seed(3)
    return [[part.tolist() for part in batch] for batch in loader]


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"transforms": flips()}, "transforms"),
        ({"device": "cpu"}, "device"),
        ({"transforms": len, "device": "cpu"}, "transforms and device"),
    ],
)
def test_what_accelerate_asks_first(options: dict[str, Any], lost: str) -> None:
    loader = new(**options)
    with pytest.raises(ValueError, match=rf"without its {lost}: .*prepare_loader\(accelerator"):
        getattr(loader, "_is_accelerate_prepared", False)
    assert len([*loader]) == 5
    assert getattr(new(), "_is_accelerate_prepared", False) is False
    loader._is_accelerate_prepared = True  # type: ignore[assignment]
    assert loader._is_accelerate_prepared is True


class Adapter:
    """As much of accelerate's DataLoaderShard as is asked for."""

    def __init__(self, base: Any) -> None:
        self.base_dataloader = base


class Accelerator:
    def prepare_data_loader(self, loader: Any) -> Any:
        assert not getattr(loader, "_is_accelerate_prepared", False)
        assert loader._faststep.transforms is None
        sampler = torch.utils.data.BatchSampler(range(19, -1, -1), 4, True)  # type: ignore[arg-type]
        return Adapter(torch.utils.data.DataLoader(loader.dataset, batch_sampler=sampler))


def test_our_loader_with_the_samplers_of_another() -> None:
    class Mine(DataLoader[Any]):
        pass

    loader = Mine(TensorDataset(IMAGES, torch.arange(20)), 4, transforms=flips(), device="cpu")
    prepared = prepare_loader(Accelerator(), loader)
    ours = prepared.base_dataloader
    assert type(ours) is Mine
    assert (ours.path, ours.transforms) == ("arrays", loader.transforms)
    assert prepared.dl_state_dict == ours.state_dict()
    labels = [batch[1] for batch in epoch(ours)]
    assert labels == torch.arange(19, -1, -1).view(5, 4).tolist()
    assert len(epoch(ours)[0][0][0][0]) == 4  # cropped
    assert [batch[1] for batch in epoch(loader)] == torch.arange(20).view(5, 4).tolist()
    with pytest.raises(TypeError, match=r"prepare_loader takes a faststep\.data\.DataLoader"):
        prepare_loader(Accelerator(), torch.utils.data.DataLoader([1]))  # type: ignore[arg-type]
    other = types.SimpleNamespace(prepare_data_loader=lambda loader: types.SimpleNamespace())
    with pytest.raises(TypeError, match="accelerate made a SimpleNamespace"):
        prepare_loader(other, loader)


def accelerator(**options: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_accelerate(workers: int, shuffle: bool) -> None:
    options = {"transforms": flips(), "device": "cpu", "num_workers": workers, "shuffle": shuffle}
    want = epoch(new(**options))
    machine = accelerator()
    with pytest.raises(ValueError, match="call faststep"):
        machine.prepare(new(**options))
    prepared = prepare_loader(machine, new(**options))
    assert machine.prepare(prepared) is prepared
    assert epoch(prepared) == want
    assert prepared.end_of_dataloader
    assert prepared.base_dataloader.path == "arrays"
    assert len(prepared) == 5
    assert prepared.total_batch_size == 4


def test_accelerate_goes_on_in_an_epoch() -> None:
    machine = accelerator()
    prepared = prepare_loader(machine, new(transforms=flips()))
    torch.manual_seed(3)
    iterator = iter(prepared)
    got = [next(iterator) for _ in range(2)]
    state = copy.deepcopy(prepared.state_dict())
    rest = [[part.tolist() for part in batch] for batch in iterator]
    again = prepare_loader(machine, new(transforms=flips()))
    again.load_state_dict(state)
    torch.manual_seed(8)
    assert [[part.tolist() for part in batch] for batch in again] == rest
    assert len(got) + len(rest) == 5


@pytest.mark.parametrize("rank", [0, 1])
def test_accelerate_shares_among_processes(rank: int) -> None:
    module = pytest.importorskip("accelerate.data_loader")
    accelerator()  # makes the state that the function looks at

    def prepare(loader: Any) -> Any:
        return module.prepare_data_loader(
            loader, torch.device("cpu"), num_processes=2, process_index=rank, put_on_device=True
        )

    machine: Any = types.SimpleNamespace(prepare_data_loader=prepare)
    torch.manual_seed(5)
    want = [labels for _, labels in epoch(prepare(new()))]
    torch.manual_seed(5)
    got = epoch(prepare_loader(machine, new(transforms=flips())))
    assert [labels for _, labels in got] == want
    assert len(got[0][0][0][0]) == 4


def test_accelerate_with_a_stream() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Streamed(lambda i: (IMAGES[i], i), 20), 4, transforms=flips())

    assert epoch(prepare_loader(accelerator(), loader())) == epoch(loader())


def test_accelerate_without_options_of_ours() -> None:
    assert epoch(accelerator().prepare(new())) == epoch(new())
    assert epoch(prepare_loader(accelerator(), new())) == epoch(new())


@pytest.mark.parametrize("in_hook", [False, True])
def test_lightning_keeps_what_the_loader_got(in_hook: bool) -> None:
    data = pytest.importorskip("lightning.pytorch.utilities.data")
    fabric = pytest.importorskip("lightning.fabric.utilities.data")
    compose = flips()
    options = {"transforms": compose, "device": "cpu", "prefetch_to_device": 1}
    if in_hook:
        with (
            fabric._replace_dunder_methods(torch.utils.data.DataLoader, "dataset"),
            fabric._replace_dunder_methods(torch.utils.data.BatchSampler),
        ):
            loader = new(**options, snapshot_every_n_steps=3)
    else:
        loader = new(**options, snapshot_every_n_steps=3)
    sampler = torch.utils.data.distributed.DistributedSampler(loader.dataset, 2, 1)  # type: ignore[arg-type]
    for update in (data._update_dataloader, fabric._update_dataloader):
        made = update(loader, sampler)
        assert type(made) is DataLoader
        assert made.sampler is sampler
        own = made._faststep
        assert (own.transforms, own.device) == (compose, torch.device("cpu"))
        assert (own.prefetch_to_device, own.snapshot_every_n_steps) == (1, 3)
        assert len(epoch(made)[0][0][0][0]) == 4
