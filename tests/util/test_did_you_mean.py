"""Other names for what there is lead to what there is."""

from __future__ import annotations

from dlctl import registry
from dlctl.job.config import Workers
from dlctl.registry import ALIASES
from dlctl.util.did_you_mean import closest, did_you_mean
from dlctl.util.keydocs import keys


def test_every_other_name_stands_for_one_that_exists_and_is_no_name_beside_it() -> None:
    kinds = [set(registry.names(kind)) for kind in registry.BUILT_IN]
    names = set().union(*kinds)
    options = [
        registry.load(kind, name).Options
        for kind in ("compressors", "optimizers")
        for name in registry.names(kind)
    ]
    described = [key for owner in (*options, Workers) for key in keys(owner)]
    known = names | {key.name for key in described}
    known |= {word.strip('"') for key in described for word in key.type.split(" or ")}
    assert set(ALIASES.values()) <= known
    assert [pair for pair in ALIASES.items() if any({*pair} <= kind for kind in kinds)] == []
    # These are names of another kind, and not where they stand for something.
    assert ALIASES.keys() & names == {"bf16", "fp16", "asgd", "dgc"}


def test_another_name_wins_over_one_that_looks_alike() -> None:
    names = registry.names("algorithms")
    assert closest("async", names, ALIASES) == "downpour"
    assert closest("Local_SGD", names, ALIASES) == "local-sgd"
    assert closest("async", ["sync"], ALIASES) == "sync", "where the other one is no choice"


def test_capital_letters_are_no_difference() -> None:
    assert closest("MyTsak", ["MyTask", "DigitsModel"]) == "MyTask"
    assert did_you_mean("digits_model", ["DigitsModel"]) == 'did you mean "DigitsModel"?'


def test_a_word_that_nothing_is_like_is_answered_with_all_there_are() -> None:
    assert did_you_mean("zzz", ["sync", "downpour"]) == "known: sync, downpour"
    assert closest("zzz", ["sync"]) == ""


def test_words_that_are_equally_likely_are_all_named() -> None:
    known = ["lr", "beta1", "beta2", "eps"]
    assert did_you_mean("betas", known, ALIASES) == 'did you mean "beta1" or "beta2"?'
    assert did_you_mean("beta1", ["lr", "betas", "eps"], ALIASES) == 'did you mean "betas"?'
