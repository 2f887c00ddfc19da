"""The wait status of a process, in words."""

import os


def explain_exit(status: int) -> str:
    """Say how a process ended: "signal 9", "exit status 1"."""
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit status {os.WEXITSTATUS(status)}"
