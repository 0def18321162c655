"""Imported by every Python process that a test starts while the seeds are shifted."""

import os

if offset := int(os.environ.get("AHOP_SEED_OFFSET", "0")):
    import seed_offset

    seed_offset.install(offset)
