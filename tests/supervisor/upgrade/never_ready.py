"""mpbroker with one fault: its handlers never serve, and never end."""

import sys
import time

from mpbroker.broker.roles import Roles
from mpbroker.cli import main
from mpbroker.supervisor import supervisor

supervisor._READY_TIMEOUT_S = 0.2
supervisor._DRAIN_S = 0.2
supervisor._STOP_S = 0.2
Roles.run_handler = lambda self, handler: time.sleep(1000)
sys.exit(main())
