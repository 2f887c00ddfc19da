r"""Put PEM that stands in a setting into the form that OpenSSL reads.

A properties file joins the lines of a value by blanks, and other sources write a line's
end as \n. Kafka takes any white space between the markers and in the base64; OpenSSL
wants a marker on a line of its own, and lines of 64 characters.
"""

from __future__ import annotations

import re
from typing import Final

_BLOCK: Final = re.compile(
    r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL
)
_LINE: Final = 64


def pem_of(text: str) -> str:
    """Return the blocks of a PEM text, each marker and each 64 characters on a line.

    What is between the blocks is left out. A text without a block is returned as it is,
    for OpenSSL to refuse.
    """
    blocks = _BLOCK.findall(text.replace("\\r", "").replace("\\n", "\n"))
    return "".join(map(_block, blocks)) if blocks else text + "\n"


def _block(block: tuple[str, str]) -> str:
    label, body = block
    if ":" in body:  # an old key's headers, whose lines must stay: Proc-Type, DEK-Info
        lines = [line.strip() for line in body.strip().splitlines()]
    else:
        base64 = "".join(body.split())
        lines = [base64[at : at + _LINE] for at in range(0, len(base64), _LINE)]
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""])
