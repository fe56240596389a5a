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
from types import ModuleType
from typing import Any

from daemons.attach.context import ProgramEnd
from daemons.worker.task.stored_code import KeptSource, import_kept
from dlctl.errors import DlctlError
from dlctl.job.config import MAIN, Job
from dlctl.util import regular


def run(job: Job, directory: Path | None) -> ProgramEnd:
    """job: resolved. directory: of the run with the stored code; None: the files as they are."""
    file = Path(job.file)
    sys.argv = [str(file), *job.args]
    sys.path.insert(0, str(job.search_path))
    if directory is not None:
        import_kept(directory, job.search_path)
    main = sys.modules[MAIN] = ModuleType(MAIN)
    try:
        loader: Any = _loader(job, directory, main)
        loader.exec_module(main)
    except SystemExit as error:
        return _exited(file, error)
    except BaseException as error:
        _told_their_hook(error)
        return _raised(file, error)
    hint = "" if b"dlctl" in _source(file) else f"{file.name} does not import dlctl"
    return ProgramEnd(f"{file.name} has ended", str(file), hint, 0, is_error=False)


def _loader(job: Job, directory: Path | None, main: ModuleType) -> SourceFileLoader:
    """What runs the program; sets the attributes of `__main__`."""
    if job.module:
        is_package = Path(job.file).stem == MAIN and not job.module.endswith(MAIN)
        spec = importlib.util.find_spec(f"{job.module}.{MAIN}" if is_package else job.module)
        if spec is None or spec.origin is None or Path(spec.origin) != Path(job.file):
            raise ModuleNotFoundError(f"no module {job.module} at {job.file}", name=job.module)
        main.__spec__, main.__package__ = spec, spec.parent
    if directory is None:
        loader = SourceFileLoader(MAIN, job.file)
    else:
        loader = KeptSource(directory, MAIN, job.file)
    vars(main).update(__file__=job.file, __cached__=None, __loader__=loader)
    return loader


def _source(file: Path) -> bytes:
    with suppress(OSError):
        return regular.read_bytes(file)
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
