"""Attacks on what the library promises: runs that are killed, damaged, shared and changed, and calls that make no sense."""
