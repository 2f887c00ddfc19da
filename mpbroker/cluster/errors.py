"""Define the errors of a cluster's database."""

from mpbroker.base.errors import MpbrokerError


class ClusterError(MpbrokerError):
    """The database cannot be used as it is; the text tells an operator what to do."""


class DatabaseUnavailableError(ClusterError):
    """The database did not answer in time; it may have executed the statement."""


class NodeFencedError(MpbrokerError):
    """This process is not the node any more: the node was started again elsewhere."""


class ObjectGivenUpError(MpbrokerError):
    """The object was given up by the database, which will never commit it.

    Its bytes have to be written again under a new key.
    """
