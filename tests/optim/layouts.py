"""Parameters and gradients in every memory layout that an optimizer may meet."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


def draw(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values of either sign in [0.25, 1): their squares times 0.001 are normal fp16 numbers."""
    value = 2.0 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1.0
    return (0.25 * value.sign() + 0.75 * value).to(dtype)


def same_strides(p: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A gradient as autograd makes it: the strides of a dense parameter, else contiguous."""
    return torch.empty_like(p, dtype=dtype).copy_(draw(tuple(p.shape), dtype, generator))


def transposed_strides(p: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return draw(tuple(p.shape[::-1]), dtype, generator).permute(*reversed(range(p.dim())))


def zero_strides(p: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """One value per row, expanded: stride 0 in the last dimension."""
    return draw((*p.shape[:-1], 1), dtype, generator).expand(p.shape)


def spaced_strides(p: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every second element of a larger tensor."""
    return draw((*p.shape[:-1], 2 * p.shape[-1]), dtype, generator)[..., ::2]


def negated(value: Tensor) -> Tensor:
    """Equal to `value`; its memory holds the opposite signs."""
    return torch._neg_view(-value)


def negated_strides(p: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A lazily negated view with the strides of a dense parameter."""
    return negated(same_strides(p, dtype, generator))


def imaginary_strides(p: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """The lazily negated part of a complex tensor, or of what looks like one."""
    return torch._neg_view(-draw((*p.shape, 2), dtype, generator))[..., 1]


Make = Callable[[torch.dtype, torch.Generator], list[Tensor]]


@dataclass(frozen=True, eq=False)
class Layout:
    """How to make the parameters' values, and a gradient for one of them."""

    name: str
    values: Make
    gradient: Callable[[Tensor, torch.dtype, torch.Generator], Tensor] = same_strides
    grad_dtype: torch.dtype | None = None
    written_back: bool = True
    unscaled_by_torch: bool = True  # which has no way for lazily negated gradients

    def parameters(self, dtype: torch.dtype, generator: torch.Generator) -> list[Parameter]:
        params = [Parameter(value) for value in self.values(dtype, generator)]
        for p in params:
            if self.grad_dtype is not None:
                p.grad_dtype = self.grad_dtype
        return params


def plain(*shapes: tuple[int, ...]) -> Make:
    return lambda dtype, generator: [draw(shape, dtype, generator) for shape in shapes]


def permuted(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    return [
        draw((9, 33), dtype, generator).t(),
        draw((4, 3, 5), dtype, generator).permute(1, 2, 0),
    ]


def channels_last(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    value = draw((3, 5, 4, 6), dtype, generator)
    volume = draw((2, 3, 2, 2, 3), dtype, generator)
    return [
        value.contiguous(memory_format=torch.channels_last),
        volume.contiguous(memory_format=torch.channels_last_3d),
    ]


def sliced(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Views with holes, an odd storage offset and elements that are not adjacent."""
    return [
        draw((12, 10), dtype, generator)[::2, 1:8],
        draw((40,), dtype, generator)[3::3],
        draw((7, 6), dtype, generator)[1:, :],
    ]


def negated_values(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Lazily negated views: packed, without dimensions, transposed, with holes; and a plain one."""
    values = [draw(shape, dtype, generator) for shape in ((67,), (), (5, 13), (5, 6))]
    views = [negated(value) for value in values]
    return [views[0], views[1], views[2].t(), views[3][:, ::2], draw((16,), dtype, generator)]


LAYOUTS = (
    Layout("contiguous", plain((67,), (5, 13), (16,))),
    Layout("transposed", permuted),
    Layout("channels_last", channels_last),
    Layout("sliced", sliced),
    Layout("zero_dim", plain((), ())),
    Layout("empty", plain((0,), (3, 0), (4,))),
    Layout("grad_transposed", plain((40, 50)), transposed_strides),
    Layout("grad_spaced", plain((6, 11)), spaced_strides),
    Layout("grad_expanded", plain((6, 11), (40,)), zero_strides, written_back=False),
    Layout("negated", negated_values),
    Layout(
        "grad_negated",
        plain((67,), (5, 13), (), (1,), (17000,)),
        negated_strides,
        unscaled_by_torch=False,
    ),
    Layout("grad_imaginary", plain((67,), (5, 13), ()), imaginary_strides, unscaled_by_torch=False),
    Layout("both_negated", negated_values, negated_strides, unscaled_by_torch=False),
    Layout("grad_fp32", plain((67,), (5, 13)), grad_dtype=torch.float32),
)
