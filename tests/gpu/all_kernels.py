"""Runs every kernel over dtypes, layouts and sizes, for a tool that watches it.

`compute-sanitizer --tool memcheck python -m gpu.all_kernels`, in the folder of the tests. With
`--every 5` it takes one in five of the optimizers' cases, under a tool that is slow.
"""

import argparse
import itertools
import sys
from typing import Any

import torch

import faststep
from faststep import _C
from faststep.data import transforms
from optim.common import DTYPES, generator
from optim.declarations import ALL
from optim.layouts import LAYOUTS

from .common import CUDA, Twins, assert_same_scales, same_bits, scalers, values


def steps(every: int) -> None:
    for declaration, dtype in list(itertools.product(ALL, DTYPES))[::every]:
        print(f"{declaration.name}, {dtype}", flush=True)
        source = generator(1)
        tensors = [t for layout in LAYOUTS for t in layout.values(dtype, source)]
        twins = Twins([*tensors, values((20_003,), 1, dtype), values((9,), 2, dtype)[1:]])
        both = twins.optimizers(
            declaration.ours, **declaration.kwargs, max_grad_norm=0.7, keep_grads=True
        )
        pair = scalers(init_scale=16.0, growth_interval=2, max_scale=64.0, hysteresis=2)
        for step in range(2):
            twins.draw_grads(step, 16.0)
            for optimizer, scaler in zip(both, pair, strict=True):
                scaler.step(optimizer)
                scaler.update()
        twins.assert_same(*both, grads=True)
        assert_same_scales(*pair)


def lists() -> None:
    twins = Twins([values((n,), n, d) for d in DTYPES for n in (1, 257, 20_003)])
    for norm_type in (2.0, 1.0, float("inf"), 3.0):
        twins.draw_grads(1)
        for params in (twins.cpu, twins.cuda):
            faststep.clip_grad_norm_(params, 0.5, norm_type)
            faststep.clip_grad_value_(params, 0.1)
    grads = [q.grad for q in twins.cuda]
    sums = torch.zeros(2 * len(grads), dtype=torch.float64, device=CUDA)
    norm, found = torch.zeros((), dtype=torch.float64, device=CUDA), torch.zeros((), device=CUDA)
    _C.device_chunk_squares(grads, None, sums[: sum(-(-g.numel() // 16384) for g in grads)], found)
    _C.device_fold_squares(sums, norm)
    for start in (True, False):
        for add, params in ((_C.accumulate, twins.cpu), (_C.device_accumulate, twins.cuda)):
            add([p.detach() for p in params], [p.grad for p in params], 0.5, start)
    for p, q in zip(twins.cpu, twins.cuda, strict=True):
        assert same_bits(p, q.cpu())
    without_half = Twins([values((n,), n, d) for d in DTYPES[:3] for n in (1, 257, 20_003)])
    both = without_half.optimizers(faststep.optim.SGD, lr=0.1)
    pair: Any = scalers(init_scale=16.0)
    without_half.draw_grads(2, 16.0)
    for optimizer, scaler in zip(both, pair, strict=True):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    without_half.assert_same(*both, grads=True)


def images() -> None:
    source = torch.randint(0, 256, (3, 3, 40, 31), dtype=torch.uint8, generator=generator(1))
    labels = torch.tensor([0, 2, 1])
    for x in (source, source.float()):
        for crop in (
            transforms.RandomCrop(37, padding=9),
            transforms.RandomResizedCrop(33),
            transforms.RandomResizedCrop(13),
            transforms.RandomResizedCrop(13, antialias=False),
        ):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for mix in (transforms.MixUp(1.0, 3), transforms.CutMix(1.0, 3)):
                    compose = transforms.Compose([crop, transforms.ToFloat(dtype), mix])
                    want = compose(x, labels, generator=generator(2))[0]
                    got = compose(x.to(CUDA), labels.to(CUDA), generator=generator(2))[0]
                    assert torch.equal(got.cpu(), want)


def losses() -> None:
    for dtype, shape in itertools.product(DTYPES, ((1, 1), (5, 33), (3, 9001))):
        if dtype == torch.float64:
            continue
        logits, target = values(shape, 1, dtype, 4.0), torch.arange(shape[0]) % shape[1] - 1
        rows = [torch.empty(shape[:1]) for _ in range(2)]
        results = [torch.empty_like(logits), torch.empty(()), torch.empty(2)]
        host = [logits, target, values(shape[1:], 2).abs(), *rows, *results]
        there = [one.to(CUDA) for one in host]
        for some in (host, there):
            assert _C.cross_entropy(*some, -1, 0.1, True)
        assert all(same_bits(one, other.cpu()) for one, other in zip(host, there, strict=True))


def main(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, metavar="N")
    steps(parser.parse_args(arguments).every)
    print("lists", flush=True)
    lists()
    print("images", flush=True)
    images()
    print("losses", flush=True)
    losses()
    torch.cuda.synchronize()
    print(f"{_C.device_counts()[0]} launches, the bits of the CPU")


if __name__ == "__main__":
    main(*sys.argv[1:])
