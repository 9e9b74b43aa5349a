"""What the command line says without a daemon: help, suggestions, errors, completion, configuration."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from command_line import KVSTORE, Terminal, kvstore

from kvstore.cli import COMMANDS
from kvstore.config import Config


def test_alone_it_says_what_to_do() -> None:
    done = kvstore()
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) < 60
    for command in COMMANDS:
        assert re.search(rf"│ {command} ", done.stdout), command
    assert "Exit status: 0 done, 1 a check failed, 2 wrong usage" in done.stdout


def all_of(*lines: Sequence[str]) -> list[subprocess.CompletedProcess[str]]:
    """Run commands side by side: a start of Python takes longer than what is tested here."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda words: kvstore(*words, environ={"COLUMNS": "200"}), lines))


def test_help_has_examples_of_options_that_exist() -> None:
    answers = all_of(*((command, "--help") for command in COMMANDS))
    for command, done in zip(COMMANDS, answers, strict=True):
        assert (done.returncode, done.stderr) == (0, ""), command
        options, found, examples = done.stdout.partition("\nExamples:\n")
        assert found, command
        assert "--json" in options
        used = re.findall(rf"kvstore {command}\b([^|>)]*)", examples)
        assert used, command
        named = [option for line in used for option in re.findall(r"--[a-z-]+", line)]
        assert not [option for option in named if option not in options], command
        # Prose is wrapped by the terminal, not by the source: short lines end paragraphs.
        prose = options.partition("╭")[0].splitlines()
        assert not [line for line, after in pairwise(prose) if after and 0 < len(line) < 150], command


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("sttus",), 'Did you mean "status"?'),
    (("status", "--jsn"), "Did you mean --json?"),
    (("top", "--intervall", "1"), "Did you mean --interval?"),
    (("completion", "bsh"), 'Did you mean "bash"?'),
    (("status", "--set", "host.capacty_bytes=1"), "did you mean capacity_bytes"),
    (("status", "--interval", "-1"), "--interval: need 0 to 3600 seconds"),
    (("top", "--interval", "0"), "--interval: need 0.05 to 3600 seconds"),
    (("top", "--interval", "nan"), "--interval: need"),
    (("top", "--interval", "soon"), "soon"),
    (("status", "extra"), "extra"),
    (("flush", "--timeout", "0"), "--timeout: need 0.1 to 3600 seconds"),
    (("flush", "--timeout", "soon"), "soon"),
    (("explain",), "name one request, or say --last"),
    (("explain", "cmpl-7", "--last"), "name one request, or say --last"),
    (("explain", ""), "say --last for the latest"),
    (("explain", "--lats"), "Did you mean --last?"),
    (("check", "--repair"), "--repair: name the directory to repair"),
    (("check", "/", "--set", "daemon.socket=/x"), "leave out --config and --set"),
]


def test_a_wrong_word_is_named_and_the_right_one_suggested() -> None:
    answers = all_of(*((*words, "--json") for words, _ in WRONG))
    for (words, hint), done in zip(WRONG, answers, strict=True):
        assert (done.returncode, done.stderr) == (2, ""), words
        said = json.loads(done.stdout)
        assert hint in said["error"], words
        assert said["status"] == "INVALID_ARGUMENT"


def test_as_text_it_is_one_line() -> None:
    done = kvstore("status", "--jsn", environ={"COLUMNS": "40"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvstore: Unknown option: --jsn. Did you mean --json?; see kvstore status --help\n"


def test_serve_that_cannot_start_is_an_object_too(tmp_path: Path) -> None:
    done = kvstore("serve", "--set", "daemon.socket=/nowhere/at/all/kv.sock", "--json")
    assert done.returncode == 2
    assert "daemon.socket" in json.loads(done.stdout)["error"]


# ---- completion -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_valid(shell: str, tmp_path: Path) -> None:
    done = kvstore("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS:
        assert command in done.stdout
    script = tmp_path / "script"
    script.write_text(done.stdout)
    program = shutil.which(shell)
    if program:  # bash is everywhere; the others are checked where they are
        flags = ("--no-execute",) if shell == "fish" else ("-n",)
        subprocess.run([program, *flags, str(script)], check=True, timeout=30)


COMPLETED = {
    "kvstore st": {"status", "stop"},
    "kvstore ex": {"explain"},
    "kvstore explain --l": {"--last"},
    "kvstore co": {"config", "completion"},
    "kvstore status --j": {"--json"},
    "kvstore completion b": {"bash"},
}


def test_bash_completes() -> None:
    asked = [f'source <("{KVSTORE}" completion bash)']
    for line in COMPLETED:
        words = line.split()
        asked.append(
            f"""
COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_LINE="{line}"; COMP_POINT={len(line)}; COMPREPLY=()
$(complete -p kvstore | sed -E 's/.*-F ([^ ]+).*/\\1/') kvstore {words[-1]} {words[-2]}
echo "${{COMPREPLY[@]}}"
"""
        )
    done = subprocess.run(
        ["bash", "-c", "\n".join(asked)], capture_output=True, text=True, timeout=60, check=True
    )
    found = [set(line.split()) for line in done.stdout.splitlines()]
    assert dict(zip(COMPLETED, found, strict=True)) == COMPLETED


def test_installing_completion_writes_to_the_home_only(tmp_path: Path) -> None:
    home = {
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": "",
        "XDG_CONFIG_HOME": "",
        "ZSH_CUSTOM": "",
        "ZDOTDIR": "",
    }
    for shell in ("bash", "fish"):
        done = kvstore("completion", shell, "--install", "--json", environ=home)
        assert done.returncode == 0, done
        written = Path(json.loads(done.stdout)["written"])
        assert written.is_relative_to(tmp_path)
        assert "kvstore" in written.read_text()


# ---- configuration ----------------------------------------------------------------------------------------


def test_config_names_the_origin_of_each_value(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('[host]\ncapacity_bytes = "2GiB"\nthreads = 3\n[daemon]\nheartbeat_s = 0.5\n')
    (tmp_path / "secrets.toml").write_text("[tenants]\ndefault = 'c0ffee'\n")
    flags = ("--config", str(file), "--set", "host.threads=4", "--set", "daemon.secrets_file=secrets.toml")
    environ = {"KVSTORE_HOST__THREADS": "5", "KVSTORE_INDEX__NODES_MAX": "1000"}
    done = kvstore("config", *flags, "--json", environ=environ)
    found = json.loads(done.stdout)
    assert found["host.capacity_bytes"] == {"value": 2 << 30, "from": str(file)}
    assert found["host.threads"] == {"value": 4, "from": "--set"}
    assert found["index.nodes_max"] == {"value": 1000, "from": "KVSTORE_INDEX__NODES_MAX"}
    assert found["events.log_max"] == {"value": 10_000, "from": "default"}
    assert "c0ffee" not in done.stdout
    said = kvstore("config", *flags, environ=environ).stdout
    assert re.search(r'^host\.capacity_bytes = "2GiB" +# .*kvstore\.toml$', said, re.MULTILINE)
    assert re.search(r"^daemon\.socket_mode = 0o600 +# default$", said, re.MULTILINE)


def test_config_refuses_what_serve_would() -> None:
    done = kvstore("config", "--set", "host.threads=many")
    assert done.returncode == 2
    assert "host.threads" in done.stderr


def test_the_default_file_is_the_defaults(tmp_path: Path) -> None:
    text = kvstore("config", "--default").stdout
    file = tmp_path / "kvstore.toml"
    file.write_text(text)
    assert Config.load(file, environ={}) == Config()
    # And so it is with every value put in.
    file.write_text(re.sub(r"^# (\w+ = |\[\[tenants)", r"\1", text, flags=re.MULTILINE))
    assert Config.load(file, environ={}) == Config()
    assert text.count("\n# ") > 2 * len(re.findall(r"^# \w+ = ", text, re.MULTILINE)) - 8


# ---- terminals --------------------------------------------------------------------------------------------


def test_colour_only_where_it_is_wanted(tmp_path: Path) -> None:
    flags = ("status", "--set", f"daemon.socket={tmp_path}/none.sock")
    shown = {}
    for name, environ in {
        "colour": {},
        "NO_COLOR": {"NO_COLOR": "1"},
        "dumb": {"TERM": "dumb"},
    }.items():
        terminal = Terminal(*flags, environ=environ)
        try:
            assert terminal.ended() == 2
        finally:
            terminal.close()
        shown[name] = terminal.shown
    assert "\x1b[31m" in shown["colour"]
    assert "\x1b[31m" not in shown["NO_COLOR"]
    assert "\x1b" not in shown["dumb"]
    assert "\x1b" not in kvstore(*flags).stderr


def test_an_ascii_terminal_gets_no_traceback() -> None:
    environ = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = kvstore("--help", environ=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert "status" in done.stdout


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [str(KVSTORE), "config"], stdout=write, stderr=subprocess.PIPE, timeout=30, check=False
        )
    finally:
        os.close(write)
    assert done.returncode == 141
    assert done.stderr == b""
