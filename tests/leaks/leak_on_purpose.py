"""Leaks memory of malloc and Python objects, for `make asan-all` to see that leaks are detected.

Lists, dictionaries and tensors cannot be found in this way, as the garbage collector's list leads
to them; what keeps references to those is found by the tests beside this file.
"""

import ctypes

malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
for _ in range(10):
    malloc(1000)  # nobody keeps the address
for i in range(10):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(bytes(100 + i)))
