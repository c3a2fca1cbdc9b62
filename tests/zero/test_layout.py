"""The arithmetic of buckets and slices, without ranks."""

import random

import pytest
import torch

from faststep.zero.layout.cuts import CHUNK, Flat, make_buckets


def flats(counts: list[int], dtype: torch.dtype = torch.float32) -> list[Flat]:
    return [Flat(count, dtype) for count in counts]


def random_params(seed: int) -> list[Flat]:
    rng = random.Random(seed)
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float64)
    sizes = (0, 1, 31, 33, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7, 300_000)
    return [Flat(rng.choice(sizes), rng.choice(dtypes)) for _ in range(rng.randrange(1, 40))]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 20, float("inf")])
@pytest.mark.parametrize("seed", range(4))
def test_every_element_has_one_owner(world: int, bucket_bytes: float, seed: int) -> None:
    params = random_params(seed)
    buckets = make_buckets(params, world, bucket_bytes)
    covered = dict.fromkeys(range(len(params)), 0)
    owners = dict.fromkeys(range(len(params)), 0)
    for bucket in buckets:
        assert bucket.size == bucket.part * world
        for rank in range(world):
            own = bucket.slice_of(rank)
            for piece in bucket.pieces_of(rank):
                param, begin, _ = bucket.places[piece.place]
                assert piece.begin == covered[param]
                assert piece.at == begin + piece.begin or not piece.size
                assert own.start <= piece.at
                assert piece.at + piece.size <= own.stop
                covered[param] += piece.size
                owners[param] += 1
    assert covered == {index: param.size for index, param in enumerate(params)}
    assert all(owners.values())


@pytest.mark.parametrize("world", [2, 3, 4, 13])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 20, float("inf")])
def test_slices_grow_by_less_than_two_chunks(world: int, seed: int, bucket_bytes: float) -> None:
    params = random_params(seed)
    for bucket in make_buckets(params, world, bucket_bytes):
        step = 128 // bucket.dtype.itemsize
        aligned = [-(-place.size // step) * step for place in bucket.places]
        assert bucket.size <= sum(aligned) + world * min(2 * CHUNK, max(aligned))
        ends = [place.begin + place.size for place in bucket.places]
        begins = [place.begin for place in bucket.places]
        assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5, 15))
def test_pieces_begin_at_chunks_and_parameters_are_aligned(world: int, seed: int) -> None:
    for bucket in make_buckets(random_params(seed), world, 1 << 20):
        for place in bucket.places:
            assert place.begin * bucket.dtype.itemsize % 128 == 0
        for rank in range(world):
            assert all(piece.begin % CHUNK == 0 for piece in bucket.pieces_of(rank))


def test_buckets_keep_the_order_and_hold_one_dtype_each() -> None:
    low = torch.bfloat16
    params = [Flat(600, t) for t in (torch.float32, low, torch.float32, low, low)]
    buckets = make_buckets(params, 2, 2400)
    assert [[p.param for p in b.places] for b in buckets] == [[0], [2], [1, 3], [4]]
    for bucket in buckets:
        assert {params[p.param].dtype for p in bucket.places} == {bucket.dtype}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 20, 25 << 20, float("inf")])
def test_ranks_own_about_as_much(world: int, bucket_bytes: float) -> None:
    block = [768 * 768, 768, 3072 * 768, 3072, 768 * 3072, 768, 768, 768]
    params = flats(block * 4 + [50257 * 384])
    loads = [0] * world
    for bucket in make_buckets(params, world, bucket_bytes):
        for rank in range(world):
            loads[rank] += sum(piece.size for piece in bucket.pieces_of(rank))
    assert max(loads) <= 1.02 * sum(loads) / world


def test_a_parameter_without_elements_is_the_first_ranks() -> None:
    (bucket,) = make_buckets(flats([0]), 3, 1024)
    assert [len(list(bucket.pieces_of(rank))) for rank in range(3)] == [1, 0, 0]


@pytest.mark.parametrize("bucket_bytes", [4096, float("inf")])
def test_the_last_buckets_may_grow_from_the_last_one(bucket_bytes: float) -> None:
    low = torch.bfloat16
    params = [Flat(256, torch.float32), Flat(64, low)] * 40
    buckets = make_buckets(params, 2, bucket_bytes, 1024)
    sizes = [sum(p.size for p in b.places) * 4 for b in buckets if b.dtype != low]
    assert sizes[:0:-1] == [min(bucket_bytes, 1024 * 2**n) for n in range(len(sizes) - 1)]
    assert sum(sizes) == 40 * 1024
    assert sizes[0] <= bucket_bytes
    last = [b.places[-1].param for b in buckets]
    assert last == sorted(last)
    for bucket in buckets:
        members = [place.param for place in bucket.places]
        assert members == sorted(members)
        assert {params[member].dtype for member in members} == {bucket.dtype}
    everything = sorted(place.param for bucket in buckets for place in bucket.places)
    assert everything == list(range(80))


def test_growing_buckets_keep_modules_together() -> None:
    params = [Flat(size, torch.float32, name) for name in "dcba" for size in (8, 256)]
    buckets = make_buckets(params, 2, 1024, 1024)
    assert [[p.param for p in b.places] for b in buckets] == [[0, 1], [2, 3], [4, 5], [6, 7]]
