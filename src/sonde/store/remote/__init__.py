"""Runs in object stores: written to a local spool and carried up, read by byte ranges through a local mirror."""
