"""What commands print, compared with the committed output."""

import pytest

from .paths import GOLDEN


def check_golden(name, text):
    """Compare with ``golden/name``; to renew it, delete the file and run twice."""
    path = GOLDEN / name
    lines = "".join(line.rstrip() + "\n" for line in text.splitlines())
    if not path.exists():
        path.write_text(lines)
        pytest.fail(f"{path} was missing: written anew, read it before you commit it")
    assert lines == path.read_text()
