"""`kvstore completion`: what a shell needs to complete our words."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from kvstore.cli.answers import say_json, say_text
from kvstore.cli.options import AsJson
from kvstore.errors import BadRequest

__all__ = ["completion_command"]


def completion_command(
    shell: Literal["bash", "zsh", "fish"],
    /,
    *,
    install: Annotated[bool, Parameter(negative=())] = False,
    as_json: AsJson = False,
) -> None:
    """Print the completion script of a shell, or install it for this user.

    Args:
        shell: bash, zsh or fish.
        install: write the script to the shell's own place for it in your home, and the line that loads it
            into ~/.bashrc or ~/.zshrc, instead of printing it.

    Examples:
        source <(kvstore completion bash)
        kvstore completion zsh --install
        kvstore completion fish > ~/.config/fish/completions/kvstore.fish
    """
    from kvstore.cli import app

    if not install:
        script = app.generate_completion(shell=shell)
        if as_json:
            say_json({"shell": shell, "script": script})
        else:
            say_text(script)
        return
    try:
        place = app.install_completion(shell=shell)
    except OSError as error:
        raise BadRequest(f"completion: cannot write {error.filename}: {error.strerror}") from None
    if as_json:
        say_json({"shell": shell, "written": str(place)})
    else:
        say_text(f"wrote {place}; open a new shell to use it")
