"""In which mode each module of a model trains: the one in which `model()` has left it.

As in any training loop, the model is put into training mode. Only modules that `model()` has put
into eval mode stay there, such as a frozen batch normalisation, unless that is the whole model, as
after `from_pretrained`.
"""

from __future__ import annotations

from torch import nn

from daemons.worker.task.user_task import Task, calling
from dlctl.model.parameter_groups import SHOWN_MAX


class Modes:
    def __init__(self, task: Task, model: nn.Module) -> None:
        """Puts the model into its modes for training. Raises TaskError."""
        self._task, self._model = task, model
        modules = dict(model.named_modules())
        self._kept = {name: each for name, each in modules.items() if not each.training}
        if len(self._kept) == len(modules):
            self._kept = {}
        self._begin()
        self._is_training = model.training

    def train(self) -> None:
        """Put the model into its modes for training again, if the task's code has put it into
        another. What that does to a part of the model holds. Raises TaskError.
        """
        if self._model.training != self._is_training:
            self._begin()

    def evaluate(self) -> None:
        """Put the whole model into eval mode. Raises TaskError."""
        with calling("model.eval()", self._task.at("model")):
            self._model.eval()

    def _begin(self) -> None:
        with calling("model.train()", self._task.at("model")):
            self._model.train()
        for module in self._kept.values():
            module.training = False

    def described(self) -> list[str]:
        """A line about the modules that stay in eval mode; [] if there are none."""
        kept = [
            f"{name or 'the model'} ({type(each).__name__})"
            for name, each in self._kept.items()
            if (parent := name.rpartition(".")[0]) not in self._kept or not parent
        ]
        if not kept:
            return []
        more = f" and {len(kept) - SHOWN_MAX} more" if len(kept) > SHOWN_MAX else ""
        shown = f"{', '.join(kept[:SHOWN_MAX])}{more}"
        return [f"these modules train in eval mode, in which model() has left them: {shown}"]
