/* transform_images and split_channels: read the tensors and run the pass. */
#include "core/image_pass.h"
#include "gpu/launch.h"
#include "py/module.h"

static int refuse(PyObject *type, const char *name, const fst_problem *problem)
{
    PyErr_Format(type, "%s %s", name, problem->detail);
    return -1;
}

static int is_type(const fst_dl_tensor *tensor, int code, int bits)
{
    return tensor->dtype.lanes == 1 && tensor->dtype.code == code && tensor->dtype.bits == bits;
}

enum { ELSEWHERE = FST_HOST - 1 };

/* FST_HOST, the number of a CUDA device, or ELSEWHERE. */
static int device_of(const fst_dl_tensor *tensor)
{
    return tensor->device.device_type == FST_DL_CPU    ? FST_HOST
           : tensor->device.device_type == FST_DL_CUDA ? tensor->device.device_id
                                                       : ELSEWHERE;
}

/* Reads a tensor of four dimensions; 0, or -1 with a Python error. */
static int read_images(fst_module *state, PyObject *object, const char *name, fst_dl_tensor *tensor)
{
    fst_problem problem;
    if (fst_tensor_read_as_is(&state->tensors, object, tensor, &problem))
        return refuse(PyExc_TypeError, name, &problem);
    if (tensor->ndim != FST_IMAGE_DIMS) {
        fst_problem_set(&problem, "shape",
                        "has %d dimensions, not 4: (samples, channels, height, width)",
                        (int)tensor->ndim);
        return refuse(PyExc_ValueError, name, &problem);
    }
    for (int d = 0; d < FST_IMAGE_DIMS; d++)
        if (tensor->shape[d] > INT32_MAX) {
            fst_problem_set(&problem, "shape", "has a dimension of more than 2^31 - 1");
            return refuse(PyExc_ValueError, name, &problem);
        }
    return 0;
}

static int read_source(fst_module *state, PyObject *object, fst_image_batch *batch, int *device)
{
    fst_dl_tensor tensor;
    if (read_images(state, object, "images", &tensor))
        return -1;
    batch->source_is_float = is_type(&tensor, FST_DL_FLOAT, 32);
    if (!batch->source_is_float && !is_type(&tensor, FST_DL_UINT, 8)) {
        PyErr_SetString(PyExc_TypeError, "images is neither uint8 nor float32");
        return -1;
    }
    if (tensor.shape[1] > FST_IMAGE_CHANNELS) {
        PyErr_Format(PyExc_ValueError, "images has %lld channels; at most %d are supported",
                     (long long)tensor.shape[1], FST_IMAGE_CHANNELS);
        return -1;
    }
    batch->source = (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset;
    memcpy(batch->source_stride, tensor.strides, sizeof batch->source_stride);
    batch->source_count = (int32_t)tensor.shape[0];
    batch->channels = (int32_t)tensor.shape[1];
    batch->source_height = (int32_t)tensor.shape[2];
    batch->source_width = (int32_t)tensor.shape[3];
    *device = device_of(&tensor);
    return 0;
}

static int read_out(fst_module *state, PyObject *object, fst_image_batch *batch, int device)
{
    fst_dl_tensor tensor;
    if (read_images(state, object, "out", &tensor))
        return -1;
    if (device_of(&tensor) != device || tensor.shape[1] != batch->channels) {
        PyErr_SetString(PyExc_ValueError,
                        "out has another device, or number of channels, than images");
        return -1;
    }
    batch->out_dtype = is_type(&tensor, FST_DL_FLOAT, 32)    ? FST_F32
                       : is_type(&tensor, FST_DL_BFLOAT, 16) ? FST_BF16
                       : is_type(&tensor, FST_DL_FLOAT, 16)  ? FST_F16
                                                             : -1;
    if (batch->out_dtype < 0) {
        PyErr_SetString(PyExc_TypeError, "out is not float32, bfloat16 or float16");
        return -1;
    }
    batch->out = (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset;
    memcpy(batch->out_stride, tensor.strides, sizeof batch->out_stride);
    batch->count = (int32_t)tensor.shape[0];
    batch->height = (int32_t)tensor.shape[2];
    batch->width = (int32_t)tensor.shape[3];
    return 0;
}

/* Reads a contiguous (samples, 17) int32 tensor in CPU memory. */
static int read_samples(fst_module *state, PyObject *object, fst_image_batch *batch)
{
    enum { WORDS = sizeof(fst_image_sample) / sizeof(int32_t) };
    fst_dl_tensor tensor;
    fst_problem problem;
    if (fst_tensor_read_as_is(&state->tensors, object, &tensor, &problem))
        return refuse(PyExc_TypeError, "samples", &problem);
    if (device_of(&tensor) != FST_HOST || !is_type(&tensor, FST_DL_INT, 32) || tensor.ndim != 2 ||
        tensor.shape[0] != batch->count || tensor.shape[1] != WORDS ||
        (batch->count > 0 && tensor.strides[1] != 1) ||
        (batch->count > 1 && tensor.strides[0] != WORDS)) {
        PyErr_Format(PyExc_ValueError,
                     "samples is not a packed (%d, %d) tensor of int32 on the cpu", batch->count,
                     (int)WORDS);
        return -1;
    }
    batch->samples = (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset;
    return 0;
}

static int check_factors(PyObject *tuple, const char *name, int32_t channels)
{
    if (PyTuple_Size(tuple) == channels)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s has %zd values for %d channels", name, PyTuple_Size(tuple),
                 channels);
    return -1;
}

/* Reads a tuple with one number per channel. Converting numbers may run Python code, so this
 * comes before any address is read. */
static int read_factors(PyObject *tuple, float *out)
{
    for (Py_ssize_t c = 0; c < PyTuple_Size(tuple) && c < FST_IMAGE_CHANNELS; c++) {
        out[c] = (float)PyFloat_AsDouble(PyTuple_GetItem(tuple, c));
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* Reads the buffer on the device for its copy of the samples. */
static int read_buffer(fst_module *state, PyObject *object, int device, fst_image_batch *batch)
{
    fst_dl_tensor tensor;
    fst_problem problem;
    if (fst_tensor_read_as_is(&state->tensors, object, &tensor, &problem))
        return refuse(PyExc_TypeError, "buffer", &problem);
    if (device_of(&tensor) != device || !is_type(&tensor, FST_DL_INT, 32) || tensor.ndim != 1 ||
        tensor.shape[0] * (int64_t)sizeof(int32_t) <
            batch->count * (int64_t)sizeof(fst_image_sample) ||
        (tensor.shape[0] > 1 && tensor.strides[0] != 1)) {
        PyErr_SetString(PyExc_ValueError,
                        "buffer is not a packed 1-d tensor of int32 on the device of images, as "
                        "large as samples");
        return -1;
    }
    batch->samples = (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset;
    return 0;
}

/* Launches the pass on torch's current stream. */
static PyObject *on_device(fst_module *state, PyObject *images, PyObject *buffer, int device,
                           fst_image_batch *batch)
{
    const fst_image_sample *samples = (const fst_image_sample *)(uintptr_t)batch->samples;
    fst_status status = {0};
    fst_problem problem;
    void *stream;
    if (device < 0 || device >= FST_GPU_DEVICES) {
        PyErr_SetString(PyExc_TypeError, "images is neither in CPU nor in CUDA memory");
        return NULL;
    }
    if (fst_image_check(batch, samples, &status))
        return fst_raise(&status);
    if (read_buffer(state, buffer, device, batch))
        return NULL;
    if (fst_tensor_stream(&state->tensors, images, device, &stream, &problem)) {
        refuse(PyExc_TypeError, "images", &problem);
        return NULL;
    }
    if (!state->list_tables[device])
        state->list_tables[device] = fst_gpu_tables_new(device, &status);
    if (!state->list_tables[device] ||
        fst_gpu_image(state->list_tables[device], batch, samples, stream, &status))
        return fst_raise(&status);
    return Py_NewRef(Py_None);
}

PyObject *fst_py_transform_images(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *images, *out, *samples, *scale, *bias, *buffer = Py_None;
    fst_image_batch batch = {0};
    fst_status status = {0};
    int device;
    int antialias = 0;
    if (!PyArg_ParseTuple(args, "OOOO!O!|Op", &images, &out, &samples, &PyTuple_Type, &scale,
                          &PyTuple_Type, &bias, &buffer, &antialias) ||
        read_factors(scale, batch.scale) || read_factors(bias, batch.bias))
        return NULL;
    PyObject *tensors[] = {images, out, samples, buffer};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        fst_tensors_learn(&state->tensors, tensors[i]);
    if (read_source(state, images, &batch, &device) || read_out(state, out, &batch, device) ||
        read_samples(state, samples, &batch) || check_factors(scale, "scale", batch.channels) ||
        check_factors(bias, "bias", batch.channels))
        return NULL;
    batch.antialias = antialias;
    if (device != FST_HOST)
        return on_device(state, images, buffer, device, &batch);
    Py_BEGIN_ALLOW_THREADS
    fst_image_transform(&batch, &status);
    Py_END_ALLOW_THREADS
    if (status.code)
        return fst_raise(&status);
    return Py_NewRef(Py_None);
}

/* Reads a contiguous 3-d uint8 tensor in CPU memory, whose dimension `channels` is 3. */
static int read_bytes(fst_module *state, PyObject *object, const char *name, int channels,
                      fst_dl_tensor *tensor)
{
    fst_problem problem;
    int64_t step = 1;
    int packed = 1;
    if (fst_tensor_read_as_is(&state->tensors, object, tensor, &problem))
        return refuse(PyExc_TypeError, name, &problem);
    for (int d = tensor->ndim; packed && d-- > 0; step *= tensor->shape[d])
        packed = tensor->shape[d] < 2 || step == 0 || tensor->strides[d] == step;
    if (!packed || device_of(tensor) != FST_HOST || !is_type(tensor, FST_DL_UINT, 8) ||
        tensor->ndim != 3 || tensor->shape[channels] != 3) {
        PyErr_Format(PyExc_ValueError, "%s is not a packed %s tensor of uint8 on the cpu", name,
                     channels ? "(height, width, 3)" : "(3, height, width)");
        return -1;
    }
    return 0;
}

PyObject *fst_py_split_channels(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *pixels, *out;
    fst_dl_tensor from, to;
    if (!PyArg_ParseTuple(args, "OO", &pixels, &out))
        return NULL;
    fst_tensors_learn(&state->tensors, out); /* before the first address is read */
    if (read_bytes(state, pixels, "pixels", 2, &from) || read_bytes(state, out, "out", 0, &to))
        return NULL;
    if (from.shape[0] != to.shape[1] || from.shape[1] != to.shape[2]) {
        PyErr_SetString(PyExc_ValueError, "out has another height or width than pixels");
        return NULL;
    }
    const size_t count = (size_t)(from.shape[0] * from.shape[1]);
    const uint8_t *source = (const uint8_t *)from.data + from.byte_offset;
    uint8_t *planes = (uint8_t *)to.data + to.byte_offset;
    if (count && source < planes + 3 * count && planes < source + 3 * count) {
        PyErr_SetString(PyExc_ValueError, "out overlaps with pixels");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    fst_image_split(count, planes, source);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}
