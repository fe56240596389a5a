"""What a launcher is: the class whose name stands in `[launcher]`, bound to its options.

Everything that a job needs to know about its launcher is declared here or is one of these methods;
no other module knows a launcher by its name. A launcher is one file and one line in the registry,
or an entry point `dlctl.launchers` of another package. One that can run a command on its hosts at
any time is a `dlctl.launch.reached.Reached`, and has little left to write.

The agent of the coordinator's machine is always `local`; a job's launcher starts the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from dlctl import registry
from dlctl.errors import DlctlError
from dlctl.launch import base

if TYPE_CHECKING:
    from dlctl.job.config import Allocated, Host, JobFile
    from dlctl.launch.answers import CallResult
    from dlctl.launch.session import Session
    from dlctl.runs.reach import Reach

KIND = "launchers"
"""The group of the registry that launchers are in."""
DECLARED = (
    "Options", "title", "noun", "takes_hosts", "can_ask", "outlives", "is_reclaimed",
    "copies_files",
)  # fmt: skip
"""What every launcher declares; it defines the abstract methods besides."""


class LeftBehind(NamedTuple):
    """What `end` has done at one host, or at the only place that it could ask."""

    host: str
    done: tuple[str, ...] = ()
    """Sentences about what has ended, and what has not."""
    error: DlctlError | None = None
    """Why it is unknown what is left on the host."""
    may_run: bool = False
    """Processes of the run may still be there."""


class Fact(NamedTuple):
    """What the owner of the hosts will do with them, for `dlctl doctor`."""

    subject: str
    """What was asked, in a word or two."""
    found: str
    fix: str = ""
    """What to do about it; "": it is fine."""
    is_fault: bool = False
    """The job will not work; otherwise it works, but not as well as it could."""


class ControlPlace(Protocol):
    """A place for a coordinator, at the owner of the hosts. Its methods raise DlctlError."""

    @property
    def is_here(self) -> bool:
        """Whether this process is in such a place."""
        ...

    def find(self) -> tuple[str, str]:
        """Its number and its state; ("", ""): there is none, or one that is about to end."""
        ...

    def started(self, number: str) -> tuple[int, str] | None:
        """The exit code and the output of `dlctl start` there; None: that is not over."""
        ...

    def submit(self, words: Sequence[str]) -> str:
        """Ask for one, which runs `dlctl start WORDS JOBFILE`; returns its number."""
        ...

    def wait(
        self, number: str, tell: Callable[[str], None], limit_s: float | None
    ) -> tuple[int, str]:
        """Wait until that command is over: its exit code and its output. tell: receives the states
        of the place meanwhile. limit_s: None: as long as the place may take to come."""
        ...

    def reach(self, number: str) -> Reach: ...

    def trial(self) -> tuple[str, ...]:
        """A command that runs what follows it in such a place, asked for only for that, at once or
        not at all."""
        ...


class Launcher:
    """The agents of one job on other hosts. Its methods change nothing unless they say so."""

    # ------------------------------------------------------------ declarations

    Options: ClassVar[type[Any]]
    """The launcher's keys of [launcher], as a dataclass with their manual below the fields."""
    title: ClassVar[str]
    """The launcher's name in findings: "Slurm"."""
    noun: ClassVar[str]
    """What one of its hosts is called: "Slurm node"."""
    takes_hosts: ClassVar[bool]
    """The hosts are those that [[hosts]] lists; otherwise the launcher brings its own (`places`).
    """
    can_ask: ClassVar[bool]
    """The hosts answer requests at any time (`ask`, `session`), not only while their agents run."""
    outlives: ClassVar[bool]
    """Agents and their daemons go on when the coordinator that has started them has ended."""
    is_reclaimed: ClassVar[bool]
    """The owner of the hosts may take them back during a run: `agents` may report `base.Notice`."""
    copies_files: ClassVar[bool]
    """The hosts have no files of the run: the Python files of the task are sent to them."""

    def __init__(self, options: Any) -> None:
        self.options = options

    # ------------------------------------------------------------ the job file

    def places(self) -> tuple[Allocated, ...]:
        """The hosts that it brings, in the order of their agents; (): it takes those listed."""
        return ()

    @property
    def workers_min(self) -> int | None:
        """The least number of workers that a run trains with, unless the job file says; None: all,
        until one is lost."""
        return None

    def check(self) -> Iterator[tuple[str | tuple[str | int, ...], str, str]]:
        """What is wrong with the options beyond their types: key or path, fault, suggestion."""
        return iter(())

    def warnings(self) -> Iterator[str]:
        """Sentences about options that are valid, and probably not meant."""
        return iter(())

    @property
    def moves(self) -> bool:
        """The coordinator may be started again on another machine: only what is on a file system
        that both share is still there."""
        return False

    # ------------------------------------------------------------ before the start

    def control(self, file: Path) -> ControlPlace | None:
        """The place that `dlctl start` of this job file asks for, to run the coordinator there;
        None: it runs where the command is called.
        """
        return None

    def reach(self) -> Reach | None:
        """How commands reach this machine, where a coordinator is about to start; None: they run
        where they are called."""
        return None

    @classmethod
    def reached(cls, place: str) -> Reach | None:
        """How commands reach the place of this name, where a coordinator was started; None: there
        are no such places."""
        return None

    def facts(self) -> Iterator[Fact]:
        """What the owner of the hosts says of them. Raises DlctlError. May block for seconds."""
        return iter(())

    def trial(self) -> list[Session]:
        """Sessions with up to two different hosts, asked for only for this, at once or not at all:
        an error of a session says why not. Raises DlctlError. May block for seconds.
        """
        return []

    def preflight(self) -> None:
        """Raises DlctlError if this machine can get no hosts as it is set up now. May block for
        seconds.
        """

    def an_address(self, hosts: Sequence[Host]) -> str:
        """Where one of its hosts is: this machine's address on the route to it is the one that all
        hosts use for the coordinator. Raises DlctlError. May block for seconds.
        """
        raise DlctlError(
            f"{self.title} does not know the address of any host before the start",
            hint="set address in [network] to the one at which the hosts reach this machine",
        )

    def folder(self, host: Host) -> str:
        """Where the files of this run are on a host, for people."""
        return host.dir or "~/.local/state/dlctl/hosts"

    @property
    def wait_s(self) -> float:
        """The longest wait for hosts before any agent can start."""
        return 0.0

    # ------------------------------------------------------------ the run

    @abstractmethod
    def agents(
        self,
        directory: Path,
        hosts: Mapping[str, Host],
        watcher: base.Watcher,
        tell: Callable[[base.News], None],
    ) -> base.AgentControl:
        """The side of the coordinator; hosts: agent -> its host. `tell` receives `Ended`, at most
        once for each order or adopted agent; `Waiting` while no host is available; and `Notice` if
        the launcher `is_reclaimed`.
        """

    def held(self, directory: Path) -> str:
        """What the run has or waits for at the owner of the hosts, as in "job 17"; "": nothing."""
        return ""

    @abstractmethod
    def end(
        self, directory: Path, hosts: Mapping[str, Host], grace_s: float, *, purge: bool
    ) -> list[LeftBehind]:
        """End what an ended run has left on its hosts: with SIGTERM, and SIGKILL after `grace_s`.
        purge: also remove the states of servers and all files there. Blocks until it is done.
        """

    # ------------------------------------------------------------ if it `can_ask`

    def ask(
        self, hosts: Mapping[str, Host], request: Mapping[str, Any], timeout_s: float
    ) -> dict[str, CallResult]:
        """One request to `daemons.node` on each of these hosts, in parallel: agent -> answer."""
        raise NotImplementedError

    def session(self, host: Host) -> Session:
        """A session of many requests with `daemons.node` on a host."""
        raise NotImplementedError

    def explain(self, answer: CallResult) -> DlctlError:
        """Why an answer is none, or what failed on the host, in words that fit this launcher."""
        raise NotImplementedError

    def slow_login(self, host: str) -> str:
        """What may make a login slow, and the command that shows it."""
        return ""


# ---------------------------------------------------------------- from the registry


def load(name: str) -> type[Launcher]:
    """Load a launcher's class. Raises UsageError for an unknown name, and ImportError, with the
    package, for one that cannot be imported or does not declare what a launcher has to.
    """
    entry = registry.find(KIND, name)
    found = entry.load()
    origin = f"{entry.origin}: " if entry.origin else ""
    if not (isinstance(found, type) and issubclass(found, Launcher)):
        raise ImportError(
            f"{origin}{entry.target} is no subclass of dlctl.launch.launcher.Launcher"
        )
    lacking = [name for name in DECLARED if not hasattr(found, name)]
    methods = (name for name in dir(found) if not name.startswith("_"))
    lacking += [n for n in methods if getattr(getattr(found, n), "__isabstractmethod__", False)]
    if lacking:
        raise ImportError(f"{origin}{entry.target} does not declare {', '.join(lacking)}")
    return found


def of(job: JobFile) -> Launcher:
    """The launcher of a resolved job. Raises DlctlError if it is not installed any more."""
    return made(job.launcher.name, job.launcher.options)


def made(name: str, options: Mapping[str, Any]) -> Launcher:
    """The launcher of this name with resolved options. Raises as `of` does."""
    from dlctl.job.config import from_dict

    try:
        kind = load(name)
    except ImportError as error:
        raise DlctlError(
            f'the launcher "{name}" cannot be loaded: {error}',
            hint="install its package again for the Python of dlctl",
        ) from error
    return kind(from_dict(kind.Options, dict(options)))


def that_have(ability: str) -> list[str]:
    """The names of all launchers that declare this ability."""
    found = []
    for name in registry.names(KIND):
        try:
            kind = load(name)
        except ImportError:
            continue  # It is reported when somebody names it.
        if getattr(kind, ability):
            found.append(name)
    return found
