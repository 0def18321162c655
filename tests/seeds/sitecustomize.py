"""Imported by every Python process that a test starts while the seeds are shifted."""

import os

import seed_offset

seed_offset.install(int(os.environ[seed_offset.VARIABLE]))
