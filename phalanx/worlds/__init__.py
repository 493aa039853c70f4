"""Worlds carry actions out: in virtual time, in one process, or on real processes."""
