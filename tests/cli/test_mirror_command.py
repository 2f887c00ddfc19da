"""The command line of `mpbroker mirror`; tests/client/mirror has what it does."""

from mpbroker.cli.exit_codes import ExitCode
from mpbroker.cli.records.mirror import describe
from mpbroker.client.mirror.topic_mirror import Progress
from tests.support.broker import Broker


def test_a_wrong_command_line_is_told_before_anything_is_asked(mpbroker):
    wrong = (
        ("--from", "nowhere:1", "--topics", "("),
        ("--from", "nowhere:1", "--topics", "t", "--from-setting", "x"),
        ("--from", "nowhere:1", "--topics", "t", "--from-setting", "no.such=1"),
        ("--from", "nowhere:x", "--topics", "t"),
        ("--topics", "t"),
        ("--from", "nowhere:1"),
    )
    for arguments in wrong:
        assert mpbroker("mirror", *arguments).code == ExitCode.USAGE, arguments


def test_settings_of_the_source_are_not_those_of_the_target(
    mpbroker, own_broker: Broker, tmp_path
):
    """The source speaks no TLS: with it, it cannot be reached."""
    settings = tmp_path / "source.properties"
    settings.write_text("security.protocol=SSL\n")
    address = own_broker.bootstrap
    asked = ("--from", address, "-b", address, "--topics", "no-such", "--retry", "0")
    for given in (
        ("--from-setting", "security.protocol=SSL"),
        ("--from-config", settings),
        ("-X", "security.protocol=SSL", "--from-config", settings),
    ):
        assert mpbroker("mirror", *asked, *given).code != ExitCode.OK, given
    plain = ("--from-setting", "security.protocol=PLAINTEXT", "--from-config", settings)
    result = mpbroker("mirror", *asked, *plain)
    assert result.code == ExitCode.ERROR
    assert "no topic that matches 'no-such'" in result.err


def test_the_progress_says_how_much_and_how_fast():
    copying = Progress("copying", 1_500, 3_000_000, 70, 4, 2)
    assert describe(copying, 1e6) == (
        "copying: 3.0 MB, 1.0 MB/s, 1,500 records, 70 to go in 2 of 4 partitions"
    )
    verifying = Progress("verifying", 1_500, 3_000_000, 0, 0, 0)
    assert describe(verifying, 2e6) == "verifying: 3.0 MB, 2.0 MB/s"
