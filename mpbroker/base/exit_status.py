"""Describe how a process ended."""

import os


def explain_exit(status: int) -> str:
    """Return a wait status in words, such as "signal 9" or "exit status 1"."""
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit status {os.WEXITSTATUS(status)}"
