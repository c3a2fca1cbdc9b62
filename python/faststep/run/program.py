"""Runs a script or a module as Python itself does."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class ProgramError(Exception):
    """Why there is nothing to run."""


class Program(NamedTuple):
    """The program to run.

    Args:
        name: a path, the name of a module, code, or "-" for code on stdin.
        arguments: those that it finds in sys.argv[1:].
        flag: "-m" where the name is that of a module, "-c" where it is code, else empty.
    """

    name: str
    arguments: Sequence[str]
    flag: str = ""

    def run(self) -> None:
        """Run it as the module __main__, in this process.

        Raises:
            ProgramError: there is no such file or module.
        """
        sys.argv[1:] = self.arguments
        if self.flag == "-m":
            self._run_module()
        elif self.flag == "-c":
            _run_code("-c", self.name, "<string>")
        elif self.name == "-":
            names = {"__file__": "<stdin>", "__cached__": None}
            _run_code("-", sys.stdin.read(), "<stdin>", **names)
        elif os.path.isdir(self.name) or zipfile.is_zipfile(self.name):
            self._run_folder()
        else:
            self._run_file()

    def _run_file(self) -> None:
        try:
            with io.open_code(os.path.abspath(self.name)) as file:
                source = file.read()
        except OSError as error:
            path = os.path.abspath(self.name)
            raise ProgramError(
                f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
            ) from None
        sys.argv[0] = self.name
        if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
            sys.path[0] = os.path.dirname(os.path.realpath(self.name))
        path = os.path.abspath(self.name)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main = _new_main(__file__=path, __loader__=loader, __package__=None, __spec__=None)
        main["__cached__"] = None
        _shown_as_pythons(lambda: exec(compile(source, path, "exec", dont_inherit=True), main))

    def _run_folder(self) -> None:
        """Run the __main__.py of a folder or of an archive."""
        path = os.path.join(os.getcwd(), self.name)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
        if spec is None:
            raise ProgramError(f"can't find '__main__' module in {path!r}")
        sys.path[: 0 if getattr(sys.flags, "safe_path", False) else 1] = [path]
        self._run_found(spec, self.name)

    def _run_module(self) -> None:
        spec = _found(self.name)
        self._run_found(spec, spec.origin or self.name)

    def _run_found(self, spec: importlib.machinery.ModuleSpec, shown: str) -> None:
        code = spec.loader.get_code(spec.name) if spec.loader else None  # type: ignore[attr-defined]
        if code is None:
            raise ProgramError(f"No code object available for {self.name}")
        sys.argv[0] = shown
        main = _new_main(
            __file__=spec.origin,
            __cached__=spec.cached,
            __loader__=spec.loader,
            __package__=spec.parent,
            __spec__=spec,
        )
        _shown_as_pythons(lambda: exec(code, main))


def _run_code(shown: str, source: str, file: str, **names: str | None) -> None:
    """Run code that lies in no file."""
    sys.argv[0] = shown
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        sys.path[0] = ""
    loader = importlib.machinery.BuiltinImporter
    main = _new_main(__loader__=loader, __package__=None, __spec__=None, **names)
    _shown_as_pythons(lambda: exec(compile(source, file, "exec", dont_inherit=True), main))


def _found(name: str) -> importlib.machinery.ModuleSpec:
    """The module, or the module __main__ of a package."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ProgramError(
            f"Error while finding module specification for {name!r} ({error})"
        ) from None
    if spec is None:
        raise ProgramError(f"No module named {name}")
    if spec.submodule_search_locations is not None:
        return _found(f"{name}.__main__")
    return spec


def _new_main(**names: Any) -> dict[str, Any]:
    """The names of a new module __main__, which stays there until the process ends."""
    main = types.ModuleType("__main__")
    vars(main).update(names, __builtins__=builtins)
    if sys.version_info < (3, 14):  # from there on Python adds it when a script has annotations
        vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # as multiprocessing has it
    return vars(main)


def _shown_as_pythons(run: Callable[[], object]) -> None:
    """Call it; if an exception ends the process, its traceback begins in the program."""
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        _show_once(error, of_program(error))
        raise


def of_program(error: BaseException) -> types.TracebackType | None:
    """The traceback of an exception from where the program begins."""
    shown, before = error.__traceback__, True
    while shown is not None and (before or _is_ours(shown)):
        before = before and not _is_ours(shown)
        shown = shown.tb_next
    return shown


def _is_ours(traceback: types.TracebackType) -> bool:
    return traceback.tb_frame.f_code.co_filename == __file__


def _show_once(error: BaseException, shown: types.TracebackType | None) -> None:
    """Let the hook that prints uncaught exceptions have this traceback of this exception."""
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, traceback: Any) -> None:
        sys.excepthook = hook  # this one has the traceback, and so the program's objects
        if value is error:
            traceback = shown
        hook(kind, value.with_traceback(traceback), traceback)

    sys.excepthook = show
