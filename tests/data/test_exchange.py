"""How csrc/py hands memory to torch: the function it calls, and tensors like torch's own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from faststep.data import DataLoader

ROOT = Path(__file__).parents[2]
INCLUDE = Path(torch.__file__).parent / "include"
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")

# the struct that is filled and the function that takes it, as in csrc/py/load/gather.c
SOURCE = """
#include <stddef.h>
#include <ATen/dlpack.h>
#include "py/torch/dlpack.h"
#define SAME(ours, its) _Static_assert(offsetof(fst_dl_managed, ours) == \\
    offsetof(DLManagedTensorVersioned, its), "differs")
_Static_assert(sizeof(fst_dl_managed) == sizeof(DLManagedTensorVersioned), "differs");
SAME(version.major, version.major);
SAME(version.minor, version.minor);
SAME(context, manager_ctx);
SAME(deleter, deleter);
SAME(flags, flags);
SAME(tensor, dl_tensor);
_Static_assert(_Generic(((DLPackExchangeAPI *)0)->managed_tensor_to_py_object_no_sync,
    int (*)(DLManagedTensorVersioned *, void **): 1, default: 0), "differs");
_Static_assert(kDLInt == 0 && kDLCPU == FST_DL_CPU, "differs");
"""


@pytest.mark.skipif(not shutil.which(COMPILER[0]), reason="no C compiler is installed")
@pytest.mark.skipif(not (INCLUDE / "ATen/dlpack.h").is_file(), reason="torch lacks its headers")
def test_the_declarations_are_torchs(tmp_path: Path) -> None:
    def compiles(text: str) -> bool:
        source = tmp_path / "same.c"
        source.write_text(text)
        command = [*COMPILER, "-std=gnu11", "-fsyntax-only", f"-I{INCLUDE}", f"-I{ROOT / 'csrc'}"]
        return not subprocess.run([*command, source], capture_output=True, check=False).returncode

    assert compiles(SOURCE)
    assert not compiles(SOURCE.replace("SAME(flags, flags)", "SAME(flags, deleter)"))
    assert not compiles(SOURCE.replace("void **): 1", "void *): 1"))


def test_a_batch_is_an_ordinary_tensor() -> None:
    data = torch.arange(24.0).view(8, 3)
    (batch,) = next(iter(DataLoader(TensorDataset(data), 4)))
    assert type(batch) is torch.Tensor
    assert batch.is_contiguous()
    assert batch.data_ptr() % 64 == 0
    assert batch.untyped_storage().nbytes() == 48
    assert not batch.requires_grad
    assert batch.is_leaf
    assert batch._version == 0
    batch.requires_grad_(True)
    (batch * 2).sum().backward()
    assert torch.equal(batch.grad, torch.full((4, 3), 2.0))
    with torch.inference_mode():
        (batch,) = next(iter(DataLoader(TensorDataset(data), 4)))
        assert batch.is_inference()
    assert torch.equal(torch.save(batch, "/dev/null") or batch.share_memory_(), data[:4])
