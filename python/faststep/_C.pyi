"""The extension module.

Tensors are dense, in float32, float64, bfloat16 or float16, and in CPU memory where nothing else
is said.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

class TensorError(TypeError):
    """A tensor cannot be used: (group, index, role, kind, detail)."""

class Plan:
    """What an optimizer remembers of its parameters between steps."""

    def forget(self) -> None:
        """Let go of the tensors of earlier steps; RuntimeError in a step."""

    def step(
        self,
        param_lists: list[list[Tensor]],
        groups: Sequence[
            tuple[int, tuple[str, ...], bool, tuple[float, ...], bool, dict[int, Tensor] | None]
        ],
        state: dict[Tensor, dict[str, Any]],
        fresh: list[tuple[int, int]] | None,
        scalars: Mapping[int, tuple[Tensor | None, Tensor | None, Tensor | None]],
        measure_found_inf: bool,
        max_norm: float,
        write_grads: bool,
        phase: int,
        squares: Squares | None = ...,
        /,
    ) -> tuple[str, Any]:
        """One step of all parameters that have a gradient.

        `scalars` holds (grad_scale, found_inf, norm) per device: -1 for CPU memory, else a CUDA
        ordinal. `fresh` is a list of (group, index) whose states were created since they were found
        missing. A NaN for `max_norm` means no clipping.

        Returns ("missing", [(group, index), ...]) where a state is missing or, a step counter, not
        on the parameter's device, and ("devices", [...]), those that have gradients, where
        `scalars` lacks one of them, and ("memory", text) where a device has too little memory for
        its tables; then nothing was done. Else ("done", (skipped, norm or None,
        parameters and moments that were written, gradients that were or None)): what the host
        found. For CUDA parameters the step was launched on torch's current stream, and the device
        knows the rest.

        `squares` takes the place of a measuring pass on the host. Where it does not fit the
        gradients the answer is ("squares", None), and nothing was done.

        `phase` is 0 for a whole step. Where several devices measure, 1 measures, into the found_inf
        and norm of each, and 2 does the rest with those two as they are then.

        Raises:
            TensorError: a tensor cannot be used; nothing was done. With the kind "driver" it is
                what a driver said, and the parameter is the first of those that the call was for.
        """

class ReleaseHook:
    """Updates a parameter in backward and frees its gradient, or calls `otherwise` with it.

    It does so itself where `plain` is set, `updated` is not, `rules` has the group, the optimizer
    neither clips nor measures in backward, nothing but the gradient's memory has changed since the
    last step of `plan`, and `mode_depth()` is 0; `updated` is then set. `mode_depth` is the address
    of an `int64_t (*)(void)`, or 0 for none.
    """

    group: int
    plain: bool
    updated: bool
    @property
    def plan(self) -> Plan:
        """Of this parameter alone."""

    def __init__(
        self,
        otherwise: Callable[[Tensor], None],
        optimizer: weakref.ref[Any],
        rules: dict[int, Any],
        mode_depth: int = 0,
        /,
    ) -> None: ...
    def __call__(self, param: Tensor, /) -> None: ...

class Squares:
    """Sums of squares of gradients, taken in backward and folded by a step.

    A slot is the place of a parameter among those of all groups.
    """

    def adopt(self, slot: int, param: Tensor, version: int, /) -> bool:
        """What was measured from `values` is in `param.grad` now, at this version.

        False where `.grad` is at another version, or cannot hold it; it then counts as changed.
        """

    def check(
        self, param_lists: list[list[Tensor]], grad_scale: Tensor | None, /
    ) -> tuple[str, int, int] | None:
        """The first gradient whose measurement does not hold, as (word, group, index), or None.

        The word is "unmeasured", "changed" or "scale": measured for another scale. From now on
        gradients are measured for this one.
        """

    def expect(self, grad_scale: Tensor | None, /) -> None:
        """Measure gradients for a step with this scale from now on."""

    def forget(self) -> None:
        """Let go of the gradients; nothing is measured any more."""

    def measure(self, slot: int, param: Tensor, values: Tensor = ..., /) -> bool:
        """Measure `param.grad`, and hold it; False where a step could not use it either.

        Where `values` are given, those that will be `param.grad`, until `adopt`.
        """

def accumulate(
    sums: Sequence[Tensor],
    terms: Sequence[Tensor],
    factor: float,
    start: bool = ...,
    more: Sequence[Tensor] | None = ...,
    /,
) -> None:
    """Add factor times each term to its sum, of any two dtypes, in one pass and in place.

    With `more`, each sum's second term is added after the first, in the same pass. The arithmetic
    is fp32, or fp64 where one of them is float64; what it gives is rounded to the sum's dtype once.
    With `start` the sums are overwritten, and need not have been initialized.

    Raises:
        TypeError: a tensor cannot be used, or shapes differ; nothing was changed.
        ValueError: the lists differ in length.
    """

def clamp(tensors: Sequence[Tensor], limit: float, /) -> None:
    """Clamp all elements to [-limit, limit] in place; NaN stays."""

def collect_grads(params: Sequence[Tensor], /) -> list[Tensor]:
    """The gradients that are not None, in order."""

def cpu_info() -> dict[str, Any]:
    """The instruction set in use ("isa"), those "supported" and "compiled", and the "threads"."""

def crc32c(data: bytes, /) -> int:
    """CRC-32C (Castagnoli) of the data."""

def device_accumulate(
    sums: Sequence[Tensor],
    terms: Sequence[Tensor],
    factor: float,
    start: bool = ...,
    more: Sequence[Tensor] | None = ...,
    /,
) -> None:
    """`accumulate` of tensors on one CUDA device, as one launch."""

def device_clamp(tensors: Sequence[Tensor], limit: float, /) -> None:
    """`clamp` of tensors on one CUDA device, as one launch."""

def device_clip(tensors: Sequence[Tensor], max_norm: float, norm: Tensor, /) -> None:
    """Multiply by min(1, max_norm / (norm + 1e-6)) on the CUDA device where all of it lies."""

def device_counts() -> tuple[int, int, int]:
    """Kernel launches, uploads of tables and bytes of these since the process started."""

def device_info(ordinal: int, /) -> dict[str, Any]:
    """Make a CUDA device ready, and describe it.

    Raises:
        RuntimeError: it cannot be used, and why.
    """

def device_norm(tensors: Sequence[Tensor], norm_type: float, out: Tensor, /) -> int:
    """Write `norm` of tensors on one CUDA device to `out`, 0-d float32 or float64 on it.

    Returns the dtypes, as `norm` does. A norm of order 0 is a TypeError.
    """

def device_unscale(
    tensors: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor | None, allow_fp16: bool, /
) -> None:
    """Multiply by `inv_scale`, on one CUDA device, and set `found_inf` to 1 at an overflow.

    Raises:
        ValueError: a tensor is float16 and `allow_fp16` is False; nothing was changed.
    """

def fusable(tensors: Sequence[Tensor], device: int = ..., /) -> bool:
    """Whether the functions of this module take these tensors, all on one device.

    The device is -1 for CPU memory, the default, or a CUDA ordinal.
    """

def has_kernels() -> bool:
    """Whether `use_kernels_of` was called: CUDA tensors can be worked on, given a driver."""

def hold(tensor: Tensor, storage_record: int, /) -> Tensor:
    """A tensor like this one over the same memory, which is not freed as long as it lives.

    Raises:
        RuntimeError: use_owners() did not say where the owner is.
        ValueError: the record is not of the tensor's storage.
    """

def holds() -> int:
    """How many memories were held and are not freed."""

def is_recorded() -> bool:
    """Whether somebody, a profiler as a rule, listens to what torch runs; True if not known."""

def measure(tensors: Sequence[Tensor], inv_scale: float, /) -> tuple[float, bool]:
    """(sum of squares of all elements times inv_scale, whether one is infinite or NaN)."""

def norm(tensors: Sequence[Tensor], norm_type: float, /) -> tuple[float, int]:
    """The norm of the tensors' norms, accumulated in double.

    Returns (norm, dtypes); `dtypes` has a bit for each of float32, float64, bfloat16, float16, from
    the lowest, that occurs.
    """

def rules() -> dict[str, tuple[int, int, tuple[str, ...]]]:
    """Per optimizer rule: its number, its states per element, the names of its hyper-parameters."""

def scale(tensors: Sequence[Tensor], factor: float, /) -> None:
    """Multiply all elements by factor in place."""

def split_channels(pixels: Tensor, out: Tensor, /) -> None:
    """Write (height, width, 3) uint8 as (3, height, width), both packed, on the calling thread.

    The GIL is released.

    Raises:
        TypeError, ValueError: a tensor is of another kind or size, or they overlap.
    """

def transform_images(
    images: Tensor,
    out: Tensor,
    samples: Tensor,
    scale: tuple[float, ...],
    bias: tuple[float, ...],
    buffer: Tensor | None = ...,
    antialias: bool = ...,
    /,
) -> None:
    """Write a batch of images to `out`, in one pass on torch's threads and without the GIL.

    On a CUDA device it is a launch on torch's current stream, which must not be captured; `buffer`
    is then int32 on the device, for its copy of `samples`.

    `images` is (M, C, H, W) uint8 or float32, `out` (N, C, h, w) float32, bfloat16 or float16, both
    with any strides; `samples` is (N, 17) int32 on the CPU, a struct of csrc/base/image_sample.h
    per row, which says what of `images` each is made of; `scale` and `bias` have a number per
    channel. What is resized is, with `antialias`, weighed over all that a pixel covers; default
    False.

    Raises:
        TypeError: a tensor cannot be used.
        ValueError: shapes differ, or a sample's image or window is not there; nothing was written.
    """

def unscale_grads(
    params: Sequence[Tensor], factor: float, allow_fp16: bool, /
) -> tuple[bool, bool, list[Tensor]]:
    """Multiply all gradients by `factor`; by 1, with `allow_fp16`, they are only looked at.

    Returns (whether there is a gradient, whether an element was infinite or NaN, the gradients that
    were written and whose version counters have yet to be moved).

    Raises:
        TypeError: a gradient cannot be used; nothing was changed.
        ValueError: a gradient is float16 and `allow_fp16` is False; nothing was changed.
    """

def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor | None,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
    /,
) -> None:
    """Update a loss scale in place; 0-d tensors, float32 and (the trackers) int32.

    All lie in CPU memory or on one CUDA device; there it is one launch.
    """

def use_callbacks(address: int, /) -> None:
    """Where libtorch's function is that `is_recorded` asks: bool at::hasCallbacks(); 0: nowhere."""

def use_kernels_of(path: str, /) -> None:
    """CUDA devices load their kernels from this fatbin when they are first used."""

def use_modes(address: int, /) -> None:
    """Where libtorch's function is that says whether a TorchFunctionMode is active.

    bool at::impl::torch_function_mode_enabled(); 0: nowhere. Reading an attribute of a tensor may
    then run Python code, and what a step has read is read again.
    """

def use_owners(*places: int) -> None:
    """Where a storage's record has its address, what frees that, and the owner, in words.

    Without arguments `hold` raises.
    """

def use_records(*words: int) -> None:
    """Recognize unchanged tensors by their records; see faststep/_torch/records.py for the numbers.

    Without arguments torch is asked about every tensor in every step.
    """

def use_threads_of(path: str | None, /) -> bool:
    """Run on the thread pool of the libtorch_cpu at `path`; False if it offers none."""

class Slots:
    """Memory for batches, used again when the tensors over it are gone."""

    def counts(self) -> tuple[int, int, int]:
        """(slots whose memory came from the system so far, free ones, those with a tensor)."""

    def empty(self, like: Tensor, rows: int, /) -> Tensor:
        """A tensor with the dtype, row shape and strides of `like`, which is dense."""

    def keep(self, number: int, /) -> None:
        """At most so many free slots stay."""

class Arena:
    """Shared memory for batches, used again when the tensors over it are gone.

    Without arguments it is made, with an anonymous file; with the number of such a file, which it
    then owns, and what `reserve` returned, it is that of another process. A forked child has it
    already.

    Raises:
        MemoryError: the system gives no memory, or no address space.
    """

    def __new__(cls, file: int = ..., reserve: int = ..., /) -> Arena: ...
    def fileno(self) -> int: ...
    def reserve(self) -> int:
        """Bytes of address space."""

    def take(self, size: int, /) -> tuple[int, Tensor]:
        """In a worker: a block, and its bytes as a uint8 tensor; given back when that is gone."""

    def put(self, address: int, size: int, /) -> int:
        """In a worker: a block with a copy of `size` bytes."""

    def send(self, block: int, /) -> None:
        """The block that `take` returned is not given back when its tensor is gone."""

    def sent(self, block: int, /) -> bool:
        """Whether the tensor is gone; if not, `send` is undone."""

    def give_back(self, block: int, /) -> None:
        """In a worker: a block of `put`, or one that was sent, is not needed after all."""

    def hold(self, block: int, size: int, /) -> Tensor:
        """In the main process: the bytes of a block that a worker filled, as a uint8 tensor.

        The block is free when the last tensor over the memory is gone.
        """

    def pin(self) -> list[int]:
        """Blocks with tensors in this process, which then are not used again before `unpin`."""

    def unpin(self, block: int, /) -> None: ...
    def sweep(self) -> int:
        """Free what workers took; only when none lives. The number of such blocks."""

    def counts(self) -> dict[str, int]:
        """Blocks "made", "free", "taken", "held", "gone", page-"locked"; bytes "backed"."""

    def prepare_locks(self, device: int, /) -> None:
        """In the main process: map the file a second time, for memory that is page-locked.

        One page is locked and let go of again, to see whether that can be.

        Raises:
            RuntimeError: there is no driver, or it cannot lock memory.
            MemoryError: the system, or the driver, gives no more.
        """

    def locked(self, address: int, size: int, /) -> Tensor | None:
        """What is held at an address, where it is page-locked, as a uint8 tensor.

        Until the last tensor over it is gone, the block is held. None where these are no bytes of
        a block, where nothing is prepared, or where more would be locked than is on its way.

        Raises:
            RuntimeError, MemoryError: the driver did not lock the block.
        """

class Gather:
    """Gathers batches of rows in threads, in the order they were asked for.

    Args:
        slots: the memory of the batches.
        fields: (empty tensor of a batch's type and row shape, number of the conversion), and for
            conversions to positions and documents the token between documents and whether it is
            the first of one, not the last. For one to floats a tuple follows: the type's number in
            csrc/base/widen.h, the scale, and as tuples no means and stds, one of each, or one for
            each element of a row's first dimension.
        nodes: the tree of csrc/io/table.h, the root last: (0, length, columns), (1, child, length,
            address of int64 indices or 0, start, step) or (2, children). A column is (address,
            stride), and a tensor if its rows these are and it is to be watched.
        threads: at most so many.
        eager: wake them for small batches too.
        owner: keeps the memory at these addresses.
    """

    def __new__(
        cls,
        slots: Slots,
        fields: tuple[tuple[Any, ...], ...],
        nodes: tuple[tuple[Any, ...], ...],
        threads: int,
        eager: bool,
        owner: object,
        /,
    ) -> Gather: ...
    def submit(
        self,
        indices: list[int] | tuple[int, ...] | Tensor,
        start: int = ...,
        count: int = ...,
        outputs: tuple[Tensor, ...] | None = ...,
        /,
    ) -> int | None:
        """Ask for one batch; its number, or 0, and nothing was done, if an index has no sample.

        None, and nothing was done either, if a tensor that has one of the samples is elsewhere or
        of another form than when this Gather was made.

        It is written to `outputs`, a packed tensor per field; by default to slots.
        """

    def take(self, number: int, /) -> list[Tensor] | None:
        """Wait for a batch: a tensor per field. Drops older ones; None if it is not there."""

    def queued(self) -> int:
        """Batches that were asked for and not taken."""

    def close(self) -> None:
        """End the threads; nothing else can be done then."""

def clip_grads(
    params: Sequence[Tensor], norm_type: float, max_norm: float, only_finite: bool, /
) -> tuple[float, bool, int, list[Tensor]]:
    """Multiply all gradients by min(1, max_norm / (norm + 1e-6)), NaN included.

    Nothing is multiplied by 1, or where `only_finite` is set and the norm is not finite. Large
    gradients that `unscale_grads` has just written take one pass.

    Returns (norm, whether there is a gradient, dtypes as `norm` has them, the gradients that were
    written and whose version counters have yet to be moved).

    Raises:
        TypeError: a gradient cannot be used; nothing was changed.
    """

def copy_indices(indices: list[int] | tuple[int, ...], out: Tensor, /) -> bool:
    """Fill an int64 tensor of the same length; False if an item is not a plain int."""

def keep_freed_memory() -> None:
    """Let malloc keep more of what is freed, for the rest of this process."""

def keep_locked_memory(keep: bool, /) -> None:
    """As the process is about to end, what arenas have locked stays so: a device may read it."""

def permute(out: Tensor, length: int, seed: int, epoch: int, start: int, step: int, /) -> None:
    """Fill an int64 tensor with places start, start + step and so on of a permutation."""

def scan_tfrecords(
    address: int, size: int, at: int, check: bool, places: Tensor, /
) -> tuple[int, int, int]:
    """Fill an int64 tensor with (start, length) of each record's data in a TFRecord file in memory.

    Starts with the record that begins `at` bytes into the file, and stops at the file's end, where
    the tensor is full, or before a damaged record; `check` looks at the data's checksums too.

    Returns (records found, where the next begins, 0 or what is wrong with it: 1 the file ends in
    its head, 2 checksum of the length, 3 the file ends in its data, 4 checksum of the data).
    """
