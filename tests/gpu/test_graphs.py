"""Steps captured into CUDA graphs and replayed."""

from typing import Any

import pytest
import torch

import faststep
from optim.declarations import ADAMW, ALL, SGD, Declaration

from .common import CUDA, REHEARSAL, Twins, assert_same_scales, place, same_bits, scalers, values

SHAPES = (3, 20_000)


def refill(twins: Twins, step: int, scale: float = 1.0) -> None:
    """New values in the gradients' own memory: a graph knows the addresses only."""
    for i, (p, q) in enumerate(zip(twins.cpu, twins.cuda, strict=True)):
        grad = values(tuple(p.shape), 10 * step + i, p.dtype, scale)
        p.grad.copy_(grad)
        q.grad.copy_(place(grad, q.device))


def warm_up(step: Any) -> None:
    """One call on a side stream, as a capture needs it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)


def capturable(declaration: Declaration) -> dict[str, Any]:
    return {"capturable": True} if "step" in declaration.state else {}


@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_replays_with_another_learning_rate(declaration: Declaration) -> None:
    twins = Twins([values((n,), n) for n in SHAPES])
    kwargs = {**declaration.kwargs, "max_grad_norm": 0.5}
    a = declaration.ours(twins.cpu, **{**kwargs, "lr": torch.tensor(0.25)})
    lr = place(torch.tensor(0.25), CUDA)
    b = declaration.ours(twins.cuda, **{**kwargs, "lr": lr}, **capturable(declaration))
    twins.set_grads([torch.zeros(n) for n in SHAPES])
    a.step()
    warm_up(b.step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b.step()
    twins.assert_same(a, b)
    for step in range(4):
        refill(twins, step)
        a.param_groups[0]["lr"].fill_(0.5 / (step + 1))
        lr.fill_(0.5 / (step + 1))
        a.step()
        graph.replay()
        twins.assert_same(a, b)
    refill(twins, 5)  # outside of the graph again, and then inside
    a.step()
    b.step()
    twins.assert_same(a, b)
    refill(twins, 6)
    a.step()
    graph.replay()
    twins.assert_same(a, b)


@pytest.mark.skipif(REHEARSAL, reason="torch's own operators are captured on real devices only")
@pytest.mark.parametrize("bounded", [False, True])
def test_whole_chain(bounded: bool) -> None:
    twins = Twins([values((n,), n) for n in SHAPES])
    a = faststep.optim.AdamW(twins.cpu, max_grad_norm=0.5)
    b = faststep.optim.AdamW(twins.cuda, max_grad_norm=0.5, capturable=True)
    options: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}
    pair = scalers(**options, **({"max_scale": 4096.0} if bounded else {}))
    twins.set_grads([torch.zeros(n) for n in SHAPES])

    def chain(optimizer: Any, scaler: Any) -> None:
        scaler.step(optimizer)
        scaler.update()

    chain(a, pair[0])
    warm_up(lambda: chain(b, pair[1]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(b, pair[1])
    for step in range(6):
        refill(twins, step, pair[0].get_scale())
        if step in (1, 4):
            twins.cpu[0].grad[0] = float("inf")
            twins.cuda[0].grad[0] = float("inf")
        chain(a, pair[0])
        graph.replay()
        twins.assert_same(a, b)
        assert_same_scales(*pair)


def test_explicit_chain_in_a_graph() -> None:
    twins = Twins([values((n,), n) for n in SHAPES])
    a, b = twins.optimizers(faststep.optim.SGD, lr=0.1)
    twins.set_grads([torch.zeros(n) for n in SHAPES])

    def chain(optimizer: Any, params: list[Any]) -> None:
        faststep.clip_grad_norm_(params, 0.5)
        faststep.clip_grad_value_(params, 0.01)
        optimizer.step()

    chain(a, twins.cpu)
    warm_up(lambda: chain(b, twins.cuda))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(b, twins.cuda)
    for step in range(3):
        refill(twins, step)
        chain(a, twins.cpu)
        graph.replay()
        twins.assert_same(a, b, grads=True)


def test_capture_has_to_be_allowed() -> None:
    twins = Twins([torch.ones(3)])
    optimizer = faststep.optim.AdamW(twins.cuda)
    twins.set_grads([torch.ones(3)])
    warm_up(optimizer.step)
    before = twins.cuda[0].cpu().clone()
    with (
        pytest.raises(RuntimeError, match=r"Attempting CUDA graph capture of step\(\).*AdamW"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    torch.cuda.synchronize()
    assert same_bits(before, twins.cuda[0].cpu())


@pytest.mark.parametrize("declaration", [ADAMW, SGD], ids=lambda d: d.name)
def test_two_graphs_of_one_optimizer(declaration: Declaration) -> None:
    """The tables of the first graph must stay as they are when the gradients move."""
    twins = Twins([values((n,), n) for n in SHAPES])
    a, b = twins.optimizers(declaration.ours, **declaration.kwargs, **capturable(declaration))
    a.param_groups[0]["capturable"] = False
    twins.draw_grads(0)
    a.step()
    warm_up(b.step)
    graphs, grads = [], []
    for n in range(2):
        twins.draw_grads(n + 1)
        grads.append([(p.grad, q.grad) for p, q in zip(twins.cpu, twins.cuda, strict=True)])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            b.step()
        graphs.append(graph)
    for n in (0, 1, 0, 0, 1):
        for p, (grad, _) in zip(twins.cpu, grads[n], strict=True):
            p.grad = grad
        a.step()
        graphs[n].replay()
        twins.assert_same(a, b)
