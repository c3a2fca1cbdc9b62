/* dtensor.h - reads what a DTensor (torch.distributed.tensor) consists of. */
#pragma once

#include "py/torch/tensor.h"

/* Learns the class DTensor, and the descriptors of its local tensor and of its spec: how it is
 * divided. Both must be slots of the class, so that reading them runs no Python code. Returns 0, or
 * -1 with a Python error. */
int fst_dtensors_learn(fst_tensors *tensors, PyTypeObject *type, PyObject *local, PyObject *spec);

int fst_dtensors_traverse(fst_dtensors *dtensors, visitproc visit, void *arg);
void fst_dtensors_clear(fst_dtensors *dtensors);

/* The local tensor and the spec of a DTensor: new references, or NULL with a Python error. */
PyObject *fst_dtensor_local(const fst_tensors *tensors, PyObject *object);
PyObject *fst_dtensor_spec(const fst_tensors *tensors, PyObject *object);
