"""DataLoader(transforms=...): on both paths, and after a resume in the middle of an epoch."""

import random
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from faststep.data import DataLoader
from faststep.data import transforms as T  # noqa: N812
from faststep.data.deliver.stages import seed_of

from .resumable import Run
from .shapes import Mapped
from .torch_and_ours import plain

ROWS, BATCH = 23, 4
X = torch.randint(0, 256, (ROWS, 3, 8, 8), dtype=torch.uint8)
Y = torch.arange(ROWS) % 5


SAMPLES = Mapped(lambda index: (X[index], Y[index]), ROWS)  # for torch's path


def transforms() -> T.Compose:
    return T.Compose([T.RandomCrop(6), T.RandomHorizontalFlip(), T.MixUp(1.0, 5)])


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": BATCH, "shuffle": True, "transforms": transforms(), **options}
    return DataLoader(dataset or TensorDataset(X, Y), **options)


def epochs(of: DataLoader[Any], count: int = 2) -> list[Any]:
    torch.default_generator.manual_seed(3)
    return [plain(batch) for _ in range(count) for batch in of]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_transformed_with_draws_of_their_own(workers: int, persistent: bool) -> None:
    options = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
    got = epochs(loader(**options), 3)
    torch.default_generator.manual_seed(3)
    bare = loader(transforms=None, **options)
    want = []
    for epoch in range(3):
        iterator = iter(bare)
        turn = epoch if options["persistent_workers"] else 0
        for number, batch in enumerate(iterator):
            seed = seed_of(iterator._base_seed, turn, number)
            drawn = torch.Generator().manual_seed(seed)
            want.append(plain(transforms()(batch, generator=drawn)))
    assert got == want
    assert len({str(batch) for batch in got}) == len(got)


def test_both_paths_agree() -> None:
    arrays, torchs = loader(), loader(SAMPLES)
    assert (arrays.path, torchs.path) == ("arrays", "torch")
    assert epochs(arrays) == epochs(torchs)


def test_nothing_else_is_drawn() -> None:
    """Sampler and base seed take from the global generator, transforms nothing; nor from random."""
    states = []
    before = random.getstate()
    for chosen in (transforms(), None):
        epochs(loader(transforms=chosen))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert random.getstate() == before


@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), SAMPLES], ids=["arrays", "torch"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2, "worker_method": "thread", "persistent_workers": True}],
    ids=["plain", "persistent"],
)
def test_a_resumed_epoch_goes_on_with_the_same_draws(dataset: Any, options: dict[str, Any]) -> None:
    options = {"batch_size": BATCH, "shuffle": True, **options}
    run = Run(lambda: (dataset, {"transforms": transforms()}), options, 3)
    per_epoch = len(run.batches) // 3
    for place in (1, 3, per_epoch, per_epoch + 1, per_epoch + 3, 2 * per_epoch + 2):
        run.check(place)


def test_any_function_of_a_batch() -> None:
    halved = loader(transforms=lambda batch: (batch[0].float() / 2, *batch[1:]), shuffle=False)
    first = next(iter(halved))
    assert isinstance(first, tuple)
    assert torch.equal(first[0], X[:BATCH].float() / 2)
    assert len(iter(halved)) == len(halved)
    with pytest.raises(TypeError, match="transforms must be a function"):
        loader(transforms=[T.CenterCrop(3)])


def test_batches_are_kept_as_long_as_they_are_needed() -> None:
    """More batches alive than there are slots."""
    kept = [batch for _ in range(3) for batch in loader(shuffle=False)]
    fresh = [batch for _ in range(3) for batch in loader(shuffle=False)]
    torch.default_generator.manual_seed(0)
    assert len({batch[0].data_ptr() for batch in kept + fresh}) == len(kept + fresh)


def test_an_error_in_a_transform_leaves_the_iterator_usable() -> None:
    calls = []

    def fails_once(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 2:
            raise ValueError("no")
        return batch

    iterator = iter(loader(transforms=fails_once, shuffle=False))
    first = next(iterator)
    with pytest.raises(ValueError, match="no"):
        next(iterator)
    assert torch.equal(next(iterator)[1], Y[2 * BATCH : 3 * BATCH])
    assert torch.equal(first[1], Y[:BATCH])
