"""The command `gradwire`: its help, what it loads, and what it says about arguments that are wrong."""

import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from gradwire.cli.group import COMMANDS, gradwire, run_command


def all_commands() -> dict[str, click.Command]:
    """Returns the commands and the commands of commands, by what is typed."""
    found = {}
    context = click.Context(gradwire)
    for name in COMMANDS:
        command = gradwire.get_command(context, name)
        found[name] = command
        if isinstance(command, click.Group):
            found |= {f"{name} {each}": inner for each, inner in command.commands.items()}
    return found


def test_help_is_shown_without_loading_torch():
    program = (
        "import sys\n"
        "sys.argv[:] = ['/somewhere/bin/gradwire', '--help']\n"
        "from gradwire.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print([name for name in ('torch', 'gradwire.rpc') if name in sys.modules])\n"
        "    import gradwire\n"
        "    print(gradwire.rpc.__name__, gradwire.GradwireError.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110, check=True)
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert done.stdout.endswith("[]\ngradwire.rpc GradwireError\n")


@pytest.mark.parametrize(
    "arguments", [["top", "http://127.0.0.1:1"], ["certs", "names", "a b"], ["store", "--port", "x"], ["spawn"]]
)
def test_errors_are_shown_without_loading_torch(arguments):
    program = (
        "import sys\n"
        f"sys.argv[:] = ['/somewhere/bin/gradwire', *{arguments}]\n"
        "from gradwire.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=110, check=False
    )
    assert (done.returncode > 0, done.stdout) == (True, "False\n")
    assert "Error: " in done.stderr


@pytest.mark.parametrize(("name", "command"), all_commands().items())
def test_help_explains_every_option_with_an_example(name, command):
    done = CliRunner().invoke(gradwire, [*name.split(), "--help"])
    assert done.exit_code == 0
    assert command.help.strip().endswith(".")
    examples = done.output.partition("\nExamples:\n")[2]
    assert f"gradwire {name} " in f"{examples} ".replace("\n", " ")
    options = [each for each in command.params if isinstance(each, click.Option)]
    assert [each.name for each in options if not each.help] == []
    assert command.name == name.split()[-1]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["sotre"], "no command 'sotre'; did you mean store?"),
        (["qqq"], "no command 'qqq'\n"),
        (["store", "--lgo", "x"], "Did you mean '--log'?"),
        (["certs", "ca", "x", "--days", "-1"], "-1.0 is not in the range"),
        (["flight", "/nowhere"], "'/nowhere' does not exist"),
    ],
)
def test_what_is_wrong_is_refused_and_near_names_are_given(arguments, problem):
    done = CliRunner().invoke(gradwire, arguments)
    assert done.exit_code == 2
    assert problem in done.output


def test_an_interrupted_command_ends_quietly(capsys):
    @click.command()
    def command() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_command(command, [], "command")
    assert ended.value.code == 130
    assert capsys.readouterr().err.strip() == ""


def test_flight_refuses_other_files(tmp_path):
    (tmp_path / "flight-a-1.json").write_text("{}")
    done = CliRunner().invoke(gradwire, ["flight", str(tmp_path)])
    assert (done.exit_code, done.output) == (
        1,
        "Error: these are no flight recorder files: KeyError: 'groups'\n",
    )
    (tmp_path / "flight-a-1.json").unlink()
    done = CliRunner().invoke(gradwire, ["flight", str(tmp_path)])
    assert (done.exit_code, done.output.startswith("Error: there are no such files")) == (1, True)


def test_flight_does_not_send_to_the_terminal_what_files_say(tmp_path):
    group = {
        "name": "0",
        "description": "\x1b]0;title\x07",
        "backend": "shm",
        "rank": 0,
        "size": 1,
        "operations": [],
    }
    (tmp_path / "flight-a-1.json").write_text(json.dumps({"written": 0, "groups": [group]}))
    done = CliRunner().invoke(gradwire, ["flight", str(tmp_path)])
    assert done.output == "group '0' (\\x1b]0;title\\x07, shm), 1 ranks\n  rank 0: no collective yet\n"
