/* docs.h - the docstrings of _C's functions and methods. The first line of each is the signature
 * that inspect.signature() reads. _C.pyi documents arguments and errors. */
#ifndef FST_PY_DOCS_H
#define FST_PY_DOCS_H

#define FST_DOC(signature, text) signature "\n--\n\n" text

/* Functions on lists of tensors. */
#define FST_DOC_ACCUMULATE                                                                      \
    FST_DOC("accumulate($module, sums, terms, factor, start=False, more=None, /)",              \
            "Add factor times each term to its sum, in place. The lists hold tensors of equal " \
            "shapes and any of the four dtypes, in CPU memory.")
#define FST_DOC_CHUNK_SQUARES                                                                     \
    FST_DOC("chunk_squares($module, tensors, inv_scale, sums, /)",                                \
            "Write the sum of squares of each chunk of a list of tensors, times inv_scale, to a " \
            "float64 tensor. Returns whether an element is infinite or NaN.")
#define FST_DOC_CLAMP                            \
    FST_DOC("clamp($module, tensors, limit, /)", \
            "Clamp all elements of a list of tensors to [-limit, limit] in place. NaN stays.")
#define FST_DOC_CLIP_GRADS                                                                         \
    FST_DOC("clip_grads($module, params, norm_type, max_norm, /)",                                 \
            "Multiply the gradients of a list of parameters by min(1, max_norm / (norm + 1e-6)). " \
            "Returns (norm, whether there is a gradient, dtypes, gradients that were written).")
#define FST_DOC_COLLECT_GRADS                    \
    FST_DOC("collect_grads($module, params, /)", \
            "The gradients of a list of parameters that are not None, in order.")
#define FST_DOC_FOLD_SQUARES                  \
    FST_DOC("fold_squares($module, sums, /)", \
            "The sum of the sums of squares of chunks, added up as every norm adds them.")
#define FST_DOC_FUSABLE                                                                        \
    FST_DOC("fusable($module, tensors, device=-1, /)",                                         \
            "Whether the functions of this module take these tensors, all on one device. The " \
            "device is a CUDA ordinal, or -1 for CPU memory.")
#define FST_DOC_MEASURE                                                                      \
    FST_DOC("measure($module, tensors, inv_scale, /)",                                       \
            "The sum of squares of all elements times inv_scale, and whether an element is " \
            "infinite or NaN.")
#define FST_DOC_NORM                                                                            \
    FST_DOC("norm($module, tensors, norm_type, /)",                                             \
            "The norm of the norms of a list of tensors, accumulated in double, and a bit for " \
            "each dtype that occurs.")
#define FST_DOC_SCALE                             \
    FST_DOC("scale($module, tensors, factor, /)", \
            "Multiply all elements of a list of tensors by factor in place.")
#define FST_DOC_UNSCALE_GRADS                                                                      \
    FST_DOC("unscale_grads($module, params, factor, allow_fp16, /)",                               \
            "Multiply the gradients of a list of parameters by factor. Returns (whether there is " \
            "a gradient, whether an element was infinite or NaN, gradients that were written).")
#define FST_DOC_UPDATE_SCALE                                                                     \
    FST_DOC("update_scale($module, scale, growth_tracker, hysteresis_tracker, found_inf, "       \
            "growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale, " \
            "/)",                                                                                \
            "Update a loss scale in place. The tensors are 0-d, float32 and (the trackers) "     \
            "int32, all in CPU memory or on one CUDA device.")

/* The same on a CUDA device. */
#define FST_DOC_DEVICE_ACCUMULATE                                                         \
    FST_DOC("device_accumulate($module, sums, terms, factor, start=False, more=None, /)", \
            "Do what accumulate() does with tensors on one CUDA device, in one launch.")
#define FST_DOC_DEVICE_CLAMP                            \
    FST_DOC("device_clamp($module, tensors, limit, /)", \
            "Do what clamp() does with tensors on one CUDA device, in one launch.")
#define FST_DOC_DEVICE_CLIP                                                                     \
    FST_DOC(                                                                                    \
        "device_clip($module, tensors, max_norm, norm, /)",                                     \
        "Multiply tensors on one CUDA device by min(1, max_norm / (norm + 1e-6)). The norm is " \
        "a 0-d tensor on that device.")
#define FST_DOC_DEVICE_COUNTS                                                                    \
    FST_DOC("device_counts($module, /)", "The numbers of kernel launches, of uploads of tables " \
                                         "and of uploaded bytes since the process started.")
#define FST_DOC_DEVICE_INFO                     \
    FST_DOC("device_info($module, ordinal, /)", \
            "Make a CUDA device ready for use, and describe it.")
#define FST_DOC_DEVICE_CHUNK_SQUARES                                                         \
    FST_DOC(                                                                                 \
        "device_chunk_squares($module, tensors, grad_scale, sums, found_inf, /)",            \
        "Write the sum of squares of each chunk of tensors on one CUDA device, of elements " \
        "divided by grad_scale (None for 1), to sums, and set found_inf at an infinity or NaN.")
#define FST_DOC_DEVICE_FOLD_SQUARES                        \
    FST_DOC("device_fold_squares($module, sums, norm, /)", \
            "Write the root of fold_squares(sums) to norm, a 0-d tensor on the CUDA device.")
#define FST_DOC_DEVICE_NORM                                                                    \
    FST_DOC("device_norm($module, tensors, norm_type, out, /)",                                \
            "Write the norm of tensors on one CUDA device to out, a 0-d tensor in float32 or " \
            "float64 on it. Returns the dtypes as norm() does.")
#define FST_DOC_DEVICE_UNSCALE                                                                    \
    FST_DOC(                                                                                      \
        "device_unscale($module, tensors, inv_scale, found_inf, allow_fp16, /)",                  \
        "Multiply tensors on one CUDA device by inv_scale, and set found_inf to 1 if an element " \
        "is infinite or NaN. Both are 0-d float32 tensors on it, or found_inf is None.")

/* Memory that stays with the process. */
#define FST_DOC_RETAIN_MEMORY                                                                  \
    FST_DOC("retain_memory($module, limit, group, version, /)",                                \
            "Keep the memory that torch frees, at most limit bytes (negative: no limit), and " \
            "only what the control group in this folder, of version 1 or 2, has left.")
#define FST_DOC_RELEASE_MEMORY            \
    FST_DOC("release_memory($module, /)", \
            "Give what is kept back to the system. Returns its bytes.")
#define FST_DOC_END_RETAINING            \
    FST_DOC("end_retaining($module, /)", \
            "Undo retain_memory(), and give back what is kept. Returns its bytes.")
#define FST_DOC_RETAINED_MEMORY            \
    FST_DOC("retained_memory($module, /)", \
            "Returns (active, limit or None, used, kept, peak of used, blocks, fresh bytes).")
#define FST_DOC_FOREIGN_ALLOCATOR            \
    FST_DOC("foreign_allocator($module, /)", \
            "The file of the library whose malloc is in use; None if it is glibc's.")

/* The loader. */
#define FST_DOC_COPY_INDICES                                                                     \
    FST_DOC("copy_indices($module, indices, out, /)",                                            \
            "Fill an int64 tensor from a list or tuple of the same length. False if an item is " \
            "not a plain int.")
#define FST_DOC_CRC32C \
    FST_DOC("crc32c($module, data, /)", "The CRC-32C (Castagnoli) of a bytes object.")
#define FST_DOC_KEEP_FREED_MEMORY            \
    FST_DOC("keep_freed_memory($module, /)", \
            "Let malloc keep more of what is freed, until the process ends.")
#define FST_DOC_KEEP_LOCKED_MEMORY                  \
    FST_DOC("keep_locked_memory($module, keep, /)", \
            "Set whether the page-locked memory of arenas stays locked while the process ends.")
#define FST_DOC_PERMUTE                                                                          \
    FST_DOC("permute($module, out, length, seed, epoch, start, step, /)",                        \
            "Fill an int64 tensor with items start, start + step and so on of a permutation of " \
            "length items.")
#define FST_DOC_SCAN_TFRECORDS                                                                 \
    FST_DOC("scan_tfrecords($module, address, size, at, check, places, /)",                    \
            "Fill an int64 tensor with start and length of each record of a TFRecord file in " \
            "memory. Returns (records found, where the next begins, its fault or 0).")
#define FST_DOC_SPLIT_CHANNELS                         \
    FST_DOC("split_channels($module, pixels, out, /)", \
            "Write a packed uint8 tensor (height, width, 3) as (3, height, width).")
#define FST_DOC_TRANSFORM_IMAGES                                                             \
    FST_DOC("transform_images($module, images, out, samples, scale, bias, buffer=None, "     \
            "antialias=False, /)",                                                           \
            "Write images (M, C, H, W) in uint8 or float32 to out (N, C, h, w) in float32, " \
            "bfloat16 or float16. A row of samples, int32 (N, 17), says what each is made of.")

/* What is in use. */
#define FST_DOC_CPU_INFO                                                                         \
    FST_DOC("cpu_info($module, /)",                                                              \
            "The instruction set in use, those that are supported and compiled, and the thread " \
            "pool.")
#define FST_DOC_HAS_KERNELS \
    FST_DOC("has_kernels($module, /)", "Whether use_kernels_of() was called.")
#define FST_DOC_HOLD                                                                             \
    FST_DOC("hold($module, tensor, storage_record, /)",                                          \
            "Return a tensor like this one over the same memory. The memory is not freed while " \
            "that tensor lives.")
#define FST_DOC_HOLDS FST_DOC("holds($module, /)", "The number of tensors' memories that are held.")
#define FST_DOC_HYPER                                                                            \
    FST_DOC("hyper($module, group, places, /)",                                                  \
            "The numbers at places in a parameter group, as floats. A place is a key, or a key " \
            "and an index.")
#define FST_DOC_IS_BUILT_IN             \
    FST_DOC(                            \
        "is_built_in($module, obj, /)", \
        "Whether there is nothing but str, bytes, numbers and None in lists, tuples and dicts.")
#define FST_DOC_IS_RECORDED        \
    FST_DOC(                       \
        "is_recorded($module, /)", \
        "Whether a profiler or another callback observes torch's operators. True if not known.")
#define FST_DOC_RULES                                                                           \
    FST_DOC("rules($module, /)",                                                                \
            "For each optimizer rule its number, its states per element, and the names of its " \
            "hyper-parameters.")
#define FST_DOC_USE_CALLBACKS                                                                      \
    FST_DOC("use_callbacks($module, address, /)",                                                  \
            "Set the address of libtorch's at::hasCallbacks(), which is_recorded() asks. 0 means " \
            "that it is not known.")
#define FST_DOC_USE_DTENSORS                                                                      \
    FST_DOC("use_dtensors($module, type, local, spec, /)",                                        \
            "Set the class DTensor, and its slots with the local tensor and with the spec. Plan " \
            "steps the local tensors of such parameters.")
#define FST_DOC_USE_KERNELS_OF                  \
    FST_DOC("use_kernels_of($module, path, /)", \
            "Let CUDA devices load their kernels from this fatbin when they are first used.")
#define FST_DOC_USE_MODES                                                                      \
    FST_DOC("use_modes($module, address, /)",                                                  \
            "Set the address of libtorch's function that says whether a TorchFunctionMode is " \
            "active. 0 means that it is not known.")
#define FST_DOC_USE_OWNERS                                                                       \
    FST_DOC("use_owners($module, *places)",                                                      \
            "Set where a storage's record has the memory's address, the function that frees it " \
            "and its owner, in words. Without arguments hold() raises.")
#define FST_DOC_USE_RECORDS                                                                      \
    FST_DOC("use_records($module, *words)",                                                      \
            "Set where torch's records of tensors are, to recognize unchanged tensors. Without " \
            "arguments torch is asked about every tensor.")
#define FST_DOC_USE_STREAMS                                                                        \
    FST_DOC("use_streams($module, function, /)",                                                   \
            "Set the function that says of a device and the handle of its current stream whether " \
            "that stream is never destroyed. None: it is not known of any.")
#define FST_DOC_USE_THREADS_OF                  \
    FST_DOC("use_threads_of($module, path, /)", \
            "Run on the thread pool of the libtorch_cpu at this path. False if it offers none.")

/* TensorError. */
#define FST_DOC_TENSOR_ERROR \
    "A tensor cannot be used. The arguments are (group, index, role, kind, detail)."

/* Plan. */
#define FST_DOC_PLAN_FORGET     \
    FST_DOC("forget($self, /)", \
            "Drop the tensors of earlier steps. Raises RuntimeError during a step.")
#define FST_DOC_PLAN_SETTLE                                                                       \
    FST_DOC("settle($self, index, param_spec, grad_spec, state_specs=(), /)",                     \
            "Take a gradient and states with these specs for a parameter with that one: all are " \
            "divided in the same way. The index counts the parameters of all lists.")
#define FST_DOC_PLAN_STEP                                                                       \
    FST_DOC("step($self, param_lists, groups, state, fresh, scalars, measure_found_inf, "       \
            "max_norm, write_grads, phase, /)",                                                 \
            "Update all parameters that have a gradient. Returns (word, value): the word says " \
            "what was done or what is missing.")

/* ReleaseHook. */
#define FST_DOC_RELEASE_HOOK                                                                       \
    FST_DOC("ReleaseHook(otherwise, optimizer, rules, /)",                                         \
            "Updates a parameter in backward and frees its gradient, or calls otherwise with the " \
            "parameter.")
#define FST_DOC_RELEASE_HOOK_CLIPS "Whether gradients are clipped to the optimizer's max_grad_norm."
#define FST_DOC_RELEASE_HOOK_GROUP "The number of the parameter's group."
#define FST_DOC_RELEASE_HOOK_LAST_NORM \
    "The norm of all gradients of the step before; negative where it is not known."
#define FST_DOC_RELEASE_HOOK_MEASURES \
    "Whether a gradient is measured, and clipped by last_norm instead of by its own norm."
#define FST_DOC_RELEASE_HOOK_PLAIN "Whether the hook may step without calling Python."
#define FST_DOC_RELEASE_HOOK_PLAN "The Plan for this parameter only."
#define FST_DOC_RELEASE_HOOK_SQUARE_SUM "The sum of squares of the gradient that was measured."
#define FST_DOC_RELEASE_HOOK_UPDATED \
    "Whether the parameter was updated since the last optimizer.step()."

/* Slots. */
#define FST_DOC_SLOTS_COUNTS                                                                      \
    FST_DOC("counts($self, /)", "The numbers of slots whose memory came from the system so far, " \
                                "of free slots, and of slots with a tensor.")
#define FST_DOC_SLOTS_EMPTY            \
    FST_DOC(                           \
        "empty($self, like, rows, /)", \
        "A tensor of this many rows, with the dtype, row shape and strides of a dense tensor.")
#define FST_DOC_SLOTS_KEEP FST_DOC("keep($self, number, /)", "Keep at most this many free slots.")

/* Gather. */
#define FST_DOC_GATHER                                                \
    FST_DOC("Gather(slots, fields, nodes, threads, eager, owner, /)", \
            "Gathers batches of rows in threads, in the order they were asked for.")
#define FST_DOC_GATHER_CLOSE \
    FST_DOC("close($self, /)", "End the threads. Nothing else can be done after that.")
#define FST_DOC_GATHER_QUEUED \
    FST_DOC("queued($self, /)", "The number of batches that were asked for and not taken.")
#define FST_DOC_GATHER_SUBMIT                                                                   \
    FST_DOC("submit($self, indices, start=0, count=-1, outputs=None, /)",                       \
            "Ask for the batch of these indices, and return its number. 0 means that an index " \
            "has no sample, and nothing was done.")
#define FST_DOC_GATHER_TAKE           \
    FST_DOC("take($self, number, /)", \
            "Wait for a batch, and return a tensor for each field. Older batches are dropped.")

/* Arena. */
#define FST_DOC_ARENA                       \
    FST_DOC("Arena(file=-1, reserve=0, /)", \
            "Shared memory for batches, used again when the tensors over it are gone.")
#define FST_DOC_ARENA_COUNTS    \
    FST_DOC("counts($self, /)", \
            "A dict with the numbers of blocks in each state, and the bytes that have memory.")
#define FST_DOC_ARENA_FILENO \
    FST_DOC("fileno($self, /)", "The descriptor of the anonymous file that holds the blocks.")
#define FST_DOC_ARENA_GIVE_BACK           \
    FST_DOC("give_back($self, block, /)", \
            "In a worker: free a block of put(), or one that was sent.")
#define FST_DOC_ARENA_HOLD                                                                     \
    FST_DOC("hold($self, block, size, /)",                                                     \
            "In the main process: the first size bytes of a block that a worker filled, as a " \
            "uint8 tensor.")
#define FST_DOC_ARENA_LOCKED                                                                       \
    FST_DOC("locked($self, address, size, /)",                                                     \
            "The bytes at an address of a held block, page-locked, as a uint8 tensor. None where " \
            "they are not locked.")
#define FST_DOC_ARENA_PIN                                                                     \
    FST_DOC("pin($self, /)",                                                                  \
            "Keep the blocks with tensors in this process from being used again, and return " \
            "their numbers.")
#define FST_DOC_ARENA_PREPARE_LOCKS                                                                \
    FST_DOC("prepare_locks($self, device, /)",                                                     \
            "In the main process: map the file a second time, for memory that is page-locked for " \
            "a CUDA device.")
#define FST_DOC_ARENA_PUT                   \
    FST_DOC("put($self, address, size, /)", \
            "In a worker: copy size bytes to a new block, and return its number.")
#define FST_DOC_ARENA_RESERVE \
    FST_DOC("reserve($self, /)", "The bytes of address space that the arena has.")
#define FST_DOC_ARENA_SEND           \
    FST_DOC("send($self, block, /)", \
            "Keep the block of take() when its tensor is gone, as it goes to the main process.")
#define FST_DOC_ARENA_SENT           \
    FST_DOC("sent($self, block, /)", \
            "Whether the tensor of a block is gone. If not, send() is undone.")
#define FST_DOC_ARENA_SWEEP    \
    FST_DOC("sweep($self, /)", \
            "Free what workers took, and return the number of such blocks. No worker may live.")
#define FST_DOC_ARENA_TAKE          \
    FST_DOC("take($self, size, /)", \
            "In a worker: the number of a new block, and its bytes as a uint8 tensor.")
#define FST_DOC_ARENA_UNPIN FST_DOC("unpin($self, block, /)", "Undo pin() for one block.")

#endif
