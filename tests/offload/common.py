"""A model of odd parameters, and training runs with and without offload that must agree in bits."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import faststep
from faststep._torch.dtensor import part_of

Make = Callable[..., Any]


class Odd(nn.Module):
    """Several chunks, a tied weight, channels last, a transposed one, a scalar, an empty one, one
    that is frozen, one without a gradient, and one that lies with gaps."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)

        def made(*size: int) -> Tensor:
            return (torch.randn(size, generator=source) * 0.1).to(dtype)

        self.embedding = nn.Embedding(300, 130, _weight=made(300, 130))
        self.inner = nn.Linear(130, 130, bias=False)
        self.inner.weight = nn.Parameter(made(130, 130))
        self.head = nn.Linear(130, 300, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = nn.Parameter(made(130, 77).t())
        self.last = nn.Parameter(made(40, 30, 4, 4).to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(torch.ones((), dtype=dtype))
        self.empty = nn.Parameter(made(0, 3))
        self.frozen = nn.Parameter(made(5000), requires_grad=False)
        self.unused = nn.Parameter(made(50))
        self.gaps = nn.Parameter(made(60, 130)[:, ::2])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.inner(self.embedding(tokens)).tanh()
        out = self.head(hidden).float().logsumexp(-1).mean() * self.scalar.float()
        odd = (hidden @ self.turned.t()).float().square().mean() + self.empty.float().sum()
        odd = odd + self.last.float().square().sum() * self.frozen.float().sum().cos()
        return out + odd + (hidden[..., :65] @ self.gaps.t()).float().square().mean()


def tokens(count: int, seed: int = 1) -> Iterator[Tensor]:
    source = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randint(0, 300, (4, 9), generator=source)


def bits(*objects: Any) -> list[Any]:
    """All numbers of tensors, state dicts and lists, and where they lie in memory.

    Of a DTensor those of this rank's part.
    """
    found: list[Any] = []
    for one in objects:
        if isinstance(one, Tensor):
            one = part_of(one)
            flat = one.detach().clone().contiguous()
            found.append((one.dtype, one.shape, one.stride(), flat.flatten().view(torch.uint8)))
        elif isinstance(one, dict):
            found += [sorted(map(str, one))]
            for key in sorted(one, key=str):
                found += bits(one[key])
        elif isinstance(one, (list, tuple)):
            found += bits(*one)
        else:
            found.append(one)
    return found


def assert_same(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second)
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        if isinstance(one, tuple):
            assert one[:3] == other[:3], number
            assert torch.equal(one[3], other[3]), number
        else:
            assert one == other, number


def _noted_answers(offloaded: Any) -> list[Any]:
    """What its steps return from now on."""
    answers: list[Any] = []
    step = offloaded.step

    def noted(request: Any) -> Any:
        answers.append(step(request))
        return answers[-1]

    offloaded.step = noted
    return answers


def train(
    make: Make,
    offload: dict[str, Any] | None,
    dtype: torch.dtype = torch.float32,
    *,
    steps: int = 4,
    micro_steps: int = 1,
    step: Callable[[Any, nn.Module, Tensor], None] | None = None,
    keep: bool = False,
    holds_grads: bool = False,
    notes_skips: bool = True,
) -> list[Any]:
    """What a run leaves behind: parameters, gradients, states, and what the steps found."""
    model = Odd(dtype)
    named = dict(model.named_parameters())
    last = [named.pop("scalar"), named.pop("last")]
    optimizer = make([{"params": named.values()}, {"params": last, "lr": 0.003}])
    offloaded = None
    if offload is not None:
        options = {**offload}
        if options.pop("wait_in_forward", False):
            options["model"] = model
        offloaded = faststep.offload(optimizer, **options)
        answers = _noted_answers(offloaded)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    found: list[Any] = []
    for batch in tokens(steps):
        for part in batch.chunk(micro_steps):
            loss = model(part)
            if step is None:
                loss.backward()
        if step is None:
            optimizer.step()
        else:
            step(optimizer, model, loss)
        scheduler.step()
        found += bits(optimizer.last_grad_norm)
        if notes_skips:
            found.append(optimizer.step_was_skipped)
        if keep:
            found += bits([param.grad for param in model.parameters()])
        if not holds_grads:
            optimizer.zero_grad()
    if offloaded is not None:
        offloaded.wait()
        assert None not in answers  # left to the step without offload
    found += bits(model.state_dict(), optimizer.state_dict())
    del optimizer, offloaded, scheduler
    gc.collect()
    return found
