"""One setting more: made.up.limit, which is a row of the table and nothing else.

python -m tests.config.made_up_key FILE serve ...

runs a broker that has it. Each handler that starts writes the value that it reads into
FILE, on a line of its own.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from mpbroker.base.config_def import ConfigType, between
from mpbroker.config import BROKER_CONFIG_DEF, BrokerConfig
from mpbroker.config.broker_key import BrokerKey, Reader
from mpbroker.config.machine import share_of_cores

ROW = BrokerKey(
    "made.up.limit",
    ConfigType.INT,
    share_of_cores(1, at_least=2, at_most=4),
    "Limit of what a test makes up.",
    validator=between(1, 1000),
    reader=Reader.HANDLER,
    per_listener=between(1, 10),
)


def main() -> int:
    """Run a command with the row in the table."""
    from mpbroker.broker.roles import Roles
    from mpbroker.cli import main as run

    file = sys.argv.pop(1)
    setattr(BrokerConfig, ROW.attribute, ROW)
    BROKER_CONFIG_DEF._keys[ROW.name] = ROW
    run_handler = Roles.run_handler

    def note_and_run(self: Roles, *arguments: Any, **options: Any) -> None:
        value: Any = getattr(self.parts.config, ROW.attribute)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, b"%d\n" % value)
        os.close(fd)
        run_handler(self, *arguments, **options)

    Roles.run_handler = note_and_run  # type: ignore[method-assign]
    return run()


if __name__ == "__main__":
    sys.exit(main())
