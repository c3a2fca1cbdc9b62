/* Parses the arguments of Gather into the table of rows. */
#include "py/load/gather.h"

/* Whether PyArg_ParseTuple can parse the object; else there is a TypeError. */
static int is_tuple(PyObject *object)
{
    if (PyTuple_Check(object))
        return 1;
    PyErr_SetString(PyExc_TypeError, "expected a tuple");
    return 0;
}

static int read_floats_dtype(fst_dl_dtype type, fst_dtype *dtype)
{
    *dtype = type.code == FST_DL_BFLOAT ? FST_BF16 : type.bits == 32 ? FST_F32 : FST_F16;
    return type.lanes == 1 &&
           ((type.code == FST_DL_FLOAT && (type.bits == 16 || type.bits == 32)) ||
            (type.code == FST_DL_BFLOAT && type.bits == 16));
}

/* Parses (dtype number, scale, means, stds). The last two are tuples that are empty, or have one
 * float, or one for each element of a row's first dimension. */
static int parse_floats(fst_field *field, const fst_field_form *form, PyObject *spec)
{
    fst_float_form *floats = &field->floats;
    PyObject *means, *stds;
    int from;
    if (!PyArg_ParseTuple(spec, "ifO!O!", &from, &floats->scale, &PyTuple_Type, &means,
                          &PyTuple_Type, &stds))
        return -1;
    const Py_ssize_t count = PyTuple_Size(means);
    const int fits = count <= 1 || (form->row_dims && count == form->row_shape[0]);
    if (from < 0 || from >= FST_NUMBER_COUNT || !read_floats_dtype(form->dtype, &floats->to) ||
        !fits || PyTuple_Size(stds) != count) {
        PyErr_SetString(PyExc_ValueError, "no such field of floats");
        return -1;
    }
    floats->from = (fst_number)from;
    if (!count)
        return 0;
    floats->mean = PyMem_Calloc((size_t)count * 2, sizeof *floats->mean);
    if (!floats->mean) {
        PyErr_NoMemory();
        return -1;
    }
    floats->std = floats->mean + count;
    floats->run = field->items / (size_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        floats->mean[i] = (float)PyFloat_AsDouble(PyTuple_GetItem(means, i));
        floats->std[i] = (float)PyFloat_AsDouble(PyTuple_GetItem(stds, i));
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* Parses (prototype, conversion[, boundary, begins, floats]). The prototype is an empty tensor
 * with the output's dtype and row shape. `boundary` is the token between documents; `floats` is
 * what parse_floats takes. */
static int parse_field(const fst_module *state, fst_gather_object *self, size_t f, PyObject *spec)
{
    fst_field *field = &self->table.fields[f];
    fst_field_form *form = &self->forms[f];
    fst_dl_tensor tensor;
    PyObject *prototype, *floats = NULL;
    unsigned boundary = 0;
    int conversion, begins = 0;
    if (!is_tuple(spec) ||
        !PyArg_ParseTuple(spec, "Oi|IpO!", &prototype, &conversion, &boundary, &begins,
                          &PyTuple_Type, &floats) ||
        fst_read_tensor(state, prototype, &tensor))
        return -1;
    if (tensor.ndim < 1 || tensor.ndim > FST_MAX_ROW_DIMS + 1 || tensor.dtype.bits % 8 ||
        conversion < 0 || conversion >= FST_CONVERSION_COUNT ||
        (conversion == FST_TO_FLOATS) != (floats != NULL)) {
        PyErr_SetString(PyExc_ValueError, "no such field");
        return -1;
    }
    form->dtype = tensor.dtype;
    form->row_dims = tensor.ndim - 1;
    field->conversion = (fst_conversion)conversion;
    field->boundary = boundary;
    field->begins = begins;
    field->items = conversion == FST_AS_IS ? tensor.dtype.bits / 8u * tensor.dtype.lanes : 1;
    for (int d = 0; d < form->row_dims; d++) {
        form->row_shape[d] = tensor.shape[d + 1];
        if (__builtin_mul_overflow(field->items, (size_t)tensor.shape[d + 1], &field->items)) {
            PyErr_SetString(PyExc_ValueError, "a row of a field is larger than memory");
            return -1;
        }
    }
    return floats ? parse_floats(field, form, floats) : 0;
}

/* Whether a tensor is contiguous and has the shape of a batch of `rows` with this form. */
static int is_batch(const fst_field_form *form, int64_t rows, const fst_dl_tensor *tensor)
{
    int64_t stride = 1;
    int fits = tensor->ndim == form->row_dims + 1 && tensor->dtype.code == form->dtype.code &&
               tensor->dtype.bits == form->dtype.bits && tensor->dtype.lanes == form->dtype.lanes;
    for (int d = form->row_dims; fits && d >= 0; d--) {
        fits = tensor->shape[d] == (d ? form->row_shape[d - 1] : rows) &&
               (!tensor->strides || tensor->shape[d] <= 1 || tensor->strides[d] == stride);
        stride *= tensor->shape[d] > 1 ? tensor->shape[d] : 1;
    }
    return fits;
}

int fst_gather_read_outputs(const fst_module *state, const fst_gather_object *self,
                            PyObject *outputs, Py_ssize_t rows, char **addresses)
{
    const size_t fields = self->table.field_count;
    if (!PyTuple_Check(outputs) || PyTuple_Size(outputs) != (Py_ssize_t)fields) {
        PyErr_Format(PyExc_TypeError, "outputs must be a tuple of %zu tensors", fields);
        return -1;
    }
    for (size_t f = 0; f < fields; f++) {
        fst_dl_tensor tensor;
        if (fst_read_memory(state, PyTuple_GetItem(outputs, (Py_ssize_t)f), &tensor))
            return -1;
        if (!is_batch(&self->forms[f], rows, &tensor)) {
            PyErr_Format(PyExc_ValueError,
                         "outputs[%zu] is not a packed tensor of %zd rows of field %zu's type and "
                         "shape",
                         f, rows, f);
            return -1;
        }
        addresses[f] = (char *)tensor.data + tensor.byte_offset;
    }
    return 0;
}

/* Parses (address, stride[, the tensor with these rows, or None]). */
static int parse_column(const fst_module *state, PyObject *spec, fst_column *column,
                        fst_watch **watch)
{
    unsigned long long address;
    long long stride;
    PyObject *watched = Py_None;
    if (!is_tuple(spec) || !PyArg_ParseTuple(spec, "KL|O", &address, &stride, &watched))
        return -1;
    *column = (fst_column){(const char *)(uintptr_t)address, stride};
    return watched == Py_None || (*watch = fst_watch_new(state, watched)) ? 0 : -1;
}

static int parse_rows(const fst_module *state, fst_gather_object *self, size_t number,
                      PyObject *spec)
{
    fst_node *node = &self->table.nodes[number];
    const size_t fields = self->table.field_count;
    PyObject *columns;
    long long length;
    int kind;
    if (!PyArg_ParseTuple(spec, "iLO!", &kind, &length, &PyTuple_Type, &columns))
        return -1;
    node->length = length;
    node->columns = PyMem_Calloc(fields, sizeof *node->columns);
    if (!node->columns) {
        PyErr_NoMemory();
        return -1;
    }
    if ((size_t)PyTuple_Size(columns) != fields) {
        PyErr_SetString(PyExc_ValueError, "expected a column per field");
        return -1;
    }
    for (size_t f = 0; f < fields; f++)
        if (parse_column(state, PyTuple_GetItem(columns, (Py_ssize_t)f), &node->columns[f],
                         &self->watches[number * fields + f]))
            return -1;
    return 0;
}

static int parse_chosen(fst_node *node, size_t number, PyObject *spec)
{
    unsigned long long address;
    long long length, start, step;
    Py_ssize_t child;
    int kind;
    if (!PyArg_ParseTuple(spec, "inLKLL", &kind, &child, &length, &address, &start, &step))
        return -1;
    if (child < 0 || (size_t)child >= number) {
        PyErr_SetString(PyExc_ValueError, "children come before their parents");
        return -1;
    }
    node->child = (size_t)child;
    node->length = length;
    node->chosen = (const int64_t *)(uintptr_t)address;
    node->start = start;
    node->step = step;
    return 0;
}

static int parse_joined(const fst_table *table, fst_node *node, size_t number, PyObject *spec)
{
    PyObject *children;
    int kind;
    if (!PyArg_ParseTuple(spec, "iO!", &kind, &PyTuple_Type, &children))
        return -1;
    node->child_count = (size_t)PyTuple_Size(children);
    node->children = PyMem_Calloc(node->child_count + 1, sizeof *node->children);
    node->ends = PyMem_Calloc(node->child_count + 1, sizeof *node->ends);
    if (!node->children || !node->ends) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < node->child_count; i++) {
        const size_t child = PyLong_AsSize_t(PyTuple_GetItem(children, (Py_ssize_t)i));
        if (child >= number) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "children come before their parents");
            return -1;
        }
        node->children[i] = child;
        node->length += table->nodes[child].length;
        node->ends[i] = node->length;
    }
    return 0;
}

static int parse_node(const fst_module *state, fst_gather_object *self, size_t number,
                      PyObject *spec)
{
    fst_node *node = &self->table.nodes[number];
    const long kind =
        PyTuple_Check(spec) && PyTuple_Size(spec) ? PyLong_AsLong(PyTuple_GetItem(spec, 0)) : -1;
    if (PyErr_Occurred())
        return -1;
    node->kind = (fst_node_kind)kind;
    if (kind == FST_ROWS)
        return parse_rows(state, self, number, spec);
    if (kind == FST_CHOSEN)
        return parse_chosen(node, number, spec);
    if (kind == FST_JOINED)
        return parse_joined(&self->table, node, number, spec);
    PyErr_SetString(PyExc_ValueError, "no such node");
    return -1;
}

int fst_gather_parse(const fst_module *state, fst_gather_object *self, PyObject *fields,
                     PyObject *nodes)
{
    const size_t field_count = (size_t)PyTuple_Size(fields);
    const size_t node_count = (size_t)PyTuple_Size(nodes);
    self->table.fields = PyMem_Calloc(field_count + 1, sizeof *self->table.fields);
    self->forms = PyMem_Calloc(field_count + 1, sizeof *self->forms);
    self->table.nodes = PyMem_Calloc(node_count + 1, sizeof *self->table.nodes);
    self->watches = PyMem_Calloc(field_count * node_count + 1, sizeof(fst_watch *));
    if (!self->table.fields || !self->forms || !self->table.nodes || !self->watches) {
        PyErr_NoMemory();
        return -1;
    }
    if (!field_count || !node_count) {
        PyErr_SetString(PyExc_ValueError, "expected a field and a node");
        return -1;
    }
    self->table.field_count = field_count;
    self->table.node_count = node_count;
    for (size_t f = 0; f < field_count; f++)
        if (parse_field(state, self, f, PyTuple_GetItem(fields, (Py_ssize_t)f)))
            return -1;
    for (size_t n = 0; n < node_count; n++)
        if (parse_node(state, self, n, PyTuple_GetItem(nodes, (Py_ssize_t)n)))
            return -1;
    return 0;
}

void fst_gather_forget(fst_gather_object *self)
{
    for (size_t n = 0; n < self->table.node_count; n++) {
        PyMem_Free(self->table.nodes[n].columns);
        PyMem_Free(self->table.nodes[n].children);
        PyMem_Free(self->table.nodes[n].ends);
    }
    for (size_t f = 0; f < self->table.field_count; f++)
        PyMem_Free(self->table.fields[f].floats.mean);
    for (size_t w = 0; w < self->table.node_count * self->table.field_count; w++)
        fst_watch_free(self->watches[w]);
    PyMem_Free(self->watches);
    PyMem_Free(self->table.fields);
    PyMem_Free(self->table.nodes);
    PyMem_Free(self->forms);
}
