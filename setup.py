"""Compiles faststep._C and the kernels, and nothing else: the metadata is in pyproject.toml.

The compiler's flags are in files that the Makefile and the tests read as well: csrc/compile.flags
for every object, csrc/cpu/<level>.flags for the loops of an instruction set. FASTSTEP_WERROR=1
makes warnings errors; FASTSTEP_SANITIZE=address,undefined builds an instrumented extension.

Where nvcc and a GPU are found the kernels of cuda/ become faststep/kernels.fatbin, for the GPUs of
this machine. FASTSTEP_CUDA=1 builds them for all architectures of cuda/targets.py, and fails
where there is no nvcc. FASTSTEP_FATBIN names a file of kernels to take instead. FASTSTEP_CUDA=0
leaves them out.
"""

import copy
import ctypes
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")  # free-threaded CPythons have none yet
SANITIZE = os.environ.get("FASTSTEP_SANITIZE")
X86 = platform.machine() in ("x86_64", "AMD64")
LEVELS = ["base"] + (["avx2", "avx512"] if X86 and not SANITIZE else [])  # one source, one fault
LOOPS = sorted(glob("csrc/cpu/*.isa.c"))
PLAIN = sorted(set(glob("csrc/**/*.c", recursive=True)) - set(LOOPS))
HEADERS = sorted({*glob("csrc/**/*.*", recursive=True)} - {*PLAIN, *LOOPS})
KERNELS = sorted(glob("cuda/*.*"))
CUDA = os.environ.get("FASTSTEP_CUDA", "")
FATBIN = os.environ.get("FASTSTEP_FATBIN")  # kernels that were compiled before


def nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    places = [os.environ.get("PATH", os.defpath), *(os.path.join(h, "bin") for h in homes if h)]
    return shutil.which("nvcc", path=os.pathsep.join(places))


def gpus() -> list[int]:
    """Compute capabilities of the GPUs that CUDA's driver shows: 90 is 9.0."""
    found = []
    device, major, minor = (ctypes.c_int() for _ in range(3))
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return found
    while driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), len(found)) == 0:
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        found.append(10 * major.value + minor.value)
    return found


def targets() -> list[str]:
    """nvcc's options for what the kernels are built for. Of each GPU that is the machine code which
    the file has for it, and PTX, which every later GPU can run."""
    made_of = runpy.run_path("cuda/targets.py")["MADE_OF"]
    if CUDA == "1":
        of_all = [f"-gencode=arch={ptx},code=[{','.join(made)}]" for ptx, made in made_of.items()]
        return [*of_all, "--compress-mode=size"]
    ptx_of = {int(c[3:]): ptx for ptx, made in made_of.items() for c in made if c[:3] == "sm_"}
    codes = {max(sm for sm in ptx_of if sm <= gpu) for gpu in gpus() if gpu >= min(ptx_of)}
    return [f"-gencode=arch={ptx_of[c]},code=[{ptx_of[c]},sm_{c}]" for c in sorted(codes)]


def newest(*sources: str) -> float:
    return max(map(os.path.getmtime, sources))


def flags() -> list[str]:
    """What every object is compiled with, after the interpreter's flags and the user's CFLAGS."""
    extra = ["-Werror"] if os.environ.get("FASTSTEP_WERROR") == "1" else []
    if SANITIZE:
        # With -O1 the loops compile in a third of the time, and run no slower.
        extra += ["-O1", f"-fsanitize={SANITIZE}"]
        extra += ["-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    return ["@csrc/compile.flags", *extra]


def macros() -> list[tuple[str, str]]:
    stable = [("Py_LIMITED_API", "0x030A0000")] if STABLE_ABI else []
    return stable + [(f"FST_HAVE_{level.upper()}", "1") for level in LEVELS[1:]]


class BuildExt(build_ext):
    """Compiles what is out of date, side by side, and the loops once per instruction set."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:  # the folder that pip gives is thrown away; `--inplace` has this one
            self.build_temp = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"

    def run(self) -> None:
        folder = os.path.dirname(self.get_ext_fullpath("faststep._C"))
        with ThreadPoolExecutor(1) as beside:
            kernels = beside.submit(self.build_kernels, os.path.join(folder, "kernels.fatbin"))
            super().run()
        kernels.result()

    def build_extension(self, ext: Extension) -> None:
        jobs = [(source, self.build_temp, []) for source in PLAIN]
        for level in LEVELS:
            folder = os.path.join(self.build_temp, level)
            jobs += [(source, folder, [f"@csrc/cpu/{level}.flags"]) for source in LOOPS]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: self.compile(*job), jobs))
        linked = copy.copy(ext)
        linked.sources, linked.extra_objects, linked.depends = [], objects, objects
        super().build_extension(linked)

    def build_kernels(self, built: str) -> None:
        compiler = nvcc()
        codes = targets() if compiler and CUDA != "0" else []
        if codes or (FATBIN and CUDA != "0"):
            os.makedirs(os.path.dirname(built), exist_ok=True)
            shutil.copy(FATBIN or self.fatbin(compiler, codes), built)
            return
        if CUDA == "1":
            raise CompileError("FASTSTEP_CUDA=1, but nvcc is neither in PATH nor in CUDA_HOME")
        if os.path.exists(built):
            os.remove(built)

    def fatbin(self, compiler: str, codes: list[str]) -> str:
        """The kernels for these architectures, compiled if a source is newer."""
        name = "all" if CUDA == "1" else "-".join(re.findall(r"sm_\d+", " ".join(codes)))
        built = f"build/kernels/{name}.fatbin"
        sources = [*KERNELS, "setup.py", *glob("csrc/base/*.h"), *glob("csrc/rules/*.*")]
        if self.force or not os.path.exists(built) or os.path.getmtime(built) <= newest(*sources):
            os.makedirs("build/kernels", exist_ok=True)
            options = ["--options-file=cuda/nvcc.flags", *codes, "--threads=0", "-fatbin"]
            command = [compiler, *options, "cuda/kernels.cu", "-o", built]
            self.announce(" ".join(command), 2)
            if subprocess.run(command, check=False).returncode:
                raise CompileError(f"{compiler} failed; FASTSTEP_CUDA=0 builds no CUDA kernels")
        return built

    def compile(self, source: str, folder: str, extra: list[str]) -> str:
        (built,) = self.compiler.object_filenames([source], output_dir=folder)
        changed = newest(source, "setup.py", *HEADERS)
        if self.force or not os.path.exists(built) or os.path.getmtime(built) <= changed:
            options = flags() + extra
            self.compiler.compile([source], folder, macros=macros(), extra_postargs=options)
        return built


setup(
    ext_modules=[
        Extension(
            "faststep._C",
            sources=PLAIN + LOOPS,
            depends=HEADERS + KERNELS,
            libraries=["m", "dl", "pthread"],
            extra_link_args=[f"-fsanitize={SANITIZE}"] if SANITIZE else [],
            py_limited_api=STABLE_ABI,
        )
    ],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE_ABI else {},
)
