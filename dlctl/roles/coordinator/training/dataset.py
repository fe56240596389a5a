"""What a run knows of its dataset, by which the dataset of each worker is compared.

Whoever lists the data in another order, or other data, would train some samples twice and others
never. The shards of a stream have one number in every worker, by their names (`util/listing.py`);
so their order may differ, and the run has that of its first worker. The files of a map-style
dataset are known by their digest alone, and must be the same in the same order.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from dlctl.errors import DlctlError, RemoteProtocolError
from dlctl.util import listing
from dlctl.util.text import OTHER_NUMBERS
from dlctl.wire.messages import Json, ModelReady

SHOWN_MAX = 3
"""The most names that an error lists."""
NAME_CHARS_MAX = 80
_DIGEST = re.compile("([0-9a-f]{64})?")


class Dataset(NamedTuple):
    """Samples, perhaps cut into clients, or shards of a stream."""

    samples: int = 0
    shards: int = 0
    clients: tuple[int, ...] = ()
    """The number of samples of each client."""
    names: str = ""
    """The names of the shards, one a line, in the order in which the run begins them; "": they have
    only numbers.
    """
    files: str = ""
    """Digest of the files that a map-style dataset lists; "": it lists none."""
    is_own: bool = False
    """The workers' training loops have data of their own, of which samples are only counted."""

    def __str__(self) -> str:
        if self.is_own:
            return "data of the training loops' own"
        if self.clients:
            return f"{len(self.clients)} clients with {sum(self.clients)} samples in all"
        return f"{self.shards} shards of a stream" if self.shards else f"{self.samples} samples"

    @property
    def order(self) -> list[int]:
        """The numbers of the shards, in the order in which the run begins them."""
        if self.names:
            return listing.numbers(listing.of_text(self.names))
        return list(range(self.shards))

    @staticmethod
    def built(message: ModelReady) -> Dataset:
        """The dataset as a worker describes it. Raises RemoteProtocolError."""
        try:
            names = message.names.decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(f"the names of its shards are no text: {error}") from None
        if names and len(listing.of_text(names)) != message.shards:
            raise RemoteProtocolError(f"there are not as many names as shards, {message.shards}")
        if not _DIGEST.fullmatch(message.files):
            raise RemoteProtocolError("this is no digest of its files")
        parts = message.samples, message.shards, message.clients, names, message.files
        return Dataset(*parts, is_own=message.has_own_data)

    @staticmethod
    def saved(data: Json) -> Dataset:
        """The dataset as a checkpoint has it (`to_json`): without clients."""
        names = listing.ROW.join(data.get("stream_names", ()))
        samples, shards = data.get("dataset_samples", 0), data.get("stream_shards", 0)
        files, is_own = data.get("dataset_files", ""), data.get("own_data", False)
        return Dataset(samples, shards, (), names, files, is_own)

    def to_json(self) -> Json:
        """What identifies its parts, for a checkpoint."""
        names = {"stream_names": listing.of_text(self.names)} if self.names else {}
        files = {"dataset_files": self.files} if self.files else {}
        return {**names, **files, **({"own_data": True} if self.is_own else {})}

    def met(self, worker: str, built: Dataset, *, resumes: bool) -> Dataset:
        """The run's dataset, once a worker has built its own. Raises DlctlError if that is another
        one. resumes: this one is that of a checkpoint, and the first worker has come: shards may be
        new, which are begun last, and the files may be others.
        """
        if not any(self):
            return built
        # A checkpoint of an earlier version has no names.
        names = self.names or (built.names if resumes else "")
        lacking, new = _less(names, built.names), _less(built.names, names)
        if lacking or (new and not resumes):
            raise DlctlError(
                f"the shards of {worker} are others than those of this run: "
                f"{_others(lacking, new)}",
                hint=_SAME_NAMES + (_FRESH if lacking else _TAKES_UP.format("new ones")),
            )
        shards = built.shards - len(new)
        mine, its = (self.samples, self.shards, self.is_own), (built.samples, shards, built.is_own)
        if mine != its or (self.clients and self.clients != built.clients):
            raise DlctlError(
                f"the dataset of {worker} has {built}; in this run it has {self}",
                hint=f"dataset() must give the same samples on every host and every time; {_FRESH}",
            )
        if built.files != self.files and not resumes:
            raise DlctlError(
                f"the files of {worker} are others than in this run, or in another order",
                hint=_SAME_FILES + _TAKES_UP.format("a change"),
            )
        return built._replace(names=listing.ROW.join([names, *new]) if new else names)

    def check_places(self) -> None:
        """Raises DlctlError unless the shards have the same numbers by their names as by their
        places in the list, which an earlier version recorded.
        """
        if self.order != list(range(self.shards)):
            raise DlctlError(
                f"{OTHER_NUMBERS}, as dlctl did before; now they are numbered by their sorted "
                "names",
                hint="dlctl recover --from-checkpoint continues from a checkpoint",
            )


_FRESH = "after a change start with --fresh to begin a new run"
_TAKES_UP = "a run that resumes (dlctl recover --from-checkpoint) takes up {}"
_SAME_NAMES = "shards() must list the same names in every worker, whatever their order; "
_SAME_FILES = (
    "sample n of the dataset must be the same in every worker: sort what os.listdir or glob "
    "returns; "
)


def _less(names: str, others: str) -> list[str]:
    """The names that are not among the others, in their order."""
    left = Counter(listing.of_text(others))
    left.subtract(listing.of_text(names))
    return list((-left).elements())


def _others(lacking: list[str], new: list[str]) -> str:
    both = (("it lacks", lacking), ("it has, besides,", new))
    return "; ".join(f"{what} {_shown(names)}" for what, names in both if names)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return ", ".join(f'"{name:.{NAME_CHARS_MAX}}"' for name in names[:SHOWN_MAX]) + more
