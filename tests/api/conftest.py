"""What the tests of the public face share: other processes, as in the tests of processes."""

from __future__ import annotations

from tests.process.conftest import folder as folder
from tests.process.conftest import nursery as nursery
from tests.process.conftest import peers as peers
