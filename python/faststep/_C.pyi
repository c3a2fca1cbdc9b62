"""The extension module.

Unless a docstring says otherwise, tensors are dense, of dtype float32, float64, bfloat16 or
float16, and in CPU memory.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

class TensorError(TypeError):
    """A tensor cannot be used: (group, index, role, kind, detail)."""

class OffloadPipe:
    """Threads that update parameters in host memory, tile by tile.

    Args:
        threads: that update, from 1 to 256; two more copy.
        tile: elements that a thread copies or updates at a time, rounded up to whole chunks.

    Raises:
        ValueError: one of the two is out of range.
    """

    def __init__(self, threads: int, tile: int, /) -> None: ...
    def arrive(self, index: int, grad: Tensor | torch.cuda.Event, factor: float, /) -> bool:
        """Copy a gradient to the host, and sum its squares times factor unless that is NaN.

        A view of the gradient is kept until it is copied; nobody may resize its storage meanwhile.
        False if an earlier step could not return the parameter.

        On a CUDA device the caller copies, and passes the `torch.cuda.Event` behind that, which is
        kept until it has passed.

        Raises:
            IndexError: there is no such parameter.
            TypeError: the gradient is not of the type and size of its copy, or not in CPU memory.
            RuntimeError: the object was made before a fork, or `set` runs in another thread.
        """

    def begin(self) -> None:
        """Forget the gradients that were copied, once nothing moves."""

    def busy(self) -> tuple[float, float, float]:
        """The seconds that copies in, updates and copies out have taken."""

    def pace(self, bytes_in: float, bytes_out: float, /) -> None:
        """Let copies take as long as over links of so many bytes per second; 0 is no limit.

        Raises:
            ValueError: a rate is neither 0 nor at least 10000.
        """

    def set(
        self, params: Sequence[tuple[Tensor, ...]], device: int = ..., stream: int = ..., /
    ) -> None:
        """Set the parameters, once nothing moves.

        Of each a tuple: the parameter, its copy, that of its gradient, and room for the sums of its
        chunks, in float64. More tensors are kept alive with them. All lie in CPU memory without
        gaps, and their elements in the same order. With the ordinal of a CUDA `device` the
        parameters lie there, the others are page-locked, and updated parameters are copied back by
        `stream`, the handle of one.

        Raises:
            TypeError: they do not fit.
        """

    def settle(self) -> int:
        """Wait for the gradients. Returns the state of the pass: see csrc/core/pipeline.h."""

    def wait(self, index: int = -1, /) -> int:
        """Wait until a parameter is back, or all are. Returns the state of the pass.

        Raises:
            IndexError: there is no such parameter.
        """

class Plan:
    """Remembers the parameters of an optimizer between steps.

    Attributes:
        applied: how many calls of `step` have updated parameters, or have left that to a device.
    """

    applied: Final[int]

    def forget(self) -> None:
        """Drop the tensors of earlier steps. RuntimeError during a step."""

    def offload(self, offload: OffloadPipe, /) -> None:
        """Let an OffloadPipe update the parameters that it has, and return them.

        A step has allowed their update when it returns.

        Raises:
            TypeError: it is no OffloadPipe, or a step runs.
        """

    def settle(
        self,
        index: int,
        param_spec: object,
        grad_spec: object,
        state_specs: tuple[object, ...] = (),
        /,
    ) -> None:
        """Take a gradient and states with these specs for a parameter with that one.

        All are DTensors. The states are in the order of the rule's keys. `index` counts the
        parameters of all lists. The specs are kept, and compared by identity.

        Raises:
            RuntimeError: a step runs.
            ValueError: the index is negative or too large, or there are too many states.
        """

    def step(
        self,
        param_lists: list[list[Tensor]],
        groups: Sequence[
            tuple[
                int,
                tuple[str, ...],
                bool,
                tuple[float, ...],
                bool,
                dict[int, Tensor] | None,
                bool,
                bool,
                int | None,
                int,
                Mapping[int, tuple[int, int, int, bool]] | None,
            ]
        ],
        state: dict[Tensor, dict[str, Any]],
        fresh: list[tuple[int, int]] | None,
        scalars: Mapping[int, tuple[Tensor | None, Tensor | None, Tensor | None]],
        measure_found_inf: int,
        max_norm: float,
        write_grads: bool,
        phase: int,
        /,
    ) -> tuple[str, Any]:
        """Update all parameters that have a gradient.

        `scalars` holds (grad_scale, found_inf, norm) per device: -1 for CPU memory, else a CUDA
        ordinal. `fresh` lists (group, index) of parameters whose states were created after an
        earlier call found them missing. A NaN for `max_norm` means no clipping. With 2 for
        `measure_found_inf` a float16 gradient in CPU memory is refused.

        `phase` is 0 for a whole step. Where several devices measure, phase 1 measures into the
        found_inf and norm of each device, and phase 2 applies what these hold then.

        Returns:
            ("done", (skipped, norm or None, parameters and moments that were written, gradients
            that were written or None)): what the host found. For CUDA parameters the step was
            launched on torch's current stream, and only the device knows the rest.

            In the other cases nothing was done:
            ("missing", [(group, index), ...]): a state is missing, or a step counter is not on its
            parameter's device.
            ("layouts", [(group, index), ...]): the parameter, its gradient or a state is a DTensor,
            and settle() was not told that all are divided in the same way. Of adafactor: torch's
            operators have to step the parameter; one may be listed twice.
            ("divided", None): a parameter is a DTensor, and a norm or an overflow of this rank's
            part is not that of all: measure and apply in two calls.
            ("devices", [...]): the devices with gradients; `scalars` lacks one of them.
            ("memory", text): a device has too little memory for its tables.

        Raises:
            TensorError: a tensor cannot be used; nothing was done. The kind "driver" is an error of
                the CUDA driver, and names the first of the parameters that the call was for.
            ValueError: a float16 gradient was refused, or adafactor is one of several rules, or is
                to measure or write gradients; nothing was done.
        """

class ReleaseHook:
    """Updates a parameter in backward and frees its gradient, or calls `otherwise` with it.

    It updates the parameter itself, and sets `updated`, if all of these hold: `plain` is set,
    `updated` is not, `rules` has the group, the optimizer does not measure in backward, it does not
    clip either or `clips` is set and `max_grad_norm` is a float (with `measures`, `last_norm` must
    be known too), nothing but the gradient's memory has changed since the last step of `plan`, and
    `mode_depth()` is 0. The argument `mode_depth` is the address of an `int64_t (*)(void)`, or 0
    for none.

    With `together`, (append, [bytes], limit), it calls append(param) instead, and adds `bytes` to
    those of the list, if that was over 0 and stays below the limit.
    """

    bytes: int
    clips: bool
    group: int
    last_norm: float
    measures: bool
    plain: bool
    square_sum: float
    together: tuple[Callable[[Tensor], object], list[int], int] | None
    updated: bool
    @property
    def plan(self) -> Plan:
        """The Plan for this parameter only."""

    def __init__(
        self,
        otherwise: Callable[[Tensor], None],
        optimizer: weakref.ref[Any],
        rules: dict[int, Any],
        mode_depth: int = 0,
        /,
    ) -> None: ...
    def __call__(self, param: Tensor, /) -> None: ...

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

def any_dtensor(tensors: Iterable[object], /) -> bool:
    """True if one of these is of exactly the class that `use_dtensors` was given."""

def chunk_squares(tensors: Sequence[Tensor], inv_scale: float, sums: Tensor, /) -> bool:
    """Write the sum of squares of each chunk, of its elements times inv_scale, to `sums`.

    Chunks are 16384 elements of a tensor, the last of each may be shorter; tensors without an
    element have none. `sums` is contiguous float64, with an element per chunk, in order.

    Returns whether an element is infinite or NaN.

    Raises:
        TypeError: a tensor or `sums` cannot be used.
        ValueError: `sums` has another number of elements.
    """

def clamp(tensors: Sequence[Tensor], limit: float, /) -> None:
    """Clamp all elements to [-limit, limit] in place; NaN stays."""

def collect_grads(params: Sequence[Tensor], /) -> list[Tensor]:
    """The gradients that are not None, in order."""

def cpu_info() -> dict[str, Any]:
    """The instruction set in use ("isa"), those "supported" and "compiled", and the "threads"."""

def crc32c(data: bytes, /) -> int:
    """CRC-32C (Castagnoli) of the data."""

def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    losses: Tensor,
    likelihoods: Tensor,
    slope: Tensor | None,
    loss: Tensor,
    factors: Tensor,
    ignored: int,
    smoothing: float,
    mean: bool,
    /,
) -> bool:
    """Fill `losses` (N) with the cross-entropy of each row of `logits` (N, C).

    `target` is int64 (N), `weight` float32 (C), `losses` float32. `likelihoods` (N), float32, gets
    the softmax of each target. A row whose target is `ignored` has loss, likelihood and weight 0.
    `slope` (N, C), of the logits' dtype, gets the gradient of the sum of the losses; with `mean`
    divided by the sum of the weights, unless it is float16, whose range is too small. `loss` (),
    float32, gets the sum or mean of the losses, and `factors` (2), float32, the factor of each row
    in the gradient, and what that is still to be multiplied by. On a CUDA device
    nothing is waited for, and a target that is no class makes its row NaN.

    False if nothing was done: a tensor is of another kind, shape, dtype or device, or not packed,
    or a target in CPU memory is not a class.
    """

def device_accumulate(
    sums: Sequence[Tensor],
    terms: Sequence[Tensor],
    factor: float,
    start: bool = ...,
    more: Sequence[Tensor] | None = ...,
    /,
) -> None:
    """`accumulate` of tensors on one CUDA device, as one launch."""

def device_chunk_squares(
    tensors: Sequence[Tensor], grad_scale: Tensor | None, sums: Tensor, found_inf: Tensor, /
) -> None:
    """`chunk_squares` of tensors on one CUDA device, of elements divided by `grad_scale`.

    `sums` is on the device. `found_inf` is set to 1 where an element is infinite or NaN.

    Raises:
        ValueError: `sums` has another number of elements.
    """

def device_clamp(tensors: Sequence[Tensor], limit: float, /) -> None:
    """`clamp` of tensors on one CUDA device, as one launch."""

def device_clip(tensors: Sequence[Tensor], max_norm: float, norm: Tensor, /) -> None:
    """Multiply by min(1, max_norm / (norm + 1e-6)) on the CUDA device where all of it lies."""

def device_counts() -> tuple[int, int, int]:
    """Kernel launches, uploads of tables and bytes of these since the process started."""

def device_fold_squares(sums: Tensor, norm: Tensor, /) -> None:
    """Write the root of `fold_squares(sums)` to `norm`, both on one CUDA device.

    Raises:
        ValueError: there are no sums, or 2^32 or more.
    """

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

def fold_squares(sums: Tensor, /) -> float:
    """The sum of chunks' sums of squares, added up as every norm adds them.

    With the `chunk_squares` of all gradients in the order of their parameters this is the square of
    the norm that a step finds, bit for bit.

    Raises:
        TypeError: `sums` is not a contiguous float64 tensor in CPU memory.
    """

def fusable(tensors: Sequence[Tensor], device: int = ..., /) -> bool:
    """True if the functions of this module take these tensors, all on one device.

    The device is -1 for CPU memory, the default, or a CUDA ordinal.
    """

def check_driver() -> None:
    """Ask the driver for its version, without starting CUDA; nothing is raised without a driver.

    Raises:
        RuntimeError: the kernels need a newer one, or there are none.
    """

def has_kernels() -> bool:
    """True if `use_kernels_of` was called: with a driver, CUDA tensors can be used."""

def hold(tensor: Tensor, storage_record: int, /) -> Tensor:
    """A tensor like this one over the same memory, which is not freed while that tensor lives.

    Raises:
        RuntimeError: use_owners() did not say where the owner is.
        ValueError: the record is not of the tensor's storage.
    """

def holds() -> int:
    """The number of tensors' memories that are held."""

def hyper(
    group: Mapping[str, Any], places: tuple[str | tuple[str, int], ...], /
) -> tuple[float, ...]:
    """`group[place]`, or `group[key][index]` where a place is (key, index), as floats.

    ValueError where `group[key]` has not two entries.
    """

def is_recorded() -> bool:
    """True if a profiler or another callback observes torch's operators, or if not known."""

def measure(tensors: Sequence[Tensor], inv_scale: float, /) -> tuple[float, bool]:
    """(sum of squares of all elements times inv_scale, whether one is infinite or NaN)."""

def norm(tensors: Sequence[Tensor], norm_type: float, /) -> tuple[float, int]:
    """The norm of the tensors' norms, accumulated in double.

    Returns (norm, dtypes); `dtypes` has a bit for each of float32, float64, bfloat16, float16, from
    the lowest, that occurs.
    """

def rules() -> dict[str, tuple[int, int, tuple[str, ...]]]:
    """Per optimizer rule: its number, its states per element, the names of its hyper-parameters.

    The last one is adafactor, whose three states are those of vectors and matrices.
    """

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
    per row, which describes how each output image is made from `images`; `scale` and `bias` have a
    number per channel. With `antialias` a resized pixel is the weighted mean of all that it covers;
    default False.

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
    """Set the address of libtorch's bool at::hasCallbacks(), for `is_recorded`; 0: not known."""

def use_dtensors(type: type[Tensor], local: object, spec: object, /) -> None:
    """Set the class DTensor, and its slots with the local tensor and with the spec.

    `Plan` steps the local tensors of parameters, gradients and states of exactly this class.

    Raises:
        TypeError: it is no class of tensors, or `local` or `spec` is no descriptor.
    """

def use_kernels_of(path: str, /) -> None:
    """Set the fatbin that CUDA devices load their kernels from at first use."""

def use_modes(address: int, /) -> None:
    """Set the address of libtorch's function that says whether a TorchFunctionMode is active.

    It is bool at::impl::torch_function_mode_enabled(); 0: not known. While a mode is active,
    reading an attribute of a tensor may run Python code, so a step reads again what it has read.
    """

def use_streams(function: Callable[[int, int], bool] | None, /) -> None:
    """Set the function that says whether a CUDA stream is never destroyed.

    It gets the device and the handle (a CUstream) of torch's current stream there, and is asked
    once about each handle. None: not known of any; only the default stream is then.

    Raises:
        TypeError: it cannot be called.
    """

def use_owners(*places: int) -> None:
    """Set where a storage's record has the memory's address, the function that frees it, and its
    owner, in words.

    Without arguments `hold` raises.
    """

def use_records(*words: int) -> None:
    """Set where torch's records of tensors are, to recognize unchanged ones (_torch/records.py).

    Without arguments torch is asked about every tensor in every step.
    """

def use_threads_of(path: str | None, /) -> bool:
    """Use the thread pool of the libtorch_cpu at `path`. False if it offers none."""

class Slots:
    """Memory for batches, used again when the tensors over it are gone."""

    def counts(self) -> tuple[int, int, int]:
        """(slots whose memory came from the system so far, free slots, slots with a tensor)."""

    def empty(self, like: Tensor, rows: int, /) -> Tensor:
        """A tensor with the dtype, row shape and strides of `like`, which is dense."""

    def keep(self, number: int, /) -> None:
        """Keep at most so many free slots."""

class Arena:
    """Shared memory for batches, used again when the tensors over it are gone.

    Without arguments it makes an arena with an anonymous file. With the descriptor of such a file,
    which it then owns, and what `reserve` returned, it attaches to the arena of another process. A
    forked child has the arena already.

    Raises:
        MemoryError: the system gives no memory, or no address space.
    """

    def __new__(cls, file: int = ..., reserve: int = ..., /) -> Arena: ...
    def fileno(self) -> int: ...
    def reserve(self) -> int:
        """Bytes of address space."""

    def take(self, size: int, /) -> tuple[int, Tensor]:
        """In a worker: a block and its bytes as a uint8 tensor. Given back when that is gone."""

    def put(self, address: int, size: int, /) -> int:
        """In a worker: a block with a copy of `size` bytes."""

    def send(self, block: int, /) -> None:
        """Keep the block of `take` when its tensor is gone."""

    def sent(self, block: int, /) -> bool:
        """True if the tensor is gone; if not, `send` is undone."""

    def give_back(self, block: int, /) -> None:
        """In a worker: free a block of `put`, or one that was sent."""

    def hold(self, block: int, size: int, /) -> Tensor:
        """In the main process: the bytes of a block that a worker filled, as a uint8 tensor.

        The block is free when the last tensor over the memory is gone.
        """

    def pin(self) -> list[int]:
        """Keep the blocks with tensors in this process from reuse until `unpin`. Returns them."""

    def unpin(self, block: int, /) -> None: ...
    def sweep(self) -> int:
        """Free the blocks that workers took, once no worker lives. Returns how many."""

    def counts(self) -> dict[str, int]:
        """Blocks "made", "free", "taken", "held", "gone", page-"locked"; bytes "backed"."""

    def prepare_locks(self, device: int, /) -> None:
        """In the main process: map the file a second time, for memory that is page-locked.

        One page is locked and unlocked as a test.

        Raises:
            RuntimeError: there is no driver, or it cannot lock memory.
            MemoryError: the system, or the driver, gives no more.
        """

    def locked(self, address: int, size: int, /) -> Tensor | None:
        """The bytes at an address of a held block, page-locked, as a uint8 tensor.

        The block is held until the last tensor over it is gone. None if these are not bytes of a
        held block, if `prepare_locks` was not called, or if more would be locked than is on its
        way.

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
    ) -> Batch | Literal[False] | None:
        """Ask for one batch. False, and nothing was done, if an index has no sample.

        None, and nothing was done, if a source tensor has other memory or another form than when
        this Gather was made.

        The batch is written to `outputs`, a contiguous tensor per field; by default to slots.
        """

    def close(self) -> None:
        """End the threads. A batch is then gathered when it is taken."""

class Batch:
    """A batch that a Gather was asked for. It is dropped with its last reference."""

    def take(self) -> list[Tensor] | None:
        """Wait for the batch: a tensor per field; None if it was taken."""

def clip_grads(
    params: Sequence[Tensor], norm_type: float, max_norm: float, /
) -> tuple[float, bool, int, list[Tensor]]:
    """Multiply all gradients by min(1, max_norm / (norm + 1e-6)), NaN included.

    Nothing is multiplied by 1. Large gradients that `unscale_grads` has just written take one pass.

    Returns (norm, whether there is a gradient, dtypes as `norm` has them, the gradients that were
    written and whose version counters have yet to be moved).

    Raises:
        TypeError: a gradient cannot be used; nothing was changed.
    """

def retain_memory(limit: int, group: str | None, version: int, /) -> None:
    """Keep the memory that torch frees for its next tensors, from now on.

    Args:
        limit: the most that is kept, in bytes; negative: no limit.
        group: the folder of a control group, whose limit is watched too.
        version: 1 or 2, of the group's files.

    Raises:
        MemoryError: no addresses can be reserved.
        RuntimeError: the allocator is not glibc's, or torch does not use it in a known way.
        ValueError: version is another, or the path is too long.
    """

def release_memory() -> int:
    """Give what is kept back to the system; returns its bytes."""

def end_retaining() -> int:
    """Undo `retain_memory`, and give back what is kept; returns its bytes."""

def retained_memory() -> tuple[bool, int | None, int, int, int, int, int]:
    """(active, limit or None, used, kept, the most that was used, blocks, bytes that were fresh)

    Sizes are bytes. Fresh memory is what had to be taken from the system, in all.
    """

def foreign_allocator() -> str | None:
    """The file of the library whose malloc is in use; None if it is glibc's."""

def keep_freed_memory() -> None:
    """Let malloc keep more of what is freed, until the process ends."""

def keep_locked_memory(keep: bool, /) -> None:
    """Set whether arenas' page-locked memory stays locked while the process ends."""

def permute(out: Tensor, length: int, seed: int, epoch: int, start: int, step: int, /) -> None:
    """Fill an int64 tensor with items start, start + step and so on of a permutation."""

def scan_tfrecords(
    address: int, size: int, at: int, check: bool, places: Tensor, /
) -> tuple[int, int, int]:
    """Fill an int64 tensor with (start, length) of each record's data in a TFRecord file in memory.

    Starts with the record that begins `at` bytes into the file, and stops at the file's end, where
    the tensor is full, or before a damaged record; `check` looks at the data's checksums too.

    Returns (records found, where the next begins, 0 or what is wrong with it: 1 the file ends in
    its head, 2 checksum of the length, 3 the file ends in its data, 4 checksum of the data).
    """
