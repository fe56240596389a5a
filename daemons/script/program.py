"""Runs the user's program as Python would: as `__main__`, with its arguments, its folder first in
`sys.path`; in the version that the run has stored. No random number generator is seeded.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

from daemons.attach.context import ProgramEnd
from daemons.worker.task.stored_code import KeptSource, import_kept
from dlctl.errors import DlctlError
from dlctl.job.config import MAIN, Job


def run(job: Job, directory: Path | None) -> ProgramEnd:
    """job: resolved. directory: of the run with the stored code; None: the files as they are."""
    file = Path(job.file)
    sys.argv = [str(file), *job.args]
    sys.path.insert(0, str(job.search_path))
    if directory is not None:
        import_kept(directory, job.search_path)
    main = ModuleType(MAIN)
    vars(main).update(__builtins__=__builtins__, __file__=str(file), __cached__=None)
    sys.modules[MAIN] = main
    try:
        exec(_code(job, directory, main), vars(main))  # noqa: S102  the user's program
    except SystemExit as error:
        return _exited(file, error)
    except BaseException as error:
        _told_their_hook(error)
        return _raised(file, error)
    hint = "" if b"dlctl" in _source(file) else f"{file.name} does not import dlctl"
    return ProgramEnd(f"{file.name} has ended", str(file), hint, 0, is_error=False)


def _code(job: Job, directory: Path | None, main: ModuleType) -> CodeType:
    """The program, compiled; sets the attributes of `__main__` that depend on how it is run."""
    file, loader = Path(job.file), cast(Any, None)
    if job.module:
        is_package = file.stem == MAIN and not job.module.endswith(MAIN)
        spec = importlib.util.find_spec(f"{job.module}.{MAIN}" if is_package else job.module)
        if spec is None or spec.origin is None or not Path(spec.origin).samefile(file):
            raise ModuleNotFoundError(f"no module {job.module} at {file}", name=job.module)
        loader, name = spec.loader, spec.name
        main.__spec__, main.__package__ = spec, spec.parent
    else:
        kind = SourceFileLoader if directory is None else _kept(directory)
        loader, name = kind(MAIN, str(file)), MAIN
        main.__spec__ = main.__package__ = None
    main.__loader__ = loader
    code: CodeType = loader.get_code(name)
    return code


def _kept(directory: Path) -> Any:
    return lambda name, path: KeptSource(directory, name, path)


def _source(file: Path) -> bytes:
    with suppress(OSError):
        return file.read_bytes()
    return b"dlctl"  # Nothing can be said of a file that is gone.


def _exited(file: Path, error: SystemExit) -> ProgramEnd:
    from daemons.worker.task.user_task import user_line

    said, code = "with code 0", 0
    if isinstance(error.code, int):
        said, code = f"with code {error.code}", error.code
    elif error.code is not None:
        print(error.code, file=sys.stderr)
        said, code = f'with "{error.code!s:.500}"', 1
    where = user_line(traceback.extract_tb(error.__traceback__)) or str(file)
    return ProgramEnd(f"{file.name} has exited {said}", where, "", code, is_error=False)


def _raised(file: Path, error: BaseException) -> ProgramEnd:
    # This imports torch, which most programs have imported by now.
    from daemons.worker.task.user_task import blame

    failed = blame(f"running {file.name}", error)
    what, where, hint = failed.message, failed.where, failed.hint
    if isinstance(error, DlctlError):
        what, where, hint = error.message, error.where or where, error.hint or hint
    return ProgramEnd(what, where or str(file), hint or "", 1, is_error=True, detail=failed.detail)


def _told_their_hook(error: BaseException) -> None:
    """A library may have replaced the hook, to note in its own records that the program failed."""
    if sys.excepthook is not sys.__excepthook__:
        with suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
