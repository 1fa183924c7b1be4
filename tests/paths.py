"""Where the tests find what is not in their own folder."""

from pathlib import Path

#: The root of the repository.
ROOT = Path(__file__).parents[1]
#: What commands print.
GOLDEN = ROOT / "tests" / "golden"
#: Research data beside the repository; tests that read them skip where they are not.
SHARED = ROOT.parent / "shared"
