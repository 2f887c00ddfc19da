"""The error that pipelines raise."""

from __future__ import annotations

from mpbroker.base.errors import MpbrokerError


class PipelineError(MpbrokerError):
    """A pipeline cannot run; the text names the setting, its value and what is right.

    The user changes the description, the table or the topic, and starts it again.
    """
