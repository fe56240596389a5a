"""Live settings: what is shown reads back, and what cannot be is refused with a suggestion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_type_hints

import pytest
from annotated_types import Ge, Le, Lt

from dlctl import registry
from dlctl.errors import UsageError
from dlctl.job import settings
from dlctl.job.settings import Live
from dlctl.util import keydocs, numeric_limits

GOOD = {
    "push_every_steps": ["1", "4", "1000000", "auto"],
    "fetch_every_steps": ["16", "auto"],
    "push": ["5MB/s", "100Mbit/s", "off", "64KiB/s"],
    "fetch": ["1.5GB/s"],
    "push_window": ["128MB", "64KiB", "1.5GB", "off"],
    "lr": ["0.02", "1e-5", "3", "1e6"],
    "inner_lr": ["0", "0.1", "1e9"],
    "local_steps": ["1", "500"],
    "exchange_every_steps": ["1", "64"],
    "alpha": ["auto", "0.1", "1"],
    "density": ["0.01", "1"],
    "log_level": ["debug", "warning"],
    "staleness": ["0", "1", "7"],
    "clock_steps": ["1", "8"],
    "fetch_every_clocks": ["1", "100"],
    "rate": ["0.1"],
    "contact_every_steps": ["1", "100"],
    "steps_at_once": ["1", "1000"],
    "target_samples": ["1", "4096"],
    "damping": ["0.001", "1e-5"],
    "factor_decay": ["0.95"],
    "kl_clip": ["0.001"],
}
OF_TOYS = {"capacity"}
"""They are there if another test has registered `tests/toys/`."""
BAD = [
    ("push_every_steps", "0"),
    ("push_every_steps", "1.5"),
    ("push_every_steps", "-1"),
    ("push_every_steps", "true"),
    ("fetch_every_steps", "fast"),
    ("fetch_every_steps", "Auto"),
    ("push_every_steps", "٣"),
    ("push", "500"),
    ("fetch", "0B/s"),
    ("push_window", "4"),
    ("push_window", "5MB/s"),
    ("push_window", "0MB"),
    ("push_window", "-1MB"),
    ("push_window", "100Mbit"),
    ("lr", "nan"),
    ("lr", "inf"),
    ("lr", "0"),
    ("lr", "1000001"),
    ("lr", "1e300"),
    ("inner_lr", "-0.1"),
    ("inner_lr", "1e300"),
    ("local_steps", "0"),
    ("local_steps", "auto"),
    ("local_steps", "1.5"),
    ("contact_every_steps", "0"),
    ("steps_at_once", "0"),
    ("target_samples", "0"),
    ("target_samples", "16777217"),
    ("staleness", "-1"),
    ("staleness", "all"),
    ("clock_steps", "0"),
    ("fetch_every_clocks", "auto"),
    ("alpha", "0"),
    ("alpha", "1.1"),
    ("alpha", "Auto"),
    ("density", "0"),
    ("density", "1.01"),
    ("log_level", "loud"),
]


LIVE = settings.LiveSettings({key: setting for key, setting, _ in settings.every()})
"""All that the components of the registry declare, as if one job had them all."""


def test_every_setting_has_examples_here():
    assert GOOD.keys() == LIVE.by_key.keys() - OF_TOYS


@pytest.mark.parametrize(("key", "text"), [(k, t) for k, texts in GOOD.items() for t in texts])
def test_what_is_shown_reads_back_to_the_same_value(key, text):
    value = LIVE.parse(key, text)
    assert LIVE.parse(key, LIVE.format(key, value)) == value


@pytest.mark.parametrize(("key", "text"), BAD)
def test_a_value_that_cannot_be_is_refused_with_the_name_of_its_key(key, text):
    with pytest.raises(UsageError, match=f"^{key}: "):
        LIVE.parse(key, text)


def test_a_rate_that_cannot_be_is_refused_in_the_words_of_the_job_file():
    with pytest.raises(UsageError, match=r"^lr: .*1000000 .*1e300"):
        LIVE.parse("lr", "1e300")
    with pytest.raises(UsageError, match=r"^inner_lr: .*1000000000 .*-1"):
        LIVE.parse("inner_lr", "-1")


@pytest.mark.parametrize(
    ("kind", "key", "limits"),
    [
        ("optimizers", "lr", numeric_limits.LearningRate),
        ("optimizers", "weight_decay", numeric_limits.WeightDecay),
        ("inner_optimizers", "weight_decay", numeric_limits.WeightDecay),
    ],
)
def test_rates_have_the_same_limits_in_the_job_file(kind, key, limits):
    found = {}
    for name in registry.names(kind):
        hints = get_type_hints(registry.load(kind, name).Options, include_extras=True)
        found |= {name: hints[key]} if key in hints else {}
    assert len(found) >= 2
    assert set(found.values()) == {limits}


def test_a_mistyped_key_gets_a_suggestion():
    with pytest.raises(UsageError, match='"push_every_steps"'):
        LIVE.parse("push_every_step", "4")
    with pytest.raises(UsageError, match="push, fetch, push_window, log_level, "):
        LIVE.parse("zzz", "4")


def test_a_value_of_a_setting_from_another_version_is_shown_as_it_is():
    assert LIVE.format("colour", "blue") == "blue"
    assert LIVE.format("colour", 3) == "3"
    assert LIVE.format("lr", None) == "-"
    assert LIVE.format("push", None) == "off"


def test_an_interval_that_cannot_be_is_refused_with_what_it_can_be():
    expected = '"fast" is not a whole number >= 1 and <= 1000000 or "auto"'
    with pytest.raises(UsageError, match=expected):
        LIVE.parse("push_every_steps", "fast")


@dataclass(kw_only=True)
class Options:
    """As a method would have them."""

    warmup: Live[Annotated[float, Ge(0), Lt(1)]] = 0.5
    """Part of the run. More about it."""
    rounds: Live[Annotated[int, Ge(2), Le(9)] | Literal["auto", "all"]] = "auto"
    """Rounds of all, R; there are more."""
    size: int = 3
    """It does not change."""


class Wrong(NamedTuple):
    names: Live[list[str]]


def test_an_option_says_itself_that_it_is_live_and_its_type_says_how_it_is_written():
    live = settings.of_options(Options)
    assert list(live) == ["warmup", "rounds"]
    assert [live["warmup"].parse(text) for text in ("0", "0.25", "1e-3")] == [0.0, 0.25, 0.001]
    assert [live["rounds"].parse(text) for text in ("2", "9", "auto", "all")] == [
        2,
        9,
        "auto",
        "all",
    ]
    for key, text in (
        ("warmup", "1"),
        ("warmup", "all"),
        ("warmup", "nan"),
        ("rounds", "1"),
        ("rounds", "10"),
        ("rounds", "2.5"),
        ("rounds", "9" * 5000),
        ("rounds", ""),
    ):
        with pytest.raises(ValueError, match="number"):
            live[key].parse(text)


def test_an_option_whose_source_is_not_there_is_called_by_its_name() -> None:
    found: dict[str, type] = {}
    exec("@dataclass\nclass Options:\n    rate: Live[float] = 1.0", globals(), found)
    (key,) = keydocs.keys(found["Options"])
    assert (key.name, key.text) == ("rate", "Changes live.")
    (setting,) = settings.of_options(found["Options"]).values()
    assert settings._explained("rate", setting, found["Options"]).help == "rate"
    (rounds,) = [
        setting for key, setting in settings.of_options(Options).items() if key == "rounds"
    ]
    words = 'rounds of all, R, or "auto", or "all"'
    assert settings._explained("rounds", rounds, Options).help == words


def test_an_option_of_another_type_cannot_be_live():
    with pytest.raises(TypeError, match=r"list\[str\]"):
        settings.written_as(get_type_hints(Wrong, include_extras=True)["names"])


def test_the_pages_say_of_a_live_option_that_it_is_one():
    texts = {key.name: key.text for key in keydocs.keys(Options)}
    assert texts == {
        "warmup": "Part of the run. More about it. Changes live.",
        "rounds": "Rounds of all, R; there are more. Changes live.",
        "size": "It does not change.",
    }


def test_a_job_has_the_settings_of_its_own_components_and_of_every_run():
    job = {
        "algorithm": {"name": "local-sgd", "options": {"local_steps": 4}},
        "inner": {"name": "adamw", "options": {"lr": 0.1}},
        "compression": {"name": "none", "options": {}},
        "optimizer": {"name": "adam", "options": {"lr": 0.1}},
    }
    live = settings.of_job(job)
    assert list(live.by_key) == [*settings.GENERAL, "local_steps", "inner_lr", "lr"]
    paths = ["algorithm.local_steps", "optimizer.lr", "inner.lr", "limits.push"]
    assert [live.called(path) for path in paths] == ["local_steps", "lr", "inner_lr", "push"]
    others = ["algorithm.lr", "optimizer.push", "compression.density", "workers.count", "push"]
    assert not any(live.called(path) for path in others)


def test_a_rate_has_to_go_with_the_decay_of_every_group_that_is_trained():
    groups = [
        {"match": ["a"], "weight_decay": None, "lr_scale": 4.0, "train": True},
        {"match": ["b"], "weight_decay": 2.0, "lr_scale": 0.5, "train": True},
        {"match": ["c"], "weight_decay": 1e6, "lr_scale": 1.0, "train": False},
    ]
    adamw = {"name": "adamw", "options": {"lr": 0.1, "weight_decay": 0.5}}
    live = settings.of_job({"optimizer": adamw, "parameters": groups})
    assert live.parse("lr", "0.5") == 0.5
    with pytest.raises(UsageError, match=r"got 2.04 \* 0.5") as caught:
        live.parse("lr", "0.51")
    assert "dlctl set lr=0.5" in str(caught.value.hint)
    assert settings.of_job({"optimizer": adamw}).parse("lr", "2") == 2.0


def test_a_job_of_components_that_are_not_installed_has_the_settings_of_every_run():
    job = {"algorithm": {"name": "nobody-has-it", "options": {}}, "compression": None}
    assert list(settings.of_job(job).by_key) == list(settings.GENERAL)


def test_what_our_own_components_declare_is_written_plainly():
    """So `dlctl get` shows it without importing them."""
    ours = [setting for _, setting, owners in settings.every() if owners]
    assert ours
    assert {setting.format for setting in ours} == {settings.plainly}


@pytest.mark.parametrize("kind", registry.SECTIONS.values())
def test_no_component_declares_a_key_of_every_run_or_one_that_is_no_option(kind):
    for name in registry.names(kind):
        options = get_type_hints(registry.load(kind, name).Options)
        declared = settings.declared(kind, name)
        strange = {s.option or key for key, s in declared.items()} - options.keys()
        assert (name, strange, declared.keys() & settings.GENERAL.keys()) == (name, set(), set())
