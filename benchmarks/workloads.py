"""What is measured: tensor shapes, the work on them, and the memory that one work needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]

MAX_NORM = 1.0
INIT_SCALE = 65536.0


def resnet50() -> Shapes:
    """Parameter shapes of ResNet-50: 161 tensors, 25.6 M elements (He et al., 2015)."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    incoming = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, incoming, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                shapes += [(4 * width, incoming, 1, 1), (4 * width,), (4 * width,)]
            incoming = 4 * width
    return (*shapes, (1000, 2048), (1000,))


def gpt2_small() -> Shapes:
    """Parameter shapes of GPT-2 small: 148 tensors, 124.4 M elements (Radford et al., 2019)."""
    d = 768
    block = ((d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,))
    mlp = ((d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,))
    return ((50257, d), (1024, d), *((block + mlp) * 12), (d,), (d,))


SHAPES: Mapping[str, Callable[[], Shapes]] = MappingProxyType(
    {
        "2000 x 64": lambda: ((64,),) * 2000,
        "16 x 1M": lambda: ((1 << 20,),) * 16,
        "ResNet-50": resnet50,
        "GPT-2 small": gpt2_small,
    }
)


def count_elements(shapes: Shapes) -> int:
    """Elements of all tensors together."""
    return sum(int(torch.Size(shape).numel()) for shape in shapes)


@dataclass(frozen=True)
class Family:
    """A kind of work and the bytes that it must move at least.

    Args:
        title: what is timed.
        bytes_per_element: the least traffic of fp32 work: every operand is read once in each pass
            that needs it, and written once. 0 if the time does not depend on it.
        states: how many tensors of a parameter's size the optimizer keeps for it.
        scaled: whether the gradients arrive multiplied by the loss scale.
    """

    title: str
    bytes_per_element: int
    states: int = 2
    scaled: bool = False


# Of one optimizer each: the class, and how many states of the parameter's size it keeps. A step
# reads and writes these and the parameter, and reads the gradient. Adafactor's states of matrices
# are smaller; it reads the gradient three times and the parameter twice.
OTHER_OPTIMIZERS: Mapping[str, int] = MappingProxyType(
    {
        "Adagrad": 1,
        "RMSprop": 1,
        "Adamax": 2,
        "Adadelta": 2,
        "RAdam": 2,
        "NAdam": 2,
        "ASGD": 1,
        "Rprop": 2,
        "Adafactor": 1,
    }
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        # Pass one reads g; pass two reads p, g, m, v and writes p, m, v.
        "chain": Family(
            "AMP chain, AdamW: unscale_, clip_grad_norm_, step, update", 32, scaled=True
        ),
        "adamw": Family("plain AdamW step", 28),
        # bf16 states, of 2 bytes
        "adamw bf16 states": Family("plain AdamW step, fp32 with bf16 states", 20),
        # bf16: parameter, remainder and states read and written, the gradient read
        "adamw remainders": Family("plain AdamW step, bf16 with remainders and bf16 states", 18),
        # and int8 states; the chain reads the gradient before, too
        "adamw remainders int8": Family("plain AdamW step, bf16 with remainders, int8 states", 14),
        "chain remainders int8": Family(
            "AMP chain, AdamW, bf16 with remainders and int8 states", 16, scaled=True
        ),
        # int8 states, of a byte
        "adamw int8 states": Family("plain AdamW step, fp32 with int8 states", 16),
        "sgd": Family("plain SGD step with momentum", 20, states=1),
        "lion": Family("plain Lion step", 20, states=1),
        # Pass one reads g; pass two reads and writes it.
        "clip": Family("clip_grad_norm_ alone", 12, states=0),
        "cuda chain": Family(
            "AMP chain on CUDA, AdamW: unscale_, clip_grad_norm_, step, update", 32, scaled=True
        ),
        "cuda clip": Family("clipped AdamW step on CUDA: clip_grad_norm_, step", 32),
        "cuda adamw": Family("plain AdamW step on CUDA", 28),
        "cuda bf16 states": Family("plain AdamW step on CUDA, fp32 with bf16 states", 20),
        "cuda int8 states": Family("plain AdamW step on CUDA, fp32 with int8 states", 16),
        "cuda unaligned": Family("plain AdamW step on CUDA, gradients 8 bytes off alignment", 28),
        # Writes an fp32 element, and reads at most as many bytes of the source as a crop has.
        "cuda images": Family("images on CUDA: random resized crop, flip, normalize", 5, states=0),
        # Forward reads a logit; backward reads it and writes its gradient.
        "cuda cross-entropy": Family("cross-entropy on CUDA, forward and backward", 12, states=0),
        "cuda release": Family("GPT-2's updates on CUDA after or in a backward pass of copies", 0),
        "cuda graph": Family("clip_grad_norm_ and AdamW's step on CUDA, replayed as a graph", 32),
        **{
            name.lower(): Family(f"plain {name} step", 12 + 8 * states, states=states)
            for name, states in OTHER_OPTIMIZERS.items()
        },
        "sums": Family("windows of 8, bf16 with fp32 sums: add up, divide, clip, AdamW step", 0),
        "mean": Family("the end of a window of 8, fp32: divide, clip, AdamW step", 0),
        "release": Family("what AdamW updates in backward add to backward", 0),
        "sharded": Family("training steps with clipping and AdamW, 2 ranks", 0),
        "sharded update": Family("clipping and AdamW's step, 2 ranks", 0),
        "dtensors": Family("clipping and AdamW's step on DTensors, 2 ranks", 0),
        # Forward reads a logit; backward reads it and writes its gradient.
        "cross-entropy": Family("cross-entropy, forward and backward, on the CPU", 12),
        "loader": Family("a batch of a loader, shuffled", 4),
        "host": Family("host time of a CUDA step, AdamW: a fake driver, empty kernels", 0),
    }
)


@dataclass(frozen=True)
class Work:
    """One row of the benchmarks: a family of work on tensors of given shapes.

    Args:
        family: a key of ``FAMILIES``.
        label: the shapes' name.
        shapes: the tensors' shapes.
        true_norm: the unscaled gradients' global norm; ``MAX_NORM`` clips what is above 1.
        fresh_gradients: every round gets newly allocated gradients, as after
            ``zero_grad(set_to_none=True)``; otherwise the same tensors are refilled.
        cold: before every round something larger than the caches is read and written.
        sweep: the sweep that the work belongs to: "tensors", "elements" or "" for none.
        only: names of the contenders to measure; empty for all of the family.
        dtype: of parameters, gradients and states.
    """

    family: str
    label: str
    shapes: Shapes
    true_norm: float = 4.0
    fresh_gradients: bool = False
    cold: bool = False
    sweep: str = ""
    only: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32

    @property
    def key(self) -> str:
        """A name that identifies the work in reports."""
        return f"{self.family} | {self.label}"

    @property
    def writes(self) -> bool:
        """Whether a round changes tensors: gradients below the limit are left as they are, and
        remainders are kept beside bf16 copies."""
        is_left = self.family == "clip" and self.true_norm <= MAX_NORM
        return not is_left and "remainders" not in self.family

    @property
    def elements(self) -> int:
        """Elements of all parameters together."""
        return count_elements(self.shapes)

    @property
    def least_bytes(self) -> int:
        """The bytes that the work must move at least."""
        per_element = FAMILIES[self.family].bytes_per_element * self.dtype.itemsize // 4
        return per_element * self.elements

    def bytes_needed(self, contenders: int) -> int:
        """Memory for parameters, gradients, their source, states and torch's temporaries.

        Args:
            contenders: how many optimizers keep states side by side.
        """
        states = FAMILIES[self.family].states
        return self.dtype.itemsize * self.elements * (3 + states * contenders + 2)


class Arena:
    """The tensors of one work, shared by all contenders so that they touch the same memory.

    Args:
        work: what is measured.
        seed: seed of the parameters and gradients.
        device: where they lie.
    """

    def __init__(self, work: Work, seed: int = 0, device: str = "cpu") -> None:
        self.work = work
        generator = torch.Generator(device).manual_seed(seed)

        def drawn(deviation: float) -> list[Tensor]:
            empty = (torch.empty(s, dtype=work.dtype, device=device) for s in work.shapes)
            return [tensor.normal_(0.0, deviation, generator=generator) for tensor in empty]

        self.parameters = [torch.nn.Parameter(tensor) for tensor in drawn(0.02)]
        self._source = drawn(1.0)
        self._elsewhere = torch.zeros(1 << 26 if work.cold else 0, dtype=torch.uint8)
        squares = sum(float(g.square().sum(dtype=torch.float64)) for g in self._source)
        scale = INIT_SCALE if FAMILIES[work.family].scaled else 1.0
        for gradient in self._source:
            gradient.mul_(work.true_norm * scale / squares**0.5)
        for parameter, gradient in zip(self.parameters, self._source, strict=True):
            parameter.grad = self._placed(gradient)

    def _placed(self, gradient: Tensor) -> Tensor:
        """A copy in new memory; as in a bucket behind other gradients, if the work is so."""
        if self.work.family != "cuda unaligned":
            return gradient.clone()
        before = 8 // gradient.element_size()
        bucket = torch.empty(
            before + gradient.numel(), dtype=gradient.dtype, device=gradient.device
        )
        return bucket[before:].view(gradient.shape).copy_(gradient)

    def refill(self) -> None:
        """Restore every parameter's gradient, the last one first, as backward does.

        Belongs before each round, untimed.
        """
        for parameter, gradient in zip(self.parameters[::-1], self._source[::-1], strict=True):
            if parameter.grad is None or self.work.fresh_gradients:
                parameter.grad = self._placed(gradient)
            else:
                parameter.grad.copy_(gradient)
        self._elsewhere.add_(1)

    def probe(self) -> Tensor:
        """Copies of the first values of the first and last parameter and gradient."""
        ends = (self.parameters[0], self.parameters[-1])
        tensors = [t for p in ends for t in (p.detach(), p.grad) if t is not None]
        return torch.cat([t.flatten()[:8] for t in tensors]).clone()


def available_bytes() -> int | None:
    """Memory that can be used without swapping, None where the system does not tell."""
    listing = Path("/proc/meminfo")
    if listing.is_file():
        for line in listing.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
