"""Patches that leave the session: exported to a file, and the same in every process."""
