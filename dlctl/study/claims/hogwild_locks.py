"""Without locks two processes train a sparse model as well as with them, and faster."""

from __future__ import annotations

from dlctl.study.claims.base import Evidence, Lab, PaperClaim, less, within

EPOCHS = 3
ALIKE = 1.01


def experiment(lab: Lab) -> Evidence:
    answer = lab.loop("locks", {"seeds": [*lab.seeds], "epochs": EPOCHS})
    seconds, loss = ({arm: answer[arm][key] for arm in answer} for key in ("seconds", "loss"))
    one, free, locked = answer
    relative = [a / b for a, b in zip(loss[free], loss[one], strict=True)]
    return Evidence(
        margins={
            "as good": within(relative, ALIKE),
            "faster than with locks": less(seconds[free], seconds[locked]),
        },
        figures={"seconds": seconds, "loss": loss},
    )


CLAIM = PaperClaim(
    paper="Niu et al., Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient "
    "Descent, 2011",
    sentence="If updates are sparse, processes that write to one model without any locks lose "
    "nothing in quality, and are faster than with locks.",
    setup="Logistic regression on 16,000 bags of 60 of 50,000 words in shared memory, "
    f"{EPOCHS} epochs, by one process, by two without locks, and by two with a lock around each "
    "step. The processes are real, and so are the times, of the machine on which it runs.",
    measure="the loss over all bags at the end, and the seconds",
    criterion={
        "as good": f"the loss of two without locks is at most {ALIKE:g} times that of one",
        "faster than with locks": "two without locks take less time than two with locks",
    },
    experiment=experiment,
    remark="The model has learned little in three epochs, from 0.693: equal losses say less than "
    "they would later. The machine had other work while this ran.",
    minutes=1,
)
