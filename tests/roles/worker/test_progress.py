"""How far the run is, as one replica knows it, and its own rate there."""

from dlctl.roles.worker.progress import OwnRate, Progress


def test_between_two_words_everybody_has_had_as_much_as_this_replica() -> None:
    progress = Progress(lambda: 4)
    progress.computed(8)
    assert progress.samples == 32
    progress.pushed()
    progress.on_total(40)
    assert progress.samples == 40
    progress.computed(8)
    progress.computed(8)
    assert progress.samples == 40 + 4 * 16


def test_what_was_not_pushed_at_a_word_is_not_in_it() -> None:
    progress = Progress(lambda: 2)
    progress.computed(8)
    progress.pushed()
    progress.computed(8)
    progress.on_total(16)
    assert progress.samples == 16 + 2 * 8


def test_it_never_goes_back() -> None:
    progress = Progress(lambda: 4)
    progress.computed(8)
    progress.pushed()
    assert progress.samples == 32
    progress.on_total(8)
    assert progress.samples == 32


def test_an_older_word_changes_nothing() -> None:
    progress = Progress(lambda: 2)
    progress.on_total(100)
    progress.computed(8)
    progress.on_total(64)
    assert progress.samples == 116


def test_who_is_not_on_any_list_yet_is_there_all_the_same() -> None:
    progress = Progress(lambda: 0)
    progress.computed(8)
    assert progress.samples == 8


def test_the_rate_is_a_part_of_its_peak_which_may_change() -> None:
    rate = OwnRate(0.4)
    assert rate.at(10) == 0.4
    rate.factor = lambda samples: samples / 100
    assert rate.at(50) == 0.2
    rate.lr = 0.8
    assert rate.at(50) == 0.4
