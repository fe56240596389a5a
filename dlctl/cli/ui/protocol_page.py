"""What `dlctl simulate --protocol` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dlctl.cli.ui import console
from dlctl.study import saturation
from dlctl.util import units, values

if TYPE_CHECKING:
    from dlctl.ops.protocol import ProtocolWindow

_WHAT = {"coordinator": "the coordinator", "server": "a server", "link": "a link"}


def show(found: ProtocolWindow) -> None:
    data = data_of(found)
    rows = _rows(data)
    width = max(map(len, rows))
    console.show(
        "dlctl.simulate-protocol/1",
        data,
        "\n".join(f"{name:<{width}}  {console.escape(text)}" for name, text in rows.items()),
    )


def data_of(found: ProtocolWindow) -> dict[str, Any]:
    request = found.request
    return {
        "windows": list(found.windows),
        "saturates": None if found.first is None else asdict(found.first),
        "error": found.error,
        "spread": saturation.spread(found.largest),
        "wanted_s": request.until_s,
        "step_s": request.step_s,
        "parameters": request.parameters,
        "link": None if request.link is None else asdict(request.link),
    }


def _rows(data: Mapping[str, Any]) -> dict[str, str]:
    row, link = data["windows"][-1], data["link"]
    of_link = (
        "no limit of the links"
        if link is None
        else (f"links of {units.short_rate(link['bytes_per_s'])}")
    )
    alone = row["steps_per_s"] * data["step_s"] / row["workers"]
    busy = ", ".join(f"{each['name']} {100 * each['share']:.3g} %" for each in row["busy"].values())
    found = {
        "run": f"{row['workers']:,} workers, {data['parameters']:,} parameters, {of_link}",
        "steps": f"{row['steps_per_s']:.4g} per second, {100 * alone:.3g} % of what the workers "
        "alone would make",
        "busy": busy,
        "saturates": _saturates(data["saturates"], data["windows"]),
        "simulated": f"{row['seconds']:.3g} of {data['wanted_s']:.3g} virtual seconds in "
        f"{values.duration(sum(one['cpu_s'] for one in data['windows']))} of CPU time",
        "error": _error(data),
    }
    if row["trained"] < row["workers"]:
        found["begun"] = f"only {row['trained']:,} of them within the time: --within gives more"
    return found


def _saturates(first: Mapping[str, Any] | None, windows: Sequence[Mapping[str, Any]]) -> str:
    if first is None:
        return "nothing"
    what, few = f"{_WHAT[first['kind']]} first ({first['name']})", windows[0]
    if saturation.free(windows):
        return f"{what}, at about {first['workers']:,.0f} workers"
    if saturation.tells(few):
        return f"{what}, with {few['workers']:,} workers already"
    return _untold(few)


def _error(data: Mapping[str, Any]) -> str:
    if data["spread"] is None:
        return _untold(data["windows"][-1])
    text = f"{100 * data['spread']:.2g} % between the halves of the window"
    if data["error"] is None:
        return text
    small = data["windows"][-2]
    return f"{text}; {100 * data['error']:+.2g} % if foretold from {small['workers']:,} workers"


def _untold(row: Mapping[str, Any]) -> str:
    what = f"not known: the window of {row['workers']:,} workers"
    if row["is_whole"]:
        return f"{what} is shorter than a round: use --until"
    return f"{what} was cut before each half had a step: use --within"
