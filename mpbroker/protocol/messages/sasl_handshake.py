"""SaslHandshake: choose a SASL mechanism.

After a handshake of version 0 the tokens are sent as frames without a header; after
version 1 in SaslAuthenticate requests.

Source: Kafka protocol guide, "SaslHandshake".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, STRING, array, field
from mpbroker.protocol.message import Message


class SaslHandshakeRequest(
    Message, api_key=ApiKey.SASL_HANDSHAKE, versions=(0, 1), flexible_from=None
):
    mechanism: str = field(STRING)


class SaslHandshakeResponse(
    Message, api_key=ApiKey.SASL_HANDSHAKE, versions=(0, 1), flexible_from=None
):
    error_code: int = field(INT16)
    mechanisms: list[str] = array(STRING)
