"""The error that pipelines raise."""

from __future__ import annotations

from mpbroker.base.errors import MpbrokerError


class PipelineError(MpbrokerError):
    """A pipeline cannot run; the message names the setting and says what is right.

    The user changes the pipeline's TOML file, the table or the topic, and starts the
    pipeline again.
    """


class DescriptionError(PipelineError):
    """A pipeline's TOML file is wrong; only a change of the file helps."""
