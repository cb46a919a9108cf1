"""Which code this is: what is kept of one run for the next is named by it.

All of the package counts, not only what writes graphs today: a list of such modules goes stale when
one moves, and then serves what another code has written. After an update everything is made once
more.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


@cache
def code_digest(package: Path = PACKAGE) -> str:
    """SHA-256 of the places and contents of all Python files below a folder, 64 hexadecimal digits.

    The first answer stays, as the modules do that were imported. Takes some 15 ms.
    """
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if path.name.startswith("."):  # an editor's, no module
            continue
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()
