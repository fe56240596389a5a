"""`dlctl completion`: the script for shell completion."""

from __future__ import annotations

import click

from dlctl.cli.group import make_command
from dlctl.cli.ui import console


@make_command(
    'eval "$(dlctl completion bash)"  # in ~/.bashrc',
    'eval "$(dlctl completion zsh)"  # in ~/.zshrc',
    "dlctl completion fish | source  # in config.fish",
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """It completes commands, options, jobs and daemons from files on this machine, without
    contacting any daemon.
    """
    from click.shell_completion import get_completion_class

    from dlctl.cli.app import COMPLETION_VARIABLE

    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root().command
    console.out(kind(root, {}, "dlctl", COMPLETION_VARIABLE).source().rstrip("\n"))
