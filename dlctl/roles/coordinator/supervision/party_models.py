"""The models of a run with parties: each worker builds the part of its side.

The layout of the run is known once a worker of either side has built its own (`party_layouts`).
"""

from __future__ import annotations

from dlctl.errors import DlctlError
from dlctl.model import party_layouts
from dlctl.model.flat import AVERAGED, CONSTANT, Layout

TOLD_MAX = 3


class PartyModels:
    """What the sides have built."""

    def __init__(self) -> None:
        self._built: dict[int, Layout] = {}
        """Side -> its layout."""
        self._samples = 0

    def known(self, side: int, whole: Layout | None) -> Layout | None:
        """The layout of a side; whole: that of the run, if there is one."""
        if whole is not None:
            return party_layouts.parts_of(whole)[side]
        return self._built.get(side)

    def built(self, side: int, layout: Layout, samples: int) -> tuple[Layout, int] | None:
        """A worker has built its side, with a dataset of so many samples; the head has none. The
        layout of the run and its samples; None: nobody has built the other side so far.
        """
        self._built[side] = layout
        self._samples = max(self._samples, samples)
        if len(self._built) < 2:
            return None
        return party_layouts.joined([self._built[0], self._built[1]]), self._samples


def check_head(name: str, layout: Layout) -> None:
    """Raises DlctlError for tensors that the head cannot have: nothing carries them."""
    for kind, what, instead in (
        (AVERAGED, "buffers", "use GroupNorm or LayerNorm in place of BatchNorm"),
        (CONSTANT, "frozen parameters", "set requires_grad = True, or keep them as plain tensors"),
    ):
        names = [entry.name for entry in layout.entries if entry.kind == kind]
        if names:
            more = ", ..." if len(names) > TOLD_MAX else ""
            raise DlctlError(
                f"{name}: the head's server_model() has {what}: "
                f"{', '.join(names[:TOLD_MAX])}{more}",
                hint=f"{instead}, and start again",
            )
