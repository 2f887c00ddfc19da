"""The command line of `mpbroker serve`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpbroker.cli import main
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.serve import OPTIONS, parse_serve_arguments
from mpbroker.cli.serve_command import command


def test_settings_are_cut_at_the_first_equals_sign_only():
    parsed = parse_serve_arguments(["listeners=A://h:1", "sasl.jaas=a=b;c=", "empty="])
    assert parsed.overrides == {
        "listeners": "A://h:1",
        "sasl.jaas": "a=b;c=",
        "empty": "",
    }


def test_options_and_settings_may_be_mixed_in_any_order():
    read, write = os.pipe()
    try:
        parsed = parse_serve_arguments(
            [
                "a=1",
                "--daemon",
                f"--ready-fd={write}",
                "b=2",
                "--config",
                "x.properties",
            ]
            + ["--pid-file=p", "--override", "c=3"]
        )
    finally:
        os.close(read)
        os.close(write)
    assert parsed.overrides == {"a": "1", "b": "2", "c": "3"}
    assert parsed.config_file == Path("x.properties")
    assert parsed.pid_file == Path("p")
    assert parsed.ready_fd == write
    assert parsed.daemon


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["server.properties"], "--config server.properties"),
        (["=9092"], "not KEY=VALUE"),
        (["--bogus"], "no such option: --bogus (see"),
        (["--confg", "x"], "no such option: --confg; did you mean --config? (see"),
        (["--data-dir", "x"], "--data-dir; the directory is a setting: log.dirs=DIR"),
        (["--config"], "--config needs a value"),
        (["--config="], "--config needs a file name"),
        (["-c", "a", "--config", "b"], "--config is given twice"),
        (["-c", "a", "-c", "a"], "--config is given twice"),
        (["--ready-fd", "one"], "not a file descriptor number"),
        (["--ready-fd", "-1"], "not a file descriptor number"),
        (["--ready-fd", "9999"], "no such open file descriptor"),
        (["--ready-fd", "9" * 40], "no such open file descriptor"),
        (["a=1", "a=2"], "a is given twice (see"),
        (["--daemon=yes"], "no such option: --daemon"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error_that_says_what_is_wrong(
    arguments, complaint
):
    with pytest.raises(CliError) as caught:
        parse_serve_arguments(arguments)
    assert complaint in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE


def test_serve_help_names_every_option_and_exit_code(capsys):
    assert main(["serve", "--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) < 90
    for option in OPTIONS:
        assert ", ".join(option.names) in text
    for code in ExitCode:
        assert f"\n  {code:<3} " in text


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.names[-1])
def test_every_option_of_the_table_is_parsed_and_offered_by_completion(option):
    for name in option.names:
        if option.value is None:
            assert parse_serve_arguments([name]) != parse_serve_arguments([])
            with pytest.raises(CliError, match="no such option"):
                parse_serve_arguments([f"{name}=x"])
        else:
            with pytest.raises(CliError, match=f"{name} needs a value"):
                parse_serve_arguments([name])
    (known,) = [each for each in command.params if option.names[-1] in each.opts]
    assert (known.opts, known.is_flag) == (list(option.names), option.value is None)


def test_a_usage_error_is_one_line_on_stderr_and_exit_code_2(capsys):
    assert main(["serve", "nonsense"]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mpbroker: ") and err.count("\n") == 1


def test_parsing_serve_imports_neither_click_nor_argparse():
    code = (
        "import sys; from mpbroker.cli.serve import parse_serve_arguments as p;"
        "p(['a=1', '--daemon']);"
        "heavy = {'click', 'argparse', 'rich', 'asyncio'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "setting", ["lisseners=PLAINTEXT://:0", "num.io.threads=four", "num.io.threads=0"]
)
def test_a_wrong_setting_of_the_command_line_is_exit_code_2(
    setting, tmp_path, monkeypatch, capsys
):
    where = f"log.dirs={tmp_path}/data"
    assert main(["serve", where, setting]) == ExitCode.USAGE
    assert setting.partition("=")[0] in capsys.readouterr().err
    file = tmp_path / "server.properties"
    file.write_text(setting)
    assert main(["serve", where, "--config", str(file)]) == ExitCode.ERROR
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    assert main(["serve", where, setting]) == ExitCode.CONFIG
