"""kafka-python's codecs and batches, imported without the warning its import gives.

It reads its schemas with importlib.resources.read_text(), deprecated in Python 3.11.
"""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "(read|open)_text", DeprecationWarning)
    from kafka import codec
    from kafka.record import default_records, legacy_records

__all__ = ["codec", "default_records", "legacy_records"]
