"""The mark of tests of what only the extension for LMDB does."""

import pytest

from raypipe.stores.lmdb_file import why_not_compiled

needs_extension = pytest.mark.skipif(
    bool(why_not_compiled()), reason=why_not_compiled()
)
